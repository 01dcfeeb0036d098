"""A source of notices that a test controls."""

from __future__ import annotations

from collections.abc import Callable

from limpet.notices.notice import Notice


class Announced:
    """A source that reports what a test has announced."""

    name = "a test"
    interval = 3600.0

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.wake: Callable[[], object] = lambda: None

    def start(self, wake: Callable[[], object]) -> None:
        self.wake = wake

    def announce(self, seconds: float | None = None, *, stops: bool = True) -> None:
        self.notices.append(Notice("a test", seconds, stops))
        self.wake()

    def poll(self) -> Notice | None:
        return self.notices.pop(0) if self.notices else None
