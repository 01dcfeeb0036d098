"""One file on its way into a ``LocalStore``."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock

from holdfast.buffers import address_of, as_byte_view, direct_io_length
from holdfast.errors import NotFound, StoreError
from holdfast.storage.checks import WrittenRanges
from holdfast.storage.local_files import LocalFiles
from holdfast.storage.os_calls import UNSUPPORTED
from holdfast.storage.store import Stat
from holdfast.types import ALIGNMENT

_MAX_TRIES = 16
_LINK_UNSUPPORTED = UNSUPPORTED | {errno.EPERM, errno.EMLINK}
_RENAME_UNSUPPORTED = UNSUPPORTED | {errno.EINVAL}
_DIRECT_UNSUPPORTED = UNSUPPORTED | {errno.EINVAL}


def is_partial(name: str) -> bool:
    """Whether a file of that name is an unfinished upload."""
    return name.startswith(".") and name.endswith(".partial")


class LocalUpload:
    """A temporary file in the object's own folder, until ``commit`` gives it the object's name.

    Two descriptors: ``_fd`` goes through the page cache, takes what is not aligned, and is the
    one that is synced; ``_direct_fd`` takes the rest.
    """

    def __init__(self, files: LocalFiles, key: str, length: int, *, direct: bool) -> None:
        self._files = files
        self._fs = files.fs
        self._key = key
        self._written = WrittenRanges(key, files.url, length)
        self._length = length
        self._path = files.path(key)
        self._folder, name = os.path.split(self._path)
        if is_partial(name):
            raise StoreError(
                f"{key} cannot be put into {files.url}: such names are those of unfinished uploads",
                key=key,
                store=files.url,
            )
        self._temp_path = f"{self._folder}/.{name[:48]}.{secrets.token_hex(8)}.partial"
        self._lock = Lock()
        self._closed = False  # to new calls; the descriptors stay until the last one has left
        self._active_calls = 0
        self._fds: list[int] = []
        self._direct_fd: int | None = None
        with files.translate_errors("create", key, writing=True):
            try:
                self._fd = self._create()
                self._fds.append(self._fd)
                self._inode = self._fs.fstat(self._fd).inode
                if length:
                    self._fs.fallocate(self._fd, length)
                if direct and length >= ALIGNMENT:
                    self._direct_fd = self._open_direct()
            except BaseException:
                self.abort()
                raise

    def write_at(self, offset: int, data: memoryview) -> None:
        data = as_byte_view(data)
        self._written.check_bounds(offset, len(data))
        with self._using_descriptors("write"):
            address = address_of(data)
            done = 0
            while done < len(data):
                done += self._write(offset + done, data[done:], address + done)
            self._written.add(offset, len(data))

    def commit(self, *, accept_existing: bytes | None = None) -> Stat:
        """As the Store protocol has it. ``same``: an object that holds exactly these bytes is as
        good as ours."""
        with self._using_descriptors("commit", last=True):
            try:
                self._written.require_complete()
                modified = self._sync()
                self._publish(accept_existing)
            except BaseException:
                self._remove_temp()
                raise
        with suppress(OSError):  # the object stands; a second name for it is left to sweep
            self._fs.unlink(self._temp_path)
        try:
            self._files.sync_folders(self._folder)
        except OSError as error:
            # Neither is the object sure to stay, nor would removing it now be sure to last.
            raise self._unknown_outcome("its folder cannot be synced", error) from error
        return Stat(self._key, self._length, modified)

    def abort(self) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
            idle = not self._active_calls
        if idle:
            self._close()
        if first:
            self._remove_temp()

    def __enter__(self) -> LocalUpload:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()

    @contextmanager
    def _using_descriptors(self, action: str, *, last: bool = False) -> Iterator[None]:
        """Keeps the descriptors open while a thread uses them: a number closed too early may
        already be another file's. ``last``: no other call may run now or begin later."""
        with self._lock:
            if self._closed or (last and self._active_calls):
                raise StoreError(
                    f"Cannot {action} {self._key}: its upload is over or in use",
                    expected="neither committed nor aborted, and commit after the last write",
                    found="already over"
                    if self._closed
                    else f"{self._active_calls} writes running",
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
                self._close()

    def _create(self) -> int:
        for _ in range(_MAX_TRIES):
            with suppress(FileNotFoundError):  # a delete has just removed the folder, empty
                self._files.make_folders(self._folder)
                return self._fs.open(self._temp_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        raise FileNotFoundError(errno.ENOENT, "its folder is removed again and again")

    def _open_direct(self) -> int | None:
        try:
            fd = self._fs.open(self._temp_path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _DIRECT_UNSUPPORTED:
                raise
            return None
        self._fds.append(fd)
        return fd

    def _write(self, offset: int, data: memoryview, address: int) -> int:
        """Bytes written: at least one."""
        fd, span = self._direct_fd, direct_io_length(offset, address, len(data), len(data))
        if fd is None or not span:
            count = self._fs.pwrite(self._fd, data, offset)
        else:
            try:
                count = self._fs.pwrite(fd, data[:span], offset)
            except OSError as error:
                if error.errno not in _DIRECT_UNSUPPORTED:
                    raise
                self._direct_fd = None  # opened, yet refused: from now on through the page cache
                count = self._fs.pwrite(self._fd, data, offset)
        if count <= 0:
            raise OSError(errno.EIO, "a write wrote nothing")
        return count

    def _sync(self) -> float:
        """Make the bytes durable, and close the file; the time that it was last written.

        A failed fsync is final: the kernel may have dropped the pages and would report success
        the next time.
        """
        self._fs.fsync(self._fd)
        found = self._fs.fstat(self._fd)
        if found.size != self._length:
            raise StoreError(
                f"{self._key} in {self._files.url} has another length than was written",
                expected=f"{self._length} bytes",
                found=f"{found.size} bytes",
                key=self._key,
                store=self._files.url,
            )
        while self._fds:
            self._fs.close(self._fds.pop())
        return found.modified

    def _publish(self, accept_existing: bytes | None) -> None:
        """Give the file its name, unless the name is taken by another."""
        try:
            self._link_or_rename()
        except OSError as error:
            # The reply may have been lost and the call repeated by the client of a network file
            # system: what stands there now decides, not the error.
            if self._is_published(error):
                return
            if (
                error.errno == errno.EEXIST
                and accept_existing is not None
                and self._object_equals(accept_existing)
            ):
                return
            raise

    def _link_or_rename(self) -> None:
        try:
            self._fs.link(self._temp_path, self._path)
        except OSError as error:
            if error.errno not in _LINK_UNSUPPORTED:
                raise
            try:
                self._fs.rename_noreplace(self._temp_path, self._path)
            except OSError as refusal:
                if refusal.errno not in _RENAME_UNSUPPORTED:
                    raise
                raise StoreError(
                    f"{self._key} cannot be committed to {self._files.url}",
                    expected="a file system with hard links or with renameat2(RENAME_NOREPLACE)",
                    found=f"neither ({error.strerror}; {refusal.strerror})",
                    todo="Save to another file system: on this one two writers could both win",
                    key=self._key,
                    store=self._files.url,
                ) from refusal

    def _is_published(self, error: OSError) -> bool:
        try:
            return self._fs.stat(self._path).inode == self._inode
        except FileNotFoundError:
            return False
        except OSError:
            raise self._unknown_outcome("it cannot be looked at", error) from error

    def _object_equals(self, data: bytes) -> bool:
        try:
            if self._files.stat(self._key).length != len(data):
                return False
            return self._files.get(self._key, len(data)) == data
        except NotFound:  # a folder, or deleted since
            return False

    def _unknown_outcome(self, why: str, error: OSError) -> StoreError:
        return StoreError(
            f"Whether {self._key} was committed to {self._files.url} is unknown:"
            f" {why}: {error.strerror or error}",
            todo="See the system's log; look for the object when the file system is well",
            key=self._key,
            store=self._files.url,
            outcome="unknown",
        )

    def _close(self) -> None:
        while self._fds:
            with suppress(OSError):  # the upload has failed already, or was synced before
                self._fs.close(self._fds.pop())

    def _remove_temp(self) -> None:
        with suppress(OSError):  # sweep finds what stays
            self._fs.unlink(self._temp_path)
        self._files.remove_empty_folders(self._folder)
