"""The driver's loop of a training with workers: commits, steps of the Checkpointer, and losses.

Every request of a worker to the coordinator is answered by this loop, one after the other. So a
save, which begins within ``ckpt.step``, sees the queue and the ledger between two commits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from limpet import events
from limpet.errors import LimpetError
from limpet.tables.coordinator import Answer, Coordinator, Synchronous
from limpet.tables.messages import Commit, Committed, Finished, NextBatch, Superseded, Wait
from limpet.training.checkpointer import Checkpointer
from limpet.training.training_evaluation import TrainingEvaluation

_LOOK_SECONDS = 0.2
"""How often the loop looks for what nobody reports, such as a lost process."""

_PARKED_SECONDS = 10.0
"""How long a request for a mini-batch waits. The connection of a worker waits for a minute."""

_HANGS = "it has not made a step within the lease_seconds of the queue"

_MAX_LOSSES = 5
"""The losses of workers in a row, without a step between them, after which the training ends."""


class Ended(NamedTuple):
    """The function of a worker has returned, or raised ``error``; or its process is lost."""

    worker: str
    error: BaseException | None = None
    lost: str = ""


class Engine(Protocol):
    """Where servers and workers run: threads of this process, or actors of Ray."""

    servers: int

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]: ...
    def start_worker(self, name: str, generation: int) -> None: ...
    def stop_worker(self, name: str) -> None: ...
    def join(self) -> None:
        """Wait for a moment until the workers that were stopped have ended."""

    def find_losses(self) -> tuple[list[Ended], list[int]]:
        """Return the workers and the servers that are lost."""

    def replace_server(self, number: int) -> None: ...


class Inbox:
    """Requests of workers, from any thread."""

    def __init__(self) -> None:
        self.items: SimpleQueue[tuple[Commit | NextBatch, Future[Answer]] | Ended] = SimpleQueue()
        self._is_closed = False

    def ask(self, request: Commit | NextBatch) -> Answer:
        """Return the answer of the loop; if that has ended, ``Superseded``."""
        future: Future[Answer] = Future()
        self.items.put((request, future))
        while True:
            try:
                return future.result(1.0)
            except TimeoutError:
                if self._is_closed:
                    return Superseded()

    def close(self) -> None:
        self._is_closed = True


class Driver:
    """The loop. ``workers``: how many there should be; ``roll_back`` returns the whole training to
    its newest version, after servers are lost."""

    def __init__(
        self,
        coordinator: Coordinator,
        engine: Engine,
        inbox: Inbox,
        ckpt: Checkpointer,
        *,
        evaluation: TrainingEvaluation | None,
        workers: int,
        after_step: Callable[[], object],
        roll_back: Callable[[list[int]], None],
    ) -> None:
        self.workers = workers
        self._coordinator, self._engine, self._inbox = coordinator, engine, inbox
        self._ckpt, self._after_step, self._roll_back = ckpt, after_step, roll_back
        self._evaluation = evaluation
        self._running: set[str] = set()
        self._done = 0
        self._started = self._losses = 0
        self._is_stopping = False
        self._asked: dict[str, float] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._parked: list[tuple[NextBatch, Future[Answer], float]] = []

    def run(self) -> None:
        """Train until all workers have returned, or ``ckpt.should_stop`` is True. Raises the error
        of a worker's function, and what ``ckpt.step`` raises."""
        queue = self._coordinator.queue
        queue.on_overdue = lambda worker: self._inbox.items.put(
            Ended(worker.partition(" at ")[0], lost=_HANGS)  # of a connection, with its address
        )
        try:
            looked = 0.0
            while True:
                if self._evaluation is not None and not self._is_stopping:
                    self._evaluation.step()  # between two commits
                    self._is_stopping = self._ckpt.should_stop
                if time.monotonic() - looked > _LOOK_SECONDS:
                    looked = time.monotonic()
                    self._look()
                if not self._running and (self._done or self._is_over):
                    if not self._is_evaluated:
                        what = "All workers have returned before the evaluation was complete: call"
                        raise LimpetError(f"{what} worker.next() until it returns None")
                    self._engine.call("mark", self._to_all((self._coordinator.mark(),)))
                    return
                try:
                    item = self._inbox.items.get(timeout=_LOOK_SECONDS)
                except Empty:
                    continue
                self._handle(item)
        finally:
            self._stop()

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
        lost_workers, lost_servers = self._engine.find_losses()
        for ended in lost_workers:
            self._end(ended)
        if lost_servers:
            self._restart(lost_servers)
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
        for parked in [p for p in self._parked if time.monotonic() - p[2] > _PARKED_SECONDS]:
            self._parked.remove(parked)
            parked[1].set_result(Wait())

    def _handle(self, item: tuple[Commit | NextBatch, Future[Answer]] | Ended) -> None:
        if isinstance(item, Ended):
            self._end(item)
            return
        (request, future), evaluation = item, self._evaluation
        self._asked[request.worker] = time.monotonic()
        try:
            if self._is_over or request.worker not in self._running:
                future.set_result(Superseded())
            elif isinstance(request, Commit) and evaluation and not request.evaluates:
                raise LimpetError("With evaluation=, worker.next() needs evaluate=")
            elif self._is_stopping:
                future.set_result(Wait())
            elif isinstance(request, NextBatch):
                self._hand_out(request, future)
            elif evaluation and evaluation.is_pausing:
                future.set_result(Wait())
            else:
                answer = self._coordinator.commit(request)
                if isinstance(answer, Committed):
                    self._metrics[request.batch] = request.metrics
                future.set_result(answer)
                if isinstance(answer, Committed):
                    self._losses = 0
                    self._count(answer)
        except LimpetError as e:
            if not future.done():
                future.set_exception(e)
            raise

    def _hand_out(self, request: NextBatch, future: Future[Answer]) -> None:
        answer = self._coordinator.next_batch(request)
        if isinstance(answer, Finished) and not self._is_evaluated:
            answer = Wait()
        if isinstance(answer, Wait) and self._evaluation is None:
            self._parked.append((request, future, time.monotonic()))
        else:
            future.set_result(answer)

    def _count(self, answer: Committed) -> None:
        """Count a step: each commit, or each complete round."""
        coordinator = self._coordinator
        if isinstance(coordinator, Synchronous):
            pushes = coordinator.complete_round
            if pushes is None:
                return
            arguments = (coordinator.generation, pushes, coordinator.step + 1, answer.entry.rates)
            self._engine.call("apply_round", self._to_all(arguments))
            coordinator.finish_round()
        elif coordinator.step <= self._ckpt.current_step:
            return  # the message has come twice
        metrics, self._metrics = self._metrics, {}
        self._after_step()
        self._ckpt.step(_average([metrics[number] for number in sorted(metrics)]))
        self._is_stopping = self._is_stopping or self._ckpt.should_stop
        parked, self._parked = self._parked, []
        for request, future, _ in parked:
            self._handle((request, future))

    def _to_all(self, arguments: tuple[Any, ...]) -> dict[int, tuple[Any, ...]]:
        return dict.fromkeys(range(self._engine.servers), arguments)

    # -- losses ----------------------------------------------------------------------------------

    def _end(self, ended: Ended) -> None:
        if ended.worker not in self._running:
            return
        if ended.error is not None:
            raise ended.error
        if ended.lost and not self._is_over:
            self._losses += 1
            error = LimpetError(f"{ended.worker} was lost: {ended.lost}")
            if self._losses > _MAX_LOSSES:
                raise error
            events.emit("worker_lost", worker=ended.worker, error=error)
            self._lose(ended.worker)
            return
        self._done += 1
        self._lose(ended.worker)

    def _lose(self, name: str) -> None:
        """Continue without a worker. Its records go to others; its last commit counts."""
        self._running.discard(name)
        coordinator = self._coordinator
        committed, entry = coordinator.lose(name)
        arguments = (coordinator.generation, name, committed, entry)
        self._engine.call("lose", self._to_all(arguments))
        coordinator.forget(name)
        self._engine.stop_worker(name)

    def _restart(self, servers: list[int]) -> None:
        """Return to the newest version, under a new generation."""
        for name in sorted(self._running):
            self._engine.stop_worker(name)
        self._running.clear()
        self._done = 0
        for _, future, _ in self._parked:
            future.set_result(Superseded())
        self._parked, self._metrics = [], {}
        if self._evaluation is not None:
            self._evaluation.restart()
        self._roll_back(servers)

    def _stop(self) -> None:
        self._inbox.close()
        if self._evaluation is not None:
            self._evaluation.abandon("the training ended")
        for name in sorted(self._running):
            self._engine.stop_worker(name)
        self._engine.join()


def _average(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the average of each metric, in the order of the mini-batches."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    values = {name: [metrics[name] for metrics in found if name in metrics] for name in names}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
