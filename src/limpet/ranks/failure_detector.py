"""Detect which of the ranks that a rank waits for have failed, and which are stragglers.

A rank that is killed sends no last heartbeat. Without a report, the others wait for one for
``Timeouts.silent`` seconds. The system knows at once that a process has ended, and ranks with
consecutive numbers usually share a host: the ranks next to it report it (``Neighbors``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from limpet import machine
from limpet.errors import RankFailed
from limpet.events import emit
from limpet.ranks.store_connection import KeyValueStore
from limpet.text import format_ranks

STRAGGLER_SECONDS = 30.0
"""Seconds without progress after which waiting ranks report a rank as a straggler."""

_MAX_SHOWN = 8


WaitPosition = tuple[int, ...]
"""The numbers of a collective, of an operation within it, and of a wait within that operation."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last heartbeat of a rank.

    ``count``: the number of heartbeats so far; ``progress``: a counter that increases with the
    rank's progress; ``host``: the name of its host; ``waiting_at``: the earliest position at which
    it waits for others.
    """

    count: int
    progress: int
    host: str
    waiting_at: WaitPosition | None = None


class Limits(Protocol):
    """``silent`` and ``stuck`` of ``Timeouts``."""

    @property
    def silent(self) -> float: ...
    @property
    def stuck(self) -> float: ...


class Heartbeats(Protocol):
    """The client from which the heartbeats of other ranks are read."""

    clock: Callable[[], float]

    @property
    def timeouts(self) -> Limits: ...

    def heartbeats(self, ranks: Sequence[int]) -> list[Heartbeat | None]: ...


class FailureDetector:
    """Monitors ranks that this rank waits for, starting with its first check.

    ``waited``: the seconds so far, almost without those for which this process was suspended.

    ``operation``: the operation that the ranks perform, for messages. ``stuck``: seconds that a
    live rank may make no progress. If it is None, the bound of ``Timeouts`` applies, also to a rank
    without a first heartbeat. ``position``: a rank that itself waits at an earlier position is not
    stuck. If a rank that waits at any position were exempt, two ranks could wait for each other
    forever.
    """

    def __init__(
        self,
        kv: Heartbeats,
        operation: str,
        stuck: float | None = None,
        position: WaitPosition = (0, 0),
    ) -> None:
        self._position = position
        self._kv = kv
        self._operation = operation
        self._silent = kv.timeouts.silent
        self._stuck = kv.timeouts.stuck if stuck is None else stuck
        self._never_seen = max(self._silent, kv.timeouts.stuck if stuck is None else 0.0)
        self._checked_at = kv.clock()
        self.waited = 0.0
        self._observed: dict[int, tuple[Heartbeat | None, float, float]] = {}
        self._arrived: set[int] = set()

    def failed(
        self, ranks: Sequence[int], has_arrived: Callable[[int], bool] = lambda rank: False
    ) -> RankFailed | None:
        """Return an error if one of these ranks has ended, is dead, or is stuck, else None.

        Ranks for which ``has_arrived`` returns True are exempt. It is called only for ranks that
        seem to have failed, because calling it for all ranks would be slow.

        The error is about the first failed rank. It also names ranks that have used half of their
        time: if several ranks die at once, one check does not find all of them.
        """
        self._observe(ranks)
        if all(self._failure_reason(r) is None for r in ranks):
            return None
        suspects = [
            r for r in ranks if self._failure_reason(r, 0.5) is not None and not has_arrived(r)
        ]
        for rank in suspects:
            if (reason := self._failure_reason(rank)) is not None:
                return self.make_error([rank, *(r for r in suspects if r != rank)], *reason)
        return None

    def stragglers(self, ranks: Sequence[int], has_arrived: Callable[[int], bool]) -> list[int]:
        """Return the ranks without progress for ``STRAGGLER_SECONDS`` as of the last check.

        Ranks for which ``has_arrived`` returned True are omitted and not checked again.
        """
        late_ranks = [
            r
            for r in ranks
            if r in self._observed and self.waited - self._observed[r][2] > STRAGGLER_SECONDS
        ]
        self._arrived.update(r for r in late_ranks if r not in self._arrived and has_arrived(r))
        return [r for r in late_ranks if r not in self._arrived]

    def _observe(self, ranks: Sequence[int]) -> None:
        last_check_at, self._checked_at = self._checked_at, self._kv.clock()
        # A process that was suspended, perhaps with the whole job, has lost only a part. The parts
        # are longer than the interval between checks.
        self.waited += min(self._checked_at - last_check_at, self._silent / 2)
        now = self.waited
        for rank, heartbeat in zip(ranks, self._kv.heartbeats(ranks) if ranks else (), strict=True):
            last, beat_at, progress_at = self._observed.get(rank, (heartbeat, now, now))
            if heartbeat is not None and last is not None:
                beat_at = now if heartbeat.count != last.count else beat_at
                is_exempt = (
                    heartbeat.waiting_at is not None and heartbeat.waiting_at < self._position
                )
                progress_at = (
                    now if is_exempt or heartbeat.progress != last.progress else progress_at
                )
            elif heartbeat is not last:
                beat_at = progress_at = now
            self._observed[rank] = (heartbeat, beat_at, progress_at)

    def _failure_reason(self, rank: int, fraction: float = 1.0) -> tuple[str, str] | None:
        """Return the expected and the found behavior of a rank that has failed, else None.

        ``fraction``: the fraction of the timeouts to apply.
        """
        heartbeat, beat_at, progress_at = self._observed[rank]
        silent_for, idle_for = self.waited - beat_at, self.waited - progress_at
        if heartbeat is not None and heartbeat.count < 0:
            return "its process to run until the end of the operation", "that the process has ended"
        if heartbeat is None and silent_for > self._never_seen * fraction:
            return f"a first heartbeat within {self._never_seen:g} s", "that the rank never joined"
        if heartbeat is not None and silent_for > self._silent * fraction:
            return f"a heartbeat within {self._silent:g} s", "none: the process has died or hangs"
        if idle_for > self._stuck * fraction:
            return f"some progress within {self._stuck:g} s", "none, though the process is alive"
        return None

    def make_error(self, ranks: Sequence[int], expected: str, found: str) -> RankFailed:
        """Return the error for failed ranks; ``expected`` and ``found`` describe the first one."""
        rank, *others = ranks
        heartbeat = self._observed[rank][0] if rank in self._observed else None
        host = f" on {heartbeat.host}" if heartbeat is not None and heartbeat.host else ""
        more = f" (nor did {format_ranks(others)})" if others else ""
        return RankFailed(
            f"Rank {rank}{host} did not join {self._operation}{more}",
            expected=expected,
            found=found,
            todo=f"Check the log of rank {rank}, and that all ranks make this call. LIMPET_SILENT"
            " and LIMPET_STUCK set the time limits in seconds",
            rank=rank,
            lost=True,
        )


def emit_stragglers(ranks: Sequence[int], operation: str, waited: float, timeout: float) -> None:
    """Emit the event that this rank waits, and for which ranks.

    ``waited``: the seconds so far; ``timeout``: the seconds after which this rank gives up if the
    ranks make no progress.
    """
    emit(
        "ranks_awaited",
        what=operation,
        ranks=list(ranks[:_MAX_SHOWN]),
        count=len(ranks),
        seconds=waited,
        longest=timeout,
    )


class Neighbors:
    """The ranks before and after this one, if they are on this host.

    All calls are made in the thread that owns the connection.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._unknown = [r for r in (rank - 1, rank + 1) if 0 <= r < size]
        self._processes: dict[int, tuple[int, str]] = {}
        self._host = ""

    def report(self, store: KeyValueStore, closed: bytes) -> None:
        """Make the last heartbeat of a neighbor whose process has ended say so. Call it after each
        heartbeat of this rank.

        ``closed``: the heartbeat of a process that has ended regularly, which stays.
        """
        if not self._host:
            self._announce(store)
        for rank in list(self._unknown):
            if store.check([f"heartbeat/{rank}/process"]):
                self._unknown.remove(rank)
                host, _, process = store.get(f"heartbeat/{rank}/process").decode().rpartition("\n")
                if host == self._host:
                    self._processes[rank] = int(process.partition(":")[0]), process
        for rank, (pid, process) in self._processes.items():
            if pid != os.getpid() and machine.pid_and_start_time(pid) != process:
                key = f"heartbeat/{rank}"
                last = bytes(store.get(key))
                # a message that is still on its way may replace this one, which is then repeated
                if last != closed and not last.startswith(b"-1 "):
                    name = last.decode().split(" ")[2]
                    store.set(key, f"-1 0 {name}".encode())

    def _announce(self, store: KeyValueStore) -> None:
        """Tell the neighbors which process this is."""
        host, boot, process = machine.process_identity()
        self._host = f"{host}\n{boot}"
        if not process.endswith(":gone"):  # the system does not tell
            store.set(f"heartbeat/{self._rank}/process", f"{self._host}\n{process}".encode())
