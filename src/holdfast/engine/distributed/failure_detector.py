"""Ranks that are waited for: which of them are lost, and which only keep the others waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.engine.distributed.kv import Board, Pulse, Turn
from holdfast.errors import RankFailed
from holdfast.events import emit
from holdfast.text import named

LATE = 30.0
"""Seconds for which a rank may get on with nothing until those who wait for it say so."""

_SHOWN = 8


class Vigil:
    """Looks after ranks that are waited for, from its first look on. ``what``: they have to do.
    ``stuck``: seconds for which one that is alive may get on with nothing; if it is not given, also
    for one that has not been heard of yet. One that waits itself, in an earlier turn than ``turn``,
    is not stuck; were it in any, two could wait for each other for ever."""

    def __init__(
        self, board: Board, what: str, stuck: float | None = None, turn: Turn = (0, 0)
    ) -> None:
        self._turn = turn
        self._board = board
        self._what = what
        patience = board.patience
        self._silent = patience.silent
        self._stuck = patience.stuck if stuck is None else stuck
        self._unheard = max(patience.silent, patience.stuck if stuck is None else 0.0)
        self._now = 0.0
        self._seen: dict[int, tuple[Pulse | None, float, float]] = {}
        self._came: set[int] = set()

    def lost(
        self, ranks: Sequence[int], came: Callable[[int], bool] = lambda rank: False
    ) -> RankFailed | None:
        """That one of these ranks has ended, is dead, or is stuck, as an error; but none that
        ``came``. That is asked of those only: of the others, who are many, it need not be known.

        The error is of the first. It names with it those who are half as long without a sign: of
        those who have died together not all are found in one look."""
        self._look(ranks)
        lost = {r for r in ranks if self._why(r) is not None}
        missed = [r for r in ranks if self._why(r, 0.5) is not None and not came(r)] if lost else ()
        for rank in missed:
            why = self._why(rank)
            if why is not None:
                return self.error([rank, *(r for r in missed if r != rank)], *why)
        return None

    def late(self, ranks: Sequence[int], came: Callable[[int], bool]) -> list[int]:
        """Those of them that have got on with nothing for ``LATE`` seconds, at the last look.
        Whoever ``came`` is not asked about again."""
        still = [r for r in ranks if r in self._seen and self._now - self._seen[r][2] > LATE]
        self._came.update(r for r in still if r not in self._came and came(r))
        return [r for r in still if r not in self._came]

    def _look(self, ranks: Sequence[int]) -> None:
        now = self._now = self._board.clock()
        for rank, pulse in zip(ranks, self._board.pulses(ranks) if ranks else (), strict=True):
            before, beaten, moved = self._seen.get(rank, (pulse, now, now))
            if pulse is not None and before is not None:
                beaten = now if pulse.beats != before.beats else beaten
                waits = pulse.waits is not None and pulse.waits < self._turn
                moved = now if waits or pulse.progress != before.progress else moved
            elif pulse is not before:
                beaten = moved = now
            self._seen[rank] = (pulse, beaten, moved)

    def _why(self, rank: int, share: float = 1.0) -> tuple[str, str] | None:
        """What was expected of a rank and what was found, if it is missed. ``share``: of the time
        that it has."""
        pulse, beaten, moved = self._seen[rank]
        silence, rest = self._now - beaten, self._now - moved
        if pulse is not None and pulse.beats < 0:
            return "it to stay until then", "that it has ended"
        if pulse is None and silence > self._unheard * share:
            return f"it within {self._unheard:g} s", "that it never came"
        if pulse is not None and silence > self._silent * share:
            return f"a sign of life within {self._silent:g} s", "none: it has died or hangs"
        if rest > self._stuck * share:
            return f"some progress within {self._stuck:g} s", "none, though the process is alive"
        return None

    def error(self, ranks: Sequence[int], expected: str, found: str) -> RankFailed:
        """That ranks are missed; of the first is told what was ``expected`` and ``found``."""
        rank, *others = ranks
        pulse = self._seen[rank][0] if rank in self._seen else None
        host = f" on {pulse.host}" if pulse is not None and pulse.host else ""
        more = f", nor {'does' if len(others) == 1 else 'do'} {named(others)}" if others else ""
        return RankFailed(
            f"Rank {rank}{host} does not take part in {self._what}{more}",
            expected=expected,
            found=found,
            todo="Look at that rank's log. Do all ranks make this call? The bounds are"
            " HOLDFAST_SILENT and HOLDFAST_STUCK (seconds)",
            rank=rank,
            lost=True,
        )


def tell_late(ranks: Sequence[int], what: str, seconds: float, longest: float) -> None:
    """Tell that this rank waits, and for which. ``longest``: seconds after which it gives up, if
    they do not get on until then."""
    emit(
        "ranks_awaited",
        what=what,
        ranks=list(ranks[:_SHOWN]),
        count=len(ranks),
        seconds=seconds,
        longest=longest,
    )
