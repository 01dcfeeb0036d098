"""Writes a file of HDFS under a temporary name, makes it durable, and renames it.

That a file exists proves nothing: a file whose writer died is visible, with the length that it had
last, and can be renamed. So the length is compared before the rename, which replaces nothing.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from limpet.deadline import CLEANUP_SECONDS, Deadline
from limpet.errors import AlreadyExists, NotFound, StoreError, Unavailable
from limpet.storage.checks import check_written_length, weak_store_error
from limpet.storage.hdfs.closing import close_file
from limpet.storage.hdfs.connection import LONGEST_CALL
from limpet.storage.hdfs.files import HdfsFiles
from limpet.storage.remote import outcome_unknown
from limpet.storage.store import Stat
from limpet.types import BLOCK_SIZE, MIB

_PROMISE = "a file whose bytes are on disk when its upload is committed (hsync)"

_IN_FLIGHT = 16 * MIB
"""A little more than what hdfs-native accepts before a DataNode confirms it, in bytes."""

_RECOVERY_PAUSES = (1, 2, 4, 8, 16, 24, 0)
"""Seconds after each question whether the NameNode has closed a file. Less than a heartbeat of the
DataNodes (3 s by default) may be too short for them to do it."""

_FIRST_LIMIT = 10.0
"""Seconds after which a step of a write is abandoned, and the bytes are written in another way.
When a DataNode is gone that is not the first one of a new block, hdfs-native waits for ever."""


class HdfsAppender:
    """A large file that is being written under a temporary name, and then renamed to its key.

    Each call of hdfs-native is a step of its own, so nothing follows one that was abandoned.
    """

    def __init__(self, store: HdfsFiles, key: str, length: int) -> None:
        self._store, self._key, self._length = store, key, length
        self._files = _TemporaryFiles(store, key)
        self._limits = _Limits()
        self._path = ""
        self._writer: Any = None
        self._position = 0
        self._tail: deque[bytes] = deque()  # the last bytes, which no DataNode may have yet

    def append(self, data: memoryview) -> None:
        block = bytes(data)  # hdfs-native copies other buffers one element at a time
        self._require_file()
        writer = self._writer
        try:
            self._call_once("write", lambda _: writer.write(block))
        except Unavailable:
            self._go_on(block)
        self._position += len(block)
        self._tail.append(block)
        while sum(map(len, self._tail)) - len(self._tail[0]) >= _IN_FLIGHT:
            self._tail.popleft()

    def commit(self) -> Stat:
        store, key = self._store, self._key
        self._require_file()
        writer = self._writer
        try:
            if self._length:
                try:
                    self._call_once("write", lambda _: _sync(store, key, writer))
                except Unavailable:
                    self._go_on(b"")
            self._close()
        except NotFound as e:
            raise _deleted_error(store, key) from e
        return _rename(self._files, self._path, self._length, store.look_up(self._path, key))

    def abort(self) -> None:
        self._writer = None
        self._files.delete()

    def _require_file(self) -> None:
        if self._writer is None:
            create = self._files.create
            self._path, self._writer = self._store.call("create", "write", self._key, create)

    def _close(self) -> None:
        path, writer = self._path, self._writer
        try:
            self._call_once("close", lambda c: close_file(c, path, writer))
        except Unavailable:
            deadline = self._store.deadline_for("close", self._key)
            recover = partial(_recover_lease, self._store, self._key, path, deadline)
            self._store.connection.throttle.call("recover_lease", deadline, recover)

    def _go_on(self, data: bytes) -> None:
        """Write ``data``, of which DataNodes may have a part, after an error of the writer.

        The client replaces a DataNode that fails within a block, but not one that is gone when it
        begins a block. Then, the file is closed with the bytes that the DataNodes have, and opened
        again. If all bytes are known, they go to a new file instead, which takes less time. In
        either case, they are synced, because a failure may appear only then.

        A sync has an effect only on a block that gets bytes. If the last block gets no more of
        them, and its DataNodes may have them only in memory, the file is copied.
        """
        store, key = self._store, self._key
        deadline = store.deadline_for("write", key)
        rest = b"".join([*self._tail, data])
        begin = self._position + len(data) - len(rest)

        def write_rest() -> tuple[str, Any]:
            path, missing, goes_on = self._path, rest, False
            if begin:
                found = self._recover(path, begin, rest, deadline)
                goes_on = found.length < begin + len(rest) and found.length % found.blocksize > 0
            with self._limits.step(deadline) as limit:
                if goes_on:
                    missing = rest[found.length - begin :]
                    writer = store.call_once("write", key, lambda c: _append(c, path, limit), limit)
                else:
                    path, writer = store.call_once("write", key, self._files.create, limit)
            if not goes_on:
                self._copy(self._path, begin, writer, deadline)
            with self._limits.step(deadline) as limit:
                store.call_once("write", key, lambda _: _write(store, key, writer, missing), limit)
            return path, writer

        self._path, self._writer = store.connection.throttle.call("append", deadline, write_rest)

    def _copy(self, source: str, length: int, writer: Any, deadline: Deadline) -> None:
        """Write the first bytes of a closed file to another one."""
        store, key = self._store, self._key
        for start in range(0, length, BLOCK_SIZE):

            def copy(client: Any, start: int = start) -> None:
                size = min(BLOCK_SIZE, length - start)
                writer.write(bytes(client.read(source).read_range(start, size)))

            with self._limits.step(deadline) as limit:
                store.call_once("write", key, copy, limit)

    def _recover(self, path: str, begin: int, rest: bytes, deadline: Deadline) -> Any:
        """Let the NameNode close a file, and return its status. ``rest`` has what it lacks.

        ``begin``: where ``rest`` begins in the file. Raises ``StoreError``.
        """
        store, key = self._store, self._key
        _recover_lease(store, key, path, deadline)
        found = store.call_once("look up", key, lambda c: c.get_file_info(path), deadline)
        length = found.length
        if not begin <= length <= begin + len(rest):
            raise StoreError(
                f"{store.url} has lost bytes of {key} with the DataNodes that had them",
                expected=f"{begin} to {begin + len(rest)} bytes",
                found=f"{length} bytes",
                todo="Save again; more copies of each block (replication=) make this rare",
                key=key,
                store=store.url,
            )
        return found

    def _call_once(self, action: str, request: Callable[[Any], object]) -> None:
        with self._limits.step(self._store.deadline_for(action, self._key)) as limit:
            self._store.call_once(action, self._key, request, limit)


def put_small(store: HdfsFiles, key: str, data: bytes) -> Stat:
    """Create a small file. All steps are repeated together while HDFS is unavailable.

    Raises ``AlreadyExists`` and other kinds of ``StoreError``.
    """
    files = _TemporaryFiles(store, key)
    deadline = store.deadline_for("write", key)
    limits = _Limits()

    def write() -> tuple[str, Any]:
        with limits.step(deadline) as limit:
            path, writer = store.call_once("write", key, files.create, limit)
            store.call_once("write", key, lambda _: _write(store, key, writer, data), limit)
            store.call_once("close", key, lambda c: close_file(c, path, writer), limit)
            return path, store.call_once("look up", key, lambda c: c.get_file_info(path), limit)

    try:
        try:
            path, status = store.connection.throttle.call("create", deadline, write)
        except NotFound as e:
            raise _deleted_error(store, key) from e
        return _rename(files, path, len(data), status)
    finally:
        files.delete()


class _Limits:
    """The times at which the steps of one write are abandoned: early enough for a few more tries.

    After a step that took too long, the next ones get more time: HDFS may be slow.
    """

    def __init__(self) -> None:
        self._seconds = _FIRST_LIMIT

    @contextmanager
    def step(self, deadline: Deadline) -> Iterator[Deadline]:
        seconds = min(self._seconds, max(1.0, deadline.seconds_left / 4))
        limit = Deadline.after(seconds, deadline.purpose).earlier(deadline)
        try:
            yield limit
        except Unavailable:
            if not limit.seconds_left:
                self._seconds = min(1.5 * self._seconds, LONGEST_CALL)
            raise


class _TemporaryFiles:
    """The files under temporary names that a process has created for a key.

    ``paths`` are those that may exist. There is a new one for each try to create one, because an
    earlier try, whose reply was lost, may have had its effect.
    """

    def __init__(self, store: HdfsFiles, key: str) -> None:
        self.store, self.key = store, key
        self.paths: list[str] = []

    def create(self, client: Any) -> tuple[str, Any]:
        """Create a file. Return its path and its writer. Raises the errors of hdfs-native."""
        from hdfs_native import WriteOptions

        folder, _, name = self.store.path(self.key).rpartition("/")
        path = f"{folder}/.{name[:48]}.{secrets.token_hex(8)}.partial"
        self.paths.append(path)
        options = self.store.options
        return path, client.create(
            path,
            WriteOptions(
                block_size=options.block_size, replication=options.replication, create_parent=True
            ),
        )

    def delete(self) -> None:
        """Delete the files, which also ends their leases. ``sweep`` deletes those that remain."""
        deadline = Deadline.after(CLEANUP_SECONDS, f"the cleanup of {self.key}")
        store = self.store.for_cleanup().within(deadline)
        for path in self.paths:
            with suppress(StoreError):  # the error of the upload counts
                store.delete_file(path, self.key)
        self.paths = []


def _write(store: HdfsFiles, key: str, writer: Any, data: bytes) -> None:
    """Write bytes and make them durable, as ``_sync`` does."""
    if data:
        writer.write(data)
        _sync(store, key, writer)


def _append(client: Any, path: str, limit: Deadline) -> Any:
    """Open a closed file again, and return its writer. Raises the errors of hdfs-native."""
    writer = client.append(path)
    if not limit.seconds_left:
        writer.close()  # this call was abandoned, and nobody else would end the lease
    return writer


def _sync(store: HdfsFiles, key: str, writer: Any) -> None:
    """Make all bytes durable; the client has done that for each completed block.

    Raises ``StoreError`` if HDFS cannot do it, and the errors of hdfs-native.
    """
    found = "an hdfs-native without it: install 0.14.7 or a later version"
    if hasattr(writer, "hsync"):
        try:
            writer.hsync()
            return
        except NotImplementedError:
            found = "a file without it, such as one in an erasure-coded folder"
    if not store.options.allow_weak:
        raise weak_store_error(key, store.url, _PROMISE, found)


def _recover_lease(store: HdfsFiles, key: str, path: str, deadline: Deadline) -> None:
    """Let the NameNode close a file with the bytes that the DataNodes have.

    Raises ``Unavailable`` if it does not in time, and other kinds of ``StoreError``. Each question
    whether the file is closed makes the DataNodes begin anew, so the pauses grow.
    """
    for pause in _RECOVERY_PAUSES:
        limit = Deadline.after(LONGEST_CALL, deadline.purpose).earlier(deadline)
        if store.call_once("close", key, lambda client: client.recover_lease(path), limit):
            return
        time.sleep(min(pause, deadline.seconds_left))
    raise Unavailable(
        f"Cannot close {key} in {store.url}: the NameNode does not get its last block",
        todo="Check that the DataNodes run that have it",
        key=key,
        store=store.url,
    )


def _rename(files: _TemporaryFiles, path: str, length: int, status: Any) -> Stat:
    """Rename one of the files to its key, delete the others, and return the status.

    ``status``: what the NameNode says about the file. A rename keeps the time of its last change.
    Raises ``AlreadyExists``.
    """
    store, key = files.store, files.key
    if status is None:
        raise _deleted_error(store, key)
    check_written_length(key, store.url, length, status.length)
    target = store.path(key)
    try:
        store.call("rename", "commit", key, lambda c: c.rename(path, target, overwrite=False))
    except NotFound as e:  # an earlier try has renamed it, or ``sweep`` has deleted it
        with outcome_unknown():
            found = store.look_up(target, key)
        if found is None or (found.length, found.modification_time) != (
            status.length,
            status.modification_time,
        ):
            raise _deleted_error(store, key) from e
    except AlreadyExists:
        store.refuse_folder(key)
        raise
    files.paths.remove(path)
    files.delete()
    return Stat(key, status.length, status.modification_time / 1000)


def _deleted_error(store: HdfsFiles, key: str) -> StoreError:
    return StoreError(
        f"The upload of {key} to {store.url} was deleted before its commit",
        todo="Raise the minimum age of `limpet sweep`, then save again",
        key=key,
        store=store.url,
    )
