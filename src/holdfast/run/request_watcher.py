"""Watches a run for save requests (see ``save_request.py``) and signals, during the training."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread, current_thread, main_thread
from types import FrameType
from typing import Any
from weakref import ref

from holdfast import events
from holdfast.errors import HoldfastError, StoreError
from holdfast.run.save_request import read_request, remove_request
from holdfast.storage.store import Store
from holdfast.threads import Latch, start_thread

SIGNAL = "signal"
"""The value of ``RequestWatcher.pending_request`` if a signal made the request."""


class RequestWatcher:
    """Polls a run for save requests on its own thread, so that training does not block.

    The training checks ``pending_request`` at each step. If a request is pending, the training
    calls ``accept()`` when the save begins, and then ``mark_done(id)`` after the commit or
    ``mark_failed(id)``. The watcher belongs to the process that created it and does nothing in a
    forked process. If the store fails, the watcher raises nothing and emits the event
    ``request_unseen`` once per outage.

    ``interval`` is the number of seconds between two polls. Each poll is one small read.
    ``wait(seconds)`` returns True when the thread must end; tests replace it.
    """

    def __init__(
        self, store: Store, interval: float = 2.0, wait: Callable[[float], bool] | None = None
    ) -> None:
        self._store = store
        self._interval = interval
        self._closing = Latch()
        self._wait = self._closing.wait if wait is None else wait
        self._pid = os.getpid()
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._lock = Lock()
        # accept, mark_done, and mark_failed increase it; a poll that overlaps one has stale results
        self._generation = 0
        self._pending: str | None = None
        self._accepted: str | None = None
        self._to_remove: str | None = None  # saved, but its file could not be removed yet
        self._signalled = False
        self._installed_handlers: list[tuple[int, Any, Any]] = []
        self._outage = False

    @property
    def pending_request(self) -> str | None:
        """The id of the request that waits for a save, ``SIGNAL`` for a signal, or None."""
        return self._pending or (SIGNAL if self._signalled else None)

    def start(self) -> None:
        """Start to poll.

        If no thread can be started, request files have no effect, and the event
        ``request_unseen`` is emitted.
        """
        args = ref(self), self._wait, self._interval
        thread = Thread(target=_poll_regularly, args=args, name="holdfast-request", daemon=True)
        if start_thread(thread):
            self._thread = thread
        else:
            self._report_outage(RuntimeError("can't start new thread"))

    def accept(self) -> str | None:
        """Accept the pending request for the save that begins now, and return its id or None.

        The request is then no longer pending. The save also answers a signal that arrived in
        addition to a request file.
        """
        if self._pid != os.getpid():
            return None
        with self._lock:
            request = self.pending_request
            if request is not None and request != SIGNAL:
                self._accepted = request
            self._pending, self._signalled = None, False
            self._generation += 1
        return request

    def accept_with_callback(self) -> Callable[[bool], None]:
        """Accept the pending request for the save that begins now, and return a callback.

        The caller calls the callback with True if the save was committed, and with False if not.
        """
        request_id = self.accept()
        return lambda committed: (self.mark_done if committed else self.mark_failed)(request_id)

    def mark_done(self, request_id: str | None) -> None:
        """Remove the request's file, because the save that answers the request is committed.

        If the store fails, each poll tries the removal again.
        """
        if request_id is None or request_id == SIGNAL or self._pid != os.getpid():
            return
        with self._lock:
            self._to_remove = request_id
            self._generation += 1
        self._remove_file(request_id)

    def mark_failed(self, request_id: str | None) -> None:
        """Reopen the request, because the save that was to answer it failed.

        A request file is pending again after the next poll. A signal is not.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._accepted == request_id:
                self._accepted = None
            self._generation += 1

    def poll(self) -> None:
        """Poll the run once. The thread calls this method.

        If the store fails, an event reports it and nothing is raised.
        """
        generation = self._generation
        try:
            request_id = read_request(self._store)
        except StoreError as e:
            self._report_outage(e)
            return
        self._outage = False
        with self._lock:
            if generation != self._generation:
                return
            self._pending = None if request_id == self._accepted else request_id
            to_remove = self._to_remove
        if to_remove is not None:
            self._remove_file(to_remove)

    def install_signal_handler(self, number: int) -> None:
        """Make a signal such as ``signal.SIGUSR1`` request a save, until ``close``.

        The handler sets a flag and then calls the previous handler. Raises ``HoldfastError`` if
        ``number`` is not a signal or cannot be handled (``SIGKILL``), and outside the main thread,
        where Python allows no handlers.
        """

        def handler(received: int, frame: FrameType | None) -> None:
            self._signalled = True
            if callable(previous):
                previous(received, frame)

        try:
            previous = signal.getsignal(number)
            signal.signal(number, handler)
        except (OSError, TypeError, ValueError) as e:
            raise HoldfastError(
                f"No handler could be installed for signal {number!r}",
                found=str(e),
                todo="Use a signal that can be handled, such as signal.SIGUSR1"
                if current_thread() is main_thread()
                else "Call save_on_signal from the main thread of the program",
            ) from e
        self._installed_handlers.append((number, handler, previous))

    def close(self) -> None:
        """Stop the thread and restore the previous signal handlers.

        If an exception ended the thread before, for example one from an event sink, raise it.
        """
        if self._pid != os.getpid():
            return
        for number, handler, previous in reversed(self._installed_handlers):
            # leave a handler that someone installed over this one
            if signal.getsignal(number) is handler and previous is not None:
                with suppress(ValueError):  # outside the main thread
                    signal.signal(number, previous)
        self._closing.set()
        if self._thread is not None:
            self._thread.join(10)  # a daemon thread: a store that hangs delays close only this long
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _remove_file(self, request_id: str) -> None:
        try:
            remove_request(self._store, request_id)
        except StoreError as e:
            self._report_outage(e)
            return
        with self._lock:
            self._to_remove = None
            if self._accepted == request_id:
                self._accepted = None
            self._generation += 1

    def _report_outage(self, error: Exception) -> None:
        """Emit ``request_unseen`` once per outage, from the thread that sees it first."""
        with self._lock:
            is_first, self._outage = not self._outage, True
        if is_first:
            events.emit("request_unseen", store=self._store.url, error=str(error))


def _poll_regularly(
    reference: ref[RequestWatcher], wait: Callable[[float], bool], interval: float
) -> None:
    """Poll until ``wait`` returns True, or until a watcher that nobody closed is collected."""
    while (watcher := reference()) is not None:
        try:
            watcher.poll()
        except Exception as e:  # noqa: BLE001  (top-level function of a thread: close raises it)
            watcher._error = e
            return
        del watcher
        if wait(interval):
            return
