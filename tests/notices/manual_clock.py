"""A clock that tests set."""

from datetime import UTC, datetime, timedelta

START = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


class ManualClock:
    """A clock that only ``advance`` moves. It is also a time of day."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds

    def now(self):
        return START + timedelta(seconds=self.seconds)

    def advance(self, seconds):
        self.seconds += seconds
