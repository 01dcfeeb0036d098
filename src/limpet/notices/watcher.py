"""The threads that watch the sources of notices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Lock, Thread
from weakref import WeakMethod, finalize

from limpet import events
from limpet.arguments import check_seconds
from limpet.deadline import Deadline
from limpet.errors import LimpetError
from limpet.notices.exit_status import write_error
from limpet.notices.notice import Notice, NoticeSource, check_notice
from limpet.threads import start_thread

_DETECTION = "the detection of the platform"


class NoticeWatcher:
    """Polls each source of notices on a thread of its own. One of them at a time calls
    ``on_notice``, a method, which is referenced weakly: a training that nobody closed is collected.
    A source may have ``start(wake)`` and ``close()``: it calls ``wake`` to be polled at once.
    ``detect`` returns more sources, on a thread."""

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        on_notice: Callable[[Notice], object],
        detect: Callable[[], Sequence[NoticeSource]] = tuple,
    ) -> None:
        self._watches = [_Watch(source) for source in sources]
        self._on_notice = WeakMethod(on_notice)
        self._detect = detect
        self._is_ending = False
        self._lock = Lock()
        self._threads: list[Thread] = []
        self._error: Exception | None = None
        self._pid = os.getpid()
        owner: object = getattr(on_notice, "__self__")  # noqa: B009  (a method)
        finalize(owner, self._end_threads).atexit = False

    def start(self) -> None:
        """Start the sources and the threads. The event ``notice_source_failed`` reports each that
        cannot be started, such as a signal outside the main thread."""
        for watch in list(self._watches):
            start = getattr(watch.source, "start", None)
            if start is not None:
                try:
                    start(watch.wake)
                except LimpetError as e:
                    self._watches.remove(watch)
                    _emit_failure(watch.source, e)
        for watch in self._watches:
            self._watch(watch)
        if self._detect is not tuple and not self._start(self._add_detected):
            error = RuntimeError("can't start new thread")
            events.emit("notice_source_failed", source=_DETECTION, error=error)

    def close(self) -> None:
        """End the threads and close the sources; raises nothing (see ``raise_error``). A source
        that wakes its thread is polled once more: a signal may have come just before."""
        if self._pid != os.getpid():
            return
        self._end_threads()
        limit = Deadline.after(1.0, "the last polls of the sources of notices")
        for thread in self._threads:
            thread.join(limit.seconds_left)  # a daemon: a poll that hangs delays only for so long
        self._threads.clear()
        for watch in self._watches:
            for end in (self._poll_last, _close_source):
                try:
                    end(watch)
                except Exception as e:  # noqa: BLE001  (``raise_error`` raises it)
                    self._error = self._error or e

    def raise_error(self, ended: BaseException | None = None) -> None:
        """Raise the first error, other than an outage, that ended a source; or note it on
        ``ended``, the exception that ends the training."""
        error, self._error = self._error, None
        if error is None:
            return
        if ended is None:
            raise error
        note = f"In addition, a source of notices failed: {type(error).__name__}: {error}"
        ended.add_note(note)
        if not isinstance(ended, Exception):  # Python shows no notes of SystemExit
            write_error(note)

    def _end_threads(self) -> None:
        """Let the threads end. It takes no lock, because a garbage collection may call it."""
        self._is_ending = True
        for watch in list(self._watches):
            watch.wake()

    def _watch(self, watch: _Watch) -> None:
        if not self._start(self._run, watch):
            _emit_failure(watch.source, RuntimeError("can't start new thread"))

    def _start(self, run: Callable[..., None], *args: _Watch) -> bool:
        thread = Thread(target=run, args=args, name="limpet-notices", daemon=True)
        is_started = start_thread(thread)
        if is_started:
            self._threads.append(thread)
        return is_started

    # -- the threads -----------------------------------------------------------------------------

    def _add_detected(self) -> None:
        try:
            found = self._detect()
            events.emit("platform_detected", sources=[source.name for source in found])
        except Exception as e:  # noqa: BLE001  (``raise_error`` raises it)
            self._error = e
            events.emit("notice_source_failed", source=_DETECTION, error=e)
            return
        for source in found:
            self._watches.append(_Watch(source))
            self._watch(self._watches[-1])

    def _run(self, watch: _Watch) -> None:
        """Poll a source, and pass on its notices. An error ends this source, and no other one."""
        try:
            while not self._is_ending and self._on_notice() is not None:
                due_at = time.monotonic() + check_seconds("interval=", watch.source.interval)
                notice = watch.ask()
                if notice is not None:
                    self._pass_on(notice)
                watch.wait(due_at - time.monotonic())
        except BaseException as e:  # noqa: BLE001  (``raise_error`` raises it)
            watch.is_woken = False
            self._fail(watch.source, e)

    def _poll_last(self, watch: _Watch) -> None:
        is_woken, watch.is_woken = watch.is_woken, False
        notice = watch.ask() if is_woken else None
        if notice is not None:
            self._pass_on(notice, is_last=True)

    def _pass_on(self, notice: Notice, *, is_last: bool = False) -> None:
        with self._lock:
            on_notice = self._on_notice()
            if on_notice is not None and (is_last or not self._is_ending):
                on_notice(notice)

    def _fail(self, source: NoticeSource, error: BaseException) -> None:
        if not isinstance(error, Exception):  # such as SystemExit, or a panic in a library in Rust
            cause, error = error, RuntimeError(f"{type(error).__name__}: {error}")
            error.__cause__ = cause
        self._error = self._error or error
        _emit_failure(source, error)


class _Watch:
    """A source, and what wakes its thread."""

    def __init__(self, source: NoticeSource) -> None:
        self.source = source
        self.is_woken = hasattr(source, "start")
        """True if the source wakes its thread, and may still be polled."""
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._is_failing = False

    def wake(self) -> None:
        """Let ``wait`` return. A handler of a signal may call this: it takes no lock."""
        self._wakes.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until the next poll is due, or the source wakes its thread."""
        with suppress(Empty):
            self._wakes.get(timeout=min(max(0.0, seconds), TIMEOUT_MAX))

    def ask(self) -> Notice | None:
        """Return the valid notice of the source, or None if there is none, or no answer."""
        try:
            notice = self.source.poll()
        except OSError as e:
            if not self._is_failing:
                self._is_failing = True
                _emit_failure(self.source, e)
            return None
        self._is_failing = False
        return check_notice(notice)


def _close_source(watch: _Watch) -> None:
    close = getattr(watch.source, "close", None)
    if close is not None:
        close()


def _emit_failure(source: object, error: Exception) -> None:
    name = getattr(source, "name", type(source).__qualname__)
    events.emit("notice_source_failed", source=name, error=error)
