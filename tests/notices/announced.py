"""A source of notices that a test controls."""

from collections.abc import Callable

from limpet.notices.notice import Notice


class Announced:
    """A source that reports what a test has announced."""

    name = "a test"
    interval = 3600.0

    def __init__(self):
        self.notices: list[Notice] = []
        self.wake: Callable[[], object] = lambda: None

    def start(self, wake):
        self.wake = wake

    def announce(self, seconds=None, *, stops=True):
        self.notices.append(Notice("a test", seconds, stops))
        self.wake()

    def poll(self):
        return self.notices.pop(0) if self.notices else None
