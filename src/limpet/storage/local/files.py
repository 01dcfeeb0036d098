"""The files of a ``LocalStore``: paths, reads, folders, and operating system errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from limpet.buffers import address_of, as_byte_view, direct_io_length
from limpet.errors import (
    AlreadyExists,
    BrokenLink,
    Denied,
    NoSpace,
    NotFound,
    StoreError,
    Unavailable,
)
from limpet.storage.checks import check_range, short_read_error, too_long_error
from limpet.storage.local.os_calls import (
    INVALID_OR_UNSUPPORTED,
    O_DIRECT,
    O_DIRECTORY,
    O_NONBLOCK,
    Fs,
)
from limpet.storage.store import Stat, check_key
from limpet.types import MIB

NOT_FOUND_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_ERROR_TYPES: dict[int, tuple[type[StoreError], str | None]] = {
    errno.ENOENT: (NotFound, None),
    errno.ENOTDIR: (NotFound, None),
    errno.EISDIR: (NotFound, None),
    errno.EEXIST: (AlreadyExists, None),
    errno.EACCES: (Denied, "Check the owner and permissions of the folder"),
    errno.EPERM: (Denied, "Check the owner and permissions of the folder"),
    errno.EROFS: (Denied, "The file system is read-only: see the system log"),
    errno.ENOSPC: (NoSpace, None),
    errno.EDQUOT: (NoSpace, "Free space under the quota, or save elsewhere"),
    errno.EFBIG: (NoSpace, "Raise the file size limit (ulimit -f)"),
    errno.ETIMEDOUT: (Unavailable, None),
    errno.ESTALE: (Unavailable, None),
    errno.EAGAIN: (Unavailable, None),
    errno.EBUSY: (Unavailable, None),
    errno.ENOTCONN: (Unavailable, "The file system's server or daemon is gone: remount it"),
    errno.EHOSTDOWN: (Unavailable, None),
    errno.EHOSTUNREACH: (Unavailable, None),
    errno.EMFILE: (Unavailable, "Raise the limit on open files (ulimit -n)"),
    errno.ENFILE: (Unavailable, "The system has too many open files"),
    errno.ENOMEM: (Unavailable, "The system is out of memory"),
}
_KINDS = {
    "file": "a file",
    "folder": "a folder",
    "link": "a symbolic link that leads to nothing",
    "other": "a device",
}
DIRECT_MIN_BYTES = MIB
"""Transfers of fewer bytes use the page cache: direct I/O gains too little, and recently written
data is often read soon."""


class LocalFiles:
    """The operations that ``LocalStore`` and ``LocalUpload`` share.

    They are all operations except writing and listing objects.
    """

    folder_mode = 0o777
    """The mode of new folders, without the bits of the umask."""

    space_advice = "Free disk space or inodes, or save elsewhere"

    def __init__(
        self, root: str | os.PathLike[str], *, fs: Fs | None = None, direct: bool = True
    ) -> None:
        self.url = os.fspath(root)
        self.fs = Fs() if fs is None else fs
        self._root = os.path.abspath(self.url)
        self._direct = direct and bool(O_DIRECT)
        self._root_synced = False  # the names of the root and its parents are durable

    @property
    def root(self) -> str:
        """The absolute path of the folder, whatever the current folder is by now."""
        return self._root

    def stat(self, key: str) -> Stat:
        with self.translate_errors("look up", key):
            file_stat = self.fs.stat(self.path(key))
        if file_stat.kind != "file":
            raise NotFound(
                f"There is no {key} in {self.url}",
                expected="a file",
                found=_KINDS[file_stat.kind],
                key=key,
                store=self.url,
            )
        return Stat(key, file_stat.size, file_stat.modified)

    def refuse_obstacle(self, key: str, path: str, expected: str) -> None:
        """Raise ``StoreError`` if ``key`` cannot be written because ``path`` is something else.

        ``path``: the path of the key's file or folder. ``expected``: "file" or "folder". What is in
        the way is not an object: a caller that tried again after ``AlreadyExists`` would never end.
        """
        while path != self._root:
            kind = expected
            try:
                kind = self.fs.stat(path).kind
            except OSError:
                with suppress(OSError):  # absent, or unknown: then the error of the operation tells
                    if self.fs.stat(path, follow=False).kind == "link":
                        kind = "link"
            if kind != expected:
                obstacle = f"{self.url.rstrip('/')}/{os.path.relpath(path, self._root)}"
                raise StoreError(
                    f"Cannot create {key} in {self.url}: {obstacle} is in the way",
                    expected=f"a {expected}, or nothing",
                    found=_KINDS[kind],
                    todo=f"Move {obstacle} away, then try again. Nothing was changed",
                    key=key,
                    store=self.url,
                )
            if expected == "file":
                return
            path = os.path.dirname(path)

    def get(self, key: str, limit: int) -> bytes:
        length = self.stat(key).length
        if length > limit:
            raise too_long_error(key, self.url, limit, length)
        data = bytearray(length)
        self.get_range(key, 0, length, memoryview(data))
        return bytes(data)

    def get_range(
        self, key: str, offset: int, length: int, into: memoryview, *_: memoryview
    ) -> None:
        into = as_byte_view(into)
        check_range(key, self.url, offset, length, len(into))
        if not length:
            self.stat(key)
            return
        path = self.path(key)
        done = 0
        with self.translate_errors("read", key):
            if (
                self._direct
                and length >= DIRECT_MIN_BYTES
                and direct_io_length(offset, address_of(into), length, len(into))
            ):
                try:
                    done = self._read(path, offset, length, into, flag=O_DIRECT)
                except OSError as error:
                    if error.errno not in INVALID_OR_UNSUPPORTED:
                        raise
            if done < length:
                done += self._read(path, offset + done, length - done, into[done:])
        if done < length:
            raise short_read_error(key, self.url, offset, length, done)

    def object_equals(self, key: str, data: bytes) -> bool:
        """Return True if there is an object with exactly these bytes."""
        try:
            return self.stat(key).length == len(data) and self.get(key, len(data)) == data
        except (NotFound, BrokenLink):  # a folder, a broken link, or deleted in the meantime
            return False

    def path(self, key: str, *, to_change: bool = False) -> str:
        """Return the path of a key's file. Raises ``StoreError`` if the key is not a valid path.

        ``to_change``: the file will be written or deleted. Raises ``StoreError`` if a folder of the
        key is a symbolic link: what is behind the link belongs to someone else.
        """
        check_key(key, self.url)
        try:
            os.fsencode(key)
        except UnicodeEncodeError as error:
            with self.translate_errors("name", key):
                raise OSError(errno.EILSEQ, str(error)) from error
        path = root = self._root.rstrip("/")
        for level in key.split("/")[:-1] if to_change else ():
            path = f"{path}/{level}"
            with self.translate_errors("look up", key), suppress(*NOT_FOUND_ERRORS):
                if self.fs.stat(path, follow=False).kind == "link":
                    raise StoreError(
                        f"Cannot change {key} in {self.url}: {path} is a symbolic link",
                        expected="a folder: nothing is written or deleted through a link",
                        found=f"a link to {os.path.realpath(path)}",
                        todo="Use the target of the link, or replace the link by a real folder",
                        key=key,
                        store=self.url,
                        link=path,
                    )
        return f"{root}/{key}"

    def make_folders(self, folder: str) -> None:
        """Create a folder and its parents if they are missing."""
        try:
            self.fs.stat(folder)  # if it is a file, the next operation raises
        except FileNotFoundError:
            self.make_folders(os.path.dirname(folder))
            if len(folder) <= len(self._root):
                self._root_synced = False
            with suppress(FileExistsError):
                self.fs.mkdir(folder, self.folder_mode)

    def sync_folders(self, folder: str) -> None:
        """Make all folder names from the root down to ``folder`` durable, and the names in it.

        The first call also syncs all parents of the root, because another process may have created
        any of them recently. Parents of the root that this process may not read are skipped.
        """
        for path in (folder, *map(str, Path(folder).parents)):
            is_above_root = len(path) < len(self._root)
            if is_above_root and self._root_synced:
                return
            try:
                with self.syncing(path):
                    pass
            except PermissionError:
                if not is_above_root:
                    raise
        self._root_synced = True

    @contextmanager
    def syncing(self, folder: str) -> Iterator[None]:
        """Make the names in a folder durable when the block has succeeded."""
        if not O_DIRECTORY:  # Windows cannot open a folder: its journal makes names durable
            yield
            return
        fd = self.fs.open(folder, os.O_RDONLY | O_DIRECTORY)
        try:
            yield
            # EINVAL: this file system has no fsync for folders, so it determines how durable names
            # are.
            try:
                self.fs.fsync(fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        finally:
            self.fs.close(fd)

    def remove_empty_folders(self, folder: str) -> None:
        """Remove the folder and its parents below the root, up to the first that is not empty."""
        with suppress(OSError):  # not empty, or already removed
            while folder != self._root:
                self.fs.rmdir(folder)
                folder = os.path.dirname(folder)

    @contextmanager
    def translate_errors(self, action: str, key: str, *, writing: bool = False) -> Iterator[None]:
        """Convert an ``OSError`` to a ``StoreError`` that names the action and the key."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP) and (link := self._broken_link(key)):
                raise BrokenLink(
                    f"Cannot {action} {key} in {self.url}: {link} is a broken symbolic link",
                    expected="a link to something that exists",
                    found=f"a link to {os.path.realpath(link)}",
                    todo="Restore the target (is its disk mounted?), or remove the link",
                    file=key,
                    key=key,
                    store=self.url,
                    link=link,
                ) from error
            error_type, todo = _ERROR_TYPES.get(error.errno or 0, (StoreError, None))
            if writing and error_type is NotFound:
                error_type = StoreError  # a parent folder was removed, or is a file
            if error.errno == errno.ENOSPC:
                todo = self.space_advice
            raise error_type(
                f"Cannot {action} {key} in {self.url}: {error.strerror or error}",
                todo=todo,
                key=key,
                store=self.url,
                errno=error.errno,
            ) from error

    def _broken_link(self, key: str) -> str | None:
        """Return the path of the symbolic link that keeps a key from leading anywhere, or None."""
        path = Path(self._root) if key == "." else Path(self._root, key)
        is_link = False
        for place in map(str, (path, *path.parents)):
            try:
                is_link = self.fs.stat(place, follow=False).kind == "link"
                self.fs.stat(place)
            except OSError as error:
                if is_link or error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    return place if is_link else None
            else:
                return None
        return None

    def _read(self, path: str, offset: int, length: int, into: memoryview, flag: int = 0) -> int:
        # O_NONBLOCK: a FIFO that has replaced the file is an error, not a wait for its writer
        fd = self.fs.open(path, os.O_RDONLY | O_NONBLOCK | flag)
        address = address_of(into)
        done = 0
        try:
            while done < length:
                span = length - done
                if flag:
                    span = direct_io_length(offset + done, address + done, span, len(into) - done)
                count = span and self.fs.preadv(fd, into[done : done + span], offset + done)
                if not count:  # the end of the file or of the aligned part
                    break
                done = min(done + count, length)
        finally:
            self.fs.close(fd)
        return done
