"""Decides when a save is due, at the same step on all ranks.

Each rank evaluates policies on steps and epochs by itself. One rank notices that a time has passed
or that a request has arrived. It proposes a save, and all ranks save at a step on which they agree
(``ranks/agreement.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from limpet import events
from limpet.ranks.agreement import Agreement, LocalAgreement
from limpet.ranks.group import Group, broadcast_from_first
from limpet.run.policy import PolicyInput, SavePolicy
from limpet.training.goodput import Goodput
from limpet.training.preemption import SAVE as PREEMPTION_SAVE
from limpet.training.preemption import SAVE_ONLY as PREEMPTION_SAVE_ONLY
from limpet.training.step_counter import StepCounter


class Cadence:
    """Evaluates the save policy at each step.

    ``busy`` says what happens to a save that is due while another one is in flight: it waits
    (``"wait"``) or is skipped (``"skip"``).
    """

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
        self._begun_step: int | None = None
        self.restart()

    @property
    def skipped_since_save(self) -> bool:
        """True if a save was skipped since the last save."""
        return self._last_skip is not self._last_save

    @property
    def has_begun(self) -> bool:
        """True if a save of this step has begun, or if nothing was done since the resume.

        All ranks get the same result, also if the save has failed on one of them.
        """
        return self._begun_step == self._step_counter.step

    def restart(self, since: tuple[int, int] | None = None, *, is_saving: bool = True) -> None:
        """Count from now on, because a save begins or training resumes from a version.

        ``since``: count from this number of steps and of epochs instead. ``is_saving``: a version
        of this step exists, or will exist.
        """
        self._renew_proposals()
        step, seconds, epochs = self._now()
        self._begun_step = step if is_saving and since is None else None
        step, epochs = (step, epochs) if since is None else since
        self._last_save = self._last_skip = step, seconds, epochs

    def _pass_over(self) -> None:
        """Let neither epochs nor proposals until now cause a save: there is a version already."""
        self._renew_proposals()
        (step, seconds, _), epochs = self._last_save, self._step_counter.epoch
        self._last_save = self._last_skip = step, seconds, epochs

    def _renew_proposals(self) -> None:
        self._save_number += 1
        # the number lets a save that begins before the agreed step answer the proposal too
        self._proposals = f"save {self._save_number}", f"request {self._save_number}"

    def save_reason(
        self,
        requested: bool,
        agreed_proposals: frozenset[str],
        agreement: Agreement | LocalAgreement,
        busy: bool,
    ) -> Literal["request", "cadence", "preemption"] | None:
        """Return why the state after this step must be saved, or None if no save is due.

        ``requested`` is True if a request for a save is pending on this rank. ``agreed_proposals``
        holds the proposals that the ranks have agreed on for this step. ``busy`` is True if a save
        is in flight.
        """
        if self.has_begun:  # ``end_epoch``, or the end of a guarded call, follows the step
            self._pass_over()
            return None
        if self._group.size == 1:
            self._requested = requested
            due = requested or self.is_due_on_this_rank()
        else:
            by_clock, by_request = self._proposals
            self._requested = not {by_clock, by_request}.isdisjoint(agreed_proposals)
            requested = requested or by_request in agreed_proposals
            due = self._requested or self._is_due_by_count()
            if not due and (requested or self._is_due_by_clock(busy)):
                agreement.propose(by_request if requested else by_clock)
        if not agreed_proposals.isdisjoint((PREEMPTION_SAVE, PREEMPTION_SAVE_ONLY)):
            self._requested = True  # never skipped
            return "preemption" if PREEMPTION_SAVE in agreed_proposals else "request"
        if not due:
            return None
        return "request" if requested else "cadence"

    def _is_due_by_count(self) -> bool:
        """Return True if a save is due by steps or epochs.

        No time is involved, so all ranks get the same result.
        """
        last = self._last_skip if self._skip_allowed else self._last_save
        (step, _, epochs), (last_step, _, last_epochs) = self._now(), last
        return self._policy.due(PolicyInput(step, 0.0, epochs, last_step, 0.0, last_epochs))

    def _is_due_by_clock(self, busy: bool) -> bool:
        """Return True if this is rank 0 and a save is due by its clock."""
        may_save = self._group.rank == 0 and not (self._skip_allowed and busy)
        return may_save and self.is_due_on_this_rank()

    def is_due_on_this_rank(self) -> bool:
        """Return True if a save is due by the counts and the clock of this rank."""
        return self._policy.due(PolicyInput(*self._now(), *self._last_save))

    def skip_if_busy(self, busy: Callable[[], bool], run_url: str, goodput: Goodput) -> bool:
        """Return True if the due save is skipped because a save is in flight on rank 0.

        Only ``busy="skip"`` allows that, and a requested save is never skipped. Of consecutive
        steps at which the same save is due, only the first counts as skipped.
        """
        may_skip = self._skip_allowed and not self._requested
        if not may_skip or not broadcast_from_first(
            self._group, "the decision to skip a save", busy, bool
        ):
            return False
        now = self._now()
        if self._group.size > 1 or self._policy.due(PolicyInput(*now, *self._last_skip)):
            self._last_skip = now
            goodput.counts["skipped"] += 1
            events.emit("save_skipped", run=run_url, step=self._step_counter.step)
        return True

    def _now(self) -> tuple[int, float, int]:
        """Return the steps, seconds, and epochs until now, as in ``PolicyInput``."""
        return self._step_counter.step, time.monotonic(), self._step_counter.epoch
