"""Writes one file to a ``LocalStore``."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Lock
from typing import TypeVar

from limpet.buffers import address_of, as_byte_view, direct_io_length
from limpet.errors import StoreError
from limpet.storage.checks import check_written_length, refuse_partial
from limpet.storage.local.files import LocalFiles
from limpet.storage.local.os_calls import INVALID_OR_UNSUPPORTED, O_DIRECT, UNSUPPORTED
from limpet.storage.store import Stat, Upload
from limpet.storage.uploads import WrittenRanges
from limpet.types import ALIGNMENT

T = TypeVar("T")

_MAX_TRIES = 16
_LINK_UNSUPPORTED = UNSUPPORTED | {errno.EPERM, errno.EMLINK}


class LocalUpload(Upload):
    """A temporary file in the object's folder, until ``commit`` gives it the object's name.

    The upload uses two file descriptors. ``_fd`` uses the page cache, writes the data that is not
    aligned, and is synced. ``_direct_fd`` writes the rest.
    """

    _suffix = "partial"
    _access = os.O_WRONLY

    def __init__(self, files: LocalFiles, key: str, length: int, *, direct: bool) -> None:
        self._files = files
        self._fs = files.fs
        self._key = key
        self._written = WrittenRanges(key, files.url, length)
        self._length = length
        self._path = files.path(key, to_change=True)
        self._folder, name = os.path.split(self._path)
        refuse_partial(key, files.url)
        self._temp_path = f"{self._folder}/.{name[:48]}.{secrets.token_hex(8)}.{self._suffix}"
        self._lock = Lock()
        self._closed = False  # for new calls; active calls may still use the descriptors
        self._active_calls = 0
        self._descriptors = ExitStack()
        self._direct_fd: int | None = None
        with files.translate_errors("create", key, writing=True):
            try:
                self._fd = self._create()
                self._descriptors.callback(self._fs.close, self._fd)
                self._inode = self._fs.fstat(self._fd).inode
                if length:
                    self._reserve(length)
                if direct and length >= ALIGNMENT:
                    self._open_direct()
            except BaseException:
                self.abort()
                raise

    def write_at(self, offset: int, *data: memoryview) -> None:
        for view in map(as_byte_view, data):
            with self._using_descriptors("write"), self._written.adding(offset, len(view)):
                done = 0
                while done < len(view):
                    count = self._write(offset + done, view[done:])
                    if count <= 0:
                        raise OSError(errno.EIO, "a write transferred no bytes")
                    done += count
            offset += len(view)

    def commit(self, *, accept_existing: bytes | None = None) -> Stat:
        """Commit as specified in the ``Upload`` protocol.

        ``accept_existing``: succeed if an object with exactly these bytes already exists.
        """
        with self._using_descriptors("commit", last=True):
            try:
                self._written.require_complete()
                modified = self._sync()
                self._publish(accept_existing)
            except BaseException:
                self._remove_temp()
                raise
        with suppress(OSError):  # the object is complete; sweep removes its second name
            self._fs.unlink(self._temp_path)
        try:
            self._files.sync_folders(self._folder)
        except OSError as error:
            # The object may not be durable, and its removal may not be durable either.
            raise self._unknown_outcome("syncing its folder failed", error) from error
        return Stat(self._key, self._length, modified)

    def abort(self) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
            idle = not self._active_calls
        if idle:
            with suppress(OSError):  # the upload has failed, or its data is already synced
                self._descriptors.close()
        if first:
            self._remove_temp()

    @contextmanager
    def _using_descriptors(self, action: str, *, last: bool = False) -> Iterator[None]:
        """Keep the descriptors open while a thread uses them.

        A descriptor that is closed too early may already refer to another file. ``last``: no other
        call may be active now or begin later.
        """
        with self._lock:
            if self._closed or (last and self._active_calls):
                active = f"active writes: {self._active_calls}"
                raise StoreError(
                    f"Cannot {action} {self._key}: its upload is finished or in use",
                    expected="an upload that is not committed or aborted, without active writes",
                    found="a finished upload" if self._closed else active,
                    key=self._key,
                    store=self._files.url,
                )
            self._closed = last
            self._active_calls += 1
        try:
            with self._files.translate_errors(action, self._key, writing=True):
                yield
        finally:
            with self._lock:
                self._active_calls -= 1
                idle = self._closed and not self._active_calls
            if idle:
                with suppress(OSError):  # see ``abort``
                    self._descriptors.close()

    def _create(self) -> int:
        """Create the temporary file, and return its descriptor."""
        flags = self._access | os.O_CREAT | os.O_EXCL
        return self._in_folder(lambda: self._fs.open(self._temp_path, flags))

    def _reserve(self, length: int) -> None:
        """Allocate the space of the temporary file, if the file system can."""
        self._fs.fallocate(self._fd, length)

    def _in_folder(self, make: Callable[[], T]) -> T:
        """Return the result of ``make``, which creates a name in the folder of the object."""
        for _ in range(_MAX_TRIES):
            with suppress(FileNotFoundError):  # a delete removed the empty folder
                try:
                    self._files.make_folders(self._folder)
                    return make()
                except (FileNotFoundError, NotADirectoryError):
                    self._files.refuse_obstacle(self._key, self._folder, "folder")
                    raise
        raise FileNotFoundError(errno.ENOENT, "its folder was removed repeatedly")

    def _open_direct(self) -> None:
        try:
            self._direct_fd = self._fs.open(self._temp_path, os.O_WRONLY | O_DIRECT)
            self._descriptors.callback(self._fs.close, self._direct_fd)
        except OSError as error:
            if error.errno not in INVALID_OR_UNSUPPORTED:
                raise

    def _write(self, offset: int, data: memoryview) -> int:
        """Write the beginning of the data, and return the number of bytes written."""
        direct_fd = self._direct_fd
        if direct_fd is not None:
            span = direct_io_length(offset, address_of(data), len(data), len(data))
            if span:
                try:
                    return self._fs.pwrite(direct_fd, data[:span], offset)
                except OSError as error:
                    if error.errno not in INVALID_OR_UNSUPPORTED:
                        raise
                self._direct_fd = None  # opened, but it cannot write: use the page cache
        return self._fs.pwrite(self._fd, data, offset)

    def _sync(self) -> float:
        """Make the data durable, close the file, and return its modification time.

        A failed fsync is final: the kernel may have dropped the pages, and a second fsync would
        then report success.
        """
        self._fs.fsync(self._fd)
        file_stat = self._fs.fstat(self._fd)
        check_written_length(self._key, self._files.url, self._length, file_stat.size)
        self._descriptors.close()
        return file_stat.modified

    def _publish(self, accept_existing: bytes | None) -> None:
        """Give the file its final name, unless another object has that name."""
        try:
            try:
                self._fs.link(self._temp_path, self._path)
            except OSError as error:
                if error.errno not in _LINK_UNSUPPORTED:
                    raise
                self._rename(error)
        except OSError as error:
            # The client of a network file system may have lost the reply and repeated the call.
            # Therefore the current file decides, not the error.
            if not self._is_published(error) and not (
                error.errno == errno.EEXIST
                and accept_existing is not None
                and self._files.object_equals(self._key, accept_existing)
            ):
                if error.errno == errno.EEXIST:
                    self._files.refuse_obstacle(self._key, self._path, "file")
                raise

    def _rename(self, link_error: OSError) -> None:
        try:
            self._fs.rename_noreplace(self._temp_path, self._path)
        except OSError as error:
            if error.errno not in INVALID_OR_UNSUPPORTED:
                raise
            raise StoreError(
                f"Cannot commit {self._key} to {self._files.url}",
                expected="a file system with hard links or renameat2(RENAME_NOREPLACE)",
                found=f"neither ({link_error.strerror}; {error.strerror})",
                todo="Use another file system: on this one, two writers could both succeed",
                key=self._key,
                store=self._files.url,
            ) from error

    def _is_published(self, error: OSError) -> bool:
        try:
            return self._fs.stat(self._path, follow=False).inode == self._inode
        except FileNotFoundError:
            return False
        except OSError:
            raise self._unknown_outcome("looking up the object failed", error) from error

    def _unknown_outcome(self, why: str, error: OSError) -> StoreError:
        return StoreError(
            f"It is unknown whether {self._key} was committed to {self._files.url}:"
            f" {why}: {error.strerror or error}",
            todo="Check the system log; check for the object once the file system works",
            key=self._key,
            store=self._files.url,
            outcome="unknown",
        )

    def _remove_temp(self) -> None:
        with suppress(OSError):  # sweep removes a file that remains
            self._fs.unlink(self._temp_path)
        self._files.remove_empty_folders(self._folder)
