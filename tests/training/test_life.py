"""A run over its lifetime: store failures, requests, going back, early stopping, statistics."""

import re
import subprocess
import sys
import threading
from copy import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import limpet
from limpet import events, machine
from limpet.errors import (
    Denied,
    FormatTooNew,
    LimpetError,
    MissingLeaf,
    NoSnapshot,
    NoSpace,
    PlanError,
    SaveFailed,
    StoreError,
    Unavailable,
    UnexpectedLeaf,
)
from limpet.format.names import Version
from limpet.format.records import Pin, encode_record
from limpet.run.policy import EverySteps, KeepBest, KeepLast, Never, OnException, StopWhen
from limpet.run.run import Run
from limpet.run.save_request import RequestedSave, request_and_wait
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from limpet.training.goodput import Goodput
from tests.forging import seal, sealed_content
from tests.trainings import (
    initial_state,
    missing_metrics,
    state_after,
    states_equal,
    threads_of_trainings,
    train,
    trained_run,
    training,
)
from tests.unreliable_stores import HookedStore


class GatedStore(MemoryStore):
    """A store that writes shards only while ``open`` is set, and raises ``broken`` if not None."""

    def __init__(self):
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.broken: StoreError | None = None

    def put(self, key, length):
        assert self.open.wait(20)
        if self.broken is not None:
            raise self.broken
        return super().put(key, length)


def record_events():
    emitted: list[tuple[str, dict[str, Any]]] = []
    return emitted, events.attach(lambda name, fields: emitted.append((name, fields)))


def test_a_due_save_waits_for_the_pending_one_and_emits_an_event():
    store = GatedStore()
    emitted, attached = record_events()
    with attached, training(store, EverySteps(2)) as (state, ckpt):
        train(state, ckpt, 2)
        ckpt.wait()
        store.open.clear()
        train(state, ckpt, 5)
        threading.Timer(0.05, store.open.set).start()
        train(state, ckpt, 6)
        assert [f["step"] for n, f in emitted if n == "save_waited"] == [6]
        ckpt.wait()
        statistics, saved = ckpt.statistics(), [f["blocked"] for n, f in emitted if n == "saved"]
        assert 0 < statistics["waited_seconds"] < statistics["last_blocked_seconds"] == saved[-1]
        assert sum(saved) < statistics["blocked_seconds"]
    assert [s.step for s in Run(store).snapshots()] == [2, 4, 6]


def no_space():
    return NoSpace("Cannot write: No space left on device")


def test_an_explicit_save_raises_despite_warn():
    store = GatedStore()
    state = initial_state()
    ckpt = Checkpointer(store, state, save=EverySteps(100), on_error="warn")
    train(state, ckpt, 3)
    store.broken = no_space()
    with pytest.raises(NoSpace):
        ckpt.save()
    store.broken = None
    assert ckpt.save().step == 3
    store.broken = no_space()
    train(state, ckpt, 100)
    with pytest.warns(SaveFailed, match="since step 3"):
        ckpt.close()


def test_a_read_only_folder_raises_at_the_first_step():
    class ReadOnly(MemoryStore):
        def put_if_absent(self, key, data):
            raise Denied(f"Cannot write {key}: Read-only file system")

    ckpt = Checkpointer(ReadOnly(), initial_state(), save=EverySteps(1000))
    with pytest.raises(Denied, match="Read-only"):
        ckpt.step()
    ckpt.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save": 500}, r"save=.*EverySteps\(500\), not 500"),
        ({"save": KeepLast(1)}, r"save=.*not KeepLast"),
        ({"keep": EverySteps(1)}, r"keep=.*KeepLast\(3\)"),
        ({"keep": 3}, "keep="),
        ({"stop": "loss"}, r"stop=.*not 'loss'"),
        ({"state": torch.nn.Linear(2, 2)}, r"state must be a dict such as .*Linear"),
        ({"state": [1]}, "state must be"),
        ({"incremental": "no"}, "incremental="),
        ({"incremental": 0}, "incremental"),
        ({"on_error": "ignore"}, "on_error"),
        ({"overlap": 1}, "overlap="),
    ],
)
def test_arguments_of_wrong_types(arguments, message):
    with pytest.raises(LimpetError, match=message):
        Checkpointer(MemoryStore(), arguments.pop("state", initial_state()), **arguments)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (1.5, r"a dict such as .*a float"),
        (torch.tensor(1.0), "a Tensor"),
        ({"loss": "low"}, r"'loss' is not a number.*a str"),
        ({"loss": torch.ones(3)}, r"Tensor of shape \(3,\)"),
        ({"loss": True}, "a bool"),
        ({"loss": np.str_("abc")}, "not a number"),
        ({"loss": torch.tensor(1 + 2j)}, "not a number"),
        ({"loss": 2**70}, "64-bit int"),
        ({"loss": torch.empty(1, device="meta")}, "not a number"),
        ({"half a pair \ud800": 1.0}, "not a number"),
        ({3: 1.0}, "3 is not a number"),
    ],
)
def test_invalid_metrics_raise_at_once(metrics, message):
    with training(MemoryStore(), EverySteps(10**6)) as (_, ckpt):
        with pytest.raises(PlanError, match=message):
            ckpt.step(metrics)
        with pytest.raises(PlanError, match=message):
            ckpt.save(metrics)
        ckpt.step({"a": 1, "b": 2.5, "c": np.float32(1), "d": torch.ones(1)})
        ckpt.step({"e": torch.tensor(1.0, dtype=torch.bfloat16), "f": np.int8(3)})
        ckpt.step({"g": float("nan")})


def test_the_result_of_state_dict_is_rejected():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for values in ({"opt": optimizer.state_dict()}, {"all": {"opt": schedule.state_dict()}}):
        with pytest.raises(PlanError, match=r"opt in the state.*copy made once"):
            Checkpointer(MemoryStore(), {"model": model, **values})
    state = {"model": model.state_dict(), "optimizer": optimizer, "schedule": schedule}
    Checkpointer(MemoryStore(), state).close()


@pytest.mark.parametrize("name", ["train.py", "train.py/", "train.py/runs/a", "link"])
def test_a_file_is_not_a_run(tmp_path, name):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "link").symlink_to("train.py")
    (tmp_path / "folder").symlink_to(tmp_path)
    for url in (f"{tmp_path}/{name}", f"{tmp_path}/folder/{name}"):
        with pytest.raises(LimpetError, match=r"be the folder of a run: \S+ is a file"):
            Checkpointer(url, initial_state())
    Checkpointer(tmp_path / "folder", initial_state()).close()


def test_a_version_is_not_a_run(tmp_path):
    for name in ("version_8", "version_8.1"):
        with pytest.raises(LimpetError, match=r"is not a run.*resume\(start="):
            Checkpointer(tmp_path / name, initial_state())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a@latest", "a@8", "a@8.1"])
def test_the_address_of_a_version_is_not_a_run(tmp_path, name):
    for call in ("step", "resume"):  # an ordinary name if no such run exists
        with Checkpointer(tmp_path / call / name, initial_state(), save=Never()) as ckpt:
            getattr(ckpt, call)()
        with training(tmp_path / call / "a", EverySteps(1)) as (state, ckpt):
            train(state, ckpt, 1)
        ckpt = Checkpointer(tmp_path / call / name, initial_state())
        with pytest.raises(LimpetError, match=r"is not a run.*the address of a version"):
            getattr(ckpt, call)()
        ckpt.close()


def test_a_snapshot_is_not_a_run(tmp_path):
    limpet.save(tmp_path / "snapshot", initial_state())
    for call in ("step", "resume", "save"):
        ckpt = Checkpointer(tmp_path / "snapshot", initial_state())
        with pytest.raises(LimpetError, match=r"is not a run.*found a snapshot"):
            getattr(ckpt, call)()
        ckpt.close()


def test_a_save_right_after_a_step_has_its_metrics():
    with training(MemoryStore(), EverySteps(10**6)) as (state, ckpt):
        train(state, ckpt, 3)
        assert ckpt.save().metadata["metrics"] == {"loss": state["history"][-1]}
        ckpt.step()
        assert ckpt.save().metadata["metrics"] == {}
        ckpt.step({"loss": 2.0})
        assert ckpt.save({"other": 1.0}).metadata["metrics"] == {"loss": 2.0, "other": 1.0}


def test_events_of_the_start_and_of_unsaved_steps():
    store = MemoryStore()
    emitted, attached = record_events()
    with attached:
        with pytest.raises(SystemExit), training(store, EverySteps(4)) as (state, ckpt):
            ckpt.resume()
            train(state, ckpt, 6)
            sys.exit(0)
        with training(store, EverySteps(4)) as (state, ckpt):
            ckpt.resume()
            train(state, ckpt, 8)
        with training(store, EverySteps(4)) as (_, ckpt):
            ckpt.resume()
    expected = ("began", "left_unsaved", "resumed")
    assert [n for n, _ in emitted if n in expected] == [
        "began",
        "left_unsaved",
        "resumed",
        "resumed",
    ]
    [unsaved] = [f for n, f in emitted if n == "left_unsaved"]
    assert (unsaved["step"], unsaved["since"]) == (6, 4)


OTHER_TRAINING = """
import sys, limpet
state = {"x": [0.0], "progress": limpet.Progress()}
ckpt = limpet.Checkpointer(sys.argv[1], state, save=limpet.EverySteps(1))
ckpt.resume()
for _ in range(2):
    ckpt.step()
    ckpt.wait()
print("training", flush=True)
sys.stdin.readline()
ckpt.step()
ckpt.close()
"""


@pytest.mark.slow
def test_a_second_training_raises_while_the_first_runs(tmp_path):
    command = [sys.executable, "-c", OTHER_TRAINING, str(tmp_path / "a")]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdin is not None
    assert first.stdout is not None
    assert first.stdout.readline() == "training\n"
    state: dict[str, Any] = {"x": [0.0], "progress": limpet.Progress()}
    for choice in ("raise", "warn"):
        ckpt = Checkpointer(tmp_path / "a", state, on_error=choice)
        ckpt.resume()
        with pytest.raises(LimpetError, match=rf"Another training.*process {first.pid} on"):
            ckpt.step()
        with pytest.raises(LimpetError, match="Another training"):
            ckpt.resume(at=1)  # must not change the lineage of the other training
        ckpt.close()
    assert Run(tmp_path / "a").line() == [Version(1), Version(2)]
    assert Run(tmp_path / "a").branch() == 0
    if first.pid % 2:  # neither a finished nor a killed training blocks others
        first.kill()
    first.communicate("\n", timeout=60)
    with Checkpointer(tmp_path / "a", state, save=EverySteps(1)) as ckpt:
        ckpt.resume()
        ckpt.step()
    assert not (tmp_path / "a" / "writer.json").exists()


def test_a_replaced_training_saves_nothing_more():
    """For example, a node that was believed dead returns, while its successor runs elsewhere."""
    store = MemoryStore()
    old_store = HookedStore(store)  # as on another machine: this process does not see the same run
    state, options = initial_state(), {"save": EverySteps(2), "on_error": "warn"}
    old = Checkpointer(old_store, state, at_end=False, **options)
    train(state, old, 2)
    old.wait()
    with training(store, EverySteps(2)) as (new_state, new):
        new.resume()
        train(new_state, new, 3)
        with pytest.raises(LimpetError, match="taken this run over"):
            train(state, old, 6)
            old.wait()
        train(new_state, new, 4)
    assert Run(store).line() == [Version(2), Version(4)]
    old.close()


ELSEWHERE = ("another", "boot", "7:1")
DEAD = (machine.process_identity()[0], "an earlier boot", "7:1")


@pytest.mark.parametrize("died", [ELSEWHERE, DEAD], ids=["elsewhere", "dead"])
def test_a_successor_removes_only_the_pins_of_its_predecessor(died):
    """For example, a machine disappears during a save.

    Its pins would protect versions for a week, because other machines cannot see that it is dead.
    """
    store = MemoryStore()
    with training(store, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 3)
    attempt, third = "0" * 12, ("a third", "boot", "7:1")
    for number, (version, holder) in enumerate(
        [
            ("version_1", died),
            (None, died),
            ("version_2", third),
            ("version_3", machine.process_identity()),
        ]
    ):
        record = encode_record(Pin(attempt, version, machine.utc_now(), *holder))
        store.put_if_absent(f"pin-{number:012}.json", record)
    store.put_if_absent("writer.json", encode_record(Pin(attempt, None, machine.utc_now(), *died)))
    with training(store, EverySteps(1), KeepLast(1)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, 4)
    assert Run(store).listing().process_pins == [f"pin-{n:012}.json" for n in (2, 3)]
    assert Run(store).line() == [Version(2), Version(3), Version(4)]


def test_a_failure_to_remove_old_pins_does_not_stop_the_training():
    """The pins expire after a week anyway."""

    class FailingDeleteStore(MemoryStore):
        def delete(self, key):
            if key.startswith("pin-00"):
                raise Unavailable("a temporary error")
            super().delete(key)

    store = FailingDeleteStore()
    for key in ("pin-000000000000.json", "writer.json"):
        store.put_if_absent(key, encode_record(Pin("0" * 12, None, machine.utc_now(), *ELSEWHERE)))
    with training(store, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 2)
    assert Run(store).line() == [Version(1), Version(2)]


def test_a_new_checkpointer_of_a_process_keeps_the_pins_of_the_previous_one():
    store = MemoryStore()
    own_pin = Pin("0" * 12, None, machine.utc_now(), *machine.process_identity())
    for key in ("pin-000000000000.json", "writer.json"):
        store.put_if_absent(key, encode_record(own_pin))
    with training(store, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 1)
    assert Run(store).listing().process_pins == ["pin-000000000000.json"]


def test_a_writer_in_a_newer_format_is_not_ignored():
    store = MemoryStore()
    with training(HookedStore(store), EverySteps(1), at_end=False) as (state, ckpt):
        train(state, ckpt, 1)
        ckpt.wait()
        later = seal(sealed_content(store.get("writer.json", 1 << 20)), 99)
        store.delete("writer.json")
        store.put_if_absent("writer.json", later)
        with training(store, EverySteps(1)) as (other, second):
            second.resume()
            with pytest.raises(FormatTooNew, match=r"writer.json"):
                train(other, second, 2)
        with pytest.raises(FormatTooNew):  # the other writer may have taken over
            train(state, ckpt, 3)
    assert store.get("writer.json", 1 << 20) == later
    assert Run(store).line() == [Version(1)]


def test_a_writer_lock_removed_by_hand_is_restored():
    store = MemoryStore()
    with training(store, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 1)
        ckpt.wait()
        for content in (None, b"{}", b""):
            store.delete("writer.json")
            if content is not None:
                store.put_if_absent("writer.json", content)
            train(state, ckpt, state["progress"].step + 1)
            ckpt.wait()
    assert "writer.json" not in [s.key for s in store.list("")]


def test_a_writer_lock_that_cannot_be_restored_leaves_nothing_unknown():
    """The save looks at the lock in the time of the save, before it commits."""

    class Server(MemoryStore):
        has_deadline = False

        def within(self, deadline):
            view = copy(self)
            view.has_deadline = True
            return view

        def put_if_absent(self, key, data):
            if key == "writer.json" and lost:
                lost.append(self.has_deadline)
                raise Unavailable("no reply", key=key, outcome="unknown")
            return super().put_if_absent(key, data)

    lost: list[bool] = []
    store = Server()
    state = initial_state()
    with Checkpointer(store, state, save=EverySteps(9), save_timeout=60) as ckpt:
        train(state, ckpt, 1)
        store.delete("writer.json")
        lost.append(True)
        with pytest.raises(Unavailable) as raised:
            ckpt.save()
        assert "outcome" not in raised.value.fields
        assert lost == [True, True]
        lost.clear()
        ckpt.save()


def network(seed=0, kind=ZeroDivisionError):
    """Return a model with buffers and dropout, and its step, which can raise ``kind``."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "progress": limpet.Progress(),
        "rng": limpet.RNG(),
    }

    def step(where=None):
        loss = model(torch.randn(16, 4)).square().mean()
        if where == "forward":
            raise kind
        optimizer.zero_grad()
        loss.backward()
        if where == "backward":
            raise kind
        optimizer.step()
        if where == "optimizer":
            raise kind
        schedule.step()
        return loss.item()

    return state, step


def test_nothing_is_saved_after_the_optimizer_has_stepped():
    store = MemoryStore()
    state, step = network()
    with (
        pytest.warns(SaveFailed, match="after step 5 was not saved"),
        pytest.raises(ZeroDivisionError) as e,
        Checkpointer(store, state, save=EverySteps(4) | OnException()) as ckpt,
    ):
        for _ in range(5):
            step()
            ckpt.step()
        step("optimizer")
    assert "after step 5 was not saved" in "".join(e.value.__notes__)
    assert [s.step for s in Run(store).snapshots()] == [4]


def test_an_exception_right_after_a_save_saves_nothing_more():
    store = MemoryStore()
    state, step = network()
    with (
        pytest.raises(ZeroDivisionError),
        Checkpointer(store, state, save=EverySteps(4) | OnException()) as ckpt,
    ):
        for _ in range(4):
            step()
            ckpt.step()
        step("forward")
    assert [s.metadata["reason"] for s in Run(store).snapshots()] == ["cadence"]


def test_a_request_from_outside_is_saved_at_the_next_step(tmp_path, poll_often):
    url, state, answers = tmp_path / "a", initial_state(), list[RequestedSave]()
    with Checkpointer(url, state, save=EverySteps(10**6), at_end=False) as ckpt:
        train(state, ckpt, 1)  # requests are possible before the first save
        requester = threading.Thread(
            target=lambda: answers.append(request_and_wait(Run(url), 60, interval=0.01))
        )
        requester.start()
        while requester.is_alive():
            train(state, ckpt, state["progress"].step + 1)
        answered_at = state["progress"].step
        train(state, ckpt, answered_at + 100)
    [snapshot] = Run(url).snapshots()
    assert answers[0].version == snapshot.version
    assert snapshot.metadata["reason"] == "request"
    assert not threads_of_trainings()


def test_resume_at_an_older_version_and_from_an_abandoned_branch():
    store = MemoryStore()
    with training(store, EverySteps(10)) as (state, ckpt):
        train(state, ckpt, 40)
    with training(store, EverySteps(10)) as (state, ckpt):
        ckpt.resume(at=20)
        assert states_equal(state, state_after(20))
        train(state, ckpt, 30)
    assert Run(store).line() == [Version(10), Version(20), Version(30, 1)]
    assert "on request" in Run(store).read_branch(1).reason
    with training(store, EverySteps(10)) as (state, ckpt):
        with pytest.raises(NoSnapshot, match="40"):
            ckpt.resume(at=40)
        snapshot = ckpt.resume(at="version_40")
        assert snapshot is not None
        assert snapshot.version == Version(40)
        assert states_equal(state, state_after(40))
        train(state, ckpt, 50)
    assert Run(store).line() == [*map(Version, (10, 20, 30, 40)), Version(50, 2)]
    with training(store, EverySteps(10)) as (state, ckpt):
        snapshot = ckpt.resume(at="30.1")
        assert snapshot is not None
        assert snapshot.version == Version(30, 1)


def test_a_resume_waits_for_the_pending_save():
    store, state = GatedStore(), initial_state()
    with Checkpointer(store, state, save=EverySteps(5)) as ckpt:
        store.open.clear()
        train(state, ckpt, 7)
        threading.Timer(0.05, store.open.set).start()
        snapshot = ckpt.resume()
        assert snapshot is not None
        assert snapshot.step == 5
        assert states_equal(state, state_after(5))


def test_a_warm_start_loads_matching_keys_and_counts_from_zero():
    url = "memory://life-warm"
    limpet.save(
        f"{url}/version_70",
        {"model": {"old": np.arange(3.0), "removed": 1}, "progress": limpet.Progress()},
        step=70,
    )
    state: dict[str, Any] = {
        "model": {"new": np.zeros(3), "head": np.ones(2)},
        "progress": limpet.Progress(),
    }
    with Checkpointer(MemoryStore(), state, save=EverySteps(1)) as ckpt:
        with pytest.raises(PlanError):
            ckpt.resume(start=f"{url}@70", keys="model/**")
        ckpt.resume(
            start=f"{url}@70",
            keys="model/**",
            missing="keep",
            unexpected="ignore",
            rename={"model/old": "model/new"},
        )
        assert ckpt.current_step == 0
        assert state["model"]["new"].tolist() == [0, 1, 2]
        assert state["model"]["head"].tolist() == [1, 1]
        ckpt.step()
        ckpt.wait()
        assert ckpt.run.line() == [Version(1)]


@pytest.mark.parametrize("at", [20, 0, "20", "20.1"])
def test_start_cannot_be_combined_with_at(at):
    for store in (MemoryStore(), trained_run()):
        with (
            training(store, EverySteps(1)) as (state, ckpt),
            pytest.raises(LimpetError, match=r"start=.*RUN@120"),
        ):
            ckpt.resume(at, start="memory://elsewhere@latest")
        assert states_equal(state, initial_state())


def test_the_error_for_another_training_lists_all_differences():
    store = MemoryStore()
    with training(store, EverySteps(5)) as (state, ckpt):
        train(state, ckpt, 5)
    other = {"model": np.zeros(3), "progress": limpet.Progress()}
    with Checkpointer(store, other) as ckpt, pytest.raises(PlanError) as e:
        ckpt.resume()
    assert isinstance(e.value, MissingLeaf | UnexpectedLeaf | PlanError)
    for key in ("model", "weights", "small", "history"):
        assert key in str(e.value)
    first = r"memory://memory holds a training with another state, of which step 5 was saved on "
    assert re.match(first + r"\d{4}-\d\d-\d\d at \d\d:\d\d UTC\. The snapshot ", str(e.value))
    assert "use another folder" in str(e.value)  # with the advice
    assert "new run" in str(e.value)
    assert Run(store).branch() == 0


BEST, STOP = KeepLast(5) | KeepBest(1, "val_los"), StopWhen("val_los")


@pytest.mark.parametrize("arguments", [{"keep": BEST}, {"keep": BEST, "stop": STOP}])
def test_a_metric_that_is_never_given_causes_one_event(arguments):
    """The event comes at the end of the training."""
    store, state = MemoryStore(), initial_state()
    ckpt = Checkpointer(store, state, save=EverySteps(1), **arguments)
    with missing_metrics() as reported, ckpt:
        train(state, ckpt, 4)
        ckpt.wait()
        assert not reported
    assert reported == [(["val_los"], ["loss"])]


def test_the_saved_event():
    store = MemoryStore()
    emitted, attached = record_events()
    with attached, training(store, EverySteps(5), KeepLast(1)) as (state, ckpt):
        train(state, ckpt, 10)
        ckpt.wait()
        statistics = ckpt.statistics()
    saved = [f for n, f in emitted if n == "saved"]
    assert [f["version"] for f in saved] == ["version_5", "version_10"]
    assert saved[0]["metrics"]["loss"] == state_after(5)["history"][-1]
    assert sum(f["bytes"] for f in saved) == statistics["bytes"]
    assert saved[-1]["blocked"] == statistics["last_blocked_seconds"]
    assert (
        sum(f["blocked"] for f in saved) < statistics["blocked_seconds"]
    )  # the statistics include other steps and the wait
    assert statistics["saves"] == 2
    assert statistics["failures"] == 0
    assert 0 < statistics["goodput"] <= 1


@pytest.fixture
def now(monkeypatch):
    """The time on both clocks of ``Goodput``."""
    now = [0.0]
    clocks = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0])
    monkeypatch.setattr("limpet.training.goodput.time", clocks)
    return now


def test_the_slowdown_of_steps_is_the_ratio_of_medians(now):
    save = SimpleNamespace(done=True)
    goodput = Goodput()
    goodput.pending = save

    def step(seconds, during_save):
        with goodput.paused():
            save.done = not during_save
        save.done = True  # the save ends within the step
        now[0] += seconds

    for seconds in (100.0, 2.0, 2.0, 2.0, 2.0):  # the first step compiles
        step(seconds, during_save=False)
    for _ in range(4):
        step(3.0, during_save=True)
    assert "step_slowdown" not in goodput.statistics()
    step(3.0, during_save=True)
    assert "step_slowdown" not in goodput.statistics()
    with goodput.paused():  # ends the fifth of these steps
        pass
    assert goodput.statistics()["step_slowdown"] == 1.5
    for _ in range(100):
        step(1.0, during_save=False)
    assert goodput.statistics()["step_slowdown"] == 3.0


def test_goodput_counts_the_saved_steps_of_all_processes(now):
    now[0] = 1000.0
    first = Goodput()
    now[0] += 10  # ten seconds of steps
    with first.paused():
        first.mark_committed(first.to_metadata()["trained_seconds"])
        now[0] += 5  # a blocking save
    now[0] += 5  # steps that are lost with the process
    with first.paused():
        pass
    assert first.statistics()["goodput"] == pytest.approx(10 / 20)
    metadata = {"began": 1000.0, "trained_seconds": 10.0}
    now[0] += 60  # until a machine is available
    second = Goodput()
    now[0] += 5  # startup
    second.resume_from(metadata)
    assert second.statistics()["goodput"] == pytest.approx(10 / 85)
    now[0] += 15
    with second.paused():
        second.mark_committed(second.to_metadata()["trained_seconds"])
    assert second.statistics()["goodput"] == pytest.approx(25 / 100)
    now[0] = 10.0  # the wall clock jumps back
    assert 0 <= second.statistics()["goodput"] <= 1
