"""Watches a run for save requests (see ``save_request.py``) during the training."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock, Thread
from weakref import ref

from limpet import events
from limpet.errors import LimpetError, StoreError
from limpet.run.save_request import read_request, remove_request
from limpet.storage.store import Store
from limpet.threads import Latch, no_op, start_thread


class RequestWatcher:
    """Polls a run for save requests on its own thread, so that training does not block.

    The training checks ``pending_request`` at each step. If a request is pending, the training
    calls ``accept()`` when the save begins, and then ``mark_done(id)`` after the commit or
    ``mark_failed(id)``. The watcher belongs to the process that created it and does nothing in a
    forked process. If the store fails, the watcher raises nothing and emits the event
    ``request_unseen`` once per outage.

    ``interval`` is the number of seconds between two polls. Each poll is one small read, and then a
    call of ``read_more``, which reads what else the training must learn.
    ``wait(seconds)`` returns True when the thread must end; tests replace it.
    """

    def __init__(
        self,
        store: Store,
        interval: float = 2.0,
        wait: Callable[[float], bool] | None = None,
        *,
        read_more: Callable[[], object] = no_op,
    ) -> None:
        self._store = store
        self._read_more = read_more
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
        self._outage = False

    @property
    def pending_request(self) -> str | None:
        """The id of the request that waits for a save, or None."""
        return self._pending

    def start(self) -> None:
        """Start to poll.

        If no thread can be started, request files have no effect, and the event
        ``request_unseen`` is emitted.
        """
        args = ref(self), self._wait, self._interval
        thread = Thread(target=_poll_regularly, args=args, name="limpet-request", daemon=True)
        if start_thread(thread):
            self._thread = thread
        else:
            self._report_outage(RuntimeError("can't start new thread"))

    def accept(self) -> str | None:
        """Accept the pending request for the save that begins now, and return its id or None.

        The request is then no longer pending.
        """
        if self._pid != os.getpid():
            return None
        with self._lock:
            request, self._pending = self._pending, None
            if request is not None:
                self._accepted = request
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
        if request_id is None or self._pid != os.getpid():
            return
        with self._lock:
            self._to_remove = request_id
            self._generation += 1
        self._remove_file(request_id)

    def mark_failed(self, request_id: str | None) -> None:
        """Reopen the request, because the save that was to answer it failed.

        It is pending again after the next poll.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._accepted == request_id:
                self._accepted = None
            self._generation += 1

    def poll(self) -> None:
        """Poll the run once. The thread calls this method.

        If the store fails, an event reports it and nothing is raised: the next poll tries again.
        """
        try:
            self._poll_request()
            self._read_more()
        except LimpetError as e:
            self._report_outage(e)
        else:
            self._outage = False

    def _poll_request(self) -> None:
        generation = self._generation
        request_id = read_request(self._store)
        with self._lock:
            if generation != self._generation:
                return
            self._pending = None if request_id == self._accepted else request_id
            to_remove = self._to_remove
        if to_remove is not None:
            self._remove_file(to_remove)

    def close(self) -> None:
        """Stop the thread.

        If an exception ended the thread before, for example one from an event sink, raise it.
        """
        if self._pid != os.getpid():
            return
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
