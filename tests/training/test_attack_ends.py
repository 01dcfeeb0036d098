"""Attacks on how trainings end and go on: what is half loaded, half counted, interrupted, or failed
before is never saved as a step, and never hides what ended the training."""

from __future__ import annotations

import linecache
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast import events, machine
from holdfast.engine.saving import pending as worker
from holdfast.engine.saving.overlap import DeferredStaging
from holdfast.errors import HoldfastError, NoSnapshot, SaveFailed, StoreError
from holdfast.format.names import MANIFEST, Version
from holdfast.format.records import Pin, encode_pin
from holdfast.run.policy import (
    EverySteps,
    KeepBest,
    KeepLast,
    KeepPolicy,
    OnException,
    Record,
    StopWhen,
)
from holdfast.run.run import Run
from holdfast.run.save_request import put_request
from holdfast.storage.memory import MemoryStore
from holdfast.training.checkpointer import Checkpointer
from holdfast.workers import Workers
from tests.trainings import flip_bit, initial_state, shard_of, train, train_step, training

State = dict[str, Any]


def network(wide: int = 2_500_000) -> tuple[State, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model.wide = nn.Parameter(torch.zeros(wide))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "progress": holdfast.Progress()}

    def step() -> None:
        model.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        model.wide.grad = torch.ones(1).expand(wide)
        optimizer.step()

    return state, step


def weights(state: State) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in state["model"].state_dict().items()}


def saved_is(store: MemoryStore, step: int, wanted: dict[str, torch.Tensor]) -> bool:
    found = holdfast.load(store.at(f"version_{step}"))["model"]
    return all(torch.equal(found[k], v) for k, v in wanted.items())


class FullDisk(MemoryStore):
    def put(self, key: str, length: int) -> Any:
        raise StoreError("a full disk")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Staging beside the training goes on only while it is set."""
    gate, stage = threading.Event(), DeferredStaging.stage
    gate.set()

    def slow(self: DeferredStaging, workers: Workers) -> None:
        assert gate.wait(20)
        stage(self, workers)

    monkeypatch.setattr(DeferredStaging, "stage", slow)
    yield gate
    gate.set()


# -- what was half loaded ------------------------------------------------------------------------


def test_a_load_that_failed_half_way_is_not_saved_as_the_last_step() -> None:
    store = MemoryStore()
    state, step = network(1000)
    with (
        pytest.raises(NoSnapshot),
        Checkpointer(store, state, save=EverySteps(2) | OnException()) as ckpt,
    ):
        for _ in range(3):
            step()
            ckpt.step()
        ckpt.wait()
        flip_bit(store, shard_of(store, "version_2"))
        ckpt.resume()
    assert Run(store).line() == [Version(2)]


def test_after_a_resume_that_failed_half_way_no_step_and_no_save_goes_on() -> None:
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
        with pytest.raises(HoldfastError, match=r"last resume\(\) failed"):
            call()
    ckpt.resume(at=2)  # an intact one makes it good
    step()
    ckpt.step()
    assert ckpt.save().step == 3
    ckpt.close()


@pytest.mark.parametrize("wrong", [{"at": 7}, {"start": "memory://never-there@1"}])
def test_a_resume_that_found_nothing_has_changed_nothing(wrong: dict[str, Any]) -> None:
    with training(MemoryStore(), EverySteps(1)) as (state, ckpt):
        with pytest.raises(HoldfastError):
            ckpt.resume(**wrong)
        train(state, ckpt, 1)


def test_a_state_within_itself_is_refused_not_walked_for_ever() -> None:
    inner: dict[str, Any] = {}
    inner["a"], inner["b"] = inner, [inner]
    ckpt = Checkpointer(MemoryStore(), {"x": inner, "y": inner}, save=OnException())
    with pytest.raises(HoldfastError, match="x"):
        ckpt.step()
    ckpt.close()
    inner.clear()


# -- what was half counted -----------------------------------------------------------------------


def test_what_is_saved_after_an_exception_in_step_is_called_by_its_own_step() -> None:
    store = MemoryStore()
    sampler = holdfast.ElasticSampler(100, 10)
    state = initial_state() | {"sampler": sampler}
    with pytest.raises(HoldfastError), Checkpointer(store, state, save=OnException()) as ckpt:
        batches = iter(sampler)
        for _ in range(3):
            next(batches)
            train_step(state)
            ckpt.step()
        train_step(state)
        ckpt.step(batches=5)
    for version in Run(store).line():
        assert holdfast.load(store.at(str(version)))["progress"]["step"] == version.step


def test_what_is_saved_after_progress_was_changed_is_called_by_its_own_step() -> None:
    store, state = MemoryStore(), initial_state()
    with (
        pytest.raises(HoldfastError),
        Checkpointer(store, state, save=EverySteps(10) | OnException()) as ckpt,
    ):
        train(state, ckpt, 15)
        ckpt.wait()
        state["progress"].step = 11
        train_step(state)
        ckpt.step()
    for version in Run(store).line():
        assert holdfast.load(store.at(str(version)))["progress"]["step"] == version.step


def test_interrupted_while_it_counts_training_goes_on() -> None:
    store, state = MemoryStore(), initial_state()
    ckpt = Checkpointer(store, state, save=EverySteps(2))
    train(state, ckpt, 1)
    fired: list[str] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "self._expected_step = progress.step" in line:
            sys.settrace(None)
            fired.append(line)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(state, ckpt, 2)
    finally:
        sys.settrace(before)
    assert fired
    train_step(state)
    ckpt.step()
    ckpt.close()


@pytest.mark.parametrize("step", [1.5, -5, 10**18, np.int64(3), True, "1"])
def test_a_number_of_steps_that_makes_no_version(step: Any) -> None:
    state = initial_state()
    state["progress"].step = step
    with Checkpointer(MemoryStore(), state, save=EverySteps(1)) as ckpt:
        with pytest.raises(HoldfastError, match=r"progress.step is not a number"):
            ckpt.step()
        state["progress"].step = 0


def test_two_progress_objects_are_one_too_many() -> None:
    with pytest.raises(HoldfastError, match="several Progress"):
        Checkpointer(MemoryStore(), initial_state() | {"other": [holdfast.Progress()]})


def test_a_warm_start_may_be_made_again() -> None:
    url = "memory://ends-warm"
    with training(url, EverySteps(10)) as (state, ckpt):
        train(state, ckpt, 20)
    state = initial_state() | {"head": np.zeros(3)}
    with Checkpointer(MemoryStore(), state) as ckpt:
        for _ in range(2):
            ckpt.resume(start=f"{url}@20", missing="keep")
            ckpt.step()
            assert ckpt.current_step == 21


# -- never afresh over versions that are there ---------------------------------------------------


def test_versions_on_another_branch_only_are_no_empty_run() -> None:
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
        with pytest.raises(NoSnapshot, match=r"version_20.*resume\(branch="):
            ckpt.resume()
        assert ckpt.resume(branch=0).step == 20  # type: ignore[union-attr]


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_branch_whose_record_is_lost_is_still_what_training_is_on(damage: str) -> None:
    """Retention has deleted the branch's first version, which would have told the same."""
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
        assert ckpt.resume().version == Version(20, 1)  # type: ignore[union-attr]
        train(state, ckpt, 22)
    before = Run(store).listing().versions
    swept = Run(store).sweep(abandoned=True, grace=0)
    assert [why for what, why in swept.kept if what == "all abandoned versions"]
    assert Run(store).listing().versions == before
    assert Version(22, 1) in before


# -- what failed before --------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["put", "delete"])
def test_an_earlier_failure_does_not_keep_the_last_step_from_being_saved(what: str) -> None:
    hold = threading.Event()
    hold.set()

    class Slow(MemoryStore):
        broken: str | None = None

        def put(self, key: str, length: int) -> Any:
            assert hold.wait(20)
            if self.broken == "put":
                raise StoreError("a blip")
            return super().put(key, length)

        def delete(self, key: str) -> None:
            if self.broken == "delete" and MANIFEST in key:
                raise StoreError("a blip")
            super().delete(key)

    store = Slow()
    state, step = network(1000)
    with (
        pytest.warns(SaveFailed, match="an earlier save failed: a blip"),
        pytest.raises(ZeroDivisionError) as e,
        Checkpointer(store, state, save=EverySteps(4) | OnException(), keep=KeepLast(1)) as ckpt,
    ):
        for number in range(1, 8):
            step()
            if number == 4:
                hold.clear()
                store.broken = what
            ckpt.step()
            if number == 1:
                ckpt.save()
        hold.set()
        assert ckpt._saver._pending is not None
        ckpt._saver._pending._thread.join()
        store.broken = None
        raise ZeroDivisionError
    assert "a blip" in "".join(e.value.__notes__)
    assert Run(store).line()[-1] == Version(7)


class Bad(KeepPolicy):
    """A policy of the user's own, with a mistake in it."""

    def keep(self, records: Any) -> Any:
        raise KeyError("mine")


def test_a_keep_policy_that_raises_costs_no_version_and_no_count() -> None:
    store, state = MemoryStore(), initial_state()
    ckpt = Checkpointer(store, state, save=EverySteps(2), keep=Bad())
    train(state, ckpt, 2)
    with pytest.raises(KeyError):
        ckpt.wait()
    ckpt.close()
    assert Run(store).line() == [Version(2)]
    assert ckpt.statistics()["saves"] == 1
    assert Record(Version(2)).metrics == {}


@pytest.mark.parametrize("of", ["the boundary", "the background"])
def test_what_ended_the_training_is_not_replaced(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    state, step = network(1000)
    keep = Bad() if of == "the background" else None

    def broken(*args: Any, **options: Any) -> Any:
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


@pytest.mark.parametrize("why", ["no thread", "a damaged version of that name"])
def test_a_save_that_cannot_begin_is_counted_told_and_asked_for_again(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, state = MemoryStore(), initial_state()
    heard: list[str] = []
    ckpt = Checkpointer(store, state, save=EverySteps(10**6), on_error="warn")
    train(state, ckpt, 1)
    put_request(store, "a" * 12)
    ckpt._watcher.poll()
    start = worker.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "holdfast-save":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if why == "no thread":
            patch.setattr(worker.Thread, "start", refuse)
        else:
            store.put_if_absent(f"version_2/{MANIFEST}", b"{}")
        with events.attach(lambda name, fields: heard.append(name)):
            try:
                train(state, ckpt, 2)
            except HoldfastError:
                assert why != "no thread"
    ckpt._watcher.poll()
    assert ckpt._watcher.pending_request
    assert ckpt.statistics()["failures"] == 1
    assert heard.count("save_failed") == 1
    ckpt.close()


# -- what is interrupted -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"overlap": True}, {"incremental": True}])
def test_an_interrupted_close_lets_the_save_in_flight_finish(
    options: dict[str, bool], gate: threading.Event
) -> None:
    class Gated(MemoryStore):
        def put_if_absent(self, key: str, data: bytes) -> Any:
            if key.startswith("pin-"):
                assert gate.wait(20)
            return super().put_if_absent(key, data)

    store = Gated()
    state, step = network()
    state["more"] = torch.randn(3_000_000)
    ckpt = Checkpointer(store, state, save=EverySteps(2), **options)  # type: ignore[arg-type]
    for _ in range(2):
        step()
        ckpt.step()
    ckpt.wait()
    gate.clear()
    threading.Timer(0.05, gate.set).start()  # an optimizer waits for it where that is its way
    for _ in range(2):
        step()
        ckpt.step()
    pending = ckpt._saver._pending
    assert pending is not None
    wait = pending._ended.wait

    def interrupt(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    pending._ended.wait = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
    pending._ended.wait = wait  # type: ignore[method-assign]
    gate.set()
    assert pending.wait().step == 4
    assert not ckpt._saver._pool.allocated_bytes
    assert "writer.json" not in [s.key for s in store.list("")]


def test_a_closed_one_takes_no_signals_and_does_not_resume() -> None:
    ckpt = Checkpointer(MemoryStore(), initial_state())
    ckpt.close()
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(HoldfastError, match="closed"):
        ckpt.save_on_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) == before
    with pytest.raises(HoldfastError, match="closed"):
        ckpt.resume()


# -- how the last save is heard of ---------------------------------------------------------------


def ran(script: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", script]
    return subprocess.run(words, check=False, capture_output=True, text=True)


END = """
import sys, warnings
import holdfast
from holdfast.errors import StoreError
from holdfast.storage.memory import MemoryStore
from tests.trainings import initial_state, train

class Broken(MemoryStore):
    def put(self, key, length):
        raise StoreError("a full disk")

def main():
    state = initial_state()
    with holdfast.Checkpointer(Broken(), state, save=holdfast.EverySteps(3)) as ckpt:
        train(state, ckpt, 3)
        {end}

"""


@pytest.mark.parametrize(
    ("end", "call", "code", "told"),
    [
        ("sys.exit()", "main()", 1, "StoreError: a full disk"),
        ("sys.exit(0)", "main()", 1, "StoreError: a full disk"),
        ("sys.exit(75)", "main()", 75, "with SystemExit. In addition, the last save failed: a"),
        ("raise KeyboardInterrupt", "try:\n    main()\nexcept KeyboardInterrupt:\n    pass", 0,
         "ended with KeyboardInterrupt. In addition, the last save failed"),
        ("pass", "main()", 1, "StoreError: a full disk"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_last_save_that_failed_is_heard_of_however_the_training_ends(
    end: str, call: str, code: int, told: str
) -> None:
    script = END.format(end=end) + call
    done = ran(script)
    assert (done.returncode, done.stdout) == (code, "")
    assert told in done.stderr


WORKER = """
import multiprocessing, sys, threading, time
import holdfast
from holdfast.errors import StoreError
from holdfast.storage.memory import MemoryStore
from tests.trainings import initial_state, train

class Broken(MemoryStore):
    def put(self, key, length):
        if {late}:
            time.sleep(0.3)  # longer than the worker has to do
        raise StoreError("a full disk")

def work():
    state = initial_state()
    ckpt = holdfast.Checkpointer(Broken(), state, save=holdfast.EverySteps(3))
    train(state, ckpt, 3)
    if not {late}:
        ckpt._saver._pending._ended.wait()

if __name__ == "__main__":
    worker = multiprocessing.get_context("{start}").Process(target=work)
    worker.start()
    worker.join()
    print(worker.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("late", [True, False])
def test_a_worker_that_waits_for_nothing_does_not_look_like_success(
    tmp_path: Path, start: str, late: bool
) -> None:
    """A forked one runs no atexit."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(start=start, late=late))
    done = ran(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    if start == "spawn":  # it imports the script by its path
        words = [sys.executable, str(script)]
        root = str(Path(__file__).parents[2])
        done = subprocess.run(
            words,
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": root},
        )
    assert done.stdout == "1\n"
    assert done.stderr.count("StoreError: a full disk") == 1


@pytest.mark.slow
@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_without_a_stderr_a_failed_save_is_no_success_either(stderr: str) -> None:
    script = END.format(end="pass").replace("with holdfast", "ckpt = holdfast")
    script = script.replace(" as ckpt:\n", "; state = ckpt.state\n").replace(
        "state := fresh()", "fresh()"
    )
    script = script.replace(
        "        train(state, ckpt, 3)\n        pass", "    train(state, ckpt, 3)"
    )
    words = ["sh", "-c", f'exec "$0" -c "$1" {stderr}', sys.executable, script + "main()"]
    assert subprocess.run(words, check=False).returncode == 1


@pytest.mark.parametrize("end", [SystemExit(1), GeneratorExit(), ZeroDivisionError()])
def test_where_warnings_are_errors_a_failed_last_save_is_heard_of_all_the_same(
    end: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what is no error nobody prints the notes."""
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
    wanted = 0 if isinstance(end, Exception) else 1
    assert capsys.readouterr().err.count("In addition, the last save failed") == wanted


@pytest.mark.parametrize("policy", [EverySteps(2), EverySteps(2) | OnException(), OnException()])
def test_who_chose_to_go_on_over_a_full_disk_leaves_with_0_as_well(policy: Any) -> None:
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


def test_leaving_with_0_raises_an_earlier_failure_that_the_last_save_does_not_make_good() -> None:
    class Flaky(MemoryStore):
        broken = True

        def put(self, key: str, length: int) -> Any:
            if self.broken:
                raise StoreError("a full disk")
            return super().put(key, length)

    for lost in (True, False):
        state, step = network(1000)
        store = Flaky()
        wanted = StoreError if lost else SystemExit
        with (
            warnings.catch_warnings(record=True) as told,
            pytest.raises(wanted),
            Checkpointer(store, state, save=EverySteps(2) | OnException()) as ckpt,
        ):
            warnings.simplefilter("always")
            step()
            ckpt.step()
            step()
            ckpt.step()
            pending = ckpt._saver._pending
            assert pending is not None
            pending._ended.wait()
            store.broken = False
            if lost:
                state["optimizer"].step()  # so the state of step 2 is gone
            raise SystemExit
        assert Run(store).line() == ([] if lost else [Version(2)])
        words = "after step 2 was not saved" if lost else "an earlier save failed"
        assert [words in str(w.message) for w in told] == [True]


# -- who is refused ------------------------------------------------------------------------------


def files(store: MemoryStore) -> list[str]:
    return [s.key for s in store.list("")]


@pytest.mark.parametrize("why", ["no resume", "another writes", "half loaded"])
def test_who_is_refused_saves_nothing_and_deletes_nothing(why: str, tmp_path: Path) -> None:
    """By OnException it did both: a training into whose run one had stumbled lost its versions."""
    store = MemoryStore()
    state, step = network(1000)
    with Checkpointer(store, state, save=EverySteps(1)) as ckpt:
        for _ in range(4):
            step()
            ckpt.step()
            ckpt.wait()
    if why == "half loaded":
        flip_bit(store, shard_of(store, "version_4"))
    if why == "another writes":
        host, boot, _ = machine.process_identity()
        parent = machine.pid_and_start_time(os.getppid())
        other = Pin("0" * 12, None, machine.utc_now(), host, boot, parent)
        store.put_if_absent("writer.json", encode_pin(other))
    before = files(store)
    state, step = network(1000)
    state["progress"].step = 7
    with (
        pytest.raises(HoldfastError) as e,
        Checkpointer(store, state, save=OnException(), keep=KeepLast(1)) as ckpt,
    ):
        if why == "half loaded":
            with pytest.raises(NoSnapshot):
                ckpt.resume(at=4)
        elif why == "another writes":
            ckpt.resume()
        for _ in range(2):
            step()
            ckpt.step()
    words = {
        "no resume": "holds versions",
        "another writes": "writes to",
        "half loaded": "state invalid",
    }
    assert words[why] in str(e.value)
    assert files(store) == before


def test_a_sink_that_waits_for_the_save_it_hears_of_is_refused_not_hung() -> None:
    state = initial_state()
    ckpt = Checkpointer(MemoryStore(), state, save=EverySteps(1))
    heard: list[HoldfastError] = []

    def wait(name: str, fields: dict[str, Any]) -> None:
        if name == "saved":
            with pytest.raises(HoldfastError, match="cannot wait for itself") as e:
                ckpt.wait()
            heard.append(e.value)

    with events.attach(wait), ckpt:
        train(state, ckpt, 2)
    assert len(heard) == 2


def test_on_exception_outside_of_a_with_block_is_refused_at_the_first_step() -> None:
    state, step = network(1000)
    ckpt = Checkpointer(MemoryStore(), state, save=EverySteps(2) | OnException())
    ckpt.resume()
    step()
    with pytest.raises(HoldfastError, match=r"OnException can never fire.*as a context"):
        ckpt.step()
    with ckpt:
        ckpt.step()


@pytest.mark.parametrize(("steps", "told"), [(4, False), (5, False), (6, True), (7, True)])
def test_what_was_left_out_last_is_told_when_the_training_ends_well(steps: int, told: bool) -> None:
    """It is not saved: behind the last step the state need not be that of any."""
    gate = threading.Event()
    gate.set()

    class Slow(MemoryStore):
        def put(self, key: str, length: int) -> Any:
            assert gate.wait(20)
            return super().put(key, length)

    store, state = Slow(), initial_state()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with Checkpointer(store, state, save=EverySteps(2), busy="skip") as ckpt:
            train(state, ckpt, 2)
            ckpt.wait()
            gate.clear()
            train(state, ckpt, steps)  # 4 is in flight, 6 is left out
            gate.set()
    assert Run(store).line() == [Version(2), Version(4)]
    message = f"Steps 5 to {steps} are not in any version"
    assert [str(w.message).startswith(message) for w in found] == [True] * told


def test_a_child_that_leaves_the_block_tells_nothing_of_unsaved_steps() -> None:
    state, heard = initial_state(), list[str]()
    with (
        events.attach(lambda name, fields: heard.append(name)),
        Checkpointer(MemoryStore(), state, save=EverySteps(3)) as ckpt,
    ):
        train(state, ckpt, 1)
        ckpt._lifecycle._pid += 1  # as a forked child sees it
    assert "left_unsaved" not in heard
    ckpt._lifecycle._pid -= 1
    ckpt.close()


# -- metrics -------------------------------------------------------------------------------------


def test_a_bad_metric_does_not_uncount_the_step_that_was_made() -> None:
    """The optimizer has stepped: the state is that of this step, and OnException can save it."""
    store = MemoryStore()
    state, step = network(1000)
    with (
        pytest.raises(HoldfastError, match="'grad_norm' is not a number"),
        Checkpointer(store, state, save=OnException()) as ckpt,
    ):
        for number in range(1, 4):
            step()
            ckpt.step({"loss": 1.0, "grad_norm": 1.0 if number < 3 else None})
    assert state["progress"].step == 3
    assert saved_is(store, 3, weights(state))
    assert Run(store).metrics(3) == {}


def test_a_metric_is_what_it_was_when_it_was_given() -> None:
    store = MemoryStore()
    state, step = network(1000)
    loss, array = torch.ones((), requires_grad=True) * 2, np.array([3.0])
    with (
        pytest.raises(ZeroDivisionError),
        Checkpointer(store, state, save=OnException()) as ckpt,
    ):
        step()
        ckpt.step({"loss": loss, "array": array})
        with torch.no_grad():
            loss.fill_(np.nan)
        array[:] = np.nan
        raise ZeroDivisionError
    assert Run(store).metrics(1) == {"loss": 2.0, "array": 3.0}


class Half(float):
    """A float of another kind."""


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [
        ("half a pair \ud800", 1.0, False),
        ("meta", torch.empty(1, device="meta"), False),
        ("a float of another kind", Half(0.5), True),
        ("the least", -(1 << 63), True),
        ("emoji \U0001f600", 1, True),
    ],
)
def test_what_a_step_takes_a_save_can_keep(name: str, value: Any, good: bool) -> None:
    state = initial_state()
    with Checkpointer(MemoryStore(), state) as ckpt:
        if good:
            ckpt.step({name: value})
            assert ckpt.save().metadata["metrics"] == {name: float(value)}
        else:
            with pytest.raises(HoldfastError, match="is not a number"):
                ckpt.step({name: value})


def test_metrics_of_a_save_after_the_cadence_has_saved_that_step_are_added() -> None:
    """To evaluate after every hundredth step is how most do it."""
    store, state = MemoryStore(), initial_state()
    keep = KeepLast(1) | KeepBest(1, "val")
    with Checkpointer(store, state, save=EverySteps(2), keep=keep) as ckpt:
        for step, val in ((2, 0.5), (4, 0.1), (6, 0.3), (7, 0.9)):
            train(state, ckpt, step)
            assert ckpt.save({"val": val}).step == step
    run = Run(store)
    assert [v.step for v in run.line()] == [4, 7]
    best = run.best("val")
    assert best is not None
    assert best.step == 4
    assert run.metrics(4) == {"val": 0.1, "loss": run.open(Version(4)).metadata["metrics"]["loss"]}
    assert run.open(Version(7)).metadata["metrics"]["val"] == 0.9


def test_metrics_of_a_save_count_for_stopping_once_a_step() -> None:
    state = initial_state()
    with Checkpointer(MemoryStore(), state, stop=StopWhen("val", patience=2)) as ckpt:
        for step, stops in ((1, False), (2, False), (3, True)):
            train(state, ckpt, step - 1)
            ckpt.step({"val": 1.0})
            ckpt.save({"val": 1.0})
            ckpt.save({"val": 1.0})
            assert ckpt.should_stop == stops


def test_early_stop_is_still_so_after_a_restart() -> None:
    """Also where a better value came before anyone asked."""
    origin = "memory://stopped"
    stop = StopWhen("val", patience=2)
    with Checkpointer(origin, initial_state(), save=EverySteps(1), stop=stop) as ckpt:
        for val in (0.9, 0.5, 0.6, 0.7, 0.4):
            ckpt.step({"val": val})
        assert ckpt.should_stop
    for patience, stopped in ((2, True), (3, False)):  # who is more patient now goes on
        with Checkpointer(origin, initial_state(), stop=StopWhen("val", patience)) as ckpt:
            ckpt.resume()
            assert ckpt.should_stop == stopped
    whole, part = initial_state(), {"weights": initial_state()["weights"]}
    for state, keys, stopped in ((whole, None, True), (part, "weights", False)):
        with Checkpointer(MemoryStore(), state, stop=stop) as ckpt:
            ckpt.resume(
                start=f"{origin}@latest", keys=keys, unexpected="ignore" if keys else "error"
            )
            assert ckpt.should_stop == stopped


def test_what_a_resumed_training_was_given_before_is_not_asked_for() -> None:
    store, stop = MemoryStore(), StopWhen("val", patience=5)
    with Checkpointer(store, initial_state(), save=EverySteps(1), stop=stop) as ckpt:
        ckpt.step({"val": 1.0})
    with Checkpointer(store, state := initial_state(), save=EverySteps(1), stop=stop) as ckpt:
        ckpt.resume()
        train(state, ckpt, 6)  # no warning, which would be an error here


def test_a_step_that_is_made_again_after_going_back_counts_again() -> None:
    state = initial_state()
    with Checkpointer(MemoryStore(), state, save=EverySteps(1), stop=StopWhen("val", 2)) as ckpt:
        for val in (1.0, 2.0):
            ckpt.step({"val": val})
        ckpt.resume(at=1)
        assert not ckpt.should_stop
        ckpt.step({"val": 2.0})
        ckpt.step({"val": 2.0})
        assert ckpt.should_stop
