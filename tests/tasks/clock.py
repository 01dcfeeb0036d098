"""A clock that only tests move."""

from __future__ import annotations


class FakeClock:
    """Returns the same time until ``advance`` is called."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
