"""The driver's loop of a training with workers: commits, steps of the Checkpointer, and losses.

Every request of a worker to the coordinator is answered by this loop, one after the other. So a
save, which begins within ``ckpt.step``, sees the queue and the ledger between two commits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, NamedTuple, Protocol

from limpet import events
from limpet.errors import CommitError, LimpetError
from limpet.tables.client import Call, ServersLost, TableClient, call_all
from limpet.tables.coordinator import Coordinator, Synchronous
from limpet.tables.messages import Answer, Batch, Commit, Entry, NextBatch
from limpet.tables.worker import Worker
from limpet.tasks.queue import Queue
from limpet.training.checkpointer import Checkpointer
from limpet.training.training_evaluation import TrainingEvaluation

_LOOK_SECONDS = 0.2
"""How often the loop looks for what nobody reports, such as a lost process."""

_HANGS = "it has not made a step within the lease_seconds of the queue"

_MAX_LOSSES = 5
"""The losses in a row, without a step between them, after which the training ends."""


class Ended(NamedTuple):
    """The function of a worker has returned, or raised ``error``; or its process is lost."""

    worker: str
    error: BaseException | None = None
    lost: str = ""


class Engine(Protocol):
    """Where servers and workers run: threads of this process, or actors of Ray. Its workers ask
    the ``Work``, which also gets how they have ended. ``lost``: the numbers of lost servers."""

    servers: int
    lost: set[int]
    call: Call

    def start_worker(self, name: str, generation: int) -> None: ...
    def stop_worker(self, name: str) -> None: ...
    def join(self) -> None:
        """Wait for a moment until the workers that were stopped have ended."""


Item = tuple[Commit | NextBatch, Future[Answer]] | Ended


@dataclass(frozen=True)
class Work:
    """What workers need, and what they tell the driver. ``seed``: of synchronous rounds, or None;
    ``options``: of their actors. ``items``: from any thread."""

    train: Callable[[Any], object]
    client: TableClient
    queue: Queue
    seed: int | None
    options: Mapping[str, Any]
    items: SimpleQueue[Item] = field(default_factory=SimpleQueue)
    has_ended: Event = field(default_factory=Event)

    def ask(self, request: Commit | NextBatch) -> Future[Answer]:
        """Return the answer of the driver; if that ends, it is ``"stopped"``."""
        future: Future[Answer] = Future()
        self.items.put((request, future))
        if self.has_ended.is_set():
            self.end()
        return future

    def worker(self, name: str, generation: int, call: Call) -> partial[Worker]:
        """Return what creates a worker from the rest of its arguments, maybe elsewhere."""
        tables, firsts = [*self.client.tables.values()], self.client.first_buckets
        own: dict[str, Any] = {"call": call, "generation": generation, "seed": self.seed}
        return partial(Worker, name, tables, firsts, **own)

    def end(self) -> None:
        self.has_ended.set()  # first: what is asked from now on calls this again
        with suppress(Empty):
            while True:
                if not isinstance(item := self.items.get_nowait(), Ended):
                    item[1].set_result("stopped")


class Driver:
    """The loop. ``workers``: how many there should be; ``recover`` replaces servers that are lost,
    and begins another generation."""

    def __init__(
        self,
        coordinator: Coordinator,
        engine: Engine,
        work: Work,
        ckpt: Checkpointer,
        *,
        evaluation: TrainingEvaluation | None,
        workers: int,
        after_step: Callable[[], object],
        recover: Callable[[], None],
    ) -> None:
        self.workers = workers
        self._coordinator, self._engine, self._work = coordinator, engine, work
        self._ckpt, self._after_step, self._recover = ckpt, after_step, recover
        self._evaluation = evaluation
        self._running: set[str] = set()
        self._done = 0
        self._started = self._losses = 0
        self._is_stopping, self._looked = False, 0.0
        self._asked: dict[str, float] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._parked: list[tuple[NextBatch, Future[Answer]]] = []

    def run(self) -> None:
        """Train until all workers have returned, or ``ckpt.should_stop`` is True. Raises the error
        of a worker's function, and what ``ckpt.step`` raises."""
        queue = self._coordinator.queue
        queue.on_overdue = lambda worker: self._work.items.put(
            Ended(worker.partition(" at ")[0], lost=_HANGS)  # of a connection, with its address
        )
        try:
            while not self._advance():
                pass
        finally:
            self._unpark()
            self._work.end()
            if self._evaluation is not None:
                self._evaluation.abandon("the training ended")
            self._stop_workers()
            self._engine.join()

    def _advance(self) -> bool:
        """Do what comes next, and return True at the end."""
        try:
            if self._engine.lost:
                self._restart()
            if self._evaluation is not None and not self._is_stopping:
                self._evaluation.step()  # between two commits
                self._is_stopping = self._ckpt.should_stop
            if time.monotonic() - self._looked > _LOOK_SECONDS:
                self._looked = time.monotonic()
                self._look()
            if not self._running and (self._done or self._is_over):
                if not self._is_evaluated:
                    what = "All workers have returned before the evaluation was complete: call"
                    raise LimpetError(f"{what} worker.next() until it returns None")
                call_all(self._engine, "mark", self._coordinator.mark())
                return True
            self._handle(self._work.items.get(timeout=_LOOK_SECONDS))
        except (Empty, ServersLost):
            pass
        except CommitError as e:  # a save has failed, maybe because of a lost server
            if e.fields.get("lost") and (rank := e.fields.get("rank")):
                self._engine.lost.add(rank - 1)
            if not self._engine.lost:
                raise
        return False

    @property
    def _is_evaluated(self) -> bool:
        """Let the evaluation of the last step begin, if it is due, and return if it is complete."""
        return self._evaluation is None or self._evaluation.finish()

    @property
    def _is_over(self) -> bool:
        """True if the training has stopped, and workers have nothing more to evaluate."""
        return self._is_stopping and self._is_evaluated

    def _look(self) -> None:
        """Start what is missing, and leave if the process will be stopped."""
        if self._evaluation is not None and self._evaluation.is_running:
            self._asked = dict.fromkeys(self._asked, time.monotonic())  # workers may wait for it
        if isinstance(self._coordinator, Synchronous):  # else the leases of the queue end
            late = time.monotonic() - self._coordinator.queue.lease_seconds
            for name in {*self._coordinator.at_work.values()}:
                if self._asked[name] < late:
                    self._end(Ended(name, lost=_HANGS))
        if self._ckpt._preemption.is_pending:
            self._ckpt._end_call()
        surplus = len(self._running) + self._done - self.workers
        for name in sorted(self._running)[: max(surplus, 0)]:
            self._lose(name)
        # a worker that has returned is not started again: there was nothing left for it
        while len(self._running) + self._done < self.workers and not self._is_over:
            self._started += 1
            name = f"worker {self._started}"
            self._running.add(name)
            self._coordinator.join(name)
            self._engine.start_worker(name, self._coordinator.generation)
        self._unpark(1)  # there may be records again: the look for them takes a moment

    def _handle(self, item: Item) -> None:
        if isinstance(item, Ended):
            self._end(item)
            return
        (request, future), evaluation = item, self._evaluation
        self._asked[request.worker] = time.monotonic()
        try:
            if self._is_over or request.worker not in self._coordinator.answered:
                future.set_result("stopped")
            elif isinstance(request, Commit) and evaluation and not request.evaluates:
                raise LimpetError("With evaluation=, worker.next() needs evaluate=")
            elif self._is_stopping:
                future.set_result("wait")
            elif isinstance(request, NextBatch):
                self._hand_out(request, future)
            elif evaluation and evaluation.is_running and evaluation.on == "paused":
                future.set_result("wait")
            else:
                answer = self._coordinator.commit(request)
                if isinstance(answer, Entry):
                    self._metrics[request.batch] = request.metrics
                future.set_result(answer)
                if isinstance(answer, Entry):
                    self._losses = 0
                    self._count(answer)
        except BaseException as e:
            if not future.done():
                future.set_exception(e)
            raise

    def _hand_out(self, request: NextBatch, future: Future[Answer]) -> None:
        answer = self._coordinator.next_batch(request)
        if answer == "finished" and not self._is_evaluated:
            answer = "wait"
        if answer == "wait" and self._evaluation is None and not request.evaluates:
            self._parked.append((request, future))
        else:
            future.set_result(answer)
            if isinstance(answer, Batch):
                self._unpark()  # there may be records for the others, too

    def _count(self, entry: Entry) -> None:
        """Count a step: each commit, or each complete round."""
        coordinator = self._coordinator
        if isinstance(coordinator, Synchronous):
            pushes = coordinator.complete_round
            if pushes is None:
                return
            round_ = coordinator.generation, pushes, coordinator.step + 1, entry.rates
            call_all(self._engine, "apply_round", *round_)
            coordinator.finish_round()
        elif coordinator.step <= self._ckpt.current_step:
            return  # the message has come twice
        metrics, self._metrics = self._metrics, {}
        self._after_step()
        self._ckpt.step(_average([metrics[number] for number in sorted(metrics)]))
        self._is_stopping = self._is_stopping or self._ckpt.should_stop
        self._unpark()

    def _unpark(self, most: int | None = None) -> None:
        """Handle the requests that wait for a mini-batch once more, each in its turn."""
        parked, self._parked = self._parked[:most], self._parked[len(self._parked[:most]) :]
        for item in parked:
            self._work.items.put(item)

    # -- losses ----------------------------------------------------------------------------------

    def _end(self, ended: Ended) -> None:
        if ended.worker not in self._running:
            return
        if ended.error is not None:
            raise ended.error
        if ended.lost and not self._is_over:
            self._lose(ended.worker)  # raises if it has ended because a server is lost
            error = self._count_loss(f"{ended.worker} was lost: {ended.lost}")
            events.emit("worker_lost", worker=ended.worker, error=error)
            return
        self._done += 1
        self._lose(ended.worker)

    def _lose(self, name: str) -> None:
        """Continue without a worker. Its records go to others; its last commit counts."""
        self._running.discard(name)
        coordinator = self._coordinator
        committed, entry = coordinator.lose(name)
        call_all(self._engine, "lose", coordinator.generation, name, committed, entry)
        coordinator.forget(name)
        self._engine.stop_worker(name)

    def _count_loss(self, what: str) -> LimpetError:
        self._losses += 1
        if self._losses > _MAX_LOSSES:
            raise LimpetError(what)
        return LimpetError(what)

    def _restart(self) -> None:
        """Go on under a new generation, after servers are lost."""
        names = ", ".join(f"server {number}" for number in sorted(self._engine.lost))
        error = self._count_loss(f"{names} of the tables was lost")
        events.emit("server_lost", run=self._ckpt.run.url, servers=names, error=error)
        self._stop_workers()
        self._done, self._metrics = 0, {}
        if self._evaluation is not None:
            self._evaluation.abandon("a server of the tables was lost")
        self._recover()
        self._is_stopping = self._ckpt.should_stop

    def _stop_workers(self) -> None:
        for name in sorted(self._running):
            self._engine.stop_worker(name)
        self._running.clear()
        self._unpark()


def _average(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the average of each metric, in the order of the mini-batches."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    values = {name: [metrics[name] for metrics in found if name in metrics] for name in names}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
