"""Durable files in a local folder, or in one that hosts share.

An object is written to a temporary file beside its final name, made durable, given that name by
``link`` (which never replaces), and then the folders are made durable. What another process made
counts only when it is durable too, so a commit syncs the whole chain of folders, not only those
that it made itself: a folder with nothing to sync costs 0.05 ms.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from holdfast.buffers import address_of, direct_span, flat
from holdfast.errors import AlreadyExists, Denied, NoSpace, NotFound, StoreError, Unavailable
from holdfast.storage.checks import check_range, short_read, too_long
from holdfast.storage.local_upload import LocalUpload, is_partial
from holdfast.storage.os_calls import UNSUPPORTED, Fs
from holdfast.storage.store import Stat, Traits, Upload, check_key
from holdfast.types import ALIGNMENT, MIB

_NO_SUCH = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_KINDS: dict[int, tuple[type[StoreError], str | None]] = {
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


DIRECT_FROM = MIB
"""Fewer bytes than this go through the page cache: there is too little to gain, and what was
just written is often read next."""


class LocalStore:
    """A store in the folder ``root``, which is made when something is put.

    ``direct``: go past the page cache with O_DIRECT wherever alignment and file system allow it.
    ``fs``: the calls to the operating system, for tests. Symbolic links below ``root`` are
    neither listed nor read as objects.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, fs: Fs | None = None, direct: bool = True
    ) -> None:
        self.url = os.fspath(root)
        self.fs = Fs() if fs is None else fs
        self._root = os.path.abspath(self.url)
        self._direct = direct
        self._rooted = False  # the names of the root and of all above it were seen durable

    @property
    def traits(self) -> Traits:
        return Traits(name="local", alignment=ALIGNMENT, durable=True)

    def put(self, key: str, length: int) -> Upload:
        return LocalUpload(self, key, length, direct=self._direct and length >= DIRECT_FROM)

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        with LocalUpload(self, key, len(data), direct=False) as upload:
            upload.write_at(0, memoryview(data))
            return upload.commit(same=data)

    def get(self, key: str, limit: int) -> bytes:
        found = self.stat(key).length
        if found > limit:
            raise too_long(key, self.url, limit, found)
        data = bytearray(found)
        self.get_range(key, 0, found, memoryview(data))
        return bytes(data)

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        into = flat(into)
        check_range(key, self.url, offset, length, len(into))
        if not length:
            self.stat(key)
            return
        path = self.path(key)
        done = 0
        with self.errors("read", key):
            big = self._direct and length >= DIRECT_FROM
            if big and direct_span(offset, address_of(into), length, len(into)):
                done = self._read_direct(path, offset, length, into)
            if done < length:
                done += self._read(path, offset + done, length - done, into[done:])
        if done < length:
            raise short_read(key, self.url, offset, length, done)

    def stat(self, key: str) -> Stat:
        with self.errors("look at", key):
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

    def list(self, prefix: str) -> Iterator[Stat]:
        return self._walk(prefix and check_key(prefix, self.url), partial=False)

    def partials(self, prefix: str) -> Iterator[Stat]:
        return self._walk(prefix and check_key(prefix, self.url), partial=True)

    def delete(self, key: str) -> None:
        path = self.path(key)
        folder = os.path.dirname(path)
        with self.errors("delete", key):
            try:
                fd = self.fs.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            except _NO_SUCH:
                return
            # Open before, so that the folder can be synced even if another removes it meanwhile;
            # synced even if the name is gone, since an earlier try may have failed just here.
            try:
                with suppress(*_NO_SUCH):
                    self.fs.unlink(path)
                self.fs.fsync(fd)
            finally:
                self.fs.close(fd)
        self.prune(folder)

    # What an upload needs of its store.

    def path(self, key: str) -> str:
        """The file of a key. Raises ``StoreError`` if it cannot be one."""
        check_key(key, self.url)
        try:
            os.fsencode(key)
        except UnicodeEncodeError as error:
            self.fail("name", key, OSError(errno.EILSEQ, str(error)))
        return f"{self._root.rstrip('/')}/{key}"

    def make_folders(self, folder: str) -> None:
        missing = []
        while not self._is_folder(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for folder in reversed(missing):
            if len(folder) <= len(self._root):
                self._rooted = False
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
        while not self._rooted:
            above = os.path.dirname(folder)
            if above == folder:
                self._rooted = True
            else:
                with suppress(PermissionError):
                    self._sync_folder(above)
                folder = above

    def prune(self, folder: str) -> None:
        """Remove the folder and those above it, below the root, as far as they are empty."""
        with suppress(OSError):  # not empty, or gone: an empty folder is no object
            while folder != self._root:
                self.fs.rmdir(folder)
                folder = os.path.dirname(folder)

    @contextmanager
    def errors(self, action: str, key: str, *, writing: bool = False) -> Iterator[None]:
        """Turns every ``OSError`` into the ``StoreError`` that names what was done to what."""
        try:
            yield
        except OSError as error:
            self.fail(action, key, error, writing=writing)

    def fail(self, action: str, key: str, error: OSError, *, writing: bool = False) -> NoReturn:
        kind, todo = _KINDS.get(error.errno or 0, (StoreError, None))
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
                    span = direct_span(offset + done, address + done, span, len(into) - done)
                count = span and self.fs.preadv(fd, into[done : done + span], offset + done)
                if not count:  # the end of the file, or of what can be read directly
                    break
                done = min(done + count, length)
        finally:
            self.fs.close(fd)
        return done

    def _walk(self, prefix: str, *, partial: bool) -> Iterator[Stat]:
        folder = self._root
        with self.errors("list", prefix or "."):
            for segment in prefix.split("/") if prefix else []:
                folder = f"{folder}/{segment}"
                try:
                    if self.fs.stat(folder).kind != "folder":
                        return
                except _NO_SUCH:
                    return
            yield from self._scan(folder, prefix, partial)

    def _scan(self, folder: str, prefix: str, partial: bool) -> Iterator[Stat]:
        try:
            with self.errors("list", prefix or "."):
                entries = self.fs.scandir(folder)
        except NotFound:
            return
        # A folder sorts as "name/", so that keys come in the order of keys.
        for name, is_folder in sorted((n + "/" * f, f) for n, f in entries):
            key = f"{prefix}/{name}" if prefix else name
            if is_folder:
                yield from self._scan(f"{folder}/{name[:-1]}", key[:-1], partial)
            elif is_partial(name) == partial:
                try:
                    found = self.fs.stat(f"{folder}/{name}")
                except _NO_SUCH:  # deleted since
                    continue
                yield Stat(key, found.size, found.modified)
