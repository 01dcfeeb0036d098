"""Exceptions of signal handlers: at any opcode, and while ``Thread.start`` starts a thread."""

import sys
import threading
from contextlib import suppress

START = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"


class InterruptOpcode:
    """A trace function that raises KeyboardInterrupt at the n-th opcode of some functions."""

    def __init__(self, at, is_traced):
        self.remaining, self.seen = at, 0
        self._is_traced = is_traced

    def __call__(self, frame, event, _):
        if not self._is_traced(frame):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.seen += 1
            if self.seen == self.remaining:
                raise KeyboardInterrupt
        return self


class SignalError(Exception):
    """The error of the signal handler."""


MOMENTS = ["before the thread begins", "after the thread began", "while it waits for the thread"]


def raise_at_start(monkeypatch, name, moment):
    """Raise ``SignalError`` once, in the thread that starts the next thread of this name.

    Before the thread begins, which is 0.1 s later; or after it began; or while ``Thread.start``
    waits for it, where Python may raise a ``RuntimeError`` in place of the error.
    """
    start = getattr(threading, START)
    begins_late = moment == MOMENTS[0]

    def start_and_raise(bootstrap, *args, **kwargs):
        thread: threading.Thread = bootstrap.__self__
        if thread.name != name:
            return start(bootstrap, *args, **kwargs)
        monkeypatch.setattr(threading, START, start)
        gate = threading.Event()

        def wait_and_run(*arguments):
            gate.wait(0.1 if begins_late else 0)
            with suppress(KeyError):  # ``Thread.start`` has removed its entry
                bootstrap(*arguments)

        started = start(wait_and_run, *args, **kwargs)
        while not begins_late and thread in threading._limbo:
            gate.wait(0.001)
        if moment == MOMENTS[2]:
            thread._started.wait = interrupted_wait
            return started
        raise SignalError

    monkeypatch.setattr(threading, START, start_and_raise)


def interrupted_wait():
    """Raise what the ``with`` block of ``threading.Event`` raises after an interrupt."""
    try:
        raise SignalError
    finally:
        threading.Lock().release()
