"""Decides when a save is due, at the same step on all ranks.

Each rank evaluates policies on steps and epochs by itself. One rank notices that a time has passed
or that a request has arrived. It proposes a save, and all ranks save at a step on which they agree
(``ranks/agreement.py``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from limpet.ranks.agreement import AnyAgreement
from limpet.ranks.group import Group
from limpet.run.policy import PolicyInput, SavePolicy
from limpet.training.preemption_plan import SAVE_BEFORE_STOP, SAVE_ON_REQUEST
from limpet.training.saver import Saver
from limpet.training.step_counter import StepCounter


@dataclass(eq=False)
class Cadence:
    """Evaluates the save policy at each step. ``saver``: whose saves it decides, or None."""

    policy: SavePolicy
    group: Group
    step_counter: StepCounter
    saver: Saver | None = None
    _save_number: int = 0
    _begun_step: int | None = None

    def __post_init__(self) -> None:
        self.restart()

    @property
    def has_begun(self) -> bool:
        """True on all ranks if a save of this step began, maybe failed, or a resume ended here."""
        return self._begun_step == self.step_counter.progress.step

    def restart(self, since: tuple[int, int] | None = None, *, is_saving: bool = True) -> None:
        """Count from now, or ``since`` steps and epochs. ``is_saving``: this step is saved."""
        self._save_number += 1
        progress = self.step_counter.progress
        self._begun_step = progress.step if is_saving and since is None else None
        self._last_step, self._last_epochs = since or (progress.step, progress.epoch)
        self._last_seconds = time.monotonic()

    def save_reason(
        self, requested: bool, agreed_proposals: frozenset[str], agreement: AnyAgreement
    ) -> Literal["request", "cadence", "preemption"] | None:
        """Return why the state after this step must be saved, or None. ``requested``: on this rank;
        ``agreed_proposals``: of the ranks, for this step."""
        if self.has_begun:  # ``end_epoch``, or the end of a guarded call, follows the step
            # neither epochs nor proposals until now cause a save: there is a version already
            self._save_number += 1
            self._last_epochs = self.step_counter.progress.epoch
            return None
        if not agreed_proposals.isdisjoint((SAVE_BEFORE_STOP, SAVE_ON_REQUEST)):
            return "preemption" if SAVE_BEFORE_STOP in agreed_proposals else "request"
        if self.group.size == 1:
            due = requested or self.is_due()
        else:
            # the number lets a save that begins before the agreed step answer the proposal too
            by_clock, by_request = f"save {self._save_number}", f"request {self._save_number}"
            is_agreed = not {by_clock, by_request}.isdisjoint(agreed_proposals)
            requested = requested or by_request in agreed_proposals
            # a count is due on all ranks, as no time is involved
            due = is_agreed or self.is_due(by_clock=False)
            if not due and (requested or (self.group.rank == 0 and self.is_due())):
                agreement.propose(by_request if requested else by_clock)
        if not due:
            return None
        return "request" if requested else "cadence"

    def is_due(self, *, by_clock: bool = True) -> bool:
        """Return True if a save is due by the counts, and the clock and the saves of this rank."""
        now = PolicyInput(
            step=self.step_counter.progress.step,
            seconds=time.monotonic() if by_clock else self._last_seconds,
            epochs=self.step_counter.progress.epoch,
            last_step=self._last_step,
            last_seconds=self._last_seconds,
            last_epochs=self._last_epochs,
            is_saving=not by_clock or (self.saver is not None and self.saver.must_wait),
        )
        return self.policy.due(now)
