"""Ranks that are waited for: which of them are lost, and which only keep the others waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.engine.distributed.kv import Heartbeat, KVClient, WaitPosition
from holdfast.errors import RankFailed
from holdfast.events import emit
from holdfast.text import format_ranks

STRAGGLER_SECONDS = 30.0
"""Seconds for which a rank may get on with nothing until those who wait for it say so."""

_MAX_SHOWN = 8


class FailureDetector:
    """Looks after ranks that are waited for, from its first look on. ``what``: they have to do.
    ``stuck``: seconds for which one that is alive may get on with nothing; if it is not given, also
    for one that has not been heard of yet. One that waits itself, in an earlier turn than ``turn``,
    is not stuck; were it in any, two could wait for each other for ever."""

    def __init__(
        self,
        kv: KVClient,
        operation: str,
        stuck: float | None = None,
        position: WaitPosition = (0, 0),
    ) -> None:
        self._position = position
        self._kv = kv
        self._operation = operation
        patience = kv.timeouts
        self._silent = patience.silent
        self._stuck = patience.stuck if stuck is None else stuck
        self._never_seen = max(patience.silent, patience.stuck if stuck is None else 0.0)
        self._now = 0.0
        self._observed: dict[int, tuple[Heartbeat | None, float, float]] = {}
        self._arrived: set[int] = set()

    def failed(
        self, ranks: Sequence[int], has_arrived: Callable[[int], bool] = lambda rank: False
    ) -> RankFailed | None:
        """That one of these ranks has ended, is dead, or is stuck, as an error; but none that
        ``came``. That is asked of those only: of the others, who are many, it need not be known.

        The error is of the first. It names with it those who are half as long without a sign: of
        those who have died together not all are found in one look."""
        self._observe(ranks)
        lost = {r for r in ranks if self._failure_reason(r) is not None}
        missed = (
            [r for r in ranks if self._failure_reason(r, 0.5) is not None and not has_arrived(r)]
            if lost
            else ()
        )
        for rank in missed:
            why = self._failure_reason(rank)
            if why is not None:
                return self.make_error([rank, *(r for r in missed if r != rank)], *why)
        return None

    def stragglers(self, ranks: Sequence[int], has_arrived: Callable[[int], bool]) -> list[int]:
        """Those of them that have got on with nothing for ``LATE`` seconds, at the last look.
        Whoever ``came`` is not asked about again."""
        still = [
            r
            for r in ranks
            if r in self._observed and self._now - self._observed[r][2] > STRAGGLER_SECONDS
        ]
        self._arrived.update(r for r in still if r not in self._arrived and has_arrived(r))
        return [r for r in still if r not in self._arrived]

    def _observe(self, ranks: Sequence[int]) -> None:
        now = self._now = self._kv.clock()
        for rank, pulse in zip(ranks, self._kv.heartbeats(ranks) if ranks else (), strict=True):
            before, beaten, moved = self._observed.get(rank, (pulse, now, now))
            if pulse is not None and before is not None:
                beaten = now if pulse.count != before.count else beaten
                waits = pulse.waiting_at is not None and pulse.waiting_at < self._position
                moved = now if waits or pulse.progress != before.progress else moved
            elif pulse is not before:
                beaten = moved = now
            self._observed[rank] = (pulse, beaten, moved)

    def _failure_reason(self, rank: int, fraction: float = 1.0) -> tuple[str, str] | None:
        """What was expected of a rank and what was found, if it is missed. ``share``: of the time
        that it has."""
        pulse, beaten, moved = self._observed[rank]
        silence, rest = self._now - beaten, self._now - moved
        if pulse is not None and pulse.count < 0:
            return "it to stay until then", "that it has ended"
        if pulse is None and silence > self._never_seen * fraction:
            return f"it within {self._never_seen:g} s", "that it never came"
        if pulse is not None and silence > self._silent * fraction:
            return f"a sign of life within {self._silent:g} s", "none: it has died or hangs"
        if rest > self._stuck * fraction:
            return f"some progress within {self._stuck:g} s", "none, though the process is alive"
        return None

    def make_error(self, ranks: Sequence[int], expected: str, found: str) -> RankFailed:
        """That ranks are missed; of the first is told what was ``expected`` and ``found``."""
        rank, *others = ranks
        pulse = self._observed[rank][0] if rank in self._observed else None
        host = f" on {pulse.host}" if pulse is not None and pulse.host else ""
        more = (
            f", nor {'does' if len(others) == 1 else 'do'} {format_ranks(others)}" if others else ""
        )
        return RankFailed(
            f"Rank {rank}{host} does not take part in {self._operation}{more}",
            expected=expected,
            found=found,
            todo="Look at that rank's log. Do all ranks make this call? The bounds are"
            " HOLDFAST_SILENT and HOLDFAST_STUCK (seconds)",
            rank=rank,
            lost=True,
        )


def emit_stragglers(ranks: Sequence[int], operation: str, waited: float, timeout: float) -> None:
    """Tell that this rank waits, and for which. ``longest``: seconds after which it gives up, if
    they do not get on until then."""
    emit(
        "ranks_awaited",
        what=operation,
        ranks=list(ranks[:_MAX_SHOWN]),
        count=len(ranks),
        seconds=waited,
        longest=timeout,
    )
