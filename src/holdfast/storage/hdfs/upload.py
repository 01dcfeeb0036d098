"""Writes a file of HDFS under a temporary name, makes it durable, and renames it.

That a file exists proves nothing: a file whose writer died is visible, with the length that it had
last, and can be renamed. So the length is compared before the rename, which replaces nothing.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from contextlib import suppress
from typing import Any

from holdfast.deadline import CLEANUP_SECONDS, Deadline
from holdfast.errors import AlreadyExists, NotFound, StoreError, Unavailable
from holdfast.storage.checks import check_written_length, weak_store_error
from holdfast.storage.hdfs.closing import close_file
from holdfast.storage.hdfs.files import HdfsFiles
from holdfast.storage.store import Stat
from holdfast.types import MIB

_PROMISE = "a file whose bytes are on disk when its upload is committed (hsync)"

_IN_FLIGHT = 16 * MIB
"""A little more than what hdfs-native accepts before a DataNode confirms it, in bytes."""

_RECOVERY_PAUSES = (1, 2, 4, 8, 16, 24, 0)
"""Seconds after each question whether the NameNode has closed a file. Less than a heartbeat of the
DataNodes (3 s by default) may be too short for them to do it."""


class HdfsAppender:
    """A large file that is being written under a temporary name, and then renamed to its key."""

    def __init__(self, store: HdfsFiles, key: str, length: int) -> None:
        self._store, self._key, self._length = store, key, length
        self._files = _TemporaryFiles(store, key)
        self._writer: Any = None
        self._position = 0
        self._tail: deque[bytes] = deque()  # the last bytes, which no DataNode may have yet

    def append(self, data: memoryview) -> None:
        if self._writer is None:
            self._writer = self._store.call("create", "write", self._key, self._files.create)
        writer = self._writer
        block = bytes(data)  # hdfs-native copies other buffers one element at a time
        try:
            self._store.call_once("write", self._key, lambda client: writer.write(block))
        except Unavailable:
            self._go_on(block)
        self._position += len(block)
        self._tail.append(block)
        while sum(map(len, self._tail)) - len(self._tail[0]) >= _IN_FLIGHT:
            self._tail.popleft()

    def _go_on(self, data: bytes) -> None:
        """Write ``data``, of which DataNodes may have a part, after an error of the writer.

        The client replaces a DataNode that fails within a block, but not one that is gone when it
        begins a block. Then, the file is closed with the bytes that the DataNodes have, and opened
        again.
        """
        store, key, path = self._store, self._key, self._files.paths[-1]
        rest = b"".join([*self._tail, data])
        stop = self._position + len(data)
        begin = stop - len(rest)

        def write_rest(client: Any) -> None:
            _recover_lease(client, path)
            length = client.get_file_info(path).length
            if not begin <= length <= stop:
                raise StoreError(
                    f"{store.url} has lost bytes of {key} with the DataNodes that had them",
                    expected=f"{begin} to {stop} bytes",
                    found=f"{length} bytes",
                    todo="Save again; more copies of each block (replication=) make this rare",
                    key=key,
                    store=store.url,
                )
            self._writer = writer = client.append(path)
            writer.write(rest[length - begin :])

        store.call("append", "write", key, write_rest)

    def commit(self) -> Stat:
        store, key = self._store, self._key
        if self._writer is None:
            self._writer = store.call("create", "write", key, self._files.create)
        writer, path = self._writer, self._files.paths[-1]
        try:
            if self._length:
                store.call_once("write", key, lambda client: _sync(store, key, writer))
            try:
                store.call_once("close", key, lambda client: close_file(client, path, writer))
            except Unavailable:
                store.call("recover_lease", "close", key, lambda c: _recover_lease(c, path))
        except NotFound as e:
            raise _deleted_error(store, key) from e
        return _rename(self._files, self._length, store.look_up(path, key))

    def abort(self) -> None:
        self._writer = None
        self._files.delete()


def put_small(store: HdfsFiles, key: str, data: bytes) -> Stat:
    """Create a small file. All steps are repeated together while HDFS is unavailable.

    Raises ``AlreadyExists`` and other kinds of ``StoreError``.
    """
    files = _TemporaryFiles(store, key)

    def write(client: Any) -> Any:
        writer = files.create(client)
        if data:
            writer.write(data)
            _sync(store, key, writer)
        close_file(client, files.paths[-1], writer)
        return client.get_file_info(files.paths[-1])

    try:
        try:
            status = store.call("create", "write", key, write)
        except NotFound as e:
            raise _deleted_error(store, key) from e
        return _rename(files, len(data), status)
    finally:
        files.delete()


class _TemporaryFiles:
    """The files under temporary names that a process has created for a key.

    ``paths`` are those that may exist. There is a new one for each try to create one, because an
    earlier try, whose reply was lost, may have had its effect.
    """

    def __init__(self, store: HdfsFiles, key: str) -> None:
        self.store, self.key = store, key
        self.paths: list[str] = []

    def create(self, client: Any) -> Any:
        """Create a file, and return its writer. Raises the errors of hdfs-native."""
        from hdfs_native import WriteOptions

        folder, _, name = self.store.path(self.key).rpartition("/")
        self.paths.append(f"{folder}/.{name[:48]}.{secrets.token_hex(8)}.partial")
        options = self.store.options
        return client.create(
            self.paths[-1],
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


def _recover_lease(client: Any, path: str) -> None:
    """Let the NameNode close a file with the bytes that the DataNodes have.

    Raises ``OSError`` if it does not in time, and the errors of hdfs-native. Each question whether
    the file is closed makes the DataNodes begin anew, so the pauses grow.
    """
    for pause in _RECOVERY_PAUSES:
        if client.recover_lease(path):
            return
        time.sleep(pause)
    raise OSError("the NameNode has not closed the file: check that its DataNodes run")


def _rename(files: _TemporaryFiles, length: int, status: Any) -> Stat:
    """Rename the last file to its key, delete the others, and return the status.

    ``status``: what the NameNode says about the file. A rename keeps the time of its last change.
    Raises ``AlreadyExists``.
    """
    store, key, path = files.store, files.key, files.paths[-1]
    if status is None:
        raise _deleted_error(store, key)
    check_written_length(key, store.url, length, status.length)
    target = store.path(key)
    try:
        store.call("rename", "commit", key, lambda c: c.rename(path, target, overwrite=False))
    except NotFound as e:  # an earlier try has renamed it, or ``sweep`` has deleted it
        found = store.look_up(target, key)
        if found is None or (found.length, found.modification_time) != (
            status.length,
            status.modification_time,
        ):
            raise _deleted_error(store, key) from e
    except AlreadyExists:
        store.refuse_folder(key)
        raise
    files.paths.pop()
    files.delete()
    return Stat(key, status.length, status.modification_time / 1000)


def _deleted_error(store: HdfsFiles, key: str) -> StoreError:
    return StoreError(
        f"The upload of {key} to {store.url} was deleted before its commit",
        todo="Raise the minimum age of `holdfast sweep`, then save again",
        key=key,
        store=store.url,
    )
