"""The gate at which a training thread waits until the ranks have agreed on actions for a step."""

from __future__ import annotations

import sys
from threading import Condition, RLock

from holdfast.errors import RankFailed

NO_ACTIONS: frozenset[str] = frozenset()
NEVER = sys.maxsize


class StepGate:
    """Stops the training thread of one rank at a step on which the ranks are about to agree.

    The usual path of ``step`` takes no lock. The training thread writes ``current_step`` and then
    reads ``_stop_at``. The watcher thread writes ``_stop_at`` and then reads ``current_step``
    (Dekker, 1962). The GIL runs one thread at a time, and each thread sees all earlier writes.
    Therefore the training thread sees the gate, or the watcher sees that it is too late, or both.
    """

    def __init__(self, timeout: float) -> None:
        self.current_step = 0
        """The number of steps that the training has reached."""

        self.delivery_count = 0
        """The number of times that ``step`` has returned actions."""

        self._stop_at = NEVER  # the minimum of the steps in _granted and _armed_step
        self._armed_step = NEVER
        self._granted: dict[int, frozenset[str]] = {}
        self._last_delivery: dict[str, int] = {}
        self._error: RankFailed | None = None
        self._timeout = timeout
        self._disabled = False
        self._lock = RLock()  # ``with`` on a Condition can leave it acquired (see ``Latch``)
        self._changed = Condition(self._lock)

    def step(self) -> frozenset[str]:
        """Count a step and return the actions for it, usually none.

        Waits at the armed step. Raises ``RankFailed`` if the agreement failed or does not respond.
        """
        self.current_step = step = self.current_step + 1
        return NO_ACTIONS if step < self._stop_at else self._wait_at(step)

    def _wait_at(self, step: int) -> frozenset[str]:
        with self._lock:
            for _ in range(8):  # in parts: a process that was suspended has lost only one part
                if is_resolved := self._changed.wait_for(
                    lambda: self._is_resolved(step), self._timeout / 8
                ):
                    break
            first = min(self._granted, default=NEVER)
            if first <= step:  # less if an earlier call was interrupted while it waited
                actions = self._granted.pop(first)
                self.delivery_count += 1
                self._last_delivery.update(dict.fromkeys(actions, self.delivery_count))
                self._update_stop()
                return actions
            if is_resolved and step < self._stop_at:
                return NO_ACTIONS
            self.disarm()
            raise self._error or RankFailed(
                "The thread that agrees with other ranks does not respond",
                expected=f"a response within {self._timeout:g} s",
                todo="Restart the job from the last committed version",
            )

    def _is_resolved(self, step: int) -> bool:
        return (
            step < self._stop_at
            or self._error is not None
            or min(self._granted, default=NEVER) <= step
        )

    def _update_stop(self) -> None:
        self._stop_at = NEVER if self._disabled else min([*self._granted, self._armed_step])
        self._changed.notify_all()

    # -- for the watcher -------------------------------------------------------------------------

    def arm(self, step: int) -> bool:
        """Stop the training at a step. Returns False if the training has already reached it."""
        with self._lock:
            self._armed_step = step
            self._update_stop()
            if self.current_step < step:
                return True
            self.disarm()
            return False

    def disarm(self) -> None:
        """Let the training pass the armed step because the ranks have not agreed on actions."""
        with self._lock:
            self._armed_step = NEVER
            self._update_stop()

    def grant(self, step: int, actions: frozenset[str]) -> None:
        """Deliver the agreed actions at the armed step."""
        with self._lock:
            self._granted[step] = actions
            self.disarm()

    def fail(self, error: RankFailed) -> None:
        """Raise an error at the armed step because the outcome of the agreement is unknown."""
        with self._lock:
            self._error = error
            self._changed.notify_all()

    def disable(self) -> None:
        """Stop the training at no further step."""
        with self._lock:
            self._disabled = True
            self._update_stop()

    def is_delivered_after(self, action: str, since: int) -> bool:
        """Return True if ``step`` will return an action or has returned it after ``since``.

        ``since`` is an earlier value of ``delivery_count``.
        """
        with self._lock:
            return self._last_delivery.get(action, 0) > since or any(
                action in actions for actions in self._granted.values()
            )
