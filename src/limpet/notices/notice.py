"""A notice that this process will be stopped, and what reports it."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from limpet.arguments import check_seconds, real
from limpet.deadline import Call
from limpet.errors import LimpetError
from limpet.text import to_repr


@dataclass(frozen=True, slots=True)
class Notice:
    """A message that this process will be stopped.

    ``source`` says what sent it, for messages: ``"SIGTERM"``. ``seconds`` is the time until the
    stop, or None if unknown; ``age`` is the time since the notice came, which counts in that case.
    ``stops`` is False if the machine is only at risk: the training saves, and goes on.
    """

    source: str
    seconds: float | None = None
    stops: bool = True
    age: float = field(default=0.0, compare=False)


class NoticeSource(Protocol):
    """Reports notices, on a thread that is not that of the training. ``name`` is for messages,
    ``interval`` is the number of seconds between two polls."""

    name: str
    interval: float

    def poll(self) -> Notice | None:
        """Return a notice, or None. MUST return or raise within 5 seconds.

        A notice that stops may be returned at each poll: only an earlier deadline has an effect;
        another one MUST be returned once. Raises ``OSError`` if the source does not answer; it is
        then polled again, and an event reports it once. Any other error ends the source, and the
        end of the training raises it.
        """
        ...


def check_notice(found: object) -> Notice | None:
    """Return a source's notice, with numbers of Python, or None; ``LimpetError`` for all else."""
    if found is None:
        return None
    if isinstance(found, Notice) and isinstance(found.source, str) and type(found.stops) is bool:
        given, age = found.seconds, real(found.age)
        seconds = given if given is None else real(given)
        if (given is None or _is_number(seconds)) and age is not None and _is_number(age):
            return replace(found, seconds=seconds, age=age)
    raise LimpetError(
        f"A source of notices returned something else than a notice or None: {to_repr(found)[:200]}"
    )


def _is_number(number: float | None) -> bool:
    return number is not None and not math.isnan(number)


POLL_SECONDS = 4.0
"""The longest time that a poll takes, in seconds. ``NoticeSource.poll`` has 5 seconds."""


class BoundedSource(ABC):
    """A source whose ``poll`` returns in time, whatever its ``check`` does.

    ``check`` may hang, as a file on a server that is away does, so it runs in a thread of its own
    (about 0.1 ms). While a call has not ended, later polls wait for that call.
    """

    def __init__(
        self, name: str, interval: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.interval = check_seconds("interval=", interval)
        self.poll_seconds = POLL_SECONDS
        self.clock = clock
        self._call: Call[tuple[Notice | None, float]] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, every {self.interval:g} s>"

    @abstractmethod
    def check(self) -> Notice | None:
        """Return a notice, or None; never called twice at the same time. Raises ``OSError`` if
        there is no answer, or an unclear one."""

    def poll(self) -> Notice | None:
        """Return what ``check`` returns, or raise its error, or ``TimeoutError`` after
        ``poll_seconds``. A later poll then has a late result, with the seconds that are left."""
        is_late = self._call is not None
        if self._call is None:
            self._call = Call(lambda: (self.check(), self.clock()), "limpet-notice")
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
