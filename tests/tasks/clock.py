"""A clock that only tests move."""


class FakeClock:
    """Returns the same time until ``advance`` is called."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds
