"""One file on its way into a ``LocalStore``."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING

from holdfast.buffers import address_of, direct_span, flat
from holdfast.errors import NotFound, StoreError
from holdfast.storage.checks import Cover
from holdfast.storage.os_calls import UNSUPPORTED
from holdfast.storage.store import Stat
from holdfast.types import ALIGNMENT

if TYPE_CHECKING:
    from holdfast.storage.local import LocalStore

_TRIES = 16
_NO_LINKS = UNSUPPORTED | {errno.EPERM, errno.EMLINK}
_NO_RENAME = UNSUPPORTED | {errno.EINVAL}
_NO_DIRECT = UNSUPPORTED | {errno.EINVAL}


def is_partial(name: str) -> bool:
    """Whether a file of that name is an unfinished upload."""
    return name.startswith(".") and name.endswith(".partial")


class LocalUpload:
    """A temporary file in the object's own folder, until ``commit`` gives it the object's name.

    Two descriptors: ``_fd`` goes through the page cache, takes what is not aligned, and is the
    one that is synced; ``_direct_fd`` takes the rest.
    """

    def __init__(self, store: LocalStore, key: str, length: int, *, direct: bool) -> None:
        self._store = store
        self._fs = store.fs
        self._key = key
        self._cover = Cover(key, store.url, length)
        self._length = length
        self._path = store.path(key)
        self._folder, name = os.path.split(self._path)
        if is_partial(name):
            raise StoreError(
                f"{key} cannot be put into {store.url}: such names are those of unfinished uploads",
                key=key,
                store=store.url,
            )
        self._temp = f"{self._folder}/.{name[:48]}.{secrets.token_hex(8)}.partial"
        self._lock = Lock()
        self._closed = False  # to new calls; the descriptors stay until the last one has left
        self._calls = 0
        self._fds: list[int] = []
        self._direct_fd: int | None = None
        with store.errors("create", key, writing=True):
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
        data = flat(data)
        self._cover.check(offset, len(data))
        with self._call("write"):
            address = address_of(data)
            done = 0
            while done < len(data):
                done += self._write(offset + done, data[done:], address + done)
            self._cover.add(offset, len(data))

    def commit(self, *, same: bytes | None = None) -> Stat:
        """As the Store protocol has it. ``same``: an object that holds exactly these bytes is as
        good as ours."""
        with self._call("commit", last=True):
            try:
                self._cover.require_whole()
                modified = self._sync()
                self._publish(same)
            except BaseException:
                self._remove()
                raise
        with suppress(OSError):  # the object stands; a second name for it is left to sweep
            self._fs.unlink(self._temp)
        try:
            self._store.sync_folders(self._folder)
        except OSError as error:
            # Neither is the object sure to stay, nor would removing it now be sure to last.
            raise self._unknown("its folder cannot be synced", error) from error
        return Stat(self._key, self._length, modified)

    def abort(self) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
            idle = not self._calls
        if idle:
            self._close()
        if first:
            self._remove()

    def __enter__(self) -> LocalUpload:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()

    @contextmanager
    def _call(self, action: str, *, last: bool = False) -> Iterator[None]:
        """Keeps the descriptors open while a thread uses them: a number closed too early may
        already be another file's. ``last``: no other call may run now or begin later."""
        with self._lock:
            if self._closed or (last and self._calls):
                raise StoreError(
                    f"Cannot {action} {self._key}: its upload is over or in use",
                    expected="neither committed nor aborted, and commit after the last write",
                    found="already over" if self._closed else f"{self._calls} writes running",
                    key=self._key,
                    store=self._store.url,
                )
            self._closed = last
            self._calls += 1
        try:
            with self._store.errors(action, self._key, writing=True):
                yield
        finally:
            with self._lock:
                self._calls -= 1
                idle = self._closed and not self._calls
            if idle:
                self._close()

    def _create(self) -> int:
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):  # a delete has just removed the folder, empty
                self._store.make_folders(self._folder)
                return self._fs.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        raise FileNotFoundError(errno.ENOENT, "its folder is removed again and again")

    def _open_direct(self) -> int | None:
        try:
            fd = self._fs.open(self._temp, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            return None
        self._fds.append(fd)
        return fd

    def _write(self, offset: int, data: memoryview, address: int) -> int:
        """Bytes written: at least one."""
        fd, span = self._direct_fd, direct_span(offset, address, len(data), len(data))
        if fd is None or not span:
            count = self._fs.pwrite(self._fd, data, offset)
        else:
            try:
                count = self._fs.pwrite(fd, data[:span], offset)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
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
                f"{self._key} in {self._store.url} has another length than was written",
                expected=f"{self._length} bytes",
                found=f"{found.size} bytes",
                key=self._key,
                store=self._store.url,
            )
        while self._fds:
            self._fs.close(self._fds.pop())
        return found.modified

    def _publish(self, same: bytes | None) -> None:
        """Give the file its name, unless the name is taken by another."""
        try:
            self._name()
        except OSError as error:
            # The reply may have been lost and the call repeated by the client of a network file
            # system: what stands there now decides, not the error.
            if self._is_named(error):
                return
            if error.errno == errno.EEXIST and same is not None and self._holds(same):
                return
            raise

    def _name(self) -> None:
        try:
            self._fs.link(self._temp, self._path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                self._fs.rename_noreplace(self._temp, self._path)
            except OSError as refusal:
                if refusal.errno not in _NO_RENAME:
                    raise
                raise StoreError(
                    f"{self._key} cannot be committed to {self._store.url}",
                    expected="a file system with hard links or with renameat2(RENAME_NOREPLACE)",
                    found=f"neither ({error.strerror}; {refusal.strerror})",
                    todo="Save to another file system: on this one two writers could both win",
                    key=self._key,
                    store=self._store.url,
                ) from refusal

    def _is_named(self, error: OSError) -> bool:
        try:
            return self._fs.stat(self._path).inode == self._inode
        except FileNotFoundError:
            return False
        except OSError:
            raise self._unknown("it cannot be looked at", error) from error

    def _holds(self, data: bytes) -> bool:
        try:
            if self._store.stat(self._key).length != len(data):
                return False
            return self._store.get(self._key, len(data)) == data
        except NotFound:  # a folder, or deleted since
            return False

    def _unknown(self, why: str, error: OSError) -> StoreError:
        return StoreError(
            f"Whether {self._key} was committed to {self._store.url} is unknown:"
            f" {why}: {error.strerror or error}",
            todo="See the system's log; look for the object when the file system is well",
            key=self._key,
            store=self._store.url,
            outcome="unknown",
        )

    def _close(self) -> None:
        while self._fds:
            with suppress(OSError):  # the upload has failed already, or was synced before
                self._fs.close(self._fds.pop())

    def _remove(self) -> None:
        with suppress(OSError):  # sweep finds what stays
            self._fs.unlink(self._temp)
        self._store.prune(self._folder)
