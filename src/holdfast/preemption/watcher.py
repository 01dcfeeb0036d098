"""The thread that watches the sources of notices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from weakref import WeakMethod, finalize

from holdfast import events
from holdfast.errors import HoldfastError
from holdfast.preemption.exit_status import write_error
from holdfast.preemption.notice import Notice, NoticeSource, check_notice
from holdfast.preemption.notices.bounded import check_seconds
from holdfast.threads import start_thread

_JOIN_SECONDS = 10.0


class NoticeWatcher:
    """Polls the sources of notices on a thread of its own, and passes on what they report.

    ``on_notice`` is a method, to which the watcher has only a weak reference: a training that
    nobody closed is collected all the same. ``detect`` is called first on the thread, and returns
    more sources. A source with the methods ``start(wake)`` and ``close()`` is started by ``start``,
    in the thread of the caller. It calls ``wake`` to be polled at once.
    """

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        on_notice: Callable[[Notice], object],
        detect: Callable[[], Sequence[NoticeSource]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = list(sources)
        self._on_notice = WeakMethod(on_notice)
        self._detect = detect
        self._clock = clock
        self._wakes: SimpleQueue[NoticeSource | None] = SimpleQueue()
        self._due_at = {id(s): 0.0 for s in self._sources}
        self._failing: set[int] = set()
        self._ended: list[NoticeSource] = []
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._pid = os.getpid()
        owner: object = getattr(on_notice, "__self__")  # noqa: B009  (a method)
        finalize(owner, self._wakes.put, None).atexit = False

    def start(self) -> None:
        """Start the sources and the thread.

        A source that cannot be started, such as a signal outside the main thread, causes the event
        ``notice_source_failed``. So does every source if no thread can be started.
        """
        for source in list(self._sources):
            start = getattr(source, "start", None)
            if start is not None:
                try:
                    start(lambda source=source: self._wakes.put(source))
                except HoldfastError as e:
                    self._sources.remove(source)
                    _emit_failure(source, e)
        self._thread = Thread(target=self._run, name="holdfast-notices", daemon=True)
        if not start_thread(self._thread):
            self._thread = None
            for source in self._sources:
                _emit_failure(source, RuntimeError("can't start new thread"))

    def close(self) -> None:
        """Close the sources and end the thread. It raises nothing: see ``raise_error``."""
        if self._pid != os.getpid():
            return
        self._wakes.put(None)
        for source in (*self._sources, *self._ended):
            close = getattr(source, "close", None)
            if close is not None:
                try:
                    close()
                except Exception as e:  # noqa: BLE001  (``raise_error`` raises it)
                    self._error = self._error or e
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)  # a daemon: a poll that hangs delays only for so long
            self._thread = None

    def raise_error(self, ended: BaseException | None = None) -> None:
        """Raise the first error, other than an outage, that ended a source.

        ``ended`` is the exception that ends the training, such as ``Preempted``. The error does not
        replace it, but becomes a note on it.
        """
        error, self._error = self._error, None
        if error is None:
            return
        if ended is None:
            raise error
        note = f"In addition, a source of notices failed: {type(error).__name__}: {error}"
        ended.add_note(note)
        if not isinstance(ended, Exception):  # Python shows no notes of SystemExit
            write_error(note)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        wakes, source = self._wakes, None
        try:
            self._add_detected()
            while self._on_notice() is not None:
                if source is not None and all(source is not s for s in self._ended):
                    self._poll(source)
                delay = self._poll_due()
                try:
                    source = wakes.get(timeout=delay)
                except Empty:
                    source = None
                    continue
                if source is None:
                    return
        except Exception as e:  # noqa: BLE001  (``raise_error`` raises it)
            self._error = e

    def _add_detected(self) -> None:
        try:
            found = self._detect()
        except Exception as e:  # noqa: BLE001  (``raise_error`` raises it)
            self._error = e
            events.emit("notice_source_failed", source="the detection of the platform", error=e)
            return
        self._sources += found
        self._due_at.update((id(source), 0.0) for source in found)

    def _poll_due(self) -> float:
        """Poll the sources that are due. Return the seconds until the next one is due."""
        for source in list(self._sources):
            if self._due_at[id(source)] <= self._clock():
                self._poll(source)
        now = self._clock()
        return min((max(0.0, self._due_at[id(s)] - now) for s in self._sources), default=60.0)

    def _poll(self, source: NoticeSource) -> None:
        """Poll a source, and pass on its notice. An error ends this source, and no other one."""
        try:
            notice = self._ask(source)
            on_notice = self._on_notice()
            if notice is not None and on_notice is not None:
                on_notice(notice)
        except BaseException as e:  # noqa: BLE001  (``raise_error`` raises it)
            self._end(source, e)

    def _ask(self, source: NoticeSource) -> Notice | None:
        """Return the valid notice of a source, or None if there is none, or no answer."""
        key = id(source)
        self._due_at[key] = self._clock() + check_seconds("interval", source.interval)
        try:
            notice = source.poll()
        except OSError as e:
            if key not in self._failing:
                self._failing.add(key)
                _emit_failure(source, e)
            return None
        self._failing.discard(key)
        return check_notice(notice)

    def _end(self, source: NoticeSource, error: BaseException) -> None:
        """Poll a source no more, because of an error."""
        if not isinstance(error, Exception):  # such as SystemExit, or a panic in a library in Rust
            cause, error = error, RuntimeError(f"{type(error).__name__}: {error}")
            error.__cause__ = cause
        self._error = self._error or error
        self._ended.append(source)
        self._sources = [s for s in self._sources if s is not source]
        _emit_failure(source, error)


def _emit_failure(source: NoticeSource, error: Exception) -> None:
    try:
        name = str(source.name)
    except Exception:  # noqa: BLE001  (a source without a name: the event reports another error)
        name = type(source).__qualname__
    events.emit("notice_source_failed", source=name, error=error)
