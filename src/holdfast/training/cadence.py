"""When a save is due, at the same step on all ranks.

What steps and epochs tell, each rank finds by itself. What a clock or a request tells, one rank
notices; it proposes a save, and all make it at a step on which they agree
(``engine/distributed/agreement.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from holdfast import events
from holdfast.engine.distributed.agreement import Agreement, Alone
from holdfast.engine.distributed.group import Group, by_first
from holdfast.run.policy import Moment, SavePolicy
from holdfast.training.goodput import Tally
from holdfast.training.step_counter import Count

SAVE, REQUEST = "save", "request"
"""What the ranks agree on, for the clock and for who asks: the next save, by its number. Should
another save begin before the step that they agree on, it answers that too."""

At = tuple[int, float, int]
"""Steps, seconds and epochs, as a ``Moment`` has them."""


class Cadence:
    """Asks the policy at each step. ``busy``: what becomes of a save that is due while one is in
    flight."""

    def __init__(
        self, policy: SavePolicy, busy: Literal["wait", "skip"], group: Group, count: Count
    ) -> None:
        self._policy = policy
        self._skips = busy == "skip"
        self._group = group
        self._count = count
        self._begun = 0
        self._asked = False
        self.restart()

    @property
    def left_out(self) -> bool:
        """Whether a save was left out since the last one."""
        return self._left_out is not self._last

    def restart(self) -> None:
        """Count from now on: a save begins, or the training goes on from a version."""
        self._begun += 1
        self._names = f"{SAVE} {self._begun}", f"{REQUEST} {self._begun}"
        self._last = self._left_out = self._now()

    def reason(
        self, wanted: bool, agreed: frozenset[str], agreement: Agreement | Alone, busy: bool
    ) -> Literal["request", "cadence"] | None:
        """Why to save after this step, if so. ``wanted``: this rank was asked for a save;
        ``agreed``: what the ranks have agreed on for this step; ``busy``: one is in flight."""
        if self._group.size == 1:
            self._asked = wanted
            due = wanted or self._policy.due(Moment(*self._now(), *self._last))
        else:
            clock, asked = self._names
            self._asked = clock in agreed or asked in agreed
            wanted = wanted or asked in agreed
            due = self._asked or self._counted()
            if not due and (wanted or self._late(busy)):
                agreement.propose(asked if wanted else clock)
        if not due:
            return None
        return "request" if wanted else "cadence"

    def _counted(self) -> bool:
        """Whether a save is due by steps or epochs. Without a clock: all ranks find the same."""
        last = self._left_out if self._skips else self._last
        (step, _, epochs), (last_step, _, last_epochs) = self._now(), last
        return self._policy.due(Moment(step, 0.0, epochs, last_step, 0.0, last_epochs))

    def _late(self, busy: bool) -> bool:
        """Whether rank 0, whose clock counts, finds that a save is due."""
        if self._group.rank or (self._skips and busy):
            return False
        return self._policy.due(Moment(*self._now(), *self._last))

    def skips(self, busy: Callable[[], bool], run: str, tally: Tally) -> bool:
        """Whether the save that is due is left out, since one is in flight on rank 0. One that was
        asked for never is."""
        if not self._skips or self._asked:
            return False
        if not by_first(self._group, "whether to save", busy, bool):
            return False
        now = self._now()
        if self._group.size > 1 or self._policy.due(Moment(*now, *self._left_out)):
            self._left_out = now  # another one, not the same
            tally.counts["skipped"] += 1
            events.emit("save_skipped", run=run, step=self._count.step)
        return True

    def _now(self) -> At:
        return self._count.step, time.monotonic(), self._count.epochs
