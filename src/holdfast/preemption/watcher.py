"""The thread that watches the sources of notices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from weakref import WeakMethod, finalize

from holdfast import events
from holdfast.errors import HoldfastError
from holdfast.preemption.notice import Notice, NoticeSource
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
        """Close the sources and end the thread.

        If an exception other than ``OSError`` ended a source before, raise it.
        """
        if self._pid != os.getpid():
            return
        self._wakes.put(None)
        for source in self._sources:
            with suppress(AttributeError):
                source.close()  # type: ignore[attr-defined]
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)  # a daemon: a poll that hangs delays only for so long
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        wakes, source = self._wakes, None
        try:
            self._add_detected()
            while self._on_notice() is not None:
                if source is not None:
                    self._poll(source)
                delay = self._poll_due()
                try:
                    source = wakes.get(timeout=delay)
                except Empty:
                    source = None
                    continue
                if source is None:
                    return
        except Exception as e:  # noqa: BLE001  (top-level function of a thread: close raises it)
            self._error = e

    def _add_detected(self) -> None:
        try:
            found = self._detect()
        except Exception as e:  # noqa: BLE001  (close raises it; the other sources are polled on)
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
        key = id(source)
        self._due_at[key] = self._clock() + source.interval
        try:
            notice = source.poll()
        except OSError as e:
            if key not in self._failing:
                self._failing.add(key)
                _emit_failure(source, e)
            return
        except Exception as e:  # noqa: BLE001  (close raises it; the other sources are polled on)
            self._error = self._error or e
            self._sources.remove(source)
            _emit_failure(source, e)
            return
        self._failing.discard(key)
        on_notice = self._on_notice()
        if notice is not None and on_notice is not None:
            on_notice(notice)


def _emit_failure(source: NoticeSource, error: Exception) -> None:
    events.emit("notice_source_failed", source=source.name, error=error)
