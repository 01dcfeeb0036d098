"""The pool of workers, with workers that follow a script instead of processes."""

from __future__ import annotations

import os
import signal
import time
from threading import Event
from typing import Any, ClassVar

import pytest

from limpet.errors import LimpetError
from limpet.evaluation.pool import Limits, WorkerPool
from limpet.evaluation.process import WorkerError, WorkerLost

RECORDS = 4


class FakeWorker:
    """Counts records. ``worker-0`` is lost in its first task; the other one does all of the work,
    before the pool has finished to replace it."""

    lost, ended = Event(), Event()
    completed = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_loaded = False

    def start(self, timeout: float) -> int:
        return RECORDS

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        if method == "load":
            self._is_loaded = True
            return None
        assert self._is_loaded, f"{method}() without a version"
        if method == "compute":
            return {"records": float(sum(arguments[0]))}
        if self.name == "worker-0" and not self.lost.is_set():
            self.lost.set()
            raise WorkerLost("killed")
        assert self.lost.wait(10)
        FakeWorker.completed += 1
        if self.completed == RECORDS:
            self.ended.set()
        return arguments[1] - arguments[0]

    def close(self) -> None: ...

    def kill(self) -> None:
        assert self.ended.wait(10)
        time.sleep(0.1)  # until the pool has the last result


def test_a_worker_that_is_replaced_when_nothing_is_left_to_do_loads_the_version() -> None:
    """The pool took it for loaded, and the version failed."""
    pool = WorkerPool(FakeWorker, 2, Limits(), None)
    pool.start()
    assert pool.evaluate("url", "digest") == {"records": RECORDS}


class Unstable(FakeWorker):
    """A worker that is lost in each load, if its name is in ``unstable``."""

    unstable: ClassVar[set[str]] = set()

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        if method == "load" and self.name in self.unstable:
            raise WorkerLost("out of memory")
        if method == "evaluate":
            return arguments[1] - arguments[0]
        return {"records": float(sum(arguments[0]))} if method == "compute" else None

    def kill(self) -> None: ...


@pytest.mark.parametrize("unstable", [{"worker-0"}, {"worker-0", "worker-1"}])
def test_the_others_go_on_without_a_worker_that_never_stays_alive(unstable: set[str]) -> None:
    Unstable.unstable = unstable
    pool = WorkerPool(Unstable, 2, Limits(), None)
    pool.start()
    if len(unstable) == 1:
        assert pool.evaluate("url", "digest") == {"records": RECORDS}
    else:
        with pytest.raises(WorkerLost, match="out of memory"):
            pool.evaluate("url", "digest")


class Broken(Unstable):
    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        raise TypeError("a defect")


def test_an_unexpected_error_of_a_thread_reaches_the_caller() -> None:
    pool = WorkerPool(Broken, 2, Limits(), None)
    pool.start()
    with pytest.raises(TypeError, match="a defect"):
        pool.evaluate("url", "digest")


class Growing(Unstable):
    """``worker-0`` is lost in its first task, and its successor has more records."""

    lengths: ClassVar[list[int]] = []

    def start(self, timeout: float) -> int:
        return self.lengths.pop()

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        if method == "evaluate" and self.lengths:
            raise WorkerLost("killed")
        return super().call(method, *arguments, timeout=timeout)


def test_a_worker_that_is_replaced_by_one_with_other_data_fails_the_version() -> None:
    Growing.lengths, Unstable.unstable = [RECORDS + 1, RECORDS], set()
    pool = WorkerPool(Growing, 1, Limits(), None)
    pool.start()
    with pytest.raises(WorkerError, match=r"other data.*Expected 4 records, found 5"):
        pool.evaluate("url", "digest")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e10, "10"])
@pytest.mark.parametrize("name", ["start", "load", "task", "attempts"])
def test_limits_that_nothing_can_keep_are_refused(name: str, value: Any) -> None:
    with pytest.raises(LimpetError, match=f"Invalid value for {name}= of Limits"):
        Limits(**{name: value})


class InterruptingWorker:
    """Loads until it is killed. The first load interrupts the main thread, as Ctrl-C does."""

    def __init__(self, name: str) -> None:
        self.name, self.killed = name, Event()

    def start(self, timeout: float) -> int:
        return RECORDS

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        if self.name == "worker-0":
            os.kill(os.getpid(), signal.SIGINT)
        assert self.killed.wait(60)
        raise WorkerLost("It was killed")

    def kill(self) -> None:
        self.killed.set()

    def close(self) -> None:
        self.kill()


def test_an_interrupt_ends_the_wait_for_workers_that_are_at_work() -> None:
    made: list[InterruptingWorker] = []

    def make(name: str) -> InterruptingWorker:
        made.append(InterruptingWorker(name))
        return made[-1]

    pool = WorkerPool(make, 2, Limits(), None)
    pool.start()
    with pytest.raises(KeyboardInterrupt):
        pool.evaluate("memory://run/version_1", "0")
    assert [worker.killed.is_set() for worker in made] == [False, False]
    pool.close()
