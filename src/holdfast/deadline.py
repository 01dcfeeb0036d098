"""A deadline: the time by which an operation must have ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import TypeVar

from holdfast.errors import HoldfastError, Unavailable
from holdfast.threads import Latch, start_thread

T = TypeVar("T")

CLEANUP_SECONDS = 10.0
"""Seconds after a deadline in which what a failed operation has left is removed."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time on a monotonic clock. ``clock`` returns the current time, in seconds.

    ``purpose`` says what must have ended by then, for error messages: "the save of RUN/version_1".
    """

    purpose: str
    at: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(
        cls, seconds: float, purpose: str, clock: Callable[[], float] = time.monotonic
    ) -> Deadline:
        """Return the deadline ``seconds`` from now. Raises ``HoldfastError`` unless positive."""
        if type(seconds) not in (int, float) or not seconds > 0:
            raise HoldfastError(
                f"Invalid deadline for {purpose}",
                expected="a number of seconds greater than 0",
                found=repr(seconds),
            )
        return cls(purpose, clock() + seconds, clock)

    @property
    def seconds_left(self) -> float:
        """The seconds until the deadline; 0.0 once it has passed."""
        return max(0.0, self.at - self.clock())

    def check(self) -> None:
        """Raise ``Unavailable`` once the deadline has passed."""
        if not self.seconds_left:
            raise Unavailable(
                f"The time is over for {self.purpose}",
                todo="Allow more time, or find out what is slow: the store or this machine",
            )

    def for_cleanup(self) -> Deadline:
        """Return the deadline of what removes the leftovers of the operation."""
        return Deadline(f"the cleanup after {self.purpose}", self.at + CLEANUP_SECONDS, self.clock)

    def earlier(self, other: Deadline | None) -> Deadline:
        """Return the earlier one of two deadlines."""
        return self if other is None or self.at <= other.at else other


def call_within(deadline: Deadline, function: Callable[[], T]) -> T:
    """Return ``function()``, which runs in a thread that is abandoned when the deadline passes.

    Then, this raises ``TimeoutError``. It raises ``OSError`` if no thread can be started, and
    otherwise the error of the function. For libraries whose calls have no timeout.
    """
    if not deadline.seconds_left:
        raise TimeoutError(f"the deadline has passed for: {deadline.purpose}")
    results: list[T] = []
    errors: list[BaseException] = []
    done = Latch()

    def run() -> None:
        try:
            results.append(function())
        except BaseException as e:  # noqa: BLE001  (the caller raises it)
            errors.append(e)
        finally:
            done.set()

    if not start_thread(Thread(target=run, daemon=True, name="holdfast-call")):
        raise OSError("cannot start a thread: raise the limit (ulimit -u)")
    if not done.wait(deadline.seconds_left):
        raise TimeoutError(f"no answer by the deadline for: {deadline.purpose}")
    if errors and not isinstance(errors[0], Exception):
        raise RuntimeError(str(errors[0])) from errors[0]  # a panic in a library in Rust
    if errors:
        raise errors[0]
    return results[0]
