"""The ledger of a training with workers: which pushes are committed, and in which order.

A coordinator is a state machine of the driver's thread: it has no lock, no clock, and no
connection. ``Asynchronous`` commits each push as a step of its own; ``Synchronous`` commits rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

from limpet.errors import LeaseLost, LimpetError, TaskError
from limpet.tables.messages import (
    Batch,
    Commit,
    Committed,
    Entry,
    Finished,
    Ledger,
    Mark,
    NextBatch,
    Rates,
    Stale,
    Superseded,
    Wait,
)
from limpet.tasks.batches import Key, TaskBatches
from limpet.tasks.queue import Queue

Answer = Committed | Stale | Superseded | Batch | Wait | Finished


class Coordinator(ABC):
    """What both modes have in common. ``rates`` returns the learning rates of the next step;
    ``queue``: of the records, set before the first worker joins."""

    queue: Queue

    def __init__(self, rates: Callable[[], Rates]) -> None:
        self.rates = rates
        self.generation = self.epoch = self.step = 0
        self.batches_done = 0
        """The mini-batches of all synchronous rounds before this one."""

        self.ledger: Ledger = {}
        """By worker, the newest commit that may not be applied on every server."""

        self._lost: set[str] = set()

    def restart(self, step: int) -> None:
        """Begin a generation after ``step`` steps: no worker has committed anything in it."""
        self.generation, self.step, self.ledger = self.generation + 1, step, {}
        self._lost.clear()

    def mark(self) -> Mark:
        """Begin the next epoch. All commits before this call belong to the cut, and none after."""
        self.epoch += 1
        return Mark(
            self.generation,
            self.epoch,
            dict(self.ledger),
            self.rates(),
            step=self.step,
            batches=self.batches_done,
        )

    def is_current(self, request: Commit | NextBatch) -> bool:
        return request.generation == self.generation and request.worker not in self._lost

    @abstractmethod
    def join(self, worker: str) -> None:
        """Add a worker, whose name no other one has had in this generation."""

    @abstractmethod
    def commit(self, request: Commit) -> Answer:
        """Commit a push that all servers hold, and the records that it consumes, or refuse it."""

    def next_batch(self, request: NextBatch) -> Answer:
        """Return an open mini-batch of the round to a worker."""
        return Finished()  # it asks only once all records are consumed

    def lose(self, worker: str) -> tuple[int, Entry | None]:
        """Declare a worker lost. Return what ``TableServer.lose`` needs; call ``forget`` once all
        servers know it."""
        self._lost.add(worker)
        entry = self.ledger.get(worker)
        return (0 if entry is None else entry.number), entry

    def forget(self, worker: str) -> None:
        self.ledger.pop(worker, None)


class Asynchronous(Coordinator):
    """Each push is a step of its own. With ``staleness=k``, a push is refused if others have
    committed more than k times since the coordinator last answered its worker; ``scaled``: the
    rates of a push are divided by that number."""

    def __init__(
        self, rates: Callable[[], Rates], staleness: int | None = None, scaled: bool = False
    ) -> None:
        super().__init__(rates)
        self._staleness, self._scaled = staleness, scaled
        self._answered: dict[str, int] = {}

    def join(self, worker: str) -> None:
        self._answered[worker] = self.step

    def commit(self, request: Commit) -> Answer:
        worker, entry = request.worker, self.ledger.get(request.worker)
        if not self.is_current(request):
            return Superseded()
        if entry is not None and request.number <= entry.number:
            return Committed(entry)  # the message has come twice
        behind = self.step - self._answered[worker]
        self._answered[worker] = self.step
        if self._staleness is not None and behind > self._staleness:
            return Stale(self.step)
        try:
            self.queue.report_consumed(request.reports)
        except LeaseLost:
            return Stale(self.step, has_lost_records=True)
        self.step += 1
        self._answered[worker] = self.step
        rates = self.rates()
        if self._scaled and behind > 1:
            rates = Rates(
                {name: rate / behind for name, rate in rates.tables.items()},
                [rate / behind for rate in rates.groups],
            )
        self.ledger[worker] = entry = Entry(request.number, self.epoch, self.step, rates)
        return Committed(entry)

    def lose(self, worker: str) -> tuple[int, Entry | None]:
        self._answered.pop(worker, None)
        return super().lose(worker)


class Synchronous(Coordinator):
    """Rounds of ``grads_to_wait`` consecutive mini-batches, the last one of an epoch of the data
    shorter. ``round`` is complete once each of its mini-batches is committed; then the driver
    applies it on the servers, and calls ``finish_round``."""

    def __init__(self, rates: Callable[[], Rates], grads_to_wait: int) -> None:
        super().__init__(rates)
        self._size = grads_to_wait
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._batches: TaskBatches | None = None
        self._batch_size = 0
        self._reader: Iterator[list[Key]] | None = None
        self._next: Batch | None = None  # read, but of the next round
        self._round: dict[int, Batch] = {}
        self._open: deque[int] = deque()
        self.at_work: dict[int, str] = {}
        """By number, the mini-batches of the round that workers have not committed."""

        self._committed: dict[int, tuple[str, int]] = {}
        self._numbers: dict[str, int] = {}

    def restart(self, step: int) -> None:
        super().restart(step)
        self._begin_pass()

    def join(self, worker: str) -> None:
        self._numbers[worker] = 0

    def next_batch(self, request: NextBatch) -> Answer:
        if not self.is_current(request):
            return Superseded()
        if not self._round and self.queue.finished("training"):
            return Finished()
        if not self._round and not self._begin_round(request.batch_size):
            return Wait()
        if request.batch_size != self._batch_size:
            raise LimpetError(
                f"All workers must call next() with one batch size in synchronous mode, as"
                f" {self._batch_size}; found {request.batch_size}"
            )
        held = [number for number, name in self.at_work.items() if name == request.worker]
        if not (held or self._open):
            return Wait()
        number = held[0] if held else self._open.popleft()  # it has left out its step
        self.at_work[number] = request.worker
        return self._round[number]

    def _begin_round(self, batch_size: int) -> bool:
        if self._batches is None:
            self._batch_size = batch_size
            self._batches = TaskBatches(self.queue.training, batch_size, worker="coordinator")
        first = self._read(self.batches_done)
        if first is None:
            return False
        self._round = {self.batches_done: first}
        data = self._batches.pending_data[0]
        for number in range(self.batches_done + 1, self.batches_done + self._size):
            batch = self._read(number)
            if batch is None:
                break
            if self._batches.pending_data[len(self._round)] != data:
                self._next = batch
                break
            self._round[number] = batch
        self._open.extend(self._round)
        return True

    def _read(self, number: int) -> Batch | None:
        """Return the next mini-batch of the data, or None if there is none now."""
        if self._next is not None:
            batch, self._next = self._next, None
            return batch
        if self._batches is None:
            return None
        if self._reader is None:
            if self._batches.pending:  # a new pass would return them to the queue
                return None
            self._reader = iter(self._batches)
        keys = next(self._reader, None)
        if keys is None:
            self._reader = None
            return None
        return Batch(number, keys)

    def commit(self, request: Commit) -> Answer:
        if not self.is_current(request):
            return Superseded()
        number, key = request.batch, (request.worker, request.number)
        if self._committed.get(number) != key:
            if self.at_work.get(number) != request.worker:
                return Stale(self.step)
            del self.at_work[number]
            self._committed[number] = key
            self._numbers[request.worker] = request.number
        return Committed(Entry(request.number, self.epoch, self.step + 1, self.rates()))

    @property
    def complete_round(self) -> list[tuple[str, int]] | None:
        """The pushes of the round in the order of their mini-batches, once all are committed."""
        if not self._round or len(self._committed) < len(self._round):
            return None
        return [self._committed[number] for number in self._round]

    def finish_round(self) -> None:
        """Count the records of a round that all servers have applied."""
        if self._batches is None:
            raise TaskError("There is no round to finish")
        self._batches.consumed(len(self._round))
        self.step += 1
        self.batches_done += len(self._round)
        self._round, self._committed = {}, {}

    def lose(self, worker: str) -> tuple[int, Entry | None]:
        super().lose(worker)
        returned = [number for number, name in self.at_work.items() if name == worker]
        for number in returned:
            del self.at_work[number]
        self._open = deque(sorted([*self._open, *returned]))
        return self._numbers.pop(worker, 0), None
