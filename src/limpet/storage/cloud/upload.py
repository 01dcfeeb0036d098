"""Streams a large object to a container. It becomes visible as a whole, when it is committed."""

from __future__ import annotations

import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from limpet.errors import NotFound, StoreError, Unavailable
from limpet.storage.checks import exists_error
from limpet.storage.cloud.container import CloudContainer
from limpet.storage.cloud.failures import translate
from limpet.storage.store import Stat, part_length
from limpet.threads import start_thread
from limpet.types import BLOCK_SIZE

PARALLEL_PARTS = 4
"""How many parts of one upload are sent at once."""

_WAITING = 2
"""How many pieces of up to ``BLOCK_SIZE`` may wait for the thread that sends them."""


class StreamAppender:
    """Appends to an object by obstore's writer, which sends the bytes in parts.

    A thread calls the writer, so that each call of this class ends by its deadline. (obstore waits
    without regard to signals, and its own limits of time are those of one request.) The writer
    repeats a part that fails, because nobody else has the bytes. It ignores ``Retry-After`` and the
    throttle, and doubles its pauses, up to 5 s.

    An upload that fails leaves parts that nobody sees. obstore cannot delete them.
    """

    def __init__(self, store: CloudContainer, key: str, length: int) -> None:
        self._store, self._key, self._length = store, key, length
        self._part = max(store.options.part_size, part_length(store.traits, length))
        self._pieces: SimpleQueue[bytes | None] = SimpleQueue()  # None: no more
        self._replies: SimpleQueue[BaseException | None] = SimpleQueue()  # one per piece
        self._credit = _WAITING
        self._is_ended = False
        self._seconds = 0.0  # for which a part is repeated
        self._thread: Thread | None = None

    def append(self, data: memoryview) -> None:
        """Copy the bytes, because the writer refers to them until they are sent."""
        for start in range(0, len(data), BLOCK_SIZE):
            if not self._credit:
                self._wait("write")
            self._credit -= 1
            self._send(bytes(data[start : start + BLOCK_SIZE]))

    def commit(self) -> Stat:
        """Complete the object, unless the key is taken: the parts themselves have no condition.

        Azure accepts the completion of a stream only once. If its reply is lost, obstore repeats it
        and gets an error. So the object is looked up after each failure. The key has no
        object before, so one of the right length is this one.
        """
        store, key = self._store, self._key
        while self._credit < _WAITING:
            self._wait("write")
        if self._length_found() is not None:
            raise exists_error(key, store.url)
        self._send(None)
        try:
            self._wait("complete")
        except StoreError as e:
            is_unknown = isinstance(e, Unavailable)
            try:
                is_visible = self._length_found() == self._length
            except StoreError:  # that of the completion counts
                is_visible, is_unknown = False, True
            if not is_visible:
                fields = {"outcome": "unknown"} if is_unknown else {}
                raise e.with_advice(**fields) from None
        return store.require_stat(key, self._length)

    def abort(self) -> None:
        """Let the thread drop the writer when its request in progress has ended."""
        self._is_ended = True
        self._pieces.put(None)

    def _length_found(self) -> int | None:
        with suppress(NotFound):
            return self._store.stat(self._key).length
        return None

    def _send(self, piece: bytes | None) -> None:
        if self._thread is None:
            self._seconds = self._store.deadline_for("write", self._key).seconds_left
            client = self._store.endpoint.streaming_client(self._store.container, self._seconds)
            name = f"limpet upload of {self._key}"
            thread = Thread(target=self._run, args=(client,), name=name, daemon=True)
            if not start_thread(thread):
                raise StoreError(
                    f"Cannot write {self._key} to {self._store.url}: no thread can be started",
                    todo="Raise the limit (ulimit -u)",
                    key=self._key,
                    store=self._store.url,
                )
            self._thread = thread
        self._pieces.put(piece)

    def _wait(self, action: str) -> None:
        """Wait until the thread has passed on a piece, or has completed the object."""
        store, key = self._store, self._key
        deadline = store.deadline_for(action, key)
        try:
            error = self._replies.get(timeout=deadline.seconds_left)
        except Empty:
            raise Unavailable(
                f"Cannot {action} {key} in {store.url}: the server is too slow",
                todo=f"Gave up after {deadline.purpose}. Check the network and the server,"
                " then try again",
                key=key,
                store=store.url,
            ) from None
        self._credit += 1
        if error is not None:
            raise self._explain(error, action)

    def _explain(self, error: BaseException, action: str) -> StoreError:
        if not isinstance(error, Exception) or isinstance(error, StoreError):
            raise error
        found = translate(error, action, self._key, self._store.url)
        if isinstance(found, Unavailable):
            self._store.endpoint.throttle.note_failure(time.monotonic() - self._seconds)
            advice = (
                f"Gave up after repeating it for up to {self._seconds:g} s. Check the network and"
            )
            return found.with_advice(f"{advice} the server, then try again")  # type: ignore[return-value]
        return found

    def _run(self, client: Any) -> None:
        """Send the pieces, and answer each. After a failure, only answer."""
        failure: BaseException | None = None
        writer: Any = None
        first: list[bytes] = []  # the pieces until the server has begun the upload
        piece: bytes | None = b""
        while piece is not None:
            piece = self._pieces.get()
            if self._is_ended:
                return
            try:
                if failure is None and writer is None:
                    first += [] if piece is None else [piece]
                    if piece is None or sum(map(len, first)) > self._part:
                        writer, first = self._begin(client, first), []
                elif failure is None and piece is not None:
                    writer.write(piece)
                if failure is None and piece is None:
                    writer.close()
            except BaseException as e:  # noqa: BLE001  (raised on the thread that waits)
                failure, first = e, []
            self._replies.put(failure)

    def _begin(self, client: Any, pieces: list[bytes]) -> Any:
        """Return a writer that has got more than one part, so that the upload has begun.

        obstore does not repeat the request of Google that begins one if the connection breaks.
        """
        import obstore

        store = self._store
        name = store.object_name(self._key)

        def begin(_: object) -> Any:
            writer = obstore.open_writer(
                client, name, buffer_size=self._part, max_concurrency=PARALLEL_PARTS
            )
            for piece in pieces:
                writer.write(piece)
            return writer

        return store.call("", "write", self._key, begin)
