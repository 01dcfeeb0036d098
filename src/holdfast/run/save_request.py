"""A save on request from outside the training: a file in the run, or a signal.

The one who asks (``ask``, ``holdfast request-save``) writes ``request-save.json`` into the run, if
it is not there already, and waits until it is gone and a new version has come. The training looks
for it (``Watcher``), saves at its next step, and removes it after the commit. Nothing depends on
clocks, and a request whose author has died costs one save.

Any file of that name is a request, whatever is in it: ``touch RUN/request-save.json`` will do.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread, current_thread, main_thread
from types import FrameType
from typing import Any

import msgspec

from holdfast import events, machine
from holdfast.errors import (
    AlreadyExists,
    DeadlinePassed,
    FormatError,
    HoldfastError,
    NotFound,
    StoreError,
)
from holdfast.format.digest import digest
from holdfast.format.names import SAVE_REQUEST, Version, is_attempt, new_attempt
from holdfast.format.sealed import seal, unseal
from holdfast.run.run import Run
from holdfast.storage.store import Store

SIGNAL = "signal"
"""What ``Watcher.wanted`` says when it was a signal that asked."""

_MAX_BYTES = 1 << 16


class SaveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: who asked for a save, and when. ``id`` is drawn anew for every request."""

    id: str
    created: str
    host: str
    process: str


# -- the one who asks ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestedSave:
    """The version that came of a request. ``joined``: another's request was there already."""

    version: Version
    joined: bool


def put_request(store: Store, request_id: str) -> str:
    """Ask for a save under the id ``mine``, and return the id of the request that stands: another's
    if there is one already. Raises ``StoreError``."""
    host, _, process = machine.process_identity()
    record = seal(SaveRequest(request_id, machine.utc_now(), host, process))[0]
    while True:
        try:
            store.put_if_absent(SAVE_REQUEST, record)
        except AlreadyExists:
            standing = read_request(store)
            if standing is None:
                continue  # it was answered at this moment
            return standing
        return request_id


def read_request(store: Store) -> str | None:
    """The id of the request that stands in a run; of a damaged one an id made of its bytes."""
    try:
        raw = store.get(SAVE_REQUEST, _MAX_BYTES)
    except NotFound:
        return None
    try:
        found = unseal(raw, SaveRequest, SAVE_REQUEST)[0].id
    except FormatError:
        found = ""
    return found if is_attempt(found) else digest(raw)[:12]


def remove_request(store: Store, request_id: str) -> None:
    """Remove the request if it is still the one of that id.

    A new one that takes its place between the look and the deletion goes with it; the one who
    wrote it sees that nothing came of it, and asks again.
    """
    if read_request(store) == request_id:
        store.delete(SAVE_REQUEST)


def request_and_wait(
    run: Run,
    timeout: float,
    *,
    wait: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    interval: float = 1.0,
) -> RequestedSave:
    """Ask the training that writes to ``run`` to save at its next step, and wait for the version.

    What is returned was committed after the call. If this ends by an error or is interrupted,
    the request is taken back. ``timeout``, ``interval``: seconds, by ``clock``; ``wait`` waits.

    Raises ``DeadlinePassed`` if nobody answered in time, and ``StoreError``.
    """
    deadline = clock() + timeout
    before = frozenset(run.listing().versions)
    mine = new_attempt()
    try:
        joined = (standing := put_request(run.store, mine)) != mine
        while True:
            if read_request(run.store) != standing:
                version = _find_new_version(run, before)
                if version is not None:
                    return RequestedSave(version, joined)
                # answered with what was there before us, or removed by hand: we still want one
                joined = (standing := put_request(run.store, mine)) != mine
            left = deadline - clock()
            if left <= 0:
                raise _unanswered_error(run, timeout, _find_new_version(run, before))
            wait(min(interval, left))
    except BaseException:
        with suppress(StoreError):  # one that is left behind costs a save, and nothing else
            remove_request(run.store, mine)
        raise


def _find_new_version(run: Run, before: frozenset[Version]) -> Version | None:
    """Of the versions that came since, the newest that was saved on request; if none says so,
    the newest."""
    newest = None
    for version in reversed([v for v in run.line() if v not in before]):
        try:
            reason = run.open(version).metadata["reason"]
        except (FormatError, NotFound):
            continue
        if reason == "request":
            return version
        newest = newest or version
    return newest


def _unanswered_error(run: Run, timeout: float, new_version: Version | None) -> DeadlinePassed:
    if new_version is None:
        found, todo = "none", "Look whether a training is running, and whether it saves to this"
        todo += " folder; if it does, its log tells of a save that failed. --timeout waits longer"
    else:
        found = f"{new_version}, which did not answer it"
        todo = "A training writes to this folder: wait longer with --timeout, or look at its log"
    return DeadlinePassed(
        f"Nobody answered the request to save {run.url}; it was taken back",
        expected=f"a version within {timeout:g} s",
        found=found,
        todo=todo,
        run=run.url,
    )


# -- the training --------------------------------------------------------------------------------


class RequestWatcher:
    """Looks for requests in a run, on a thread of its own, so that the training need not.

    The training tests ``wanted`` at each step. If it is set: ``take()`` when the save begins, then
    ``done(id)`` after the commit, or ``failed(id)``. Of the process that it was made in; in a
    forked one it does nothing. A store that fails is told once per outage by the event
    ``request_unseen``, and raises nothing here.

    ``interval``: seconds between two looks, each one small read. ``wait(seconds)``: returns True
    when the thread is to end; for tests.
    """

    def __init__(
        self, store: Store, interval: float = 2.0, wait: Callable[[float], bool] | None = None
    ) -> None:
        self._store = store
        self._interval = interval
        self._closing = Event()
        self._wait = self._closing.wait if wait is None else wait
        self._pid = os.getpid()
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._lock = Lock()
        self._generation = 0  # a look that take, done or failed overtook has seen the past
        self._pending: str | None = None
        self._accepted: str | None = None
        self._to_remove: str | None = None  # saved, but its file could not be removed yet
        self._signalled = False
        self._installed_handlers: list[tuple[int, Any, Any]] = []
        self._outage = False

    @property
    def pending_request(self) -> str | None:
        """The id of the request that waits for a save; ``SIGNAL`` if it was a signal; or None."""
        return self._pending or (SIGNAL if self._signalled else None)

    def start(self) -> None:
        """Begin to look. Where no thread can be started requests stay unseen, which is told."""
        thread = Thread(target=self._poll_loop, name="holdfast-request", daemon=True)
        try:
            thread.start()
        except RuntimeError as e:
            self._report_outage(e)
        else:
            self._thread = thread

    def accept(self) -> str | None:
        """What is wanted, if the save that begins now is to answer it; it is wanted no more. A
        signal that came beside it is answered as well."""
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
        """Take what is wanted for the save that begins now. What is returned is to be told
        whether that was committed."""
        request = self.accept()
        return lambda committed: (self.mark_done if committed else self.mark_failed)(request)

    def mark_done(self, request_id: str | None) -> None:
        """The save that answers the request is committed: remove its file. If the store fails,
        that is tried again at each look."""
        if request_id is None or request_id == SIGNAL or self._pid != os.getpid():
            return
        with self._lock:
            self._to_remove = request_id
            self._generation += 1
        self._remove_file(request_id)

    def mark_failed(self, request_id: str | None) -> None:
        """The save that was to answer the request failed. One that stands in a file is wanted
        again from the next look on; a signal is not."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._accepted == request_id:
                self._accepted = None
            self._generation += 1

    def poll(self) -> None:
        """Look once; the thread does it. A store that fails is told, not raised."""
        turn = self._generation
        try:
            found = read_request(self._store)
        except StoreError as e:
            self._report_outage(e)
            return
        self._outage = False
        with self._lock:
            if turn != self._generation:
                return
            self._pending = None if found == self._accepted else found
            answered = self._to_remove
        if answered is not None:
            self._remove_file(answered)

    def install_signal_handler(self, number: int) -> None:
        """Let a signal such as ``signal.SIGUSR1`` ask for a save too, until ``close``.

        The handler only takes a note, and calls the one that was there before it. Raises
        ``HoldfastError`` for what is no signal or cannot be handled (``SIGKILL``), and outside of
        the main thread, where Python allows no handlers.
        """

        def handler(received: int, frame: FrameType | None) -> None:
            self._signalled = True
            if callable(before):
                before(received, frame)

        try:
            before = signal.getsignal(number)
            signal.signal(number, handler)
        except (OSError, TypeError, ValueError) as e:
            at_home = current_thread() is main_thread()
            raise HoldfastError(
                f"Signal {number!r} cannot be made to ask for a save",
                found=str(e),
                todo="Give a signal that can be handled, such as signal.SIGUSR1"
                if at_home
                else "Call save_on_signal from the main thread of the program",
            ) from e
        self._installed_handlers.append((number, handler, before))

    def close(self) -> None:
        """End the thread and give signals back to who had them. Raises what ended the thread
        before, if something did (a sink of events, for one)."""
        if self._pid != os.getpid():
            return
        while self._installed_handlers:
            number, handler, before = self._installed_handlers.pop()
            # not if another has put its own in front, or from a thread that may not
            if signal.getsignal(number) is handler and before is not None:
                with suppress(ValueError):
                    signal.signal(number, before)
        self._closing.set()
        if self._thread is not None:
            self._thread.join(10)  # a daemon: a store that hangs holds nobody up for longer
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _poll_loop(self) -> None:
        try:
            self.poll()
            while not self._wait(self._interval):
                self.poll()
        except Exception as e:  # noqa: BLE001  (top of a thread: raised by close)
            self._error = e

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
        """Once per outage, from whichever thread sees it first."""
        with self._lock:
            first, self._outage = not self._outage, True
        if first:
            events.emit("request_unseen", store=self._store.url, error=str(error))
