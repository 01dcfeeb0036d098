"""A deadline: the time by which an operation must have ended."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Generic, TypeVar

from limpet.arguments import check_seconds
from limpet.errors import Unavailable
from limpet.threads import Latch, start_thread

T = TypeVar("T")

CLEANUP_SECONDS = 10.0
"""Seconds after a deadline in which what a failed operation has left is removed, by default."""

_EXIT_SECONDS = 2.0
"""The longest time for which the end of the process waits for calls that have not ended."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time on a monotonic clock, in seconds. ``purpose``, for messages: what must have ended by
    then. ``cleanup``: the seconds for a cleanup, fewer if the process will be killed soon."""

    purpose: str
    at: float
    clock: Callable[[], float] = time.monotonic
    is_for_cleanup: bool = False
    cleanup: float | None = None

    @classmethod
    def after(
        cls,
        seconds: float,
        purpose: str,
        clock: Callable[[], float] = time.monotonic,
        cleanup: float | None = None,
    ) -> Deadline:
        """Return the deadline ``seconds`` from now. Raises ``LimpetError`` unless positive."""
        number = check_seconds("The timeout", seconds, may_be_infinite=True)
        return cls(purpose, clock() + number, clock, cleanup=cleanup)

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
        if self.is_for_cleanup:
            return self
        purpose = f"the cleanup after {self.purpose}"
        return Deadline(purpose, self.at + self.cleanup_seconds, self.clock, True, self.cleanup)

    @property
    def cleanup_seconds(self) -> float:
        """The seconds after the deadline in which leftovers are removed."""
        return CLEANUP_SECONDS if self.cleanup is None else self.cleanup

    def earlier(self, other: Deadline | None) -> Deadline:
        """Return the earlier one of two deadlines."""
        return self if other is None or self.at <= other.at else other


class Call(Generic[T]):
    """A call in its own thread, which may be abandoned; ``OSError`` if no thread can be started."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._done = Latch()
        self._thread = Thread(target=self._run, daemon=True, name=name)
        _running.add(self._thread)
        if not start_thread(self._thread):
            _running.discard(self._thread)
            raise OSError("cannot start a thread: raise the limit (ulimit -u)")

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as e:  # noqa: BLE001  (``result`` raises it)
            self._errors.append(e)
        finally:
            self._done.set()
            _running.discard(self._thread)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for at most ``seconds``, and return whether the function has ended."""
        return self._done.wait(seconds)

    def result(self) -> T:
        """Wait for the function. Return what it returned, or raise its error."""
        self.wait()
        if self._errors and not isinstance(self._errors[0], Exception):
            text = str(self._errors[0])
            raise RuntimeError(text) from self._errors[0]  # a panic in a library in Rust
        if self._errors:
            raise self._errors[0]
        return self._results[0]


_running: set[Thread] = set()
"""The threads of the calls that have not ended, whether somebody waits for them or not."""


@atexit.register
def _wait_for_calls() -> None:
    """Wait for calls that have not ended: a thread that returns into Rust while the interpreter
    ends, as one of a call to a server that is away still may, aborts the process with SIGABRT."""
    deadline = Deadline.after(_EXIT_SECONDS, "the calls at the end of the process")
    for thread in list(_running):
        with suppress(RuntimeError):  # Ctrl-C came before it was started
            thread.join(deadline.seconds_left)


def call_within(deadline: Deadline, function: Callable[[], T]) -> T:
    """Return ``function()``, for a library without timeouts. Its thread is abandoned at the
    deadline, with ``TimeoutError``. Raises ``OSError`` if no thread can be started."""
    if not deadline.seconds_left:
        raise TimeoutError(f"the deadline has passed for: {deadline.purpose}")
    call = Call(function, "limpet-call")
    if not call.wait(deadline.seconds_left):
        raise TimeoutError(f"no answer by the deadline for: {deadline.purpose}")
    return call.result()
