"""The gate at which a training thread waits until the ranks have agreed on actions for a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from math import inf
from threading import Condition, RLock

from limpet.errors import RankFailed

NO_ACTIONS: frozenset[str] = frozenset()
NEVER = sys.maxsize


class StepGate:
    """Stops the training thread of one rank at a step on which the ranks are about to agree.

    The usual path of ``step`` takes no lock. The training thread writes ``current_step`` and then
    reads ``_stop_at``. The watcher thread writes ``_stop_at`` and then reads ``current_step``
    (Dekker, 1962). The GIL runs one thread at a time, and each thread sees all earlier writes.
    Therefore the training thread sees the gate, or the watcher sees that it is too late, or both.
    """

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.current_step = 0
        """The number of steps that the training has reached."""

        self.delivery_count = 0
        """The number of times that ``step`` has returned actions."""

        self._stop_at = NEVER  # the minimum of the steps in _granted and _armed_step
        self._armed_step = NEVER
        self._granted: dict[int, frozenset[str]] = {}
        self._last_delivery: dict[str, int] = {}
        self._error: BaseException | None = None
        self._raised = False
        self._timeout = timeout
        self._clock = clock
        self._wait_until = inf
        self._disabled = False
        self._lock = RLock()  # ``with`` on a Condition can leave it acquired (see ``Latch``)
        self._changed = Condition(self._lock)

    def step(self) -> frozenset[str]:
        """Count a step and return the actions for it. Waits at the armed step. ``RankFailed``: the
        agreement failed or does not respond."""
        self.current_step = step = self.current_step + 1
        return NO_ACTIONS if step < self._stop_at else self._wait_at(step)

    def check(self) -> None:
        """Raise the error of another rank, if there is one. Never waits, and counts no step."""
        if self._raised:
            self._wait_at(self.current_step)

    def _wait_at(self, step: int) -> frozenset[str]:
        with self._lock:
            is_resolved = self._wait_until_resolved(step)
            if self._raised and self._error is not None:
                error, self._error, self._raised = self._error, None, False
                self.disarm()
                raise error
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

    def _wait_until_resolved(self, step: int) -> bool:
        """Wait for the outcome for a step. Return False if it takes too long."""
        for _ in range(8):  # in parts: a process that was suspended has lost only one part
            end = self._clock() + self._timeout / 8
            while not self._is_resolved(step) and (now := self._clock()) < end:
                if now >= self._wait_until:
                    return False
                self._changed.wait(min(end, self._wait_until) - now)  # ``limit`` ends it
            if self._is_resolved(step):
                return True
        return False

    def _is_resolved(self, step: int) -> bool:
        return (
            step < self._stop_at
            or self._error is not None
            or min(self._granted, default=NEVER) <= step
        )

    def _update_stop(self) -> None:
        self._stop_at = NEVER if self._disabled else min([*self._granted, self._armed_step])
        if self._raised:
            self._stop_at = 0
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

    def raise_once(self, error: BaseException) -> None:
        """Raise an error of another rank at the next step, or at the one that waits."""
        with self._lock:
            self._error, self._raised = error, True
            self._update_stop()

    def limit(self, at: float) -> None:
        """Let no wait go on after a time on the gate's clock."""
        with self._lock:
            self._wait_until = min(self._wait_until, at)
            self._changed.notify_all()

    def unlimit(self) -> None:
        """Let waits go on for as long as usual: the round that a deadline limited has ended."""
        with self._lock:
            self._wait_until = inf

    def disable(self) -> None:
        """Stop the training at no further step."""
        with self._lock:
            self._disabled = True
            self._update_stop()

    def is_delivered_after(self, action: str, since: int) -> bool:
        """Return True if ``step`` has returned an action after the ``delivery_count``, or will."""
        with self._lock:
            return self._last_delivery.get(action, 0) > since or any(
                action in actions for actions in self._granted.values()
            )
