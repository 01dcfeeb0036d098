"""A batch sampler that reads ahead in the training tasks, and counts only what steps consume."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf

from limpet.arguments import check_count, check_rank, check_seconds, require, whole
from limpet.errors import TaskError
from limpet.lazy_torch import rank_and_world_size
from limpet.tasks.task import TrainingSide, TrainingTask
from limpet.text import to_repr

Key = int | tuple[str, int]
"""A record: its number, or the name of its data set and its number if the data set has a name."""

_Part = tuple[TrainingTask, int, int]
"""The records of a task from a first one up to, but without, another one."""


class TaskBatches:
    """A batch sampler for ``DataLoader(dataset, batch_sampler=...)`` over the training tasks.

    ``side``: the training side of the queue; this object cannot ask for evaluation tasks.
    ``batch_size``: the number of records in one batch over all ranks. A batch may begin in one task
    and end in the next one of the same job and epoch. The last batch of an epoch may be smaller.

    **One rank.** Any number of workers, each with its own object, share the tasks of the queue.
    ``worker``: the name of this one, as for ``Queue.get``.

    **Several ranks** (``rank``, ``ranks``: by default those of ``torch.distributed``). Each rank
    has its own queue with the same jobs, and nothing else takes training tasks from it. Each rank
    computes the same batches and yields its own part of each, without communication: all ranks get
    equally many batches. The parts differ by at most one record. If a batch has fewer records than
    there are ranks, the other ranks repeat records of it, because a rank without a batch would
    block the others.

    Call ``consumed`` in each step. A pass that ends early, such as by ``break``, returns the
    records that no step has consumed to the queue; the next pass begins with them.

    ``lease_seconds``: by default, leases do not end, because the queue is in the same process. With
    a ``RemoteQueue``, give a number; each step renews the leases.

    Raises ``LimpetError`` for invalid arguments.
    """

    def __init__(
        self,
        side: TrainingSide,
        batch_size: int,
        *,
        worker: str | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        lease_seconds: float = inf,
    ) -> None:
        require("side", isinstance(side, TrainingSide), "the training side of a queue", side)
        self._side, self._worker = side, worker
        self._batch_size = check_count("batch_size=", batch_size)
        self._rank, self._ranks = check_rank(rank, ranks)
        lease_seconds = check_seconds("lease_seconds=", lease_seconds, may_be_infinite=True)
        self._lease_seconds = lease_seconds
        self._pass_number = 0
        self._pending: deque[list[_Part]] = deque()  # yielded, but not consumed
        self._next: list[_Part] = []  # the batch that is put together
        self._task: TrainingTask | None = None  # the one that is read
        self._position = 0  # up to which it was read
        self._idle_passes = 0  # in a row, of which no step has consumed a batch

    @property
    def pending(self) -> int:
        """The number of batches that were yielded, and that no step has consumed."""
        return len(self._pending)

    @property
    def pending_data(self) -> list[tuple[str, int]]:
        """The job and the epoch of each of these batches."""
        return [(batch[0][0].job, batch[0][0].epoch) for batch in self._pending]

    def renew(self) -> None:
        """Start the time of all leases anew. Raises ``LeaseLost`` if one is over."""
        for task in self._held() if self._lease_seconds < inf else ():
            task.renew()

    def close(self) -> None:
        """Return what was read, and no step has consumed, to the queue."""
        self._idle_passes = 0
        self._begin_pass()

    def consumed(self, batches: int = 1) -> None:
        """Report that a step has consumed the next ``batches`` batches.

        Call it right before the optimizer applies the step, on all ranks. Raises ``TaskError``, and
        counts nothing, if fewer batches were yielded, and ``LeaseLost`` if another worker got a
        task of one of them: then discard the step, and begin another pass.
        """
        if whole(batches, 1, len(self._pending)) is None:
            raise TaskError(
                f"A step consumes more batches than were yielded, {to_repr(batches)}, not 1 to"
                f" {len(self._pending)}; after a resume, begin a new pass"
            )
        self.renew()  # first: nothing may be raised once the records count
        consumed = [self._pending[i] for i in range(batches)]
        counts: dict[TrainingTask, int] = {}
        for task, start, stop in (part for batch in consumed for part in batch):
            counts[task] = counts.get(task, 0) + stop - start
        self._side.consume(list(counts.items()))
        self._idle_passes = 0
        for _ in consumed:
            self._pending.popleft()

    def __iter__(self) -> Iterator[list[Key]]:
        """Yield this rank's part of each batch, until no task is open."""
        rank, ranks = self._rank_and_world_size()
        self._begin_pass()
        pass_number = self._pass_number
        # other workers have the tasks of an empty pass, and the loop around it may spin
        timeout = 0.2 if ranks == 1 else 0.0
        while batch := self._next_batch(timeout):
            timeout = 0.0  # the thread that waits is the one that consumes
            self._pending.append(batch)
            self._next = []
            # a rank without a record of its own repeats one
            yield _part(batch, rank, ranks) or _part(batch, rank % _length(batch), _length(batch))
            if pass_number != self._pass_number:
                raise TaskError(
                    "This pass over a TaskBatches is no longer the latest: use a separate"
                    " TaskBatches for each loader"
                )

    # -- implementation --------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        """Return what the pass before has read, and no step has consumed, to the queue."""
        self._idle_passes += 1 if self._pending else 0
        if self._idle_passes >= 2:  # one may inspect the data
            raise TaskError(
                f"No step has consumed a batch of the last {self._idle_passes} passes, so every"
                " pass yields the same batches: call consumed() in each step"
            )
        self._pass_number += 1
        for task in self._held():
            task.release()
        self._pending.clear()
        self._next = []
        self._task = None

    def _held(self) -> list[TrainingTask]:
        """Return the tasks of which records were read, or will be, and not all were consumed."""
        held = {task: None for batch in (*self._pending, self._next) for task, _, _ in batch}
        if self._task is not None:
            held[self._task] = None
        return list(held)

    def _next_batch(self, timeout: float) -> list[_Part]:
        """Return the records of the next batch of all ranks; empty if no task is open."""
        batch = self._next  # what raises below loses no task: the next pass returns them
        need = self._batch_size
        while need:
            task = self._task
            if task is None:
                task = self._side.get(self._worker, timeout, self._lease_seconds)
                if task is None:
                    break
                self._task, self._position = task, task.position
            if batch and (batch[0][0].job, batch[0][0].epoch) != (task.job, task.epoch):
                break
            stop = min(self._position + need, self._end(task))
            batch.append((task, self._position, stop))
            need -= stop - self._position
            self._position = stop
            if stop == task.stop:
                self._task = None
        return batch

    def _end(self, task: TrainingTask) -> int:
        if task.stop is None:
            task.release()
            self._task = None
            raise TaskError(
                f"TaskBatches cannot read stream {task.data!r} of job {task.job!r}: use"
                ' queue.get("training") and task.consumed() for streams'
            )
        return task.stop

    def _rank_and_world_size(self) -> tuple[int, int]:
        if self._rank is None or self._ranks is None:
            return rank_and_world_size()
        return self._rank, self._ranks


def _length(batch: list[_Part]) -> int:
    return sum(stop - start for _, start, stop in batch)


def _part(batch: list[_Part], rank: int, ranks: int) -> list[Key]:
    """Return every ``ranks``-th record of a batch, without a look at the others."""
    keys: list[Key] = []
    offset = 0
    for task, start, stop in batch:
        numbers = range(start + (rank - offset) % ranks, stop, ranks)
        keys += [(task.data, i) for i in numbers] if task.data else numbers
        offset += stop - start
    return keys
