"""The leases that are in force: by attempt, by worker, and by the time at which they end."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from limpet.tasks.spec import Kind
    from limpet.tasks.table import TaskTable


@dataclass(eq=False, slots=True)
class Lease:
    """The assignment of a task to a worker, from ``begin`` to ``end`` on the queue's clock.

    ``seconds``: the time for which a report extends it.
    ``position``: the first record that no step had consumed when the lease began.
    """

    attempt: int
    worker: str
    table: TaskTable
    number: int
    position: int
    begin: float
    seconds: float
    end: float

    def extend(self, now: float) -> None:
        """Let the time of the lease start anew."""
        self.end = now + self.seconds


class Leases:
    """The leases in force. Every operation takes O(log n) steps, amortized."""

    def __init__(self) -> None:
        self._by_attempt: dict[int, Lease] = {}
        self._by_worker: dict[tuple[str, Kind], dict[int, Lease]] = {}
        self._ends: list[tuple[float, int]] = []  # may contain leases that were renewed or ended

    def __len__(self) -> int:
        return len(self._by_attempt)

    def get(self, attempt: int) -> Lease | None:
        """Return the lease of an attempt, or None if it is over."""
        return self._by_attempt.get(attempt)

    def of_worker(self, worker: str, kind: Kind) -> list[Lease]:
        """Return the leases of a worker, oldest first."""
        return list(self._by_worker.get((worker, kind), {}).values())

    def add(self, lease: Lease) -> None:
        """Begin a lease."""
        self._by_attempt[lease.attempt] = lease
        key = (lease.worker, lease.table.spec.kind)
        self._by_worker.setdefault(key, {})[lease.attempt] = lease
        lease.table.leases[lease.number] = lease.attempt
        self.push(lease)

    def remove(self, lease: Lease) -> None:
        """End a lease."""
        del self._by_attempt[lease.attempt]
        del lease.table.leases[lease.number]
        key = (lease.worker, lease.table.spec.kind)
        held = self._by_worker[key]
        del held[lease.attempt]
        if not held:
            del self._by_worker[key]
        if len(self._ends) > 64 + 2 * len(self._by_attempt):
            self._ends = [(x.end, x.attempt) for x in self._by_attempt.values() if x.end < inf]
            heapify(self._ends)

    def next_end(self) -> float:
        """Return the time before which no lease ends."""
        return self._ends[0][0] if self._ends else inf

    def overdue(self, now: float) -> Iterator[Lease]:
        """Yield the leases whose time is over. The caller removes each."""
        while self._ends and self._ends[0][0] <= now:
            _, attempt = heappop(self._ends)
            lease = self._by_attempt.get(attempt)
            if lease is not None and lease.end <= now:
                yield lease
            elif lease is not None:
                self.push(lease)

    def push(self, lease: Lease) -> None:
        """Note when a lease ends, which may be earlier than before."""
        if lease.end < inf:
            heappush(self._ends, (lease.end, lease.attempt))
