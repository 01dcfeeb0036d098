"""The pool of workers, with workers that are threads of this process."""

import os
import signal
from threading import Thread, Timer

import pytest
import torch

import limpet
from limpet import events
from limpet.errors import TaskError
from limpet.evaluation import Workers
from limpet.evaluation.pool import WorkerLost, WorkerPool
from limpet.evaluation.worker import Worker
from limpet.loading.snapshot import reader_of
from limpet.tasks import RemoteQueue

TRIVIAL = {name: f"tests.evaluation.trivial:{name}" for name in ("setup", "evaluate", "data")}


class ThreadWorker:
    """A worker on a thread. It ends with its connection."""

    def __init__(self, pool, name, tasks):
        self._queue = RemoteQueue(pool._server.connect(name))
        self._tasks = tasks
        self._thread = Thread(target=self._work)
        self._thread.start()

    def _work(self):
        worker = Worker()
        try:
            while self._tasks:
                task = self._queue.evaluation.get(timeout=0.5)
                if task is not None:
                    self._tasks -= 1
                    worker.do(task)
        except TaskError:
            pass
        self._queue.close()

    def end(self):
        return None if self._thread.is_alive() else "out of memory"

    def kill(self):
        self._queue.close()
        self._thread.join()


class Idle:
    """A worker that never asks for a task."""

    def end(self):
        return None

    def kill(self):
        """Nothing to end."""


def make_pool(monkeypatch, make):
    monkeypatch.setattr(WorkerPool, "_make", make)
    functions = {**TRIVIAL, "collate": None}
    return WorkerPool("run", limpet.open_store("run"), Workers(2), functions, 1, (), None)


@pytest.fixture
def version(tmp_path):
    snapshot = limpet.save(tmp_path / "version_5", {"a": torch.zeros(2)}, step=5)
    return snapshot.url, reader_of(snapshot).digest


def test_the_others_go_on_without_a_worker_that_never_stays_alive(version, monkeypatch):
    made, lost = [], []

    def make(pool, name):
        made.append(name)
        return ThreadWorker(pool, name, 1 if name.startswith("worker-0") else float("inf"))

    def note(name, fields):
        lost.append(str(fields["error"]) if name == "worker_lost" else name)

    pool = make_pool(monkeypatch, make)
    try:
        pool.start()
        with events.attach(note):
            assert pool.evaluate(*version) == {"leaves": 1.0}
    finally:
        pool.close()
    assert made[:2] == ["worker-0", "worker-1"]
    assert len(made) == len(set(made)), "each process has a name of its own"
    assert all("ended. Found out of memory" in text for text in lost)


def test_without_a_worker_that_stays_alive_the_version_has_no_score(version, monkeypatch):
    count = [2.0]  # tasks of each worker: the first one counts the records

    def make(pool, name):
        return ThreadWorker(pool, name, count[0])

    pool = make_pool(monkeypatch, make)
    try:
        pool.start()
        count[0] = 0.0
        for place in pool._places:
            place.process.kill()
        with pytest.raises(WorkerLost, match="out of memory"):
            pool.evaluate(*version)
        count[0] = float("inf")
        assert pool.evaluate(*version) == {"leaves": 1.0}, "the next version is evaluated"
    finally:
        pool.close()


def test_a_worker_that_ends_before_the_evaluation_begins_is_an_error(monkeypatch):
    pool = make_pool(monkeypatch, lambda pool, name: ThreadWorker(pool, name, 0.0))
    with pytest.raises(WorkerLost, match=r"Worker worker-[01] ended"):
        pool.start()
    pool.close()


def test_an_interrupt_ends_the_wait_for_workers(monkeypatch):
    pool = make_pool(monkeypatch, lambda pool, name: Idle())
    timer = Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.start()
    finally:
        timer.join()
        pool.close()
