"""Attack the end and the resume of a training.

A state that is partially loaded, partially counted, or interrupted is never saved as a step. A
failure never hides the exception that ended the training.
"""

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import limpet
from limpet import events, machine
from limpet.errors import LimpetError, NoSnapshot, SaveFailed, StoreError, UnsavedSteps
from limpet.format.names import MANIFEST, Version
from limpet.format.records import Pin, encode_record
from limpet.run.policy import EverySteps, KeepLast, KeepPolicy, OnException, StopWhen
from limpet.run.run import Run
from limpet.run.save_request import put_request
from limpet.saving import pending
from limpet.saving.staging import DeferredStaging
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from tests.pools import allocated_bytes
from tests.ranks.trainings import TrainingJob
from tests.trainings import flip_bit, initial_state, shard_of, train, train_step, training

State = dict[str, Any]


def network(wide=2_500_000):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model.wide = nn.Parameter(torch.zeros(wide))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "progress": limpet.Progress()}

    def step():
        model.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        model.wide.grad = torch.ones(1).expand(wide)
        optimizer.step()

    return state, step


def weights(state):
    return {k: v.detach().clone() for k, v in state["model"].state_dict().items()}


def saved_state_equals(store, step, expected):
    found = limpet.load(store.at(f"version_{step}"))["model"]
    return all(torch.equal(found[k], v) for k, v in expected.items())


class FullDisk(MemoryStore):
    def put(self, key, length):
        raise StoreError("a full disk")


@pytest.fixture
def gate(monkeypatch):
    """Return an event. Deferred staging continues only while it is set."""
    gate, stage = threading.Event(), DeferredStaging.stage
    gate.set()

    def wait_and_stage(self, workers):
        assert gate.wait(20)
        stage(self, workers)

    monkeypatch.setattr(DeferredStaging, "stage", wait_and_stage)
    yield gate
    gate.set()


def test_steps_and_saves_raise_after_a_failed_resume():
    store = MemoryStore()
    state, step = network(1000)
    ckpt = Checkpointer(store, state, save=EverySteps(2))
    for _ in range(4):
        step()
        ckpt.step()
    ckpt.wait()
    flip_bit(store, shard_of(store, "version_4"))
    with pytest.raises(NoSnapshot):
        ckpt.resume(at=4)
    for call in (ckpt.step, ckpt.save):
        with pytest.raises(LimpetError, match=r"last resume\(\) failed"):
            call()
    ckpt.resume(at=2)  # an intact version makes the state valid again
    step()
    ckpt.step()
    assert ckpt.save().step == 3
    ckpt.close()


def test_a_save_after_an_exception_in_step_has_the_step_of_its_state():
    store = MemoryStore()
    loader = limpet.DataLoader(range(100), 10)
    state = initial_state() | {"loader": loader}
    with pytest.raises(LimpetError), Checkpointer(store, state, save=OnException()) as ckpt:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
            train_step(state)
            ckpt.step()
        train_step(state)
        ckpt.step(batches=5)
    for version in Run(store).line():
        assert limpet.load(store.at(str(version)))["progress"]["step"] == version.step


def test_a_run_with_versions_only_on_another_branch_is_not_empty():
    store = MemoryStore()
    with training(store, EverySteps(10)) as (state, ckpt):
        train(state, ckpt, 20)
    with training(store, EverySteps(5)) as (state, ckpt):
        ckpt.resume(at=10)
        train(state, ckpt, 15)
    for folder in ("version_10", "version_15.1"):
        for stat in list(store.list(folder)):
            store.delete(stat.key)
    with training(store, EverySteps(5)) as (state, ckpt):
        with pytest.raises(NoSnapshot, match=r"on other branches.*resume\(at="):
            ckpt.resume()
        assert ckpt.resume(at="20").step == 20


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_branch_stays_current_if_its_record_is_lost(damage):
    """Retention has deleted the first version of the branch, which could replace the record."""
    store = MemoryStore()
    with training(store, EverySteps(1), KeepLast(2)) as (state, ckpt):
        train(state, ckpt, 5)
    with training(store, EverySteps(1), KeepLast(2)) as (state, ckpt):
        ckpt.resume(at=4)
        train(state, ckpt, 20)
    if damage == "missing":
        store.delete("branch-1.json")
    else:
        flip_bit(store, "branch-1.json", -9)
    with training(store, EverySteps(1), KeepLast(2)) as (state, ckpt):
        assert ckpt.resume().version == Version(20, 1)
        train(state, ckpt, 22)
    before = Run(store).listing().versions
    swept = Run(store).sweep(abandoned=True, grace=0)
    assert [why for key, why in swept.kept if key == "all abandoned versions"]
    assert Run(store).listing().versions == before
    assert Version(22, 1) in before


@pytest.mark.parametrize("failing_call", ["put", "delete"])
def test_an_earlier_failure_does_not_prevent_the_save_of_the_last_step(failing_call):
    may_write = threading.Event()
    may_write.set()

    class SlowStore(MemoryStore):
        broken: str | None = None

        def put(self, key, length):
            assert may_write.wait(20)
            if self.broken == "put":
                raise StoreError("a temporary error")
            return super().put(key, length)

        def delete(self, key):
            if self.broken == "delete" and MANIFEST in key:
                raise StoreError("a temporary error")
            super().delete(key)

    store = SlowStore()
    state, step = network(1000)
    with (
        pytest.warns(SaveFailed, match="an earlier save failed: a temporary error"),
        pytest.raises(ZeroDivisionError) as e,
        Checkpointer(store, state, save=EverySteps(4) | OnException(), keep=KeepLast(1)) as ckpt,
    ):
        for number in range(1, 8):
            step()
            if number == 4:
                may_write.clear()
                store.broken = failing_call
            ckpt.step()
            if number == 1:
                ckpt.save()
        may_write.set()
        assert ckpt._saver.pending is not None
        ckpt._saver.pending._thread.join()
        store.broken = None
        raise ZeroDivisionError
    assert "a temporary error" in "".join(e.value.__notes__)
    assert Run(store).line()[-1] == Version(7)


class FailingPolicy(KeepPolicy):
    """A user-defined policy with a bug."""

    def keep(self, records):
        raise KeyError("in the policy")


@pytest.mark.parametrize("source", ["the savepoint", "the background"])
def test_the_exception_that_ended_the_training_is_not_replaced(source, monkeypatch):
    store = MemoryStore()
    state, step = network(1000)
    keep = FailingPolicy() if source == "the background" else None

    def broken(*args, **options):
        raise RuntimeError("CUDA error: device-side assert triggered")

    with (
        pytest.warns(SaveFailed),
        pytest.raises(SystemExit) as e,
        Checkpointer(store, state, save=EverySteps(2) | OnException(), keep=keep) as ckpt,
    ):
        for _ in range(2 if keep else 1):
            step()
            ckpt.step()
        if keep is None:
            monkeypatch.setattr(nn.Module, "state_dict", broken)
        raise SystemExit(75)
    assert e.value.code == 75
    assert "In addition" in "".join(e.value.__notes__)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("in __str__")

    __repr__ = __str__


@pytest.mark.parametrize("policy", [EverySteps(2), EverySteps(2) | OnException()])
@pytest.mark.parametrize("size", [1, 2])
def test_an_exception_that_has_no_text_ends_the_training_as_others_do(size, policy):
    """On all ranks, at the same step."""
    with TrainingJob(size) as job:

        def work(rank):
            with rank.make_checkpointer(save=policy):
                rank.train_steps(3)
                raise Unprintable

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsavedSteps)
            outcomes = job.outcomes(work)
        assert [type(outcome) for outcome in outcomes] == [Unprintable] * size
        assert job.versions == ([2, 3] if policy.on_exception else [2])


def test_another_rank_learns_of_an_exception_that_has_no_text():
    with TrainingJob(2, lockstep=False) as job:

        def work(rank):
            with rank.make_checkpointer(save=EverySteps(2)):
                rank.train_steps(2)
                if rank.rank:
                    raise Unprintable
                rank.train_steps(100_000)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert [*map(type, job.outcomes(work))] == [Unprintable] * 2


@pytest.mark.parametrize("why", ["no thread", "a damaged version of that name"])
def test_a_save_that_cannot_start_is_counted_reported_and_requested_again(why, monkeypatch):
    store, state = MemoryStore(), initial_state()
    emitted: list[str] = []
    ckpt = Checkpointer(store, state, save=EverySteps(10**6), at_end=False, on_error="warn")
    train(state, ckpt, 1)
    ckpt._watcher.close()  # a poll of its thread could end after the next one, with an older result
    put_request(store, "a" * 12)
    ckpt._watcher.poll()
    start = pending.Thread.start

    def fail_for_saves(self):
        if self.name == "limpet-save":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if why == "no thread":
            patch.setattr(pending.Thread, "start", fail_for_saves)
        else:
            store.put_if_absent(f"version_2/{MANIFEST}", b"{}")
        with events.attach(lambda name, fields: emitted.append(name)):
            try:
                train(state, ckpt, 2)
            except LimpetError:
                assert why != "no thread"
    ckpt._watcher.poll()
    assert ckpt._watcher.pending_request
    assert ckpt.statistics()["failures"] == 1
    assert emitted.count("save_failed") == 1
    ckpt.close()


@pytest.mark.parametrize("options", [{"overlap": True}, {"incremental": True}])
def test_the_save_in_progress_finishes_after_an_interrupted_close(options, gate):
    class GatedStore(MemoryStore):
        def put_if_absent(self, key, data):
            if key.startswith("pin-"):
                assert gate.wait(20)
            return super().put_if_absent(key, data)

    store = GatedStore()
    state, step = network()
    state["large"] = torch.randn(3_000_000)
    ckpt = Checkpointer(store, state, save=EverySteps(2), **options)
    for _ in range(2):
        step()
        ckpt.step()
    ckpt.wait()
    gate.clear()
    threading.Timer(0.05, gate.set).start()  # with overlap, the optimizer waits for it
    for _ in range(2):
        step()
        ckpt.step()
    pending_save = ckpt._saver.pending
    assert pending_save is not None
    wait = pending_save._ended.wait

    def interrupt(timeout=None):
        raise KeyboardInterrupt

    pending_save._ended.wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
    pending_save._ended.wait = wait
    gate.set()
    assert pending_save.wait().step == 4
    assert not allocated_bytes(ckpt._saver._pool)
    assert "writer.json" not in [s.key for s in store.list("")]


WORKER_SCRIPT = """
import multiprocessing, sys, threading, time
import limpet
from limpet.errors import StoreError
from limpet.storage.memory import MemoryStore
from tests.trainings import initial_state, train

class Broken(MemoryStore):
    def put(self, key, length):
        if {late}:
            time.sleep(0.3)  # longer than the worker runs
        raise StoreError("a full disk")

def work():
    state = initial_state()
    ckpt = limpet.Checkpointer(Broken(), state, save=limpet.EverySteps(3))
    train(state, ckpt, 3)
    if not {late}:
        ckpt._saver.pending._ended.wait()

if __name__ == "__main__":
    worker = multiprocessing.get_context("{start}").Process(target=work)
    worker.start()
    worker.join()
    print(worker.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("start", "late"), [("fork", False), ("spawn", True)])
def test_a_worker_that_does_not_wait_for_its_save_exits_with_1(tmp_path, start, late):
    """A forked process does not run atexit functions."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER_SCRIPT.format(start=start, late=late))
    done = subprocess.run(
        [sys.executable, script],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ['PYTHONPATH']}"},
    )
    assert done.stdout == "1\n"
    assert done.stderr.count("StoreError: a full disk") == 1


@pytest.mark.parametrize("end", [SystemExit(1), GeneratorExit(), ZeroDivisionError()])
def test_a_failed_last_save_is_reported_although_warnings_are_errors(end, capsys):
    """Python prints the notes of errors, but not of SystemExit and GeneratorExit."""
    state = initial_state()
    with (
        warnings.catch_warnings(),
        pytest.raises(type(end)) as e,
        Checkpointer(FullDisk(), state, save=EverySteps(2)) as ckpt,
    ):
        warnings.simplefilter("error")
        train(state, ckpt, 2)
        raise end
    assert e.value.__notes__ == ["In addition, the last save failed: a full disk."]
    expected = 0 if isinstance(end, Exception) else 1
    assert capsys.readouterr().err.count("In addition, the last save failed") == expected


@pytest.mark.parametrize("policy", [EverySteps(2), EverySteps(2) | OnException(), OnException()])
def test_on_error_warn_also_applies_to_sys_exit(policy):
    state, step = network(1000)
    with (
        pytest.warns(SaveFailed, match="a full disk"),
        pytest.raises(SystemExit),
        Checkpointer(FullDisk(), state, save=policy, on_error="warn") as ckpt,
    ):
        for _ in range(2):
            step()
            ckpt.step()
        raise SystemExit


def test_sys_exit_raises_an_earlier_failure_unless_the_last_save_succeeds():
    class FlakyStore(MemoryStore):
        broken = True

        def put(self, key, length):
            if self.broken:
                raise StoreError("a full disk")
            return super().put(key, length)

    for lost in (True, False):
        state, step = network(1000)
        store = FlakyStore()
        expected = StoreError if lost else SystemExit
        with (
            warnings.catch_warnings(record=True) as caught,
            pytest.raises(expected),
            Checkpointer(store, state, save=EverySteps(2) | OnException()) as ckpt,
        ):
            warnings.simplefilter("always")
            step()
            ckpt.step()
            step()
            ckpt.step()
            pending_save = ckpt._saver.pending
            assert pending_save is not None
            pending_save._ended.wait()
            store.broken = False
            if lost:
                state["optimizer"].step()  # so the state of step 2 is lost
            raise SystemExit
        assert Run(store).line() == ([] if lost else [Version(2)])
        command = "after step 2 was not saved" if lost else "an earlier save failed"
        assert [command in str(w.message) for w in caught] == [True]


def files(store):
    return [s.key for s in store.list("")]


@pytest.mark.parametrize("why", ["no resume", "another writer", "partially loaded"])
def test_a_rejected_training_saves_and_deletes_nothing(why, tmp_path):
    """OnException must not save into the run of another training, nor apply retention to it."""
    store = MemoryStore()
    state, step = network(1000)
    with Checkpointer(store, state, save=EverySteps(1)) as ckpt:
        for _ in range(4):
            step()
            ckpt.step()
            ckpt.wait()
    if why == "partially loaded":
        flip_bit(store, shard_of(store, "version_4"))
    if why == "another writer":
        host, boot, _ = machine.process_identity()
        parent = machine.pid_and_start_time(os.getppid())
        other = Pin("0" * 12, None, machine.utc_now(), host, boot, parent)
        store.put_if_absent("writer.json", encode_record(other))
    before = files(store)
    state, step = network(1000)
    state["progress"].step = 7
    with (
        pytest.raises(LimpetError) as e,
        Checkpointer(store, state, save=OnException(), keep=KeepLast(1)) as ckpt,
    ):
        if why == "partially loaded":
            with pytest.raises(NoSnapshot):
                ckpt.resume(at=4)
        elif why == "another writer":
            ckpt.resume()
        for _ in range(2):
            step()
            ckpt.step()
    command = {
        "no resume": "holds versions",
        "another writer": "writes to",
        "partially loaded": "state invalid",
    }
    assert command[why] in str(e.value)
    assert files(store) == before


def test_a_sink_that_waits_for_its_own_save_raises():
    state = initial_state()
    ckpt = Checkpointer(MemoryStore(), state, save=EverySteps(1))
    emitted: list[LimpetError] = []

    def wait(name, fields):
        if name == "saved":
            with pytest.raises(LimpetError, match="in the training thread") as e:
                ckpt.wait()
            emitted.append(e.value)

    with events.attach(wait), ckpt:
        train(state, ckpt, 2)
    assert len(emitted) == 2


def test_on_exception_without_a_with_block_raises_at_the_first_step():
    state, step = network(1000)
    ckpt = Checkpointer(MemoryStore(), state, save=EverySteps(2) | OnException())
    ckpt.resume()
    step()
    with pytest.raises(LimpetError, match=r"OnException can never fire.*as a context"):
        ckpt.step()
    with ckpt:
        ckpt.step()


def test_a_step_with_an_invalid_metric_is_counted():
    """The optimizer has stepped, so the state belongs to this step, and OnException can save it."""
    store = MemoryStore()
    state, step = network(1000)
    with (
        pytest.raises(LimpetError, match="'grad_norm' is not a number"),
        Checkpointer(store, state, save=OnException()) as ckpt,
    ):
        for number in range(1, 4):
            step()
            ckpt.step({"loss": 1.0, "grad_norm": 1.0 if number < 3 else None})
    assert state["progress"].step == 3
    assert saved_state_equals(store, 3, weights(state))
    assert Run(store).metrics(3) == {}


def test_metrics_are_copied_when_they_are_given():
    store = MemoryStore()
    state, step = network(1000)
    loss, array = torch.ones((), requires_grad=True) * 2, np.array([3.0])
    with pytest.raises(ZeroDivisionError), Checkpointer(store, state, save=OnException()) as ckpt:
        step()
        ckpt.step({"loss": loss, "array": array})
        with torch.no_grad():
            loss.fill_(np.nan)
        array[:] = np.nan
        raise ZeroDivisionError
    assert Run(store).metrics(1) == {"loss": 2.0, "array": 3.0}


class CustomFloat(float):
    """A subclass of float."""


def test_every_metric_that_step_accepts_can_be_saved():
    values = {"a subclass": CustomFloat(0.5), "smallest": -(1 << 63), "emoji \U0001f600": 1}
    with Checkpointer(MemoryStore(), initial_state()) as ckpt:
        ckpt.step(values)
        assert ckpt.save().metadata["metrics"] == values


def test_a_repeated_step_counts_again_for_early_stopping():
    state = initial_state()
    with Checkpointer(MemoryStore(), state, save=EverySteps(1), stop=StopWhen("val", 2)) as ckpt:
        for val in (1.0, 2.0):
            ckpt.step({"val": val})
        ckpt.resume(at=1)
        assert not ckpt.should_stop
        ckpt.step({"val": 2.0})
        ckpt.step({"val": 2.0})
        assert ckpt.should_stop
