"""The engine in one process: servers are objects, and workers are threads."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from threading import Lock, Thread
from typing import Any

from limpet.errors import LimpetError
from limpet.tables.driver import Ended, Work
from limpet.tables.messages import Answer, Commit, NextBatch
from limpet.tables.server import TableServer
from limpet.tables.worker import WorkerStopped
from limpet.threads import start_thread

_END_SECONDS = 5.0


class _Turn:
    """Lets one worker of a synchronous round compute at a time: all threads share the random
    generators, which are seeded for each mini-batch."""

    def __init__(self, work: Work) -> None:
        self._work, self._lock, self._owner = work, Lock(), ""

    def ask(self, request: Commit | NextBatch) -> Answer:
        if isinstance(request, Commit):
            return self._work.ask(request).result()
        self.end(request.worker)
        answer = self._work.ask(request).result()
        self.begin(request.worker)  # also without a mini-batch: it evaluates
        return answer

    def begin(self, worker: str) -> None:
        """Wait for the turn of a worker."""
        self._lock.acquire()
        self._owner = worker

    def end(self, worker: str) -> None:
        """Let another worker compute."""
        if self._owner == worker:
            self._owner = ""
            self._lock.release()


class LocalEngine:
    """Runs the function of workers in threads of this process."""

    def __init__(self, servers: Sequence[TableServer]) -> None:
        self.servers = len(servers)
        self.lost: set[int] = set()  # none: they are in this process
        self._servers = servers

    def prepare(self, work: Work) -> None:
        self._work, self._turn, self._threads = work, _Turn(work), list[Thread]()

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        return {n: getattr(self._servers[n], method)(*each) for n, each in arguments.items()}

    def start_worker(self, name: str, generation: int) -> None:
        thread = Thread(
            target=self._run, args=(name, generation), name=f"limpet-{name}", daemon=True
        )
        if not start_thread(thread):
            raise LimpetError(f"Cannot start one more thread, for {name}")
        self._threads.append(thread)

    def _run(self, name: str, generation: int) -> None:
        work, turn = self._work, self._turn  # not of a later call
        create = work.worker(name, generation, self.call)
        worker = create(ask=turn.ask, queue=work.queue, leased_by=name)
        try:
            if work.seed is not None:
                turn.begin(name)  # the function may use random numbers before its first batch
            work.train(worker)
            ended = Ended(name)
        except WorkerStopped:
            ended = Ended(name, lost="it was stopped")
        except BaseException as e:  # noqa: BLE001  (the driver raises it)
            ended = Ended(name, error=e)
        turn.end(name)
        worker.close()
        work.items.put(ended)

    def stop_worker(self, name: str) -> None:
        """Let a worker end at its next call. The records that it has leased go to others."""
        self._turn.end(name)
        self._work.queue.recover(name, "the training continues without it")

    def join(self) -> None:
        """Wait until the workers have ended, which may use the random generators; not for one that
        hangs."""
        until = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
