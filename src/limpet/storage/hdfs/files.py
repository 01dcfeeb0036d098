"""The calls to HDFS for the files of one folder: status, reads, and deletions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from limpet.buffers import as_byte_view
from limpet.deadline import CLEANUP_SECONDS, Deadline
from limpet.errors import NotFound, StoreError
from limpet.storage.checks import check_range, short_read_error, too_long_error
from limpet.storage.hdfs.connection import (
    LONGEST_CALL,
    Connection,
    HdfsOptions,
    shared_connection,
)
from limpet.storage.hdfs.failures import translate
from limpet.storage.remote import RemoteStore
from limpet.storage.store import Stat, Traits
from limpet.storage.throttle import Statistics
from limpet.types import BLOCK_SIZE, MIB

T = TypeVar("T")


class HdfsFiles(RemoteStore):
    """What ``HdfsStore`` and its uploads share."""

    _longest_name = 8000  # the NameNode counts characters

    def __init__(self, server: str, folder: str, options: HdfsOptions) -> None:
        super().__init__(server, folder.strip("/"), options.timeout)
        self.server = server
        self.options = options
        self._root = self.folder
        shared_connection(server, options)  # raises if hdfs-native is missing

    def statistics(self) -> Statistics:
        """Return the statistics of all calls of this process with these options."""
        return self.connection.throttle.statistics()

    @property
    def connection(self) -> Connection:
        return shared_connection(self.server, self.options)

    @property
    def traits(self) -> Traits:
        return Traits(
            "hdfs",
            1,
            durable=not self.options.allow_weak,
            ordered=True,
            upload_memory=40 * MIB,  # of HdfsAppender and of hdfs-native
        )

    @property
    def folder(self) -> str:
        """The absolute path of the folder; "" for the root."""
        return f"/{self.prefix}"[:-1]

    def path(self, key: str) -> str:
        """Return the absolute path of a key. Raises ``StoreError`` for an invalid key."""
        return f"/{self.object_name(key)}"

    def get(self, key: str, limit: int) -> bytes:
        # with a reader of its own: another file may have taken the name since the last one was made
        path = self.path(key)
        reader = self.call("open", "read", key, lambda client: client.read(path))
        length = len(reader)
        if length > limit:
            raise too_long_error(key, self.url, limit, length)

        def read(start: int) -> bytes:
            size = min(BLOCK_SIZE, length - start)
            return self.call("read", "read", key, lambda _: bytes(reader.read_range(start, size)))

        return b"".join(map(read, range(0, length, BLOCK_SIZE)))

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        into = as_byte_view(into)
        check_range(key, self.url, offset, length, len(into))
        path = self.path(key)
        if not length:
            self.stat(key)
        for start in range(0, length, BLOCK_SIZE):
            size = min(BLOCK_SIZE, length - start)
            into[start : start + size] = self._read(path, key, offset + start, size)

    def _read(self, path: str, key: str, offset: int, length: int) -> bytes:
        def read(client: Any) -> Any:
            return self.connection.readers.read(client, path, offset, length)

        data, file_length = self.call("read", "read", key, read)
        if data is None:
            raise short_read_error(key, self.url, offset, length, max(0, file_length - offset))
        return bytes(data)

    def stat(self, key: str) -> Stat:
        status = self.look_up(self.path(key), key)
        if status is None or status.isdir:
            raise NotFound(f"There is no {key} in {self.url}", key=key, store=self.url)
        return to_stat(key, status)

    def look_up(self, path: str, key: str) -> Any:
        """Return the status of a file or folder as hdfs-native has it; None if there is none."""
        try:
            return self.call(
                "get_file_info", "look up", key, lambda client: client.get_file_info(path)
            )
        except NotFound:
            return None

    def delete_file(self, path: str, key: str) -> None:
        """Delete a file if it exists, and then the folders that are empty.

        An error of a folder is of no importance: the file is deleted.
        """
        if self.call("delete", "delete", key, lambda c: c.delete(path, recursive=False)):
            with suppress(StoreError):
                cleanup = Deadline.after(CLEANUP_SECONDS, f"the cleanup of {key}")
                self.within(cleanup)._delete_empty_folders(path.rpartition("/")[0], key)

    def _delete_empty_folders(self, path: str, key: str) -> None:
        """Delete a folder and those above it, up to the first one that is not empty.

        The NameNode has no request that deletes only a folder: one for an empty folder also deletes
        a file of that name. So each path must be that of a folder.
        """
        if len(path) <= len(self._root):
            return
        status = self.look_up(path, key)
        if status is not None and status.isdir:
            self.call("delete", "delete", key, lambda c: c.delete(path, recursive=False))
            self._delete_empty_folders(path.rpartition("/")[0], key)

    def refuse_folder(self, key: str) -> None:
        """Raise ``StoreError`` if a folder has the name of an object: it is in the way for ever."""
        status = self.look_up(self.path(key), key)
        if status is not None and status.isdir:
            raise StoreError(
                f"Cannot create {key} in {self.url}: a folder has this name",
                todo="Move the folder away, then try again. Nothing was changed",
                key=key,
                store=self.url,
            )

    # -- calls ---------------------------------------------------------------------------------

    def call(self, operation: str, action: str, key: str, request: Callable[[Any], T]) -> T:
        """Return what ``request(client)`` returns. Repeat it while HDFS is unavailable.

        Raises ``StoreError``.
        """
        deadline = self.deadline_for(action, key)

        def attempt() -> T:
            limit = Deadline.after(LONGEST_CALL, deadline.purpose).earlier(deadline)
            return self.call_once(action, key, request, limit)

        return self.connection.throttle.call(operation, deadline, attempt)

    def call_once(
        self, action: str, key: str, request: Callable[[Any], T], limit: Deadline | None = None
    ) -> T:
        """Return what ``request(client)`` returns. It is a step that cannot be repeated alone.

        ``limit``: when it is abandoned, instead of at the deadline. Raises ``StoreError``.
        """
        deadline = self.deadline_for(action, key).earlier(limit)
        try:
            return self.connection.call(request, deadline)
        except StoreError:
            raise
        except Exception as e:
            raise translate(e, action, key, self.url) from e


def to_stat(key: str, status: Any) -> Stat:
    return Stat(key, status.length, status.modification_time / 1000)
