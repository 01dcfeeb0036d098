"""``Checkpointer(config=...)``: kept with each version, and compared by a resume."""

import argparse
import dataclasses
import enum
import math
from collections import OrderedDict, UserDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import limpet
from limpet import events
from limpet.errors import LimpetError
from limpet.run.run import Run
from limpet.sinks.terminal import DefaultTerminal
from limpet.storage.memory import MemoryStore
from limpet.tiers.settings import MemoryTier
from tests.cli.invoke import run_cli
from tests.ranks.trainings import TrainingJob
from tests.trainings import forget


def train(run, config, steps=1, **resume):
    """Resume, and train some steps. Return the fields of the event about the config, or None."""
    found: list[dict[str, Any]] = []

    def sink(name, fields):
        if name == "config_changed":
            found.append(fields)

    state = {"x": 0.5, "progress": limpet.Progress()}
    with (
        limpet.attach(sink),
        limpet.Checkpointer(run, state, save=limpet.EverySteps(1), config=config) as ckpt,
    ):
        ckpt.resume(**resume)
        for _ in range(steps):
            ckpt.step()
    assert len(found) <= 1
    return found[0] if found else None


def changes(before, after):
    """Return the texts about a resume with another config."""
    store = MemoryStore()
    assert train(store, before) is None
    fields = train(store, after)
    return None if fields is None else fields["changes"]


def stored(run):
    return [snapshot.metadata.get("config") for snapshot in Run(run).snapshots()]


# -- what is kept --------------------------------------------------------------------------------

EVERYTHING = {
    "lr": 3e-4,
    "batch_size": 32,
    "name": "gr\u00fc\u00df\n\x1b[31m",
    "resume": None,
    "amp": True,
    "betas": (0.9, 0.999),
    "milestones": [10, 20],
    "optim": {"name": "adamw", "groups": [{"decay": 0.0}, {"decay": 0.1}], "empty": {}},
    "labels": {0: "cat", 1: "dog"},
    "seed": 1 << 80,
    "clip": math.inf,
    "a/b": "c~d",
    "": "no name",
    "classes": {"cat"},
    "key": b"\x00\xff",
    "decay": np.float32(0.1),
}


def test_each_version_keeps_the_plain_values_that_were_passed(tmp_path):
    config = {**EVERYTHING, "not": math.nan}
    train(tmp_path, config, steps=2)
    for found in stored(tmp_path):
        assert math.isnan(found.pop("not"))
        assert repr(found) == repr(EVERYTHING)  # also the types and the order
        assert [type(v) for v in found.values()] == [type(v) for v in EVERYTHING.values()]


def test_it_is_copied_when_the_checkpointer_is_created():
    store, config = MemoryStore(), {"lr": 0.1, "optim": {"names": ["a"]}}
    state = {"x": 1}
    with limpet.Checkpointer(store, state, save=limpet.EverySteps(1), config=config) as ckpt:
        config["lr"] = 0.2
        config["optim"]["names"].append("b")
        ckpt.step()
        saved = ckpt.wait()
        assert saved is not None
        saved.metadata["config"]["optim"]["names"].clear()
        ckpt.step()
    assert stored(store) == [{"lr": 0.1, "optim": {"names": ["a"]}}] * 2


def test_without_a_config_nothing_is_stored_and_an_empty_one_is_one():
    for config, expected in ((None, None), ({}, {})):
        store = MemoryStore()
        train(store, config)
        assert stored(store) == [expected]
        assert ("config" in Run(store).snapshots()[0].metadata) == (config is not None)


def test_copies_and_other_shards_keep_it(tmp_path):
    train(tmp_path / "a", {"lr": 0.1})
    source = str(tmp_path / "a")
    assert run_cli("copy", source, str(tmp_path / "b")).code == 0
    assert run_cli("reshard", f"{source}@1", str(tmp_path / "c"), "--shards", "2").code == 0
    assert stored(tmp_path / "b") == [{"lr": 0.1}]
    assert limpet.open(tmp_path / "c").metadata["config"] == {"lr": 0.1}


def test_a_state_in_memory_has_it(memory):
    """The next start compares with what it has resumed, which no version of the run has."""
    tier = MemoryTier(every=limpet.EverySteps(1), copies=1, path=memory)
    run, found = MemoryStore(), list[str]()
    for lr in (0.1, 0.2):
        state = {"x": np.zeros(3), "progress": limpet.Progress()}
        ckpt = limpet.Checkpointer(
            run, state, save=limpet.EverySteps(100), tiers=[tier], config={"lr": lr}
        )
        with limpet.attach(lambda name, f: found.extend(f["changes"] if "config" in name else ())):
            assert (ckpt.resume() is None) == (lr == 0.1)
        ckpt.step()
        assert ckpt._tiers.memory is not None
        ckpt._tiers.memory.wait()
        ckpt._saver.writer_lock.release()  # as if the process had died
        forget(ckpt)
        ckpt._release()
    assert found == ["lr 0.1 -> 0.2"]
    assert Run(run).snapshots() == []


def test_the_config_of_rank_0_counts():
    found: list[Any] = []
    with TrainingJob(2) as job:
        for steps in (2, 4):
            with limpet.attach(
                lambda name, fields: found.append(fields) if name == "config_changed" else None
            ):
                job.run(
                    lambda trainer, steps=steps: trainer.train(
                        steps,
                        save=limpet.EverySteps(2),
                        config={"local_rank": trainer.rank, "steps": steps},
                    )
                )
        versions = Run(job.inner).snapshots()
    assert [s.metadata["config"] for s in versions] == [
        {"local_rank": 0, "steps": 2},
        {"local_rank": 0, "steps": 4},
    ]
    assert [fields["changes"] for fields in found] == [["steps 2 -> 4"]]


# -- what is refused -----------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Hostile:
    """Runs no code, and has no text."""

    def __repr__(self):
        raise RuntimeError("repr")

    def __getattr__(self, name):
        raise RuntimeError(name)


def loop():
    config: dict[str, Any] = {}
    config["self"] = [config]
    return config


REFUSED = {
    "function": ({"model": len, "f": loop}, "config['f'] is a function (pass value.__name__)"),
    "nested": (
        {"optim": {"fn": [1, {"x": loop}]}},
        "but config['optim']['fn'][1]['x'] is a function (pass value.__name__).",
    ),
    "class": ({"a": Color}, "config['a'] is an enum.EnumType (pass value.__name__)"),
    "tensor": ({"t": torch.ones(2)}, "config['t'] is a torch.Tensor (pass value.tolist())"),
    "array": ({"t": np.ones(2)}, "config['t'] is a numpy.ndarray (pass value.tolist())"),
    "module": ({"m": torch.nn.ReLU()}, "ReLU (leave it out)"),
    "dtype": ({"d": torch.float16}, "config['d'] is a torch.dtype (pass str(value))"),
    "path": ({"p": Path("x")}, "config['p'] is a pathlib.PosixPath (pass str(path))"),
    "enum": ({"e": Color.RED}, "(pass member.name, from which Class[name] returns the member)"),
    "dataclass": ({"d": Settings()}, "(pass dataclasses.asdict(value))"),
    "namespace": ({"n": argparse.Namespace()}, "(pass vars(value))"),
    "subclass": (defaultdict(int, a=1), "config is a collections.defaultdict (pass dict(value))"),
    "hostile": ({"a/b": {"~": Hostile()}}, "config['a/b']['~'] is a "),
    "itself": (loop(), "is nested deeper than 100 levels, or contains itself"),
    "surrogate": ({"s": "\udcff"}, "config['s'] is a str (its text contains lone surrogates"),
    "name": ({"\udcff": 1}, "surrogates"),
    "bytes": ({"b": b"x" * 5000}, "config['b'] is a bytes (leave it out)"),
    "key": ({"k": {(1, Hostile): 1}}, "must be a plain value"),
    "state": (
        torch.nn.Linear(3, 2).state_dict(),
        "config['weight'] is a torch.Tensor (pass value.tolist()), config['bias'] is a",
    ),
    "many": ({str(i): loop for i in range(1000)}, ", and 995 more."),
    "large": ({"x": "secret" * 200_000}, "config= takes at most 1 MiB as JSON, not 1.14 MiB."),
    "long": ({f"option {i}": i for i in range(60_000)}, "at most 1 MiB as JSON, not 1.1"),
    "Namespace": (argparse.Namespace(lr=0.1), "config is an argparse.Namespace (pass vars(value))"),
    "Settings": (Settings(), "Settings (pass dataclasses.asdict(value))"),
    "UserDict": (UserDict(lr=0.1), "config is a collections.UserDict (leave it out)"),
    "list": ([("lr", 0.1)], "config= takes a dict of plain values, but config is a list"),
    "text": ("lr: secret", "config is a str"),
    "no": (False, "config is a bool"),
    "any": (Hostile(), "Hostile"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_values_are_refused_by_name_before_any_work(name, tmp_path):
    config, expected = REFUSED[name]
    run = tmp_path / "run"
    with pytest.raises(LimpetError) as caught:
        limpet.Checkpointer(run, {"x": 1}, config=config)
    message = str(caught.value)
    assert expected in message
    assert message.startswith("config= ")
    assert len(message) < 800
    assert "\n" not in message
    assert "secret" not in message
    assert type(caught.value) is LimpetError
    assert not run.exists()


def test_an_ordinary_large_config_is_kept():
    config = {f"group {i}": {f"option {j}": 0.001 * j for j in range(100)} for i in range(100)}
    store = MemoryStore()
    train(store, config)
    assert stored(store) == [config]
    assert train(store, config) is None
    config["group 7"]["option 9"] = 1.0
    assert train(store, config)["changes"] == ["group 7.option 9 0.009000000000000001 -> 1.0"]


# -- what a resume says --------------------------------------------------------------------------

NAN = float("nan")
DIFFERENT: list[tuple[Any, Any, Any]] = [
    ({"lr": 0.001, "batch_size": 32}, {"lr": 0.0001, "batch_size": 64},
     ["lr 0.001 -> 0.0001", "batch_size 32 -> 64"]),
    ({"a": 1, "momentum": 0.9}, {"dropout": 0.1, "a": 1},
     ["momentum 0.9 (removed)", "dropout 0.1 (new)"]),
    ({"o": {"lr": 1, "n": {"x": "a"}}}, {"o": {"lr": 1, "n": {"x": None}}}, ["o.n.x 'a' -> None"]),
    ({"x": 1, "y": 2}, {"y": 2, "x": 1}, None),
    ({"x": {"a": 1}}, {"x": OrderedDict(a=1)}, None),
    ({"x": NAN, "y": [NAN], "s": {"a", "b", "c"}}, {"x": NAN, "y": [NAN], "s": {"c", "b", "a"}},
     None),
    ({"x": 1, "y": 0, "z": 0.0}, {"x": 1.0, "y": False, "z": -0.0},
     ["x 1 -> 1.0", "y 0 -> False", "z 0.0 -> -0.0"]),
    ({"x": (0.9, 0.99)}, {"x": [0.9, 0.99]}, None),  # from YAML or JSON
    ({"x": [{"n": (1, (2,))}]}, {"x": [OrderedDict(n=[1, [2]])]}, None),
    ({"x": (0.9, 0.99)}, {"x": [0.9, 0.98]}, ["x (0.9, 0.99) -> [0.9, 0.98]"]),
    ({"x": (1, 2)}, {"x": {1, 2}}, ["x (1, 2) -> {1, 2}"]),
    ({"x": np.float64(0.1), "n": (np.int64(3), np.bool_(True))}, {"x": 0.1, "n": [3, True]}, None),
    ({"x": np.float32(0.5), "n": np.int64(3)}, {"x": 0.5, "n": 3.0}, ["n np.int64(3) -> 3.0"]),
    ({"x": {"tuple": [1], "scalar": 5}}, {"x": {"list": [1], "scalar": 5}},
     ["x.tuple [1] (removed)", "x.list [1] (new)"]),
    ({"x": [{"tuple": 1, "scalar": 5}]}, {"x": [{"list": 1, "scalar": 5}]}, ["x [{'tuple': 1"]),
    ({"x": b"1" * 4000}, {"x": b"1" * 3999 + b"2"}, ["x ...1"]),
    ({"x": [1, 2]}, {"x": [1, 2, 3]}, ["x [1, 2] -> [1, 2, 3]"]),
    ({"x": [{"n": 1}, {"n": 2}]}, {"x": [{"n": 1}, {"n": 3}, {}]},
     ["x [{'n': 1}, {'n': 2}] -> [{'n': 1}, {'n': 3}, {}]"]),
    ({"x": {"a": 1}}, {"x": 3}, ["x.a 1 (removed)", "x 3 (new)"]),
    ({"x": {}}, {"x": None}, ["x {} -> None"]),
    ({"a.b": 1, "a": {"b": 2}}, {"a.b": 1, "a": {"b": 3}}, ["a.b 2 -> 3"]),
    ({"a": {"b": 2}, "a/b": 1}, {"a": {"b": 2}, "a/b": 2}, ["a/b 1 -> 2"]),
    ({"c": {0: "cat", "0": "dog"}}, {"c": {0: "cow", "0": "dog"}}, ["c.0 'cat' -> 'cow'"]),
    ({}, {"x": 1}, ["x 1 (new)"]),
    ({"x": 1}, {}, ["x 1 (removed)"]),
    ({}, {}, None),
    ({"x": 1}, None, None),
    (None, {"x": 1}, None),
    ({"x": 10**5000}, {"x": 1}, ["x 0x"]),
    ({"x": "a" * 500 + "b" + "a" * 500}, {"x": "a" * 500 + "c" + "a" * 500},
     ["x ..." + "a" * 20 + "b" + "a" * 53 + "... -> ..." + "a" * 20 + "c" + "a" * 53 + "..."]),
    ({"x": "word " * 30 + "one " + "word " * 30}, {"x": "word " * 30 + "two " + "word " * 30},
     ["x ..." + "word " * 4 + "one" + " word" * 10 + "... -> ..." + "word " * 4 + "two"]),
    ({"x": "long " * 30}, {"x": "b"}, ["x 'long " + "long " * 13 + "long... -> 'b'"]),
    ({"x" * 500: 1}, {"x" * 500: 2}, ["x" * 77 + "... 1 -> 2"]),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "expected"), DIFFERENT)
def test_a_resume_names_what_differs(before, after, expected):
    found = changes(before, after)
    if expected is None or found is None or len(found) != len(expected):
        assert found == expected
    else:
        for text, beginning in zip(found, expected, strict=True):
            assert text.startswith(beginning)
            assert len(text) < 250


def test_it_compares_with_the_version_that_it_resumes():
    store = MemoryStore()
    for lr in (0.1, 0.2, 0.3):
        train(store, {"lr": lr})
    fields = train(store, {"lr": 0.2}, at=1)
    assert fields is not None
    assert fields["changes"] == ["lr 0.1 -> 0.2"]
    assert fields["url"].endswith("version_1")
    assert train(store, None) is None
    assert train(store, {"lr": 9}) is None  # the version before has none


def test_the_start_of_another_run_is_not_compared(tmp_path):
    train(tmp_path / "a", {"lr": 0.1})
    assert train(tmp_path / "b", {"lr": 0.2}, start=f"{tmp_path / 'a'}@latest") is None
    assert train(tmp_path / "b", {"lr": 0.3})["changes"] == ["lr 0.2 -> 0.3"]


@pytest.fixture
def own_lines(monkeypatch):
    """Show no lines of trainings that other tests have left."""
    monkeypatch.setattr(events, "_defaults", {})
    monkeypatch.setattr("limpet.training.checkpointer.default_terminal", DefaultTerminal())


def with_optimizer(run, lr, **more):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    config = {"lr": lr, **more}
    state = {"model": model, "optimizer": optimizer}
    with limpet.Checkpointer(run, state, save=limpet.EverySteps(1), config=config) as ckpt:
        ckpt.resume()
        ckpt.step()


def lines_about_options(text):
    return [line for line in text.splitlines() if "config" in line or "options" in line]


@pytest.mark.usefixtures("own_lines")
def test_the_lines_need_no_terminal_and_say_first_what_the_script_has_changed(
    tmp_path, capsys, monkeypatch
):
    """The line of the config does not say what is in use: the line of the options does."""
    monkeypatch.chdir(tmp_path)
    with_optimizer("a", 0.001, batch_size=32)
    with_optimizer("a", 0.001, batch_size=32)
    assert lines_about_options(capsys.readouterr().err) == []
    with_optimizer("a", 0.0001, batch_size=64, dropout=0.1)
    assert lines_about_options(capsys.readouterr().err) == [
        "limpet: resumed with another config: lr 0.001 -> 0.0001, batch_size 32 -> 64, dropout 0.1"
        " (new)",
        "limpet: resumed the options of a/version_2. optimizer/lr: the script has 0.0001, had"
        " 0.001; the version's 0.001 is in use",
    ]


@pytest.mark.usefixtures("own_lines")
def test_at_most_eight_changes_are_shown_without_control_characters_and_passwords(capsys):
    store = MemoryStore()
    url = "x" * 60 + "postgres://me:" + "s" * 30 + "pass{}@host"  # the middle is cut out

    def config(n):
        first = {"name\x1b[1m\n": f"a\x1b[31m\n{n}", "db": url.format(n)}
        return first | {f"option {i}": i * n for i in range(1, 40)}

    for n in (1, 2):
        state = {"x": 1}
        save = limpet.EverySteps(1)
        with limpet.Checkpointer(store, state, save=save, config=config(n)) as ckpt:
            ckpt.resume()
            ckpt.step()
    (line,) = lines_about_options(capsys.readouterr().err)
    assert line.endswith(", option 5 5 -> 10, option 6 6 -> 12, and 33 more")
    assert line.isprintable()
    assert "pass" not in line


@pytest.mark.usefixtures("own_lines")
@pytest.mark.parametrize("variable", ["", "1"])
def test_it_can_be_turned_off(variable, capsys, monkeypatch):
    monkeypatch.setenv("LIMPET_QUIET", variable or "0")
    store = MemoryStore()
    for n in (1, 2):
        with limpet.Checkpointer(
            store, {"x": 1}, save=limpet.EverySteps(1), config={"n": n}, quiet=not variable
        ) as ckpt:
            ckpt.resume()
            ckpt.step()
    assert capsys.readouterr().err == ""
