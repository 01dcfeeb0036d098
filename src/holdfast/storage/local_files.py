"""The files of a ``LocalStore``: paths, reads, folders, and errors of the operating system."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from holdfast.buffers import address_of, as_byte_view, direct_io_length
from holdfast.errors import AlreadyExists, Denied, NoSpace, NotFound, StoreError, Unavailable
from holdfast.storage.checks import check_range, short_read_error, too_long_error
from holdfast.storage.os_calls import UNSUPPORTED, Fs
from holdfast.storage.store import Stat, check_key
from holdfast.types import MIB

NOT_FOUND_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_ERROR_TYPES: dict[int, tuple[type[StoreError], str | None]] = {
    errno.ENOENT: (NotFound, None),
    errno.ENOTDIR: (NotFound, None),
    errno.EISDIR: (NotFound, None),
    errno.ELOOP: (NotFound, "Symbolic links are not followed: give the folder they point to"),
    errno.EEXIST: (AlreadyExists, None),
    errno.EACCES: (Denied, "Check owner and permissions of the folder"),
    errno.EPERM: (Denied, "Check owner and permissions of the folder"),
    errno.EROFS: (Denied, "The file system is read-only: see why in the system's log"),
    errno.ENOSPC: (NoSpace, "Free space or inodes, or save elsewhere"),
    errno.EDQUOT: (NoSpace, "Free space under the quota, or save elsewhere"),
    errno.EFBIG: (NoSpace, "Raise the limit on file size (ulimit -f)"),
    errno.ETIMEDOUT: (Unavailable, None),
    errno.ESTALE: (Unavailable, None),
    errno.EAGAIN: (Unavailable, None),
    errno.EBUSY: (Unavailable, None),
    errno.ENOTCONN: (Unavailable, "The file system's server or daemon is gone: mount it again"),
    errno.EHOSTDOWN: (Unavailable, None),
    errno.EHOSTUNREACH: (Unavailable, None),
    errno.EMFILE: (Unavailable, "Raise the limit on open files (ulimit -n)"),
    errno.ENFILE: (Unavailable, "The system has too many open files"),
    errno.ENOMEM: (Unavailable, "The system has no memory left"),
}
DIRECT_MIN_BYTES = MIB
"""Fewer bytes than this go through the page cache: there is too little to gain, and what was
just written is often read next."""


class LocalFiles:
    """What ``LocalStore`` and ``LocalUpload`` share: everything but writing and listing objects."""

    def __init__(self, root: str | os.PathLike[str], *, fs: Fs | None, direct: bool) -> None:
        self.url = os.fspath(root)
        self.fs = Fs() if fs is None else fs
        self._root = os.path.abspath(self.url)
        self._direct = direct
        self._root_synced = False  # the names of the root and of all above it were seen durable

    def stat(self, key: str) -> Stat:
        with self.translate_errors("look at", key):
            found = self.fs.stat(self.path(key))
        if found.kind != "file":
            raise NotFound(
                f"There is no {key} in {self.url}",
                expected="a file",
                found="a folder" if found.kind == "folder" else "a link or a device",
                key=key,
                store=self.url,
            )
        return Stat(key, found.size, found.modified)

    def get(self, key: str, limit: int) -> bytes:
        found = self.stat(key).length
        if found > limit:
            raise too_long_error(key, self.url, limit, found)
        data = bytearray(found)
        self.get_range(key, 0, found, memoryview(data))
        return bytes(data)

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        into = as_byte_view(into)
        check_range(key, self.url, offset, length, len(into))
        if not length:
            self.stat(key)
            return
        path = self.path(key)
        done = 0
        with self.translate_errors("read", key):
            big = self._direct and length >= DIRECT_MIN_BYTES
            if big and direct_io_length(offset, address_of(into), length, len(into)):
                done = self._read_direct(path, offset, length, into)
            if done < length:
                done += self._read(path, offset + done, length - done, into[done:])
        if done < length:
            raise short_read_error(key, self.url, offset, length, done)

    def path(self, key: str) -> str:
        """The file of a key. Raises ``StoreError`` if it cannot be one."""
        check_key(key, self.url)
        try:
            os.fsencode(key)
        except UnicodeEncodeError as error:
            self.raise_store_error("name", key, OSError(errno.EILSEQ, str(error)))
        return f"{self._root.rstrip('/')}/{key}"

    def make_folders(self, folder: str) -> None:
        missing = []
        while not self._is_folder(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for folder in reversed(missing):
            if len(folder) <= len(self._root):
                self._root_synced = False
            with suppress(FileExistsError):
                self.fs.mkdir(folder)

    def sync_folders(self, folder: str) -> None:
        """Make the names durable on the way from the root's own to that of a file in ``folder``.

        Above the root the whole way is walked once: which part of it is new is not known, since
        another process may just have made it. A folder there that may not be read is skipped.
        """
        self._sync_folder(folder)
        while folder != self._root:
            folder = os.path.dirname(folder)
            self._sync_folder(folder)
        while not self._root_synced:
            above = os.path.dirname(folder)
            if above == folder:
                self._root_synced = True
            else:
                with suppress(PermissionError):
                    self._sync_folder(above)
                folder = above

    def remove_empty_folders(self, folder: str) -> None:
        """Remove the folder and those above it, below the root, as far as they are empty."""
        with suppress(OSError):  # not empty, or gone: an empty folder is no object
            while folder != self._root:
                self.fs.rmdir(folder)
                folder = os.path.dirname(folder)

    @contextmanager
    def translate_errors(self, action: str, key: str, *, writing: bool = False) -> Iterator[None]:
        """Turns every ``OSError`` into the ``StoreError`` that names what was done to what."""
        try:
            yield
        except OSError as error:
            self.raise_store_error(action, key, error, writing=writing)

    def raise_store_error(
        self, action: str, key: str, error: OSError, *, writing: bool = False
    ) -> NoReturn:
        kind, todo = _ERROR_TYPES.get(error.errno or 0, (StoreError, None))
        if writing and kind is NotFound:
            kind = StoreError  # a folder was removed under us, or is a file
        raise kind(
            f"Cannot {action} {key} in {self.url}: {error.strerror or error}",
            todo=todo,
            key=key,
            store=self.url,
            errno=error.errno,
        ) from error

    def _is_folder(self, path: str) -> bool:
        try:
            self.fs.stat(path)
        except FileNotFoundError:
            return False
        return True  # if it is a file, the next step says so

    def _sync_folder(self, folder: str) -> None:
        fd = self.fs.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.fs.fsync(fd)
        except OSError as error:
            # EINVAL: this file system has no fsync for folders; names are as durable as it
            # makes them.
            if error.errno != errno.EINVAL:
                raise
        finally:
            self.fs.close(fd)

    def _read_direct(self, path: str, offset: int, length: int, into: memoryview) -> int:
        """Bytes read directly: fewer than ``length`` where the rest must be read otherwise."""
        try:
            return self._read(path, offset, length, into, flag=os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL and error.errno not in UNSUPPORTED:
                raise
            return 0

    def _read(self, path: str, offset: int, length: int, into: memoryview, flag: int = 0) -> int:
        fd = self.fs.open(path, os.O_RDONLY | os.O_NOFOLLOW | flag)
        address = address_of(into)
        done = 0
        try:
            while done < length:
                span = length - done
                if flag:
                    span = direct_io_length(offset + done, address + done, span, len(into) - done)
                count = span and self.fs.preadv(fd, into[done : done + span], offset + done)
                if not count:  # the end of the file, or of what can be read directly
                    break
                done = min(done + count, length)
        finally:
            self.fs.close(fd)
        return done
