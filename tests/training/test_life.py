"""The life of a run as a trainer lives it: a store in trouble, going back, stopping, figures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import events, machine
from holdfast.errors import (
    Denied,
    FormatTooNew,
    HoldfastError,
    MetricMissing,
    MissingLeaf,
    NoSpace,
    PlanError,
    SaveFailed,
    StoreError,
    Unavailable,
    UnexpectedLeaf,
)
from holdfast.format.names import Version
from holdfast.format.records import Pin, encode_pin
from holdfast.run.policy import EveryEpoch, EverySteps, KeepBest, KeepLast, OnException, StopWhen
from holdfast.run.run import Run
from holdfast.run.save_request import (
    RequestedSave,
    RequestWatcher,
    put_request,
    read_request,
    request_and_wait,
)
from holdfast.storage.memory import MemoryStore
from holdfast.training.checkpointer import Checkpointer
from holdfast.training.goodput import Goodput
from tests.forging import seal, sealed_content
from tests.trainings import (
    initial_state,
    state_after,
    states_equal,
    train,
    train_step,
    trained_run,
    training,
)


class Gate(MemoryStore):
    """A store that writes shards only while the gate is open, and fails while it is ``broken``."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.broken: StoreError | None = None

    def put(self, key: str, length: int) -> Any:
        assert self.open.wait(20)
        if self.broken is not None:
            raise self.broken
        return super().put(key, length)


def told() -> tuple[list[tuple[str, dict[str, Any]]], Any]:
    heard: list[tuple[str, dict[str, Any]]] = []
    return heard, events.attach(lambda name, fields: heard.append((name, fields)))


# -- one save in flight --------------------------------------------------------------------------


def test_a_save_that_is_due_waits_for_the_one_in_flight_and_says_so() -> None:
    store = Gate()
    heard, attached = told()
    with attached, training(store, EverySteps(2)) as (state, ckpt):
        train(state, ckpt, 2)
        ckpt.wait()
        store.open.clear()
        train(state, ckpt, 5)
        threading.Timer(0.05, store.open.set).start()
        train(state, ckpt, 6)
        assert [f["step"] for n, f in heard if n == "save_waited"] == [6]
        ckpt.wait()
        figures, saved = ckpt.statistics(), [f["blocked"] for n, f in heard if n == "saved"]
        assert 0 < figures["waited_seconds"] < figures["last_blocked_seconds"] == saved[-1]
        assert sum(saved) < figures["blocked_seconds"]
    assert [s.step for s in Run(store).snapshots()] == [2, 4, 6]


def test_a_save_that_is_due_can_be_skipped_until_the_one_in_flight_is_done() -> None:
    store = Gate()
    heard, attached = told()
    state = initial_state()
    with attached, Checkpointer(store, state, save=EverySteps(2), busy="skip") as ckpt:
        train(state, ckpt, 2)
        ckpt.wait()
        store.open.clear()
        train(state, ckpt, 7)  # 4 is in flight; 6 is due and left out, and still at 7
        assert [f["step"] for n, f in heard if n == "save_skipped"] == [6]
        assert ckpt.statistics()["skipped"] == 1
        store.open.set()
        ckpt.wait()
        train(state, ckpt, 8)  # saved as soon as it can be
    assert [s.step for s in Run(store).snapshots()] == [2, 4, 8]


# -- a store in trouble --------------------------------------------------------------------------


def full() -> NoSpace:
    return NoSpace("Cannot write: No space left on device")


def test_a_full_disk_with_warn_costs_no_step_and_says_so_loudly() -> None:
    store = Gate()
    state = initial_state()
    with Checkpointer(store, state, save=EverySteps(2), on_error="warn") as ckpt:
        train(state, ckpt, 4)
        ckpt.wait()
        store.broken = full()
        match = r"NOTHING WAS SAVED.*since step 4.*No space"
        with pytest.warns(SaveFailed, match=match) as said:
            train(state, ckpt, 12)
        assert 2 <= len(said) <= 4
        assert {str(w.filename)[-12:] for w in said} == {"trainings.py"}  # the line of its own step
        assert Run(store).line() == [Version(2), Version(4)]
        assert ckpt.statistics()["failures"] >= 3
        store.broken = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SaveFailed)
            train(state, ckpt, 14)
            train(state, ckpt, 16)
    assert states_equal(state, state_after(16))
    assert [s.step for s in Run(store).snapshots()][-1] == 16
    assert all(s.verify().ok for s in Run(store).snapshots())


@pytest.mark.parametrize("choice", ["raise", "warn"])
def test_old_versions_that_cannot_be_deleted_are_told_as_what_they_are(choice: Any) -> None:
    class Keeps(MemoryStore):
        def delete(self, key: str) -> None:
            if "manifest" in key:
                raise Denied(f"Cannot delete {key}")
            super().delete(key)

    store, state = Keeps(), initial_state()
    ckpt = Checkpointer(store, state, save=EverySteps(1), keep=KeepLast(1), on_error=choice)
    train(state, ckpt, 2)
    with pytest.raises(Denied, match=r"version_2 was saved.*old versions"):
        ckpt.wait()
    train(state, ckpt, 3)
    assert ckpt._saver._pending is not None
    ckpt._saver._pending._thread.join()
    if choice == "warn":
        with pytest.warns(SaveFailed, match="Old versions accumulate.*version_3 was saved"):
            ckpt.close()
    else:
        with pytest.raises(Denied, match="version_3 was saved"):
            ckpt.close()
    assert Run(store).line() == [Version(1), Version(2), Version(3)]


def test_warn_does_not_silence_what_was_asked_for_by_name() -> None:
    store = Gate()
    state = initial_state()
    ckpt = Checkpointer(store, state, save=EverySteps(100), on_error="warn")
    train(state, ckpt, 3)
    store.broken = full()
    with pytest.raises(NoSpace):
        ckpt.save()
    store.broken = None
    assert ckpt.save().step == 3
    store.broken = full()
    train(state, ckpt, 100)
    with pytest.warns(SaveFailed, match="since step 3"):
        ckpt.close()


def test_warn_is_for_stores_a_state_that_cannot_be_kept_still_raises() -> None:
    state = initial_state() | {"bad": object()}
    ckpt = Checkpointer(MemoryStore(), state, save=EverySteps(1), on_error="warn")
    with pytest.raises(PlanError, match="bad"):
        ckpt.step()
    ckpt.close()


def test_a_folder_that_cannot_be_written_is_known_at_the_first_step() -> None:
    class ReadOnly(MemoryStore):
        def put_if_absent(self, key: str, data: bytes) -> Any:
            raise Denied(f"Cannot write {key}: Read-only file system")

    ckpt = Checkpointer(ReadOnly(), initial_state(), save=EverySteps(1000))
    with pytest.raises(Denied, match="Read-only"):
        ckpt.step()
    ckpt.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_local_folder_that_cannot_be_written(tmp_path: Any) -> None:
    (tmp_path / "runs").mkdir(mode=0o555)
    ckpt = Checkpointer(tmp_path / "runs" / "a", initial_state(), save=EverySteps(1000))
    with pytest.raises(Denied, match="runs"):
        ckpt.step()
    ckpt.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"busy": "drop"}, "busy"),
        ({"on_error": "ignore"}, "on_error"),
        ({"full_every": 0}, "full_every"),
        ({"full_every": True}, "full_every"),
        ({"full_every": 2.5}, "full_every"),
    ],
)
def test_choices_that_are_none(given: dict[str, Any], message: str) -> None:
    with pytest.raises(HoldfastError, match=message):
        Checkpointer(MemoryStore(), initial_state(), **given)


def test_every_epoch_needs_to_know_which_step_completes_one() -> None:
    for state in ({"x": 1}, initial_state()):
        with pytest.raises(HoldfastError, match=r"EveryEpoch.*ElasticSampler"):
            Checkpointer(MemoryStore(), state, save=EverySteps(5) | EveryEpoch())
    state = initial_state() | {"sampler": holdfast.ElasticSampler(10, 2)}
    Checkpointer(MemoryStore(), state, save=EveryEpoch()).close()


# -- mistakes that a person makes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"save": 500}, r"save=.*EverySteps\(500\), found 500"),
        ({"save": KeepLast(1)}, r"save=.*found KeepLast"),
        ({"keep": EverySteps(1)}, r"keep=.*KeepLast\(3\)"),
        ({"keep": 3}, "keep="),
        ({"stop": "loss"}, r"stop=.*found 'loss'"),
        ({"state": torch.nn.Linear(2, 2)}, r"state=.*a dict such as .*Linear"),
        ({"state": [1]}, "state="),
        ({"incremental": "no"}, "incremental="),
        ({"overlap": 1}, "overlap="),
    ],
)
def test_arguments_of_another_kind(given: dict[str, Any], message: str) -> None:
    with pytest.raises(HoldfastError, match=message):
        Checkpointer(MemoryStore(), given.pop("state", initial_state()), **given)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (1.5, r"a dict such as .*a float"),
        (torch.tensor(1.0), "a Tensor"),
        ({"loss": "low"}, r"'loss' is not a number.*a str"),
        ({"loss": None}, "NoneType"),
        ({"loss": [1.0]}, "a list"),
        ({"loss": torch.ones(3)}, r"Tensor of shape \(3,\)"),
        ({"loss": np.ones((2, 2))}, r"ndarray of shape \(2, 2\)"),
        ({"loss": True}, "a bool"),
        ({"loss": np.bool_(True)}, "not a number"),
        ({"loss": np.str_("abc")}, "not a number"),
        ({"loss": torch.tensor(1 + 2j)}, "not a number"),
        ({"loss": torch.tensor(True)}, "not a number"),
        ({"loss": 2**70}, "64-bit int"),
        ({3: 1.0}, "3 is not a number"),
    ],
)
def test_metrics_that_are_none_are_refused_at_once(metrics: Any, message: str) -> None:
    with training(MemoryStore(), EverySteps(10**6)) as (_, ckpt):
        with pytest.raises(PlanError, match=message):
            ckpt.step(metrics)
        with pytest.raises(PlanError, match=message):
            ckpt.save(metrics)
        ckpt.step({"a": 1, "b": 2.5, "c": np.float32(1), "d": torch.ones(1)})
        ckpt.step({"e": torch.tensor(1.0, dtype=torch.bfloat16), "f": np.int8(3)})
        ckpt.step({"g": float("nan")})


def test_what_state_dict_returned_is_refused_by_name() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for more in ({"opt": optimizer.state_dict()}, {"all": {"opt": schedule.state_dict()}}):
        with pytest.raises(PlanError, match=r"opt in the state.*copy made once"):
            Checkpointer(MemoryStore(), {"model": model, **more})
    state = {"model": model.state_dict(), "optimizer": optimizer, "schedule": schedule}
    Checkpointer(MemoryStore(), state).close()


def test_a_version_is_no_run(tmp_path: Any) -> None:
    for name in ("version_8", "version_8.1"):
        with pytest.raises(HoldfastError, match=r"is not a run.*resume\(start="):
            Checkpointer(tmp_path / name, initial_state())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a@latest", "a@8", "a@8.1"])
def test_the_address_of_a_version_is_no_run(tmp_path: Any, name: str) -> None:
    for call in ("step", "resume"):  # it is a name like another where there is no such run
        with Checkpointer(tmp_path / call / name, initial_state()) as ckpt:
            getattr(ckpt, call)()
        with training(tmp_path / call / "a", EverySteps(1)) as (state, ckpt):
            train(state, ckpt, 1)
        ckpt = Checkpointer(tmp_path / call / name, initial_state())
        with pytest.raises(HoldfastError, match=r"is not a run.*the address of a version"):
            getattr(ckpt, call)()
        ckpt.close()


def test_a_snapshot_is_no_run(tmp_path: Any) -> None:
    holdfast.save(tmp_path / "mine", initial_state())
    for call in ("step", "resume", "save"):
        ckpt = Checkpointer(tmp_path / "mine", initial_state())
        with pytest.raises(HoldfastError, match=r"is not a run.*found a snapshot"):
            getattr(ckpt, call)()
        ckpt.close()


def test_counting_progress_by_hand_too_is_refused() -> None:
    with training(MemoryStore(), EverySteps(10**6)) as (state, ckpt):
        state["progress"].step = 7  # before the first step it may be set
        ckpt.step()
        assert ckpt.current_step == 8
        state["progress"].step += 1
        with pytest.raises(HoldfastError, match="Expected 8, found 9"):
            ckpt.step()


def test_a_save_right_after_a_step_has_its_metrics() -> None:
    with training(MemoryStore(), EverySteps(10**6)) as (state, ckpt):
        train(state, ckpt, 3)
        assert ckpt.save().metadata["metrics"] == {"loss": state["history"][-1]}
        ckpt.step()
        assert ckpt.save().metadata["metrics"] == {}
        ckpt.step({"loss": 2.0})
        assert ckpt.save({"other": 1.0}).metadata["metrics"] == {"loss": 2.0, "other": 1.0}


def test_a_resume_that_goes_nowhere() -> None:
    with training(MemoryStore(), EverySteps(1)) as (_, ckpt):
        for wrong in ({"at": "8"}, {"at": 8.0}, {"branch": True}):
            with pytest.raises(HoldfastError, match="whole numbers"):
                ckpt.resume(**wrong)  # type: ignore[arg-type]


def test_the_beginning_and_steps_that_are_left_unsaved_are_told() -> None:
    store = MemoryStore()
    heard, attached = told()
    with attached:
        with training(store, EverySteps(4)) as (state, ckpt):
            ckpt.resume()
            train(state, ckpt, 6)
        with training(store, EverySteps(4)) as (state, ckpt):
            ckpt.resume()
            train(state, ckpt, 8)
        with training(store, EverySteps(4)) as (_, ckpt):
            ckpt.resume()
    wanted = ("began", "left_unsaved", "resumed")
    assert [n for n, _ in heard if n in wanted] == ["began", "left_unsaved", "resumed", "resumed"]
    [unsaved] = [f for n, f in heard if n == "left_unsaved"]
    assert (unsaved["step"], unsaved["since"]) == (6, 4)


# -- two trainings in one run --------------------------------------------------------------------

OTHER = """
import sys, holdfast
state = {"x": [0.0], "progress": holdfast.Progress()}
ckpt = holdfast.Checkpointer(sys.argv[1], state, save=holdfast.EverySteps(1))
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
def test_a_second_training_is_refused_while_the_first_one_lives(tmp_path: Any) -> None:
    command = [sys.executable, "-c", OTHER, str(tmp_path / "a")]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdin is not None
    assert first.stdout is not None
    assert first.stdout.readline() == "training\n"
    state: dict[str, Any] = {"x": [0.0], "progress": holdfast.Progress()}
    for choice in ("raise", "warn"):
        ckpt = Checkpointer(tmp_path / "a", state, on_error=choice)  # type: ignore[arg-type]
        ckpt.resume()
        with pytest.raises(HoldfastError, match=rf"Another training.*process {first.pid} on"):
            ckpt.step()
        with pytest.raises(HoldfastError, match="Another training"):
            ckpt.resume(at=1)  # it must not move the other's line either
        ckpt.close()
    assert Run(tmp_path / "a").line() == [Version(1), Version(2)]
    assert Run(tmp_path / "a").branch() == 0
    if first.pid % 2:  # at its end it makes room; killed, it blocks nobody either
        first.kill()
    first.communicate("\n", timeout=60)
    with Checkpointer(tmp_path / "a", state, save=EverySteps(1)) as ckpt:
        ckpt.resume()
        ckpt.step()
    assert not (tmp_path / "a" / "writer.json").exists()


def test_a_training_that_is_succeeded_saves_nothing_more() -> None:
    """As when a node that was taken for dead comes back: its successor runs elsewhere."""
    store = MemoryStore()
    old = Checkpointer(store, state := initial_state(), save=EverySteps(2), on_error="warn")
    train(state, old, 2)
    old.wait()
    with training(store, EverySteps(2)) as (new_state, new):
        new.resume()
        train(new_state, new, 3)
        with pytest.raises(HoldfastError, match="taken this run over"):
            train(state, old, 6)
            old.wait()
        train(new_state, new, 4)
    assert Run(store).line() == [Version(2), Version(4)]
    old.close()


ELSEWHERE = ("another", "boot", "7:1")
DEAD = (machine.process_identity()[0], "an earlier boot", "7:1")


@pytest.mark.parametrize("died", [ELSEWHERE, DEAD], ids=["elsewhere", "dead"])
def test_a_successor_takes_the_pins_of_its_predecessor_away_and_no_others(
    died: tuple[str, str, str],
) -> None:
    """As when a machine goes away for good in the middle of a save: what it had pinned would be
    kept for a week, since nobody can see from here that it is dead."""
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
        record = encode_pin(Pin(attempt, version, machine.utc_now(), *holder))
        store.put_if_absent(f"pin-{number:012}.json", record)
    store.put_if_absent("writer.json", encode_pin(Pin(attempt, None, machine.utc_now(), *died)))
    with training(store, EverySteps(1), KeepLast(1)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, 4)
    assert [s.key for s in Run(store).listing().process_pins] == [
        f"pin-{n:012}.json" for n in (2, 3)
    ]
    assert Run(store).line() == [Version(2), Version(3), Version(4)]


def test_a_store_that_fails_to_take_old_pins_away_ends_no_training() -> None:
    """It is a courtesy: they count no more after a week."""

    class Blip(MemoryStore):
        def delete(self, key: str) -> None:
            if key.startswith("pin-00"):
                raise Unavailable("a blip")
            super().delete(key)

    store = Blip()
    for key in ("pin-000000000000.json", "writer.json"):
        store.put_if_absent(key, encode_pin(Pin("0" * 12, None, machine.utc_now(), *ELSEWHERE)))
    with training(store, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 2)
    assert Run(store).line() == [Version(1), Version(2)]


def test_a_new_checkpointer_of_this_process_leaves_the_pins_of_the_last_one() -> None:
    store = MemoryStore()
    mine = Pin("0" * 12, None, machine.utc_now(), *machine.process_identity())
    for key in ("pin-000000000000.json", "writer.json"):
        store.put_if_absent(key, encode_pin(mine))
    with training(store, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 1)
    assert [s.key for s in Run(store).listing().process_pins] == ["pin-000000000000.json"]


def test_a_writer_of_a_later_format_is_not_taken_for_nobody() -> None:
    store = MemoryStore()
    with training(store, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 1)
        ckpt.wait()
        later = seal(sealed_content(store.get("writer.json", 1 << 20)), 99)
        store.delete("writer.json")
        store.put_if_absent("writer.json", later)
        with training(store, EverySteps(1)) as (other, second):
            second.resume()
            with pytest.raises(FormatTooNew, match=r"writer.json"):
                train(other, second, 2)
        with pytest.raises(FormatTooNew):  # that one may have taken over, from elsewhere
            train(state, ckpt, 3)
    assert store.get("writer.json", 1 << 20) == later
    assert Run(store).line() == [Version(1)]


def test_a_writer_that_is_removed_by_hand_is_put_back() -> None:
    store = MemoryStore()
    with training(store, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 1)
        ckpt.wait()
        for lie in (None, b"{}", b""):
            store.delete("writer.json")
            if lie is not None:
                store.put_if_absent("writer.json", lie)
            train(state, ckpt, state["progress"].step + 1)
            ckpt.wait()
    assert "writer.json" not in [s.key for s in store.list("")]


# -- the state before the step that raised -------------------------------------------------------


def network(
    seed: int = 0, kind: type[BaseException] = ZeroDivisionError
) -> tuple[dict[str, Any], Callable[[], float]]:
    """A model with buffers and dropout, and its step, which raises on demand."""
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
        "progress": holdfast.Progress(),
        "rng": holdfast.RNG(),
    }

    def step(where: str | None = None) -> float:
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


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a snapshot would hold it, to be compared."""
    snapshot = holdfast.save(MemoryStore().at("version_0"), state)
    values = {key: snapshot[key] for key in snapshot}
    return {k: np.asarray(v[...]) if hasattr(v, "shape") else v for k, v in values.items()}


def equal(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(
        np.array_equal(a[k], b[k]) if isinstance(a[k], np.ndarray) else a[k] == b[k] for k in a
    )


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_saves_the_state_before_the_step_that_raised(
    where: str, kind: type[BaseException]
) -> None:
    store = MemoryStore()
    state, step = network(0, kind)
    wanted: Any = None
    with (
        pytest.raises(kind),
        Checkpointer(store, state, save=EverySteps(100) | OnException()) as ckpt,
    ):
        for _ in range(7):
            loss = step()
            ckpt.step({"loss": loss})
        wanted = plain(state)
        step(where)
    newest = Run(store).latest()
    assert newest is not None
    assert newest.step == 7
    assert newest.metadata["reason"] == "exception"
    assert newest.metadata["metrics"] == {"loss": loss}
    assert newest.metadata["note"]["error"].startswith(kind.__name__)
    other, _ = network(1)
    with Checkpointer(store, other) as ckpt:
        ckpt.resume()
    assert equal(plain(other), wanted)


def test_once_the_optimizer_has_stepped_that_state_is_gone_and_nothing_is_saved() -> None:
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


def test_an_exception_right_after_a_save_saves_nothing_more() -> None:
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


def test_an_exception_before_the_first_step_or_without_the_policy_saves_nothing() -> None:
    for policy in (OnException(), EverySteps(100)):
        store = MemoryStore()
        state, step = network()
        with pytest.raises(ZeroDivisionError), Checkpointer(store, state, save=policy) as ckpt:
            ckpt.resume()
            if policy == EverySteps(100):
                step()
                ckpt.step()
            step("forward")
        assert Run(store).latest() is None


def test_a_save_on_exception_that_fails_hides_no_exception() -> None:
    store = Gate()
    state, step = network()
    with (
        pytest.warns(SaveFailed, match="No space"),  # whoever catches the exception sees no note
        pytest.raises(ZeroDivisionError) as e,
        Checkpointer(store, state, save=OnException()) as ckpt,
    ):
        step()
        ckpt.step()
        store.broken = full()
        step("forward")
    assert "No space" in "".join(e.value.__notes__)


# -- asked from outside --------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are looked for without pause."""
    monkeypatch.setattr(
        "holdfast.training.checkpointer.RequestWatcher", partial(RequestWatcher, interval=0.002)
    )


def test_a_request_from_outside_is_saved_at_the_next_step(tmp_path: Any, quick: None) -> None:
    url, state, answers = tmp_path / "a", initial_state(), list[RequestedSave]()
    with Checkpointer(url, state, save=EverySteps(10**6)) as ckpt:
        train(state, ckpt, 1)  # nothing is saved yet, and it can be asked all the same
        asking = threading.Thread(
            target=lambda: answers.append(request_and_wait(Run(url), 60, interval=0.01))
        )
        asking.start()
        while asking.is_alive():
            train(state, ckpt, state["progress"].step + 1)
        asked = state["progress"].step
        train(state, ckpt, asked + 100)
    [snapshot] = Run(url).snapshots()
    assert answers[0].version == snapshot.version
    assert snapshot.metadata["reason"] == "request"
    assert not [t for t in threading.enumerate() if t.name.startswith("holdfast")]


def test_a_request_whose_save_fails_is_answered_by_a_later_one(tmp_path: Any, quick: None) -> None:
    store, state = Gate(), initial_state()
    with Checkpointer(store, state, save=EverySteps(10**6), on_error="warn") as ckpt:
        train(state, ckpt, 1)
        store.broken = full()
        put_request(store, "a" * 12)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SaveFailed)
            while ckpt.statistics()["failures"] < 2:
                train(state, ckpt, state["progress"].step + 1)
            store.broken = None
            while read_request(store) is not None:
                train(state, ckpt, state["progress"].step + 1)
    assert len(Run(store).snapshots()) == 1


def test_a_signal_asks_for_a_save_until_the_end() -> None:
    store, state = MemoryStore(), initial_state()
    before = signal.getsignal(signal.SIGUSR1)
    with Checkpointer(store, state, save=EverySteps(10**6)) as ckpt:
        ckpt.save_on_signal(signal.SIGUSR1)
        train(state, ckpt, 3)
        os.kill(os.getpid(), signal.SIGUSR1)
        train(state, ckpt, 6)
    assert signal.getsignal(signal.SIGUSR1) == before
    assert Run(store).line() == [Version(4)]


# -- going back, and beginning from another run --------------------------------------------------


def test_going_on_from_a_branch_that_was_left() -> None:
    store = MemoryStore()
    with training(store, EverySteps(10)) as (state, ckpt):
        train(state, ckpt, 40)
    with training(store, EverySteps(10)) as (state, ckpt):
        ckpt.resume(at=20)
        train(state, ckpt, 30)
    with training(store, EverySteps(10)) as (state, ckpt):
        snapshot = ckpt.resume(branch=0)
        assert snapshot is not None
        assert snapshot.version == Version(40)
        assert states_equal(state, state_after(40))
        train(state, ckpt, 50)
    assert Run(store).line() == [*map(Version, (10, 20, 30, 40)), Version(50, 2)]
    with training(store, EverySteps(10)) as (state, ckpt):
        snapshot = ckpt.resume(at=30, branch=1)
        assert snapshot is not None
        assert snapshot.version == Version(30, 1)


def test_a_new_run_begins_where_another_is_and_goes_on_by_itself() -> None:
    url = "memory://life-start"
    with training(url, EverySteps(10)) as (state, ckpt):
        train(state, ckpt, 40)
    store = MemoryStore()
    with training(store, EverySteps(10)) as (state, ckpt):
        snapshot = ckpt.resume(start=f"{url}@20")
        assert snapshot is not None
        assert (snapshot.step, ckpt.current_step) == (20, 20)
        assert states_equal(state, state_after(20))
        train(state, ckpt, 30)
    [first] = Run(store).snapshots()
    assert first.manifest.parent is None  # a parent is a version of the same run
    assert first.metadata["note"]["started_from"]["url"].endswith("version_20")
    with training(store, EverySteps(10)) as (state, ckpt):
        again = ckpt.resume(start=f"{url}@20")  # the same script, restarted
        assert again is not None
        assert again.step == 30
        assert states_equal(state, state_after(30))
    with training(MemoryStore(), EverySteps(10)) as (state, ckpt), pytest.raises(HoldfastError):
        ckpt.resume(start=f"{url}@25")


def test_a_resume_waits_for_the_save_in_flight() -> None:
    store, state = Gate(), initial_state()
    with Checkpointer(store, state, save=EverySteps(5)) as ckpt:
        store.open.clear()
        train(state, ckpt, 7)
        threading.Timer(0.05, store.open.set).start()
        snapshot = ckpt.resume()
        assert snapshot is not None
        assert snapshot.step == 5
        assert states_equal(state, state_after(5))


def test_a_warm_start_takes_what_fits_and_counts_from_zero() -> None:
    url = "memory://life-warm"
    holdfast.save(
        f"{url}/version_70",
        {"model": {"old": np.arange(3.0), "gone": 1}, "progress": holdfast.Progress()},
        step=70,
    )
    state: dict[str, Any] = {
        "model": {"new": np.zeros(3), "head": np.ones(2)},
        "progress": holdfast.Progress(),
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


@pytest.mark.parametrize("back", [{"at": 20}, {"branch": 0}, {"at": 0, "branch": 1}])
def test_a_run_cannot_both_begin_and_go_back(back: dict[str, int]) -> None:
    for store in (MemoryStore(), trained_run()):
        with (
            training(store, EverySteps(1)) as (state, ckpt),
            pytest.raises(HoldfastError, match=r"start=.*RUN@120"),
        ):
            ckpt.resume(start="memory://elsewhere@latest", **back)
        assert states_equal(state, initial_state())


def test_leniency_without_a_start_is_refused() -> None:
    with training(MemoryStore(), EverySteps(1)) as (_, ckpt):
        with pytest.raises(HoldfastError, match="start="):
            ckpt.resume(missing="keep")
        ckpt.resume()


def test_a_run_of_another_training_is_refused_with_all_differences() -> None:
    store = MemoryStore()
    with training(store, EverySteps(5)) as (state, ckpt):
        train(state, ckpt, 5)
    other = {"model": np.zeros(3), "progress": holdfast.Progress()}
    with Checkpointer(store, other) as ckpt, pytest.raises(PlanError) as e:
        ckpt.resume()
    assert isinstance(e.value, MissingLeaf | UnexpectedLeaf | PlanError)
    for key in ("model", "weights", "small", "history"):
        assert key in str(e.value)
    assert "new run" in str(e.value)  # and the way that there is


def test_a_sampler_of_other_data_says_what_can_be_done_about_it() -> None:
    store = MemoryStore()
    for length in (10, 12):
        sampler = holdfast.ElasticSampler(length, 2)
        state = initial_state() | {"sampler": sampler}
        ckpt = Checkpointer(store, state, save=EverySteps(1))
        if length == 12:
            with pytest.raises(PlanError, match=r"length=10.*length=12.*keys=") as e:
                ckpt.resume()
            del state["sampler"]
            assert states_equal(state, initial_state())  # it is asked before anything is changed
            assert "overwritten" not in str(e.value)
            continue
        next(iter(sampler))
        train(state, ckpt, 1)
        ckpt.close()


def test_a_structure_that_changes_is_saved_as_it_is_and_told() -> None:
    store = MemoryStore()
    heard, attached = told()
    with attached, training(store, EverySteps(5)) as (state, ckpt):
        train(state, ckpt, 5)
        state["adapter"] = np.ones(7)
        del state["small"]["bias"]
        state["small"]["bias"] = np.ones(5)
        for _ in range(5):
            state["progress"].step += 0
            ckpt.step()
        ckpt.wait()
    [fields] = [f for n, f in heard if n == "structure_changed"]
    assert fields["added"] == ["adapter"]
    assert fields["changed"] == ["small/bias"]
    assert fields["removed"] == []
    newest = Run(store).latest()
    assert newest is not None
    assert newest["adapter"].shape == (7,)
    with training(store, EverySteps(5)) as (state, ckpt), pytest.raises(PlanError, match="adapter"):
        ckpt.resume()


# -- when to stop --------------------------------------------------------------------------------


def test_early_stop_and_its_patience_is_in_the_snapshot() -> None:
    store = MemoryStore()
    losses = [5.0, 4.0, 4.5, 4.2, 4.1, 3.0]
    seen = 0
    for stopped_at in (2, 3, 5):  # the process is ended and begun again on the way
        state = initial_state()
        with Checkpointer(
            store, state, save=EverySteps(1), stop=StopWhen("val_loss", patience=3)
        ) as ckpt:
            ckpt.resume()
            while seen < stopped_at and not ckpt.should_stop:
                train_step(state)
                ckpt.step({"val_loss": torch.tensor(losses[seen]), "loss": 1.0})
                ckpt.step({"loss": 1.0})  # a step without the metric counts for nothing
                seen += 1
            assert ckpt.should_stop == (seen == 5)
    assert seen == 5
    with Checkpointer(store, initial_state(), stop=StopWhen("val_loss", patience=3)) as ckpt:
        assert not ckpt.should_stop
        ckpt.resume()
        assert ckpt.should_stop


BEST, STOP = KeepLast(5) | KeepBest(1, "val_los"), StopWhen("val_los")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep": BEST}, r"has val_los.*they have loss.*Run.add_metrics"),
        ({"stop": STOP}, r"given val_los, which StopWhen waits for"),
        ({"keep": BEST, "stop": STOP}, r"has val_los.*\. No step of .* was given val_los"),
    ],
)
@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_a_metric_that_never_comes_is_told_once(
    given: dict[str, Any], message: str, steps: int
) -> None:
    """At a step when there are three versions, and at the latest in the end."""
    store, state = MemoryStore(), initial_state()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Checkpointer(store, state, save=EverySteps(1), **given) as ckpt:
            train(state, ckpt, min(steps, 3))
            ckpt.wait()
            train(state, ckpt, steps)
            assert len(told) == (steps > 3)
    assert [w.category for w in told] == [MetricMissing]
    assert re.search(message, str(told[0].message))


def test_nothing_is_told_of_a_metric_where_nothing_was_saved() -> None:
    with Checkpointer(MemoryStore(), state := initial_state(), keep=BEST, stop=STOP) as ckpt:
        train(state, ckpt, 3)


def test_a_metric_that_comes_with_an_evaluation_is_none_to_worry_about() -> None:
    store, state = MemoryStore(), initial_state()
    with Checkpointer(
        store, state, save=EverySteps(1), keep=KeepLast(1) | KeepBest(1, "acc", mode="max")
    ) as ckpt:
        for step in range(1, 9):
            train(state, ckpt, step)
            newest = ckpt.wait()
            assert newest is not None
            Run(store).add_metrics(newest, {"acc": step % 5})
    assert Run(store).line() == [Version(4), Version(8)]
    best = Run(store).best("acc", "max")
    assert best is not None
    assert best.step == 4


# -- figures -------------------------------------------------------------------------------------


def test_what_is_told_of_a_save() -> None:
    store = MemoryStore()
    heard, attached = told()
    with attached, training(store, EverySteps(5), KeepLast(1)) as (state, ckpt):
        train(state, ckpt, 10)
        ckpt.wait()
        figures = ckpt.statistics()
    saved = [f for n, f in heard if n == "saved"]
    assert [f["version"] for f in saved] == ["version_5", "version_10"]
    assert saved[0]["metrics"]["loss"] == state_after(5)["history"][-1]
    assert sum(f["bytes"] for f in saved) == figures["bytes"]
    assert saved[-1]["blocked"] == figures["last_blocked_seconds"]
    assert sum(f["blocked"] for f in saved) < figures["blocked_seconds"]  # other steps and the wait
    assert figures["saves"] == 2
    assert figures["failures"] == figures["skipped"] == 0
    assert 0 < figures["goodput"] <= 1


def test_goodput_counts_no_time_that_a_save_takes() -> None:
    now = [0.0]
    tally = Goodput(lambda: now[0], lambda: now[0])
    now[0] += 3
    with tally.paused():
        now[0] += 5
    now[0] += 1
    tally.add_blocked(2.0)  # in the middle of a step
    now[0] += 2
    with tally.paused():
        now[0] += 7
    tally.mark_committed(tally.to_metadata()["trained_seconds"])
    assert tally.statistics()["goodput"] == pytest.approx(4 / 18)
    assert tally.statistics()["blocked_seconds"] == 5 + 2 + 7
    assert tally.statistics()["last_blocked_seconds"] == 2


def test_goodput_counts_what_was_kept_over_all_processes() -> None:
    now = [1000.0]
    first = Goodput(lambda: now[0], lambda: now[0])
    now[0] += 10  # ten seconds of steps
    first.end_step()
    first.mark_committed(first.to_metadata()["trained_seconds"])
    now[0] += 5  # a save that blocks
    first.begin_step()
    now[0] += 5  # steps that are lost with the process
    first.end_step()
    assert first.statistics()["goodput"] == pytest.approx(10 / 20)
    noted = {"began": 1000.0, "trained_seconds": 10.0}
    now[0] += 60  # until there is a machine again
    second = Goodput(lambda: now[0], lambda: now[0])
    now[0] += 5  # starting
    second.resume_from(noted)
    assert second.statistics()["goodput"] == pytest.approx(10 / 85)
    now[0] += 15
    second.end_step()
    second.mark_committed(second.to_metadata()["trained_seconds"])
    assert second.statistics()["goodput"] == pytest.approx(25 / 100)
    now[0] = 10.0  # the clock of the day jumps back
    assert 0 <= second.statistics()["goodput"] <= 1


@pytest.mark.parametrize("lie", [None, "x", float("nan"), True, [1], 10**400])
def test_what_a_manifest_says_of_seconds_is_not_trusted(lie: Any) -> None:
    tally = Goodput()
    tally.resume_from({"began": lie, "trained_seconds": lie})
    assert 0 <= tally.statistics()["goodput"] <= 1
