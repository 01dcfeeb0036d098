"""Detect which of the ranks that a rank waits for have failed, and which are stragglers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from limpet.errors import RankFailed
from limpet.ranks.kv import STRAGGLER_SECONDS, Heartbeat, KVClient, WaitPosition
from limpet.text import format_ranks


class FailureDetector:
    """Monitors ranks that this rank waits for. ``stuck``: the seconds in which a live rank may make
    no progress (None: ``Timeouts``), unless it waits itself, at a position before ``position``. If
    one at any position were exempt, two ranks could wait for each other forever."""

    def __init__(
        self,
        kv: KVClient,
        operation: str,
        stuck: float | None = None,
        position: WaitPosition = (0, 0),
        todo: str = "Check that all ranks make this call",
    ) -> None:
        self._todo = todo and f"{todo}. "
        self._position = position
        self._kv = kv
        self._operation = operation
        self._silent = kv.timeouts.silent
        self._stuck = kv.timeouts.stuck if stuck is None else stuck
        self._never_seen = max(self._silent, kv.timeouts.stuck if stuck is None else 0.0)
        self._checked_at = kv.clock()
        self.waited = 0.0  # almost without the seconds in which this process was suspended
        self._observed: dict[int, tuple[Heartbeat | None, float, float]] = {}
        self._arrived: set[int] = set()

    def failed(
        self, ranks: Sequence[int], has_arrived: Callable[[int], bool] = lambda rank: False
    ) -> RankFailed | None:
        """Return an error about the first of these ranks that has ended, is dead, or is stuck, and
        those that have used half of their time: one check does not find all that die at once.
        ``has_arrived``, which is slow, exempts ranks that seem to have failed."""
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
        """Return ranks without progress for ``STRAGGLER_SECONDS``, if not ``has_arrived``."""
        late_ranks = [
            r
            for r in ranks
            if r in self._observed and self.waited - self._observed[r][2] > STRAGGLER_SECONDS
        ]
        self._arrived.update(r for r in late_ranks if r not in self._arrived and has_arrived(r))
        return [r for r in late_ranks if r not in self._arrived]

    def seconds_left(self, ranks: Sequence[int]) -> float:
        """Return in how many seconds the first of the ranks is stuck, without further progress."""
        return self._stuck - max(self.waited - self._observed[r][2] for r in ranks)

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
                waits_at = heartbeat.waiting_at
                is_exempt = waits_at is not None and waits_at < self._position
                has_moved = is_exempt or heartbeat.progress != last.progress
                progress_at = now if has_moved else progress_at
            elif heartbeat is not last:
                beat_at = progress_at = now
            self._observed[rank] = (heartbeat, beat_at, progress_at)

    def _failure_reason(self, rank: int, fraction: float = 1.0) -> tuple[str, str] | None:
        """Return a failed rank's expected and found behavior, by a fraction of the limits."""
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
            todo=f"Check the log of rank {rank}. {self._todo}LIMPET_SILENT and LIMPET_STUCK set the"
            " time limits in seconds",
            rank=rank,
            lost=True,
        )
