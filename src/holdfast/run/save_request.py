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
from holdfast.format.names import REQUEST, Version, is_attempt, new_attempt
from holdfast.format.sealed import seal, unseal
from holdfast.run.run import Run
from holdfast.storage.store import Store

SIGNAL = "signal"
"""What ``Watcher.wanted`` says when it was a signal that asked."""

_LIMIT = 1 << 16


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: who asked for a save, and when. ``id`` is drawn anew for every request."""

    id: str
    created: str
    host: str
    process: str


# -- the one who asks ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """The version that came of a request. ``joined``: another's request was there already."""

    version: Version
    joined: bool


def put_request(store: Store, mine: str) -> str:
    """Ask for a save under the id ``mine``, and return the id of the request that stands: another's
    if there is one already. Raises ``StoreError``."""
    host, _, process = machine.identity()
    record = seal(Request(mine, machine.now(), host, process))[0]
    while True:
        try:
            store.put_if_absent(REQUEST, record)
        except AlreadyExists:
            standing = read_request(store)
            if standing is None:
                continue  # it was answered at this moment
            return standing
        return mine


def read_request(store: Store) -> str | None:
    """The id of the request that stands in a run; of a damaged one an id made of its bytes."""
    try:
        raw = store.get(REQUEST, _LIMIT)
    except NotFound:
        return None
    try:
        found = unseal(raw, Request, REQUEST)[0].id
    except FormatError:
        found = ""
    return found if is_attempt(found) else digest(raw)[:12]


def remove_request(store: Store, request: str) -> None:
    """Remove the request if it is still the one of that id.

    A new one that takes its place between the look and the deletion goes with it; the one who
    wrote it sees that nothing came of it, and asks again.
    """
    if read_request(store) == request:
        store.delete(REQUEST)


def ask(
    run: Run,
    timeout: float,
    *,
    wait: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    interval: float = 1.0,
) -> Answer:
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
                version = _newer(run, before)
                if version is not None:
                    return Answer(version, joined)
                # answered with what was there before us, or removed by hand: we still want one
                joined = (standing := put_request(run.store, mine)) != mine
            left = deadline - clock()
            if left <= 0:
                raise _unanswered(run, timeout, _newer(run, before))
            wait(min(interval, left))
    except BaseException:
        with suppress(StoreError):  # one that is left behind costs a save, and nothing else
            remove_request(run.store, mine)
        raise


def _newer(run: Run, before: frozenset[Version]) -> Version | None:
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


def _unanswered(run: Run, timeout: float, came: Version | None) -> DeadlinePassed:
    if came is None:
        found, todo = "none", "Look whether a training is running, and whether it saves to this"
        todo += " folder; if it does, its log tells of a save that failed. --timeout waits longer"
    else:
        found = f"{came}, which did not answer it"
        todo = "A training writes to this folder: wait longer with --timeout, or look at its log"
    return DeadlinePassed(
        f"Nobody answered the request to save {run.url}; it was taken back",
        expected=f"a version within {timeout:g} s",
        found=found,
        todo=todo,
        run=run.url,
    )


# -- the training --------------------------------------------------------------------------------


class Watcher:
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
        self._process = os.getpid()
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._lock = Lock()
        self._turn = 0  # a look that take, done or failed overtook has seen the past
        self._asked: str | None = None
        self._taken: str | None = None
        self._answered: str | None = None  # saved, but its file could not be removed yet
        self._signalled = False
        self._signals: list[tuple[int, Any, Any]] = []
        self._outage = False

    @property
    def wanted(self) -> str | None:
        """The id of the request that waits for a save; ``SIGNAL`` if it was a signal; or None."""
        return self._asked or (SIGNAL if self._signalled else None)

    def start(self) -> None:
        """Begin to look. Where no thread can be started requests stay unseen, which is told."""
        thread = Thread(target=self._run, name="holdfast-request", daemon=True)
        try:
            thread.start()
        except RuntimeError as e:
            self._tell(e)
        else:
            self._thread = thread

    def take(self) -> str | None:
        """What is wanted, if the save that begins now is to answer it; it is wanted no more. A
        signal that came beside it is answered as well."""
        if self._process != os.getpid():
            return None
        with self._lock:
            request = self.wanted
            if request is not None and request != SIGNAL:
                self._taken = request
            self._asked, self._signalled = None, False
            self._turn += 1
        return request

    def answer(self) -> Callable[[bool], None]:
        """Take what is wanted for the save that begins now. What is returned is to be told
        whether that was committed."""
        request = self.take()
        return lambda committed: (self.done if committed else self.failed)(request)

    def done(self, request: str | None) -> None:
        """The save that answers the request is committed: remove its file. If the store fails,
        that is tried again at each look."""
        if request is None or request == SIGNAL or self._process != os.getpid():
            return
        with self._lock:
            self._answered = request
            self._turn += 1
        self._remove(request)

    def failed(self, request: str | None) -> None:
        """The save that was to answer the request failed. One that stands in a file is wanted
        again from the next look on; a signal is not."""
        if self._process != os.getpid():
            return
        with self._lock:
            if self._taken == request:
                self._taken = None
            self._turn += 1

    def look(self) -> None:
        """Look once; the thread does it. A store that fails is told, not raised."""
        turn = self._turn
        try:
            found = read_request(self._store)
        except StoreError as e:
            self._tell(e)
            return
        self._outage = False
        with self._lock:
            if turn != self._turn:
                return
            self._asked = None if found == self._taken else found
            answered = self._answered
        if answered is not None:
            self._remove(answered)

    def on_signal(self, number: int) -> None:
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
        self._signals.append((number, handler, before))

    def close(self) -> None:
        """End the thread and give signals back to who had them. Raises what ended the thread
        before, if something did (a sink of events, for one)."""
        if self._process != os.getpid():
            return
        while self._signals:
            number, handler, before = self._signals.pop()
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

    def _run(self) -> None:
        try:
            self.look()
            while not self._wait(self._interval):
                self.look()
        except Exception as e:  # noqa: BLE001  (top of a thread: raised by close)
            self._error = e

    def _remove(self, request: str) -> None:
        try:
            remove_request(self._store, request)
        except StoreError as e:
            self._tell(e)
            return
        with self._lock:
            self._answered = None
            if self._taken == request:
                self._taken = None
            self._turn += 1

    def _tell(self, error: Exception) -> None:
        """Once per outage, from whichever thread sees it first."""
        with self._lock:
            first, self._outage = not self._outage, True
        if first:
            events.emit("request_unseen", store=self._store.url, error=str(error))
