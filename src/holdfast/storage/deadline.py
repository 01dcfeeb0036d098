"""A deadline: the time by which an operation must have ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import HoldfastError


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
        if not seconds > 0:
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

    def earlier(self, other: Deadline | None) -> Deadline:
        """Return the earlier one of two deadlines."""
        return self if other is None or self.at <= other.at else other
