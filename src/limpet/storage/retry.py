"""Repeats the calls to a server: the one wrapper around all stores on servers.

Each method of a ``Remote``, a folder on a server, makes one try by a deadline. ``RetryStore`` makes
a store of it: it repeats a try until the deadline of the call, never more than a part or the rest
of a range, and reads an object back if the reply of its creation was lost. No packet that arrives
renews a deadline. (The model is restic's ``internal/backend/retry``.)
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol, Self, TypeVar

from limpet.buffers import as_byte_view
from limpet.deadline import CLEANUP_SECONDS, Deadline
from limpet.errors import AlreadyExists, NotFound, StoreError, Unavailable
from limpet.storage.store import (
    Entry,
    RangeReader,
    Stat,
    Traits,
    Upload,
    check_key,
    check_range,
    check_written_length,
    exists_error,
    is_partial,
    part_length,
    refuse_partial,
    short_read_error,
    too_long_error,
)
from limpet.storage.throttle import Statistics, Throttle
from limpet.storage.uploads import BufferedUpload, PartUpload, SequentialUpload
from limpet.types import BLOCK_SIZE

T = TypeVar("T")

LEAST_RATE = 100_000
"""Bytes per second. A call that transfers bytes gets the time that they take at this rate, besides
``timeout``: what arrives more slowly counts as lost, and what is as fast never ends too early."""


class Server:
    """What all stores of a process on one server share, if their options are equal.

    ``throttle`` limits their calls. ``known``: the roots that have answered; ``conditional``: those
    in which the server has refused to replace an object.
    """

    def __init__(self, concurrency: int, timeout: float) -> None:
        self.throttle = Throttle(concurrency, timeout)
        self.known: set[str] = set()
        self.conditional: set[str] = set()


class Reply(ABC):
    """The rest of an object from an offset on, or a range of it, while it arrives.

    ``length``: its bytes; ``tag``: of the object, with which a later request fails if the object
    was replaced, or ""; ``md5``: of the whole object, in hexadecimal, if the server says it.
    """

    def __init__(self, key: str, url: str, length: int, tag: str = "", md5: str = "") -> None:
        self._key, self._url = key, url
        self.length, self.tag, self.md5 = length, tag, md5

    @abstractmethod
    def receive(self, most: int, deadline: Deadline) -> bytes | memoryview:
        """Return the next bytes, as soon as some arrive, but at most so many; none at the end."""

    def read_into(self, view: memoryview, deadline: Deadline) -> Iterator[int]:
        """Fill ``view`` with the next bytes, and yield the length of each piece that arrived.

        The caller may stop after a piece, and call this again for the rest. Raises ``Unavailable``
        if the reply ends before, or is too slow for the deadline.
        """
        done, place = 0, f"{self._key} in {self._url}"
        fields = {"key": self._key, "store": self._url}
        while done < len(view):
            data = self.receive(len(view) - done, deadline)
            if not data:
                raise Unavailable(f"The reply for {place} is incomplete", **fields)
            view[done : done + len(data)] = data
            done += len(data)
            yield len(data)
            if done < len(view) and not deadline.seconds_left:
                raise Unavailable(f"Reading {place} is too slow", **fields)

    def close(self) -> None:  # noqa: B027
        """End the reply."""


class BlockReply(Reply):
    """A range that is read in blocks, each by a call of ``read(deadline, offset, length)``."""

    def __init__(
        self,
        key: str,
        url: str,
        read: Callable[[Deadline, int, int], bytes],
        offset: int,
        length: int,
    ) -> None:
        super().__init__(key, url, length)
        self._read, self._at = read, offset

    def receive(self, most: int, deadline: Deadline) -> bytes:
        size = min(BLOCK_SIZE, most)
        data = self._read(deadline, self._at, size)
        self._at += size
        return data if len(data) == size else b""


class RemoteUpload(Protocol):
    """An object that is being written to a server. Each method makes one try.

    ``remote`` is the folder with the deadline of the try. A try that raised ``Unavailable`` is
    repeated with the same arguments, unless the error has the field ``is_final``.
    """

    def write(self, remote: Any, offset: int, views: Sequence[memoryview]) -> None:
        """Write one whole part, or, to a store that only appends, the next bytes."""

    def commit(self, remote: Any) -> None:
        """Make the object durable, then visible. Raises ``AlreadyExists``."""

    def abort(self, remote: Any) -> None:
        """Remove what was written."""


class Remote(ABC):
    """A folder on a server. Each method makes one try, and raises ``StoreError``.

    ``root``: the URL of what the folder is in; ``prefix``: the path of the folder in it, with a
    slash at its end unless it is empty; ``deadline``: when the try must have ended.
    """

    longest_name: ClassVar[int] = 1024
    """The largest length of the name of an object, in bytes. (Azure counts characters.)"""

    has_conditional_put: ClassVar[bool] = True
    """Whether ``create`` exists: one request that creates an object only if its name is free.
    Otherwise, every object is an upload."""

    def __init__(self, root: str, folder: str) -> None:
        self.root = root
        self.prefix = check_key(folder, root) + "/" if folder else ""
        self.deadline = Deadline("", float("inf"))

    @property
    def url(self) -> str:
        return f"{self.root}/{self.prefix}"[:-1]

    @property
    @abstractmethod
    def traits(self) -> Traits: ...

    @property
    @abstractmethod
    def server(self) -> Server:
        """The server. All stores of a process with equal options share it."""

    def object_name(self, key: str) -> str:
        """Return the name of an object for the server. Raises ``StoreError`` for an invalid key."""
        name = self.prefix + check_key(key, self.url)
        try:
            length = len(name.encode())
        except UnicodeEncodeError:
            length = -1
        if not 0 <= length <= self.longest_name:
            raise StoreError(
                f"Invalid key {key[:200]!r} for {self.url}",
                expected=f"at most {self.longest_name} bytes, with the folder of the store",
                found=f"{length} bytes" if length > 0 else "characters that UTF-8 does not have",
                key=key,
                store=self.url,
            )
        return name

    @abstractmethod
    def stat(self, key: str) -> Stat: ...

    @abstractmethod
    def open(self, key: str, offset: int, length: int | None, tag: str) -> Reply:
        """Request ``length`` bytes, or the whole object.

        The reply has fewer if the object is shorter. With a ``tag``, a replaced object is an error.
        """

    def create(self, key: str, data: bytes | memoryview) -> bool:
        """Create an object. Return False if it exists."""
        raise NotImplementedError

    @abstractmethod
    def begin(self, key: str, length: int, head: int) -> RemoteUpload | None:
        """Begin an upload, by a request if necessary. None: one ``create`` suffices."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object or an unfinished upload. It may be missing."""

    @abstractmethod
    def page(
        self, folder: str, prefix: str, marker: Any, *, deep: bool, partial: bool
    ) -> tuple[Sequence[Entry], Any]:
        """Return some of what is in a folder, and a marker for the rest, or None at its end.

        ``prefix``: how the names begin; ``marker``: of the page before, or None. ``deep``: also
        what is in the folders below, with a path as the name; ``partial``: unfinished uploads. A
        remote without ``has_conditional_put`` ignores these two, and returns all files of a level.
        """


class RetryStore:
    """A store on a server. ``at(folder)`` and ``within(deadline)`` return views.

    ``remote``: makes the tries; ``timeout``: seconds for which a call is repeated, and which all
    requests of a listing together may take.
    """

    def __init__(self, remote: Remote, timeout: float) -> None:
        self.remote = remote
        self.timeout = timeout
        self.deadline: Deadline | None = None

    def __repr__(self) -> str:
        return f"<store {self.url}>"

    @property
    def traits(self) -> Traits:
        return self.remote.traits

    @property
    def url(self) -> str:
        return self.remote.url

    def statistics(self) -> Statistics:
        """Return the statistics of all requests of this process to the server."""
        return self.remote.server.throttle.statistics()

    def at(self, folder: str) -> Self:
        """Return a store for the keys below ``folder``."""
        view = copy(self)
        view.remote = copy(self.remote)
        view.remote.prefix += check_key(folder, self.url) + "/"
        return view

    def within(self, deadline: Deadline) -> Self:
        """Return a view whose calls end by ``deadline``."""
        view = copy(self)
        view.deadline = deadline.earlier(self.deadline)
        return view

    def _for_cleanup(self) -> Self:
        """Return a view whose calls end within ``CLEANUP_SECONDS`` of the deadline."""
        view = copy(self)
        view.deadline = None if self.deadline is None else self.deadline.for_cleanup()
        return view

    def repeat(self, action: str, key: str, request: Callable[[Any], T], nbytes: int = 0) -> T:
        """Return what ``request(remote)`` returns. Repeat it while the server is unavailable.

        ``action``: "read", for messages; ``nbytes``: the bytes that are sent. Raises
        ``StoreError``, at the latest at the deadline.
        """
        remote = copy(self.remote)
        remote.deadline = self._deadline(action, key, nbytes)
        return remote.server.throttle.call(
            f"{action} {key}", remote.deadline, lambda: request(remote)
        )

    def _deadline(self, action: str, key: str, nbytes: int = 0) -> Deadline:
        """Return the deadline of a call that transfers bytes."""
        seconds = self.timeout + nbytes / LEAST_RATE
        purpose = f"at most {seconds:.3g} s to {action} {key}"
        return Deadline.after(seconds, purpose).earlier(self.deadline)

    # -- reading -------------------------------------------------------------------------------

    def stat(self, key: str) -> Stat:
        self.remote.object_name(key)
        found: Stat = self.repeat("look up", key, lambda remote: remote.stat(key))
        return found

    def get(self, key: str, limit: int) -> bytes:
        self.remote.object_name(key)
        arrived: set[bytes] = set()

        def read(remote: Remote) -> bytes:
            reply = remote.open(key, 0, None, "")
            try:
                if reply.length > limit:
                    raise too_long_error(key, self.url, limit, reply.length)
                data = bytearray(reply.length)
                end = remote.deadline.at + reply.length / LEAST_RATE
                deadline = replace(remote.deadline, at=end).earlier(self.deadline)
                for _ in reply.read_into(memoryview(data), deadline):
                    pass
            finally:
                reply.close()
            self._compare_md5(key, bytes(data), reply.md5, arrived)
            return bytes(data)

        return self.repeat("read", key, read)

    def _compare_md5(self, key: str, data: bytes, expected: str, arrived: set[bytes]) -> None:
        """Raise ``Unavailable`` if the bytes have changed on their way. The same bytes twice have
        not: then, the server's tag only looks like their MD5."""
        import hashlib

        if not expected or hashlib.md5(data, usedforsecurity=False).hexdigest() == expected:
            return
        if data not in arrived:
            arrived.add(data)
            raise Unavailable(
                f"{key} changed on its way from {self.url}",
                expected=f"the MD5 {expected}",
                key=key,
                store=self.url,
            )

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        view = as_byte_view(into)
        check_range(key, self.url, offset, length, len(view))
        if not length:
            self.stat(key)
            return
        with self.open_range(key, offset, length) as reader:
            reader.read_into(view[:length])

    def open_range(self, key: str, offset: int, length: int) -> RangeReader:
        """Return a reader of a range. It sends no request yet."""
        check_range(key, self.url, offset, length, length)
        self.remote.object_name(key)
        return _Reader(self, key, offset, length)

    def list(self, prefix: str) -> Iterator[Stat]:
        return copy(self)._list(prefix, partial=False)

    def partials(self, prefix: str) -> Iterator[Stat]:
        # the unfinished uploads of object stores are listed by the names of their objects
        return iter(sorted(copy(self)._list(prefix, partial=True), key=lambda stat: stat.key))

    def list_level(self, folder: str, prefix: str = "") -> Iterator[Entry]:
        """See the function."""
        if "/" not in prefix:
            yield from copy(self)._entries(folder, prefix, deep=False, partial=False)

    @contextmanager
    def _listing(self) -> Iterator[None]:
        """Take the time of the block, but not of what is done with an entry, from the timeout."""
        if self.timeout <= 0:
            raise Unavailable(
                f"Listing {self.url} takes longer than its timeout",
                todo="Check the server; for a folder that large, open the store with timeout=",
                store=self.url,
            )
        began = time.monotonic()
        yield
        self.timeout -= time.monotonic() - began

    def _list(self, folder: str, *, partial: bool) -> Iterator[Stat]:
        deep = self.remote.has_conditional_put
        entries = self._entries(folder, "", deep=deep, partial=partial)
        if not deep:  # a folder sorts as "name/", so that the keys are in order
            entries = iter(sorted(entries, key=lambda e: e.name + "/" * (e.kind == "folder")))
        for entry in entries:
            key = f"{folder}/{entry.name}" if folder else entry.name
            if entry.kind == "folder":
                yield from self._list(key, partial=partial)
            else:
                if (stat := entry.stat) is None:
                    with suppress(NotFound), self._listing():  # deleted, or a link to a folder
                        stat = self.stat(key)
                if stat is not None:
                    yield stat

    def _entries(self, folder: str, prefix: str, *, deep: bool, partial: bool) -> Iterator[Entry]:
        """Yield what is in a folder, page by page. Nothing, if it does not exist."""
        if folder:
            self.remote.object_name(folder)
        marker: Any = None
        while True:

            def read(remote: Remote, marker: Any = marker) -> tuple[Sequence[Entry], Any]:
                return remote.page(folder, prefix, marker, deep=deep, partial=partial)

            try:
                with self._listing():
                    entries, marker = self.repeat("list", folder or ".", read)
            except NotFound:
                return
            for entry in entries:
                name = entry.name.rpartition("/")[2]
                if entry.name.startswith(prefix) and (
                    entry.kind == "folder" or is_partial(name) == partial
                ):
                    yield entry
            if marker is None:
                return
            if self.deadline is not None:
                self.deadline.check()

    # -- writing -------------------------------------------------------------------------------

    def put(self, key: str, length: int, head: int = 0) -> Upload:
        refuse_partial(key, self.url)
        self.remote.object_name(key)
        if length < 0:
            raise StoreError(f"Cannot write an object of {length} bytes", key=key, store=self.url)
        traits, url = self.traits, self.url
        upload = self.repeat("write", key, lambda remote: remote.begin(key, length, head))
        if upload is None:
            return BufferedUpload(url, key, length, partial(self._create_once, key))
        target = _Upload(self, key, length, upload)
        if traits.ordered:
            return SequentialUpload(url, key, length, target)
        part = part_length(traits, length)
        return PartUpload(url, key, length, head=head, part=part, target=target)

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        refuse_partial(key, self.url)
        self.remote.object_name(key)
        store, data = self.within(self._deadline("write", key, len(data))), bytes(data)
        if not self.remote.has_conditional_put:
            return store._upload_if_absent(key, data)
        store._create(key, data, accept_equal=True)
        server = self.remote.server
        if self.remote.root not in server.conditional:
            store._require_conditional_put(key, data)
            server.conditional.add(self.remote.root)
        return store._require_stat(key, len(data))

    def _upload_if_absent(self, key: str, data: bytes) -> Stat:
        try:
            with self.put(key, len(data)) as upload:
                upload.write_at(0, memoryview(data))
                stat = upload.commit()
            if self.traits.atomic:
                return stat
            error: StoreError = exists_error(key, self.url)  # if another writer replaces it
        except StoreError as e:
            if not e.is_outcome_unknown and not isinstance(e, AlreadyExists):
                raise
            error = e
        return self._require_equal(key, data, error)

    def _create_once(self, key: str, data: memoryview) -> Stat:
        store = self.within(self._deadline("write", key, len(data)))
        store._create(key, data, accept_equal=False)
        return store._require_stat(key, len(data))

    def _create(self, key: str, data: bytes | memoryview, *, accept_equal: bool) -> None:
        """Create an object with one conditional PUT. After a lost reply, or with ``accept_equal``,
        an object with exactly these bytes is accepted; otherwise ``AlreadyExists``."""
        may_be_own = accept_equal

        def put(remote: Remote) -> bool:
            nonlocal may_be_own
            try:
                return remote.create(key, data)
            except StoreError as e:
                may_be_own |= e.is_outcome_unknown
                raise

        if self.repeat("write", key, put, len(data)):
            return
        self.remote.server.conditional.add(self.remote.root)
        error = exists_error(key, self.url)
        if not may_be_own:
            raise error
        self._require_equal(key, data, error)

    def _require_conditional_put(self, key: str, data: bytes) -> None:
        """Check that the server does not replace an object of this process, by the same PUT, which
        must fail: otherwise two writers could both commit."""
        with _outcome_unknown():
            if self.repeat("write", key, lambda remote: remote.create(key, data)):
                raise StoreError(
                    f"{self.url} cannot hold a run: its server replaces objects",
                    expected="a server that refuses to create an object that exists",
                    found="one that ignores the condition, so that two writers could both commit",
                    todo="Use another server, with conditional writes, such as AWS, Ceph, MinIO, or"
                    " R2. Ceph ignores the condition in a bucket with versioning: use one without",
                    key=key,
                    store=self.url,
                )

    def _require_stat(self, key: str, length: int) -> Stat:
        """Return the status of a new object; ``StoreError`` if the server shows another length."""
        with _outcome_unknown():
            stat = self.stat(key)
            check_written_length(key, self.url, length, stat.length)
            return stat

    def _require_equal(self, key: str, data: bytes | memoryview, error: StoreError) -> Stat:
        """Return the status of an object with exactly these bytes. Otherwise raise ``error``, that
        of its creation, after which it exists or the outcome is unknown."""
        is_there = isinstance(error, AlreadyExists)
        try:
            with _outcome_unknown():
                stat = self.stat(key)
                if stat.length == len(data) and self.get(key, len(data)) == data:
                    return stat
        except StoreError as e:
            if is_there and isinstance(e, NotFound):
                raise Unavailable(
                    f"{key} in {self.url} was created and deleted by another process",
                    todo="Try again",
                    key=key,
                    store=self.url,
                ) from e
            if is_there:
                raise
        raise error

    def delete(self, key: str) -> None:
        self.remote.object_name(key)
        with suppress(NotFound):
            self._for_cleanup().repeat("delete", key, lambda remote: remote.delete(key))


class _Reader(RangeReader):
    """The bytes of a range, requested by the first ``read_into``. Between calls, the reply waits in
    the connection, and is no request in progress: whoever uses the bytes may send requests."""

    def __init__(self, store: RetryStore, key: str, offset: int, length: int) -> None:
        self._store, self._key = store, key
        self._offset, self._length = offset, length
        self._done = 0
        self._reply: Reply | None = None
        self._tag = ""  # a replaced object is an error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.close()

    def read_into(self, view: memoryview) -> None:
        view, start = as_byte_view(view), self._done
        if start + len(view) > self._length:
            raise self._too_short(self._length)

        def read(remote: Remote) -> None:
            enough = self._done + self._store.timeout * LEAST_RATE  # for another deadline
            try:
                reply = self._reply or self._open(remote)
                for count in reply.read_into(view[self._done - start :], remote.deadline):
                    self._done += count
                    if self._done >= enough:
                        return
            except BaseException:
                self.__exit__()  # the next try goes on behind the bytes that have arrived
                raise

        while self._done < start + len(view):
            self._store.repeat("read", self._key, read)

    def _open(self, remote: Remote) -> Reply:
        """Request what has not arrived."""
        offset, length = self._offset + self._done, self._length - self._done
        self._reply = reply = remote.open(self._key, offset, length, self._tag)
        if reply.length != length:
            raise self._too_short(self._done + reply.length)
        self._tag = reply.tag or self._tag
        return reply

    def _too_short(self, found: int) -> StoreError:
        return short_read_error(self._key, self._store.url, self._offset, self._length, found)


@dataclass
class _Upload(Upload):
    """Repeats the tries of an upload: to write one part or the next bytes, and to commit."""

    store: RetryStore
    key: str
    length: int
    upload: RemoteUpload
    is_ended: bool = False

    def write_at(self, offset: int, *data: memoryview) -> None:
        nbytes = sum(map(len, data))
        self.store.repeat("write", self.key, lambda r: self.upload.write(r, offset, data), nbytes)

    def commit(self) -> Stat:
        store = self.store.within(self.store._deadline("complete", self.key))
        store.repeat("complete", self.key, self.upload.commit)
        self.is_ended = True
        return store._require_stat(self.key, self.length)

    def abort(self) -> None:
        if not self.is_ended:
            self.is_ended = True
            if self.store.traits.hidden_uploads:  # no request: the throttle would take it for an
                self.upload.abort(self.store.remote)  # answer of the server, and wait for it anew
                return
            deadline = Deadline.after(CLEANUP_SECONDS, f"{CLEANUP_SECONDS:g} s to abort an upload")
            with suppress(StoreError):  # the error of the upload counts; ``sweep`` finds the rest
                store = self.store._for_cleanup().within(deadline)
                store.repeat("abort the upload of", self.key, self.upload.abort)


@contextmanager
def _outcome_unknown() -> Iterator[None]:
    """Add to an error of the block that the object may have been created."""
    try:
        yield
    except StoreError as e:
        raise e.with_advice(outcome="unknown") from e
