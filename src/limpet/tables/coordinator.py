"""The ledger of a training with workers: which pushes are committed, and in which order.

A coordinator is a state machine of the driver's thread: it has no lock, no clock, and no
connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from limpet.errors import LeaseLost, LimpetError
from limpet.tables.messages import Answer, Batch, Commit, Entry, Ledger, Mark, NextBatch, Rates
from limpet.tasks.batches import TaskBatches
from limpet.tasks.queue import Queue


class Coordinator:
    """Each push is a step of its own. ``rates`` returns the learning rates of the next step.

    With ``staleness=k``, a push is refused if others have committed more than k times since the
    coordinator last answered its worker; ``scaled``: its rates are divided by that number.
    ``queue``: of the records, set before the first worker joins.
    """

    queue: Queue

    def __init__(
        self, rates: Callable[[], Rates], staleness: int | None = None, scaled: bool = False
    ) -> None:
        self.rates = rates
        self._staleness, self._scaled = staleness, scaled
        self.generation = self.epoch = self.step = 0
        self.batches_done = 0
        """The mini-batches of all synchronous rounds before this one."""

        self.ledger: Ledger = {}
        """By worker, the newest commit that may not be applied on every server."""

        self.answered: dict[str, int] = {}
        """By worker that is not lost: the step at the last answer, or the last number in rounds."""

    def restart(self, step: int) -> None:
        """Begin a generation after ``step`` steps: no worker has committed anything in it."""
        self.generation, self.step = self.generation + 1, step
        self.ledger, self.answered = {}, {}

    def mark(self) -> Mark:
        """Begin the next epoch. All commits before this call belong to the cut, and none after."""
        self.epoch += 1
        return Mark(
            generation=self.generation,
            epoch=self.epoch,
            ledger=dict(self.ledger),
            rates=self.rates(),
            step=self.step,
            batches=self.batches_done,
        )

    def join(self, worker: str) -> None:
        """Add a worker, whose name no other one has had in this generation."""
        self.answered[worker] = self.step

    def next_batch(self, request: NextBatch) -> Answer:
        """Return an open mini-batch of a round to a worker."""
        return "finished"  # it asks only once all records are consumed

    def commit(self, request: Commit) -> Answer:
        """Commit a push that all servers hold, and the records that it consumes, or refuse it."""
        worker, entry = request.worker, self.ledger.get(request.worker)
        if entry is not None and request.number <= entry.number:
            return entry  # the message has come twice
        behind = self.step - self.answered[worker]
        self.answered[worker] = self.step
        if self._staleness is not None and behind > self._staleness:
            return "stale"
        try:
            self.queue.report_consumed(request.reports)
        except LeaseLost:
            return "taken"
        self.answered[worker] = self.step = self.step + 1
        rates = self.rates()
        if self._scaled and behind > 1:
            tables = {name: rate / behind for name, rate in rates.tables.items()}
            rates = Rates(tables, [rate / behind for rate in rates.groups])
        self.ledger[worker] = entry = Entry(request.number, self.epoch, self.step, rates)
        return entry

    def lose(self, worker: str) -> tuple[int, Entry | None]:
        """Declare a worker lost. Return what ``TableServer.lose`` needs; call ``forget`` once all
        servers know it."""
        self.answered.pop(worker, None)
        entry = self.ledger.get(worker)
        return (0 if entry is None else entry.number), entry

    def forget(self, worker: str) -> None:
        self.ledger.pop(worker, None)


class Synchronous(Coordinator):
    """Rounds of ``grads_to_wait`` consecutive mini-batches, the last one of an epoch of the data
    shorter. Once each mini-batch of a round is committed (``complete_round``), the driver applies
    it on the servers, and calls ``finish_round``."""

    _batches: TaskBatches

    def __init__(self, rates: Callable[[], Rates], grads_to_wait: int) -> None:
        super().__init__(rates)
        self._size = grads_to_wait
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._rounds: Iterator[dict[int, Batch]] | None = None
        self._round: dict[int, Batch] = {}
        self.at_work: dict[int, str] = {}
        """By number, the mini-batches of the round that workers have not committed."""

        self._committed: dict[int, tuple[str, int]] = {}

    def restart(self, step: int) -> None:
        super().restart(step)
        if self._rounds is not None:
            self._batches.close()  # else, nobody gets the records of a round that did not end
        self._begin_pass()

    def join(self, worker: str) -> None:
        self.answered[worker] = 0

    def next_batch(self, request: NextBatch) -> Answer:
        if not self._round:
            if self.queue.finished("training"):
                return "finished"
            if self._rounds is None:
                self._batch_size = request.batch_size
                side = self.queue.training
                self._batches = TaskBatches(side, self._batch_size, worker="coordinator")
                self._rounds = self._read_rounds()
            self._round = next(self._rounds)
        if request.batch_size != self._batch_size:
            raise LimpetError(
                f"All workers must call next() with one batch size in synchronous mode, as"
                f" {self._batch_size}; found {request.batch_size}"
            )
        held = [n for n, worker in self.at_work.items() if worker == request.worker]
        free = (n for n in self._round if n not in self._committed and n not in self.at_work)
        number = next(chain(held, free), None)  # it holds one if it has left out its step
        if number is None:
            return "wait"
        self.at_work[number] = request.worker
        return self._round[number]

    def _read_rounds(self) -> Iterator[dict[int, Batch]]:
        """Yield the mini-batches of each round by number; none while there are no records."""
        number, found = self.batches_done, dict[int, Batch]()
        while True:
            for keys in self._batches:
                data = self._batches.pending_data
                if found and data[-1] != data[0]:  # of another epoch
                    yield found
                    found = {}
                found[number] = Batch(number, keys)
                number += 1
                if len(found) == self._size:
                    yield found
                    found = {}
            yield found
            found = {}

    def commit(self, request: Commit) -> Answer:
        number, key = request.batch, (request.worker, request.number)
        if self._committed.get(number) != key:
            if self.at_work.get(number) != request.worker:
                return "stale"
            del self.at_work[number]
            self._committed[number] = key
            self.answered[request.worker] = request.number
        return Entry(request.number, self.epoch, self.step + 1, self.rates())

    @property
    def complete_round(self) -> list[tuple[str, int]] | None:
        """The pushes of the round in the order of their mini-batches, once all are committed."""
        if not self._round or len(self._committed) < len(self._round):
            return None
        return [self._committed[number] for number in self._round]

    def finish_round(self) -> None:
        """Count the records of a round that all servers have applied."""
        self._batches.consumed(len(self._round))
        self.step += 1
        self.batches_done += len(self._round)
        self._round, self._committed = {}, {}

    def lose(self, worker: str) -> tuple[int, Entry | None]:
        self.at_work = {number: name for number, name in self.at_work.items() if name != worker}
        return self.answered.pop(worker, 0), None
