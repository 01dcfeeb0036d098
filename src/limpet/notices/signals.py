"""Signals as notices: one handler for each signal of a process, whoever waits for it.

Python runs a handler in the main thread, which may be in a call of a library for minutes. So a
thread also reads the numbers of the signals from a pipe (``signal.set_wakeup_fd``).
"""

from __future__ import annotations

import atexit
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Thread
from types import FrameType
from typing import Any
from weakref import WeakSet

from limpet.arguments import check_seconds, require, whole
from limpet.errors import LimpetError
from limpet.machine import after_fork
from limpet.notices.notice import Notice
from limpet.threads import no_op, start_thread

_PARENT_SECONDS = 1.0
"""Seconds within which a signal that goes to a whole group of processes reaches all of them. A
signal that reaches a forked process later was sent to that process, for example to end a pool."""

_END = b"\0"
"""What ends the thread that reads the pipe: it is no number of a signal."""


class SignalNotice:
    """Reports the signals by which a scheduler announces the end of the process.

    ``numbers``: the signals; none: SIGTERM. ``seconds``: the time from the signal until the process
    is killed, if it is known. With ``stops=False``, the training saves after the signal, and goes
    on. The handlers that were installed before are called too.

    Raises ``LimpetError`` for a number that is not a signal, or one that cannot be handled.
    """

    interval = 3600.0

    def __init__(self, *numbers: int, seconds: float | None = None, stops: bool = True) -> None:
        self.seconds = None if seconds is None else check_seconds("seconds=", seconds)
        self.stops = stops
        self.yielded: frozenset[int] = frozenset()
        """The signals that are no notices once the program has a handler of its own for them."""
        self._received: list[tuple[int, float]] = []
        self._wake: Callable[[], object] = no_op
        names = []
        self.numbers = tuple(whole(number, 1) or 0 for number in numbers) or (signal.SIGTERM,)
        for number in self.numbers:
            name = signal.Signals(number).name if number in set(signal.Signals) else ""
            is_valid = name not in ("", "SIGKILL", "SIGSTOP")
            expected = "a signal that a process can handle, such as signal.SIGTERM"
            require("The argument of SignalNotice", is_valid, expected, numbers)
            names.append(name)
        self.name = " or ".join(names)

    def start(self, wake: Callable[[], object]) -> None:
        """Install the handlers. ``wake`` is called in any thread when a signal arrives. Raises
        ``LimpetError`` outside the main thread, where Python allows no handlers."""
        self._wake = wake
        _dispatcher.subscribe(self)

    def close(self) -> None:
        """Restore the handlers that were installed before, if nobody else needs these."""
        _dispatcher.unsubscribe(self)
        self._wake = no_op

    def receive(self, number: int) -> None:
        """Record that a signal has arrived. A handler may call this: it takes no lock."""
        self._received.append((number, time.monotonic()))
        self._wake()

    def poll(self) -> Notice | None:
        if not self._received:
            return None
        (number, at), *_ = self._received
        self._received.clear()
        age = time.monotonic() - at
        left = None if self.seconds is None else self.seconds - age
        return Notice(signal.Signals(number).name, left, self.stops, age)


def request_signals(sources: Iterable[object]) -> set[int]:
    """Return the signals after which a training with these sources saves and goes on."""
    numbers: dict[bool, set[int]] = {True: set(), False: set()}
    for source in sources:
        if isinstance(source, SignalNotice):
            numbers[source.stops].update(source.numbers)
    return numbers[False] - numbers[True]


def _identify(descriptor: int) -> tuple[int, int] | None:
    """Return which pipe or socket a descriptor is, or None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _shared_times() -> memoryview[float]:
    """Return memory that forked processes see: when (``time.monotonic``) which signal came."""
    return memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")


class _Dispatcher:
    """The handlers of this process, and what its forked processes know of its signals."""

    def __init__(self) -> None:
        self._subscribers: WeakSet[SignalNotice] = WeakSet()
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()
        self._pipe: tuple[Thread, int, int] | None = None  # who reads it, and its two ends
        # The descriptor that somebody else had set, such as an event loop, and which pipe it was:
        # its number may become that of another file, which must not receive the bytes of signals.
        self._other: tuple[int, tuple[int, int] | None] = -1, None
        self._received = _shared_times()

    def subscribe(self, source: SignalNotice) -> None:
        if self._pid != os.getpid():
            self._take_over()
        self._subscribers.add(source)
        try:
            for number in source.numbers:
                if number not in self._previous:
                    self._install(number)
        except LimpetError:
            self._subscribers.discard(source)  # it would keep the handlers of others installed
            raise
        if self._pipe is None:
            self._open_pipe()

    def _take_over(self) -> None:
        """Begin anew in a forked process that watches its own signals: a rank, not a worker."""
        self._pid = os.getpid()
        self._subscribers = WeakSet()
        self._received = _shared_times()
        inherited = [n for n in self._previous if signal.getsignal(n) == self.handle]
        self._previous = {n: self._previous[n] for n in inherited}

    def unsubscribe(self, source: SignalNotice) -> None:
        if self._pid != os.getpid():
            return
        self._subscribers.discard(source)
        needed = {n for s in list(self._subscribers) for n in s.numbers}
        for number in [n for n in self._previous if n not in needed]:
            self._uninstall(number)
        if not self._previous:
            self._close_pipe()

    def is_free(self, number: int) -> bool:
        """Return True if the program does not ignore, handle, or ask to save by a signal."""
        handler = signal.getsignal(number)
        if handler == self.handle:
            handler = self._previous.get(number, signal.SIG_DFL)
        for source in list(self._subscribers):
            if number in source.numbers and not source.stops:
                return False
        return bool(handler == signal.SIG_DFL)

    def _install(self, number: int) -> None:
        self._previous[number] = signal.getsignal(number)
        try:
            signal.signal(number, self.handle)
        except ValueError as e:
            del self._previous[number]
            raise LimpetError(
                f"{signal.Signals(number).name} may end the training without a save, because no"
                " handler could be installed",
                found=str(e),
                todo="Create the Checkpointer, and make its first step, in the main thread",
            ) from e

    def _uninstall(self, number: int) -> None:
        self._received[number] = 0.0
        previous = self._previous[number]
        with suppress(ValueError):  # outside the main thread: the handler acts as the previous one
            # leave a handler that someone has installed over this one
            if signal.getsignal(number) == self.handle and previous is not None:
                signal.signal(number, previous)
            del self._previous[number]

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread of this process, or of a forked one."""
        previous = self._previous.get(number, signal.SIG_DFL)
        is_forked = self._pid != os.getpid()
        if is_forked and self._has_parent_received(number):
            return  # the signal went to all processes of the job; the parent ends this one
        if not is_forked and any(number in s.numbers for s in list(self._subscribers)):
            self._deliver(number)
            if callable(previous):
                previous(number, frame)
        elif callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _deliver(self, number: int, *, is_replaced: bool = False) -> None:
        """Report a signal. ``is_replaced``: its handler is not the one of this object any more."""
        self._received[number] = time.monotonic()
        for source in list(self._subscribers):
            if number in source.numbers and not (is_replaced and number in source.yielded):
                source.receive(number)

    def _has_parent_received(self, number: int) -> bool:
        """Return True if the parent has received the signal at about the same time."""
        now = time.monotonic()
        while not self._received[number] or self._received[number] < now - _PARENT_SECONDS:
            if time.monotonic() > now + _PARENT_SECONDS:
                return False
            time.sleep(0.01)
        return True

    # -- the pipe ------------------------------------------------------------------------------

    def _open_pipe(self) -> None:
        read_end, write_end = os.pipe()
        if hasattr(os, "set_blocking"):  # not on Windows
            os.set_blocking(write_end, False)
        thread = Thread(
            target=self._read_pipe, args=(read_end,), name="limpet-signals", daemon=True
        )
        if not start_thread(thread):  # the handlers still work
            os.close(read_end)
            os.close(write_end)
            return
        self._pipe = thread, read_end, write_end
        other = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._other = other, _identify(other)

    def _read_pipe(self, read_end: int) -> None:
        while True:
            numbers = os.read(read_end, 512)
            for number in numbers:
                if number in self._previous:
                    self._deliver(number, is_replaced=signal.getsignal(number) != self.handle)
            other, identity = self._other
            if identity is not None and identity == _identify(other):
                with suppress(OSError):  # whoever set it does not read
                    os.write(other, numbers.replace(_END, b""))
            if _END in numbers:
                return

    def _close_pipe(self) -> None:
        if self._pipe is None:
            return
        thread, read_end, write_end = self._pipe
        try:
            current = signal.set_wakeup_fd(-1)
        except ValueError:
            return  # outside the main thread: the system goes on writing into the pipe
        self._pipe = None
        if current == write_end:
            other, identity = self._other
            current = other if identity is not None and identity == _identify(other) else -1
        with suppress(OSError, ValueError):  # whoever set it closes it now
            signal.set_wakeup_fd(current)
        # forked processes may have the write end, so its end here would not be seen
        with suppress(BlockingIOError):
            os.write(write_end, _END)
        thread.join(2.0)
        if not thread.is_alive():
            os.close(read_end)
            os.close(write_end)

    def forget_in_child(self) -> None:
        """Do not write the signals of a forked process into the pipe of its parent."""
        if self._pipe is not None:
            (_, read_end, write_end), self._pipe = self._pipe, None
            with suppress(ValueError):
                signal.set_wakeup_fd(-1)
            os.close(read_end)
            os.close(write_end)

    def stop_ignoring(self) -> None:
        """Let forked processes end by a signal again, because this process ends them now."""
        if self._pid == os.getpid():
            for number in range(len(self._received)):
                self._received[number] = 0.0


_dispatcher = _Dispatcher()
after_fork(_dispatcher.forget_in_child)
atexit.register(_dispatcher.stop_ignoring)


def stop_signals() -> SignalNotice:
    """Return the source by default: SIGTERM, and SIGHUP unless it is ignored (``nohup``), or the
    program has a handler for it, also one installed later."""
    if not hasattr(signal, "SIGHUP") or not _dispatcher.is_free(signal.SIGHUP):  # Windows
        return SignalNotice()
    source = SignalNotice(signal.SIGTERM, signal.SIGHUP)
    source.yielded = frozenset((signal.SIGHUP,))
    return source


def protect_worker(worker_id: int = 0) -> None:
    """Protect a worker of a ``DataLoader`` from a signal that goes to all processes of a job.

    Pass it as ``worker_init_fn=limpet.preemption.protect_worker``. Otherwise, Slurm's SIGTERM
    also ends the workers, and the training raises before it can save. It has no effect in a
    process that was not forked.
    """
    for number in _dispatcher._previous:
        signal.signal(number, _dispatcher.handle)  # PyTorch has installed its own
