"""A clock that tests set."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

START = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


class ManualClock:
    """A clock that only ``advance`` moves. It is also a time of day."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    def advance(self, seconds: float) -> None:
        self.seconds += seconds
