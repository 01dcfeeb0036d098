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
from holdfast.engine.distributed.agreement import Agreement, LocalAgreement
from holdfast.engine.distributed.group import Group, broadcast_from_first
from holdfast.run.policy import PolicyInput, SavePolicy
from holdfast.training.goodput import Goodput
from holdfast.training.step_counter import StepCounter

SAVE_PROPOSAL, REQUEST_PROPOSAL = "save", "request"
"""What the ranks agree on, for the clock and for who asks: the next save, by its number. Should
another save begin before the step that they agree on, it answers that too."""

Elapsed = tuple[int, float, int]
"""Steps, seconds and epochs, as a ``Moment`` has them."""


class Cadence:
    """Asks the policy at each step. ``busy``: what becomes of a save that is due while one is in
    flight."""

    def __init__(
        self,
        policy: SavePolicy,
        busy: Literal["wait", "skip"],
        group: Group,
        step_counter: StepCounter,
    ) -> None:
        self._policy = policy
        self._skip_allowed = busy == "skip"
        self._group = group
        self._step_counter = step_counter
        self._save_number = 0
        self._requested = False
        self.restart()

    @property
    def skipped_since_save(self) -> bool:
        """Whether a save was left out since the last one."""
        return self._last_skip is not self._last_save

    def restart(self) -> None:
        """Count from now on: a save begins, or the training goes on from a version."""
        self._save_number += 1
        self._proposals = (
            f"{SAVE_PROPOSAL} {self._save_number}",
            f"{REQUEST_PROPOSAL} {self._save_number}",
        )
        self._last_save = self._last_skip = self._now()

    def save_reason(
        self,
        requested: bool,
        agreed_proposals: frozenset[str],
        agreement: Agreement | LocalAgreement,
        busy: bool,
    ) -> Literal["request", "cadence"] | None:
        """Why to save after this step, if so. ``wanted``: this rank was asked for a save;
        ``agreed``: what the ranks have agreed on for this step; ``busy``: one is in flight."""
        if self._group.size == 1:
            self._requested = requested
            due = requested or self._policy.due(PolicyInput(*self._now(), *self._last_save))
        else:
            clock, asked = self._proposals
            self._requested = clock in agreed_proposals or asked in agreed_proposals
            requested = requested or asked in agreed_proposals
            due = self._requested or self._is_due_by_count()
            if not due and (requested or self._is_due_by_clock(busy)):
                agreement.propose(asked if requested else clock)
        if not due:
            return None
        return "request" if requested else "cadence"

    def _is_due_by_count(self) -> bool:
        """Whether a save is due by steps or epochs. Without a clock: all ranks find the same."""
        last = self._last_skip if self._skip_allowed else self._last_save
        (step, _, epochs), (last_step, _, last_epochs) = self._now(), last
        return self._policy.due(PolicyInput(step, 0.0, epochs, last_step, 0.0, last_epochs))

    def _is_due_by_clock(self, busy: bool) -> bool:
        """Whether rank 0, whose clock counts, finds that a save is due."""
        if self._group.rank or (self._skip_allowed and busy):
            return False
        return self._policy.due(PolicyInput(*self._now(), *self._last_save))

    def skip_if_busy(self, busy: Callable[[], bool], run_url: str, goodput: Goodput) -> bool:
        """Whether the save that is due is left out, since one is in flight on rank 0. One that was
        asked for never is."""
        if not self._skip_allowed or self._requested:
            return False
        if not broadcast_from_first(self._group, "whether to save", busy, bool):
            return False
        now = self._now()
        if self._group.size > 1 or self._policy.due(PolicyInput(*now, *self._last_skip)):
            self._last_skip = now  # another one, not the same
            goodput.counts["skipped"] += 1
            events.emit("save_skipped", run=run_url, step=self._step_counter.step)
        return True

    def _now(self) -> Elapsed:
        return self._step_counter.step, time.monotonic(), self._step_counter.epochs
