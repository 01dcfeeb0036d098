"""The base class of sources that ask something that may never answer."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

from limpet.arguments import seconds
from limpet.deadline import Call
from limpet.errors import LimpetError
from limpet.notices.notice import Notice
from limpet.text import to_repr

POLL_SECONDS = 4.0
"""The longest time that a poll takes, in seconds. ``NoticeSource.poll`` has 5 seconds."""


class BoundedSource(ABC):
    """A source whose ``poll`` returns in time, whatever its ``check`` does.

    A file on a server that is away, a host name, or a function of the user may hang, which an event
    must report. ``check`` therefore runs in a thread of its own, which costs about 0.1 ms. There is
    at most one such thread per source: while a call has not ended, later polls wait for that call.
    """

    def __init__(
        self, name: str, interval: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.interval = check_seconds("interval", interval)
        self.poll_seconds = POLL_SECONDS
        self.clock = clock
        self._call: Call[tuple[Notice | None, float]] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, every {self.interval:g} s>"

    @abstractmethod
    def check(self) -> Notice | None:
        """Return a notice, or None. Raises ``OSError`` if there is no answer, or an unclear one.

        It is never called twice at the same time.
        """

    def poll(self) -> Notice | None:
        """Return what ``check`` returns, or raise its error.

        Raises ``TimeoutError`` if it has not ended after ``poll_seconds``. What it returns later is
        the result of a later poll, with the seconds that are left then.
        """
        is_late = self._call is not None
        if self._call is None:
            self._call = Call(self._check_with_time, "limpet-notice")
        call = self._call
        if not call.wait(self.poll_seconds):
            raise TimeoutError(f"{self.name} has not answered for {self.poll_seconds:g} seconds")
        self._call = None
        notice, ended_at = call.result()
        if notice is None or not is_late:
            return notice
        age = self.clock() - ended_at
        left = None if notice.seconds is None else max(0.0, notice.seconds - age)
        return replace(notice, seconds=left, age=notice.age + age)

    def _check_with_time(self) -> tuple[Notice | None, float]:
        return self.check(), self.clock()


def check_seconds(option: str, value: float) -> float:
    """Return ``value``. Raises ``LimpetError`` unless it is a finite number greater than 0."""
    number = seconds(value)
    if number is None or number == math.inf:
        raise LimpetError(
            f"Invalid value for {option}=",
            expected="a number of seconds greater than 0",
            found=to_repr(value),
        )
    return number
