"""Integers of more than 4,300 digits, dates of the year 9999, and files over their size limit."""

from collections import Counter, OrderedDict

import numpy as np
import pytest

import limpet
from limpet.errors import LimpetError, PlanError, Unsupported
from limpet.format.records import Evaluation, encode_record
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySteps, KeepBest
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.cli.invoke import run_cli
from tests.forging import files_of
from tests.trainings import initial_state, trained_run

BIG = 1 << 20000
"""Python refuses to convert an integer of over 4,300 digits to decimal text; this one has 6,021."""


def state(big):
    """Return a state with an integer in every kind of plain value that can contain one."""
    return {
        "int": big,
        "list": [big, [big]],
        "tuple": (1, big),
        "set": {big},
        "frozenset": frozenset({frozenset({big})}),
        "counter": Counter(a=big),
        "ordered": OrderedDict(a=big),
        "items": {1: big, (2,): -big},
        "array": np.ones(2),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("extreme") / "run"
    for step, big in ((1, BIG), (2, -BIG), (3, 3)):
        limpet.save(root / f"version_{step}", state(big), step=step, note={"a": {big}, "b": big})
    return root


@pytest.mark.parametrize("json", [(), ("--json",)], ids=["text", "json"])
def test_commands_show_long_integers_in_hexadecimal(run, json):
    result = run_cli("show", run / "version_1", *json)
    assert result.code == 0
    assert "0x1000" in result.out
    for other in ("version_2", "version_3"):
        result = run_cli("diff", run / "version_1", run / other, *json)
        assert result.code == 7
        assert "0x1000" in result.out
    for command in (["ls", run], ["verify", run], ["copy", run, run.parent / f"copy{len(json)}"]):
        assert run_cli(*command, *json).code == 0


def test_long_integers_load(run):
    loaded = limpet.load(run / "version_1")
    assert np.array_equal(loaded.pop("array"), np.ones(2))
    expected = state(BIG)
    del expected["array"]
    assert (loaded == expected) is True


@pytest.mark.parametrize(
    "call",
    [
        lambda run: run.add_metrics(1, {"a": BIG}),
        lambda run: run.add_metrics(1, {BIG: 1}),
        lambda run: run.add_metrics(BIG, {"a": 1}),
        lambda run: run.find(BIG),
        lambda run: run.pin(1, branch=BIG),
        lambda run: run.newest(lambda s: None, at=BIG),
        lambda run: EverySteps(-BIG),
        lambda run: KeepBest(-BIG, "a"),
        lambda run: limpet.save(MemoryStore(), initial_state(), step=BIG),
        lambda run: limpet.save(MemoryStore(), initial_state(), step=10**18),
        lambda run: limpet.save(MemoryStore(), initial_state(), step=-1),
        lambda run: limpet.save(MemoryStore(), {BIG: 1}),
    ],
)
def test_a_long_integer_as_an_argument_is_refused(call):
    with pytest.raises(LimpetError) as caught:
        call(Run(trained_run(2, 1)))
    assert len(str(caught.value)) < 600


def put_evaluation(run, created, **metrics):
    digest = reader_of(run.open(run.find(1))).digest
    attempt = f"{len(files_of(run.store)):012x}"
    evaluation = Evaluation("val", attempt, "version_1", digest, created, metrics)
    key = f"version_1/eval-val.{attempt}.json"
    run.store.put_if_absent(key, encode_record(evaluation))
    return key


def test_evaluations_can_be_added_after_one_of_the_year_9999():
    run = Run(trained_run(2, 1))
    put_evaluation(run, "9999-12-31T23:59:58+00:00", a=1.0)
    for value in (2.0, 3.0):
        run.add_metrics(1, {"a": value})
        assert run.metrics(1)["a"] == value
    with pytest.raises(LimpetError, match="Delete that file") as caught:  # no time is left
        run.add_metrics(1, {"a": 4.0})
    assert "version_1/eval-" in str(caught.value)
    assert run.metrics(1)["a"] == 3.0


def test_the_times_of_evaluations_are_compared_and_not_their_text():
    run = Run(trained_run(2, 1))
    put_evaluation(run, "20260102T030405Z", a=1.0)
    put_evaluation(run, "2026-01-02T03:04:05.5+00:00", a=2.0)
    put_evaluation(run, "2026-01-02T03:04:05+00:00", b=1.0)
    put_evaluation(run, "0001-01-01T00:00:00+00:00", a=3.0, b=3.0)
    assert run.metrics(1) == {**run.metrics(1), "a": 2.0, "b": 1.0}
    run.add_metrics(1, {"a": 4.0})
    assert run.metrics(1)["a"] == 4.0


def test_commands_show_versions_of_the_year_9999(tmp_path, monkeypatch):
    for step, created in enumerate(("9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+00:00")):
        monkeypatch.setattr("limpet.machine.utc_now", lambda created=created: created)
        limpet.save(tmp_path / f"version_{step}", initial_state(), step=step)
    monkeypatch.undo()
    for command in (
        ["show", tmp_path / "version_0"],
        ["show", tmp_path / "version_1"],
        ["ls", tmp_path],
        ["ls", tmp_path, "--json"],
        ["verify", tmp_path],
    ):
        assert run_cli(*command).code == 0
    assert run_cli("diff", tmp_path / "version_0", tmp_path / "version_1").code in (0, 7)


def test_an_index_that_is_too_long_is_not_written(monkeypatch):
    monkeypatch.setattr("limpet.saving.write.MAX_MANIFEST", 100)
    store = MemoryStore()
    with pytest.raises(Unsupported, match="longer than a reader accepts") as caught:
        limpet.save(store.at("a"), initial_state())
    assert caught.value.file.endswith(".index.json")
    assert "fewer, larger tensors" in str(caught.value)
    assert not [key for key in files_of(store) if key.endswith(".json")]


def test_a_manifest_that_is_too_long_is_not_committed(monkeypatch):
    monkeypatch.setattr("limpet.saving.commit.MAX_MANIFEST", 100)
    store = MemoryStore()
    with pytest.raises(Unsupported, match="longer than a reader accepts") as caught:
        limpet.save(store.at("a"), initial_state())
    assert caught.value.file.endswith("manifest.json")
    assert not [key for key in files_of(store) if key.endswith("manifest.json")]


def test_an_evaluation_that_is_too_long_is_not_written():
    run = Run(trained_run(2, 1))
    with pytest.raises(PlanError, match="longer than a reader accepts"):
        run.add_metrics(1, {f"metric {i}": i for i in range(100_000)})
    assert run.metrics(1).keys() == {"loss"}
