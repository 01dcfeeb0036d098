"""Save requests from outside the training: any file ``request-save.json`` in the run, or a signal.

The requester writes the file, unless there is one, and waits until it is gone and a new version
exists. The training polls for it (``RequestWatcher``), saves at its next step, and removes it after
the commit. No clock counts. A request whose requester has died costs one save.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, Thread
from weakref import ref

import msgspec

from limpet import errors, events, machine
from limpet.format.digest import digest
from limpet.format.names import SAVE_REQUEST, Version, is_attempt, random_id
from limpet.format.sealed import seal, unseal
from limpet.format.strict_json import StrictDecoder
from limpet.run.lineage import lineage_folders
from limpet.run.run import Run
from limpet.snapshot.location import get_bounded
from limpet.storage.store import MAX_PUTS, Store, contended_error
from limpet.threads import Latch, no_op, start_thread

_MAX_BYTES = 1 << 16


class SaveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the request file. ``id`` is unique to each request."""

    id: str
    created: str
    host: str
    process: str


_SAVE_REQUEST = StrictDecoder(msgspec.json.Decoder(SaveRequest))


@dataclass(frozen=True, slots=True)
class RequestedSave:
    """The version that answers a request. ``joined``: it answers one of another requester."""

    version: Version
    joined: bool


def put_request(store: Store, request_id: str) -> str:
    """Request a save. Return the pending id, maybe another requester's. Raises ``StoreError``."""
    host, _, process = machine.process_identity()
    record = seal(SaveRequest(request_id, machine.utc_now(), host, process))[0]
    for _ in range(MAX_PUTS):
        try:
            store.put_if_absent(SAVE_REQUEST, record)
        except errors.AlreadyExists:
            pending_id = read_request(store)
            if pending_id is not None:  # otherwise the training answered it in the meantime
                return pending_id
        else:
            return request_id
    raise contended_error(SAVE_REQUEST, store.url)


def read_request(store: Store) -> str | None:
    """Return the id of the pending request of a run, or None; without a valid id in the file, one
    that its bytes give. Raises ``StoreError``."""
    try:
        raw = get_bounded(store, SAVE_REQUEST, _MAX_BYTES)
    except errors.NotFound:
        return None
    except errors.ManifestInvalid:
        raw = b""  # too long: a request all the same
    try:
        request_id = unseal(raw, _SAVE_REQUEST, SAVE_REQUEST)[0].id
    except errors.FormatError:
        request_id = ""
    return request_id if is_attempt(request_id) else digest(raw)[:12]


def remove_request(store: Store, request_id: str) -> None:
    """Remove the pending request if it has this id. If a new one replaces it just now, that is
    removed, and its requester, who finds no new version, requests a save again."""
    if read_request(store) == request_id:
        store.delete(SAVE_REQUEST)


def request_and_wait(
    run: Run,
    timeout: float,
    *,
    wait: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    interval: float = 1.0,  # as ``timeout`` in seconds of ``clock``
) -> RequestedSave:
    """Request a save from the training, and return a version committed after this call. An error or
    an interrupt withdraws it. Raises ``DeadlinePassed`` after ``timeout``, and ``StoreError``."""
    deadline = clock() + timeout
    before = frozenset(run.listing().versions)
    request_id = random_id()
    try:
        pending_id = put_request(run.store, request_id)
        while True:
            if read_request(run.store) != pending_id:
                version = _find_new_version(run, before)
                if version is not None:
                    return RequestedSave(version, joined=pending_id != request_id)
                # the answer was a version from before this call, or the file was removed by hand
                pending_id = put_request(run.store, request_id)
            remaining = deadline - clock()
            if remaining <= 0:
                raise errors.DeadlinePassed(
                    f"No training answered the request to save {run.url}; the request was"
                    " withdrawn",
                    expected=f"a version within {timeout:g} s",
                    todo="Check that a training is running and saves to this folder: its log shows"
                    " a save that failed. Use --timeout to wait longer",
                    run=run.url,
                )
            wait(min(interval, remaining))
    except BaseException:
        with suppress(errors.StoreError):  # a request that is left behind costs only one save
            remove_request(run.store, request_id)
        raise


def _find_new_version(run: Run, before: frozenset[Version]) -> Version | None:
    """Return the newest version that is not in ``before``, if possible one saved on request."""
    newest = None
    folders = lineage_folders(run.catalog, run.listing())
    for version in reversed([v for v in folders if v not in before]):
        try:
            if run.catalog.open(version).metadata.get("reason") == "request":
                return version
        except (errors.FormatError, errors.NotFound):
            continue
        newest = newest or version
    return newest


class RequestWatcher:
    """Polls a run for save requests every ``interval`` seconds on a thread, not in a forked
    process.

    The training checks ``pending_request`` at each step, and calls ``accept()`` when the save
    begins, and then ``mark(id, is_committed)``. Each poll also calls ``read_more``. A failing store
    raises nothing: the event ``request_unseen`` reports each outage once. ``wait`` returns True at
    the end.
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
        # accept and mark increase it; a poll that overlaps one has stale results
        self._generation = 0
        self.pending_request: str | None = None
        """The id of the request that waits for a save, or None."""
        self._accepted: str | None = None
        self._to_remove: str | None = None  # saved, but its file could not be removed yet
        self._outage = False

    def start(self) -> None:
        """Start to poll. Without a thread, the event ``request_unseen`` reports that."""
        args = ref(self), self._wait, self._interval
        thread = Thread(target=_poll_regularly, args=args, name="limpet-request", daemon=True)
        if start_thread(thread):
            self._thread = thread
        else:
            self._report_outage(RuntimeError("can't start new thread"))

    def accept(self) -> str | None:
        """Return the pending request, which the save that begins now answers, or None."""
        if self.pending_request is None or self._pid != os.getpid():
            return None
        with self._lock:
            request, self.pending_request = self.pending_request, None
            self._accepted = request
            self._generation += 1
        return request

    def mark(self, request_id: str, is_committed: bool) -> None:
        """After the commit of the save that answers it, remove the request's file, if necessary at
        a later poll. After a failed save, the request is pending again."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if is_committed:
                self._to_remove = request_id
            elif self._accepted == request_id:
                self._accepted = None
            self._generation += 1
        if is_committed:
            self._remove_file(request_id)

    def poll(self) -> None:
        """Poll the run once, on the thread. If the store fails, an event reports it."""
        try:
            self._poll_request()
            self._read_more()
        except errors.LimpetError as e:
            self._report_outage(e)
        else:
            self._outage = False

    def _poll_request(self) -> None:
        generation = self._generation
        request_id = read_request(self._store)
        with self._lock:
            if generation != self._generation:
                return
            self.pending_request = None if request_id == self._accepted else request_id
            to_remove = self._to_remove
        if to_remove is not None:
            self._remove_file(to_remove)

    def close(self) -> None:
        """Stop the thread, and raise the exception that has ended it, as of an event sink."""
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
        except errors.StoreError as e:
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
