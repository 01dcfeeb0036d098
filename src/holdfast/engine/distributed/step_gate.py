"""Where the training thread of one rank waits until it is known what all ranks do at a step."""

from __future__ import annotations

import sys
from threading import Condition

from holdfast.errors import RankFailed

NO_ACTIONS: frozenset[str] = frozenset()
NEVER = sys.maxsize


class StepGate:
    """Holds the training thread of one rank at a step that is being agreed on.

    The usual path of ``step`` takes no lock. The training thread writes ``_at`` and then reads
    ``_shut``; the watcher writes ``_shut`` and then reads ``_at`` (Dekker, 1962). The GIL lets one
    thread run at a time, and each see all that was written before: so either the training sees the
    gate, or the watcher sees that it has come too late. Never neither.
    """

    def __init__(self, timeout: float) -> None:
        self.delivery_count = 0
        """How often ``step`` has returned something."""

        self._current_step = 0
        self._stop_at = NEVER  # the first of _due and _armed
        self._armed_step = NEVER
        self._granted: dict[int, frozenset[str]] = {}
        self._last_delivery: dict[str, int] = {}
        self._error: RankFailed | None = None
        self._timeout = timeout
        self._disabled = False
        self._changed = Condition()

    @property
    def current_step(self) -> int:
        """Steps that the training has come to."""
        return self._current_step

    def step(self) -> frozenset[str]:
        self._current_step = at = self._current_step + 1
        if at < self._stop_at:
            return NO_ACTIONS
        return self._wait_at(at)

    def _wait_at(self, step: int) -> frozenset[str]:
        with self._changed:
            for _ in range(8):  # not in one: a process that was stopped finds all its time gone
                if known := self._changed.wait_for(
                    lambda: self._is_resolved(step), self._timeout / 8
                ):
                    break
            first = min(self._granted, default=NEVER)
            if first <= step:  # less: an earlier call was interrupted while it waited
                whats = self._granted.pop(first)
                self.delivery_count += 1
                self._last_delivery.update(dict.fromkeys(whats, self.delivery_count))
                self._update_stop()
                return whats
            if known and step < self._stop_at:
                return NO_ACTIONS
            error, self._armed_step = self._error, NEVER
            self._update_stop()
        raise error or RankFailed(
            "The thread by which the ranks agree does not answer",
            expected=f"an answer within {self._timeout:g} s",
            todo="Start the job again from what was committed",
        )

    def _is_resolved(self, step: int) -> bool:
        return (
            step < self._stop_at
            or self._error is not None
            or min(self._granted, default=NEVER) <= step
        )

    def _update_stop(self) -> None:
        due = min(self._granted, default=NEVER)
        self._stop_at = NEVER if self._disabled else min(due, self._armed_step)
        self._changed.notify_all()

    # -- for the watcher -------------------------------------------------------------------------

    def arm(self, step: int) -> bool:
        """Hold the training at a step from now on. False: it has come so far already."""
        with self._changed:
            self._armed_step = step
            self._update_stop()
            if self._current_step < step:
                return True
            self._armed_step = NEVER
            self._update_stop()
            return False

    def disarm(self) -> None:
        """Nothing is agreed at the step that it is armed for."""
        with self._changed:
            self._armed_step = NEVER
            self._update_stop()

    def grant(self, step: int, actions: frozenset[str]) -> None:
        """It is agreed what to do at the step that it is armed for."""
        with self._changed:
            self._armed_step = NEVER
            self._granted[step] = actions
            self._update_stop()

    def fail(self, error: RankFailed) -> None:
        """Whether something is agreed at the step that it is armed for will never be known."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def disable(self) -> None:
        """Hold nothing up any more."""
        with self._changed:
            self._disabled = True
            self._update_stop()

    def is_delivered_after(self, action: str, since: int) -> bool:
        """Whether ``step`` has returned it after ``taken`` was ``since``, or will."""
        with self._changed:
            later = any(action in whats for whats in self._granted.values())
            return later or self._last_delivery.get(action, 0) > since
