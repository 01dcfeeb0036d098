"""Durable files in a local folder or in a folder that hosts share.

The store writes an object to a temporary file in the object's folder, makes the file durable, and
gives it its final name with ``link``, which never replaces a file. It then makes the folders
durable. A folder that another process created may not be durable yet. A commit therefore syncs all
parent folders, not only those that it created. Syncing an unchanged folder takes 0.05 ms.

Symbolic links below the root are followed to read, but nothing is written or deleted through one. A
link that leads to nothing raises ``BrokenLink``. The path of the root may contain links.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from pathlib import Path
from threading import Lock
from typing import Literal, Self, TypeVar
from urllib.parse import unquote

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
from limpet.machine import full_path
from limpet.settings import read_settings
from limpet.storage.local.os_calls import (
    INVALID_OR_UNSUPPORTED,
    O_DIRECT,
    O_DIRECTORY,
    O_NONBLOCK,
    UNSUPPORTED,
    Fs,
)
from limpet.storage.store import (
    Entry,
    Stat,
    Traits,
    Upload,
    WrittenRanges,
    check_key,
    check_range,
    check_written_length,
    is_partial,
    refuse_partial,
    short_read_error,
    too_long_error,
)
from limpet.types import ALIGNMENT, MIB

T = TypeVar("T")

_MAX_TRIES = 16
_LINK_UNSUPPORTED = UNSUPPORTED | {errno.EPERM, errno.EMLINK}

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
    errno.ENAMETOOLONG: (StoreError, "Use shorter names: at most 255 bytes each, 4,095 in all"),
    errno.ELOOP: (StoreError, "Correct the symbolic link that leads to itself"),
    errno.ETXTBSY: (StoreError, "End the program that runs from this file"),
    errno.ETIMEDOUT: (Unavailable, None),
    errno.ESTALE: (Unavailable, "The file server has replaced the folder: mount it again"),
    errno.EAGAIN: (Unavailable, None),
    errno.EBUSY: (Unavailable, None),
    errno.ENOTCONN: (Unavailable, "The file system's server or daemon is gone: remount it"),
    errno.EHOSTDOWN: (Unavailable, None),
    errno.EHOSTUNREACH: (Unavailable, None),
    errno.EMFILE: (Unavailable, "Raise the limit on open files (ulimit -n)"),
    errno.ENFILE: (Unavailable, "The system has too many open files"),
    errno.ENOMEM: (Unavailable, "The system is out of memory"),
}
_ADVICE = "Check the disk or the file server, and the system log, then try again"
"""What to do after any other error."""

_KINDS = {
    "file": "a file",
    "folder": "a folder",
    "link": "a symbolic link that leads to nothing",
    "other": "a device",
}
DIRECT_MIN_BYTES = MIB
"""Transfers of fewer bytes use the page cache: direct I/O gains too little, and recently written
data is often read soon."""


_ENTRY_KINDS: dict[str, Literal["object", "folder", "link"]] = {
    "file": "object",
    "folder": "folder",
    "link": "link",
}
"""The kinds of the entries of a level. There are no other objects, such as devices."""


class LocalStore:
    """A store in the folder ``root``, which the first write creates. ``direct``: use O_DIRECT where
    possible; ``fs``: the system calls, which tests replace."""

    folder_mode = 0o777
    """The mode of new folders, without the bits of the umask."""

    space_advice = "Free disk space or inodes, or save elsewhere"

    def __init__(
        self, root: str | os.PathLike[str], *, fs: Fs | None = None, direct: bool = True
    ) -> None:
        self.url = full_path(root)  # whatever the current folder is later
        self.fs = Fs() if fs is None else fs
        self._direct = direct and bool(O_DIRECT)
        self._root_synced = False  # the names of the root and its parents are durable

    def at(self, folder: str) -> Self:
        """Return a store for the keys below ``folder``."""
        view = copy(self)
        view.url, view._root_synced = self.path(folder), False
        return view

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
        """Raise ``StoreError`` if ``path`` is not of the ``expected`` kind. It is no object: a
        caller that tried again after ``AlreadyExists`` would never end."""
        while path != self.url:
            kind = expected
            try:
                kind = self.fs.stat(path).kind
            except OSError:
                with suppress(OSError):  # absent, or unknown: then the error of the operation tells
                    if self.fs.stat(path, follow=False).kind == "link":
                        kind = "link"
            if kind != expected:
                raise StoreError(
                    f"Cannot create {key} in {self.url}: {path} is in the way",
                    expected=f"a {expected}, or nothing",
                    found=_KINDS[kind],
                    todo=f"Move {path} away, then try again. Nothing was changed",
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
        """Return the path of a key's file. ``to_change``: raise ``StoreError`` if a folder of it is
        a symbolic link, because what is behind it belongs to someone else."""
        check_key(key, self.url)
        try:
            os.fsencode(key)
        except UnicodeEncodeError as error:
            with self.translate_errors("name", key):
                raise OSError(errno.EILSEQ, str(error)) from error
        path = root = self.url.rstrip("/")
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
            if (parent := os.path.dirname(folder)) == folder:
                raise
            self.make_folders(parent)
            if len(folder) <= len(self.url):
                self._root_synced = False
            with suppress(FileExistsError):
                self.fs.mkdir(folder, self.folder_mode)

    def sync_folders(self, folder: str) -> None:
        """Make folder names from the root to ``folder``, and the names in it, durable: at first
        also all readable parents of the root, which another process may have just created."""
        for path in (folder, *map(str, Path(folder).parents)):
            is_above_root = len(path) < len(self.url)
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
            # EINVAL: without an fsync for folders, the file system says how durable names are.
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
            while folder != self.url:
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
            if todo is None and not issubclass(error_type, NotFound | AlreadyExists):
                todo = _ADVICE
            raise error_type(
                f"Cannot {action} {key} in {self.url}: {error.strerror or error}",
                todo=todo,
                key=key,
                store=self.url,
                errno=error.errno,
            ) from error

    def _broken_link(self, key: str) -> str | None:
        """Return the path of the symbolic link that keeps a key from leading anywhere, or None."""
        path = Path(self.url) if key == "." else Path(self.url, key)
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

    @property
    def traits(self) -> Traits:
        return Traits(name="local", alignment=ALIGNMENT, durable=True)

    def put(self, key: str, length: int, head: int = 0) -> Upload:
        return LocalUpload(self, key, length, direct=self._direct and length >= DIRECT_MIN_BYTES)

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        try:
            upload = LocalUpload(self, key, len(data), direct=False)
        except StoreError as error:
            if "link" in error.fields and self.object_equals(key, data):
                return self.stat(key)  # nothing has to be written through the link
            raise
        with upload:
            upload.write_at(0, memoryview(data))
            return upload.commit(accept_existing=data)

    def list(self, prefix: str) -> Iterator[Stat]:
        return self._list_prefix(prefix, partial=False)

    def partials(self, prefix: str) -> Iterator[Stat]:
        return self._list_prefix(prefix, partial=True)

    def list_level(
        self, folder: str, prefix: str = "", *, partial: bool = False
    ) -> Sequence[Entry]:
        """See the function. ``partial``: return unfinished uploads instead of objects."""
        path = self.path(folder) if folder else self.url
        try:
            with self.translate_errors("list", folder or "."):
                found = self.fs.scandir(path)
        except NotFound:
            return []
        return [
            Entry(name, _ENTRY_KINDS[kind])
            for name, kind in found
            if (kind == "folder" or (kind in _ENTRY_KINDS and is_partial(name) == partial))
            and name.startswith(prefix)
        ]

    def delete(self, key: str) -> None:
        path = self.path(key, to_change=True)
        folder = os.path.dirname(path)
        with self.translate_errors("delete", key), suppress(*NOT_FOUND_ERRORS):
            # The folder is opened first, so that it can be synced even if another process removes
            # it. It is synced even if the file is gone: an earlier delete may have failed here.
            with self.syncing(folder), suppress(*NOT_FOUND_ERRORS):
                self.fs.unlink(path)
            if folder != self.url:
                self.remove_empty_folders(folder)

    def link_target(self, key: str) -> str | None:
        """Return the key of what a symbolic link leads to, or None if that is not in this store."""
        root, target = os.path.realpath(self.url), os.path.realpath(self.path(key))
        inside = target.startswith(root.rstrip("/") + "/")
        return target[len(root.rstrip("/")) + 1 :] if inside else None

    def _list_prefix(self, prefix: str, *, partial: bool) -> Iterator[Stat]:
        folder = self.url
        with self.translate_errors("list", prefix or "."), suppress(*NOT_FOUND_ERRORS):
            for level in check_key(prefix, self.url).split("/") if prefix else []:
                folder = f"{folder}/{level}"
                # unfinished uploads are listed to delete them, and never through a link
                if self.fs.stat(folder, follow=not partial).kind != "folder":
                    return
            yield from self._list_folder(folder, prefix, partial)

    def _list_folder(self, folder: str, prefix: str, partial: bool) -> Iterator[Stat]:
        # A folder sorts as "name/", so that the objects are listed in the order of their keys.
        kinds = {e.name: e.kind for e in self.list_level(prefix, partial=partial)}
        for name, kind in kinds.items():
            if kind == "link" and not partial:
                kinds[name] = self._kind_of_target(folder, name)
        for name in sorted(n + "/" * (k == "folder") for n, k in kinds.items() if k != "link"):
            key = f"{prefix}/{name}" if prefix else name
            if name[-1] == "/":
                yield from self._list_folder(f"{folder}/{name[:-1]}", key[:-1], partial)
            else:
                with suppress(*NOT_FOUND_ERRORS):  # deleted after the folder was read
                    file_stat = self.fs.stat(f"{folder}/{name}")
                    yield Stat(key, file_stat.size, file_stat.modified)

    def _kind_of_target(self, folder: str, name: str) -> Literal["object", "folder", "link"]:
        """Return the kind of what a link leads to, or "link" if that is missing or a cycle."""
        with suppress(OSError):
            target = self.fs.stat(f"{folder}/{name}")
            while target.kind == "folder" and len(folder) >= len(self.url):
                if self.fs.stat(folder).inode == target.inode:
                    return "link"
                folder = os.path.dirname(folder)
            return _ENTRY_KINDS.get(target.kind, "link")
        return "link"


class LocalUpload(Upload):
    """A temporary file in the object's folder, until ``commit`` names it. ``_fd`` uses the page
    cache for data that is not aligned, and is synced; ``_direct_fd`` writes the rest."""

    _suffix = "partial"
    _access = os.O_WRONLY

    def __init__(self, store: LocalStore, key: str, length: int, *, direct: bool) -> None:
        self._store = store
        self._fs = store.fs
        self._key = key
        self._written = WrittenRanges(key, store.url, length)
        self._length = length
        self._path = store.path(key, to_change=True)
        self._folder, name = os.path.split(self._path)
        refuse_partial(key, store.url)
        self._temp_path = f"{self._folder}/.{name[:48]}.{secrets.token_hex(8)}.{self._suffix}"
        self._lock = Lock()
        self._closed = False  # for new calls; active calls may still use the descriptors
        self._active_calls = 0
        self._descriptors = ExitStack()
        self._direct_fd: int | None = None
        with store.translate_errors("create", key, writing=True):
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
        """Commit as ``Upload`` says; an object with the bytes ``accept_existing`` may exist."""
        with self._using_descriptors("commit", last=True):
            try:
                self._written.require_complete()
                # 1. Make the data durable. A failed fsync is final: the kernel may have dropped
                # the pages, and a second fsync would then report success.
                self._fs.fsync(self._fd)
                file_stat = self._fs.fstat(self._fd)
                check_written_length(self._key, self._store.url, self._length, file_stat.size)
                self._descriptors.close()
                # 2. Give the file its final name, unless another object has that name.
                self._publish(accept_existing)
            except BaseException:
                self._remove_temp()
                raise
        # 3. Remove its temporary name. The object is complete; sweep removes a name that remains.
        with suppress(OSError):
            self._fs.unlink(self._temp_path)
        # 4. Make the final name durable, and the folders above it.
        try:
            self._store.sync_folders(self._folder)
        except OSError as error:
            # The object may not be durable, and its removal may not be durable either.
            raise self._unknown_outcome("syncing its folder failed", error) from error
        return Stat(self._key, self._length, file_stat.modified)

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
        """Keep the descriptors open while a thread uses them: a closed one may be another file.
        ``last``: no other call is active or begins later."""
        with self._lock:
            if self._closed or (last and self._active_calls):
                active = f"active writes: {self._active_calls}"
                raise StoreError(
                    f"Cannot {action} {self._key}: its upload is finished or in use",
                    expected="an upload that is not committed or aborted, without active writes",
                    found="a finished upload" if self._closed else active,
                    key=self._key,
                    store=self._store.url,
                )
            self._closed = last
            self._active_calls += 1
        try:
            with self._store.translate_errors(action, self._key, writing=True):
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
        return self._in_folder(self._fs.open, self._temp_path, flags)

    def _reserve(self, length: int) -> None:
        """Allocate the space of the temporary file, if the file system can."""
        self._fs.fallocate(self._fd, length)

    def _in_folder(self, make: Callable[..., T], *arguments: object) -> T:
        """Call ``make``, which creates a name in the folder of the object; return its result."""
        for _ in range(_MAX_TRIES):
            with suppress(FileNotFoundError):  # a delete removed the empty folder
                try:
                    self._store.make_folders(self._folder)
                    return make(*arguments)
                except (FileNotFoundError, NotADirectoryError):
                    self._store.refuse_obstacle(self._key, self._folder, "folder")
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
                and self._store.object_equals(self._key, accept_existing)
            ):
                if error.errno == errno.EEXIST:
                    self._store.refuse_obstacle(self._key, self._path, "file")
                raise

    def _rename(self, link_error: OSError) -> None:
        try:
            self._fs.rename_noreplace(self._temp_path, self._path)
        except OSError as error:
            if error.errno not in INVALID_OR_UNSUPPORTED:
                raise
            raise StoreError(
                f"Cannot commit {self._key} to {self._store.url}",
                expected="a file system with hard links or renameat2(RENAME_NOREPLACE)",
                found=f"neither ({link_error.strerror}; {error.strerror})",
                todo="Use another file system: on this one, two writers could both succeed",
                key=self._key,
                store=self._store.url,
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
            f"It is unknown whether {self._key} was committed to {self._store.url}:"
            f" {why}: {error.strerror or error}",
            todo="Check the system log; check for the object once the file system works",
            key=self._key,
            store=self._store.url,
            outcome="unknown",
        )

    def _remove_temp(self) -> None:
        with suppress(OSError):  # sweep removes a file that remains
            self._fs.unlink(self._temp_path)
        self._store.remove_empty_folders(self._folder)


def open_local(url: str) -> LocalStore:
    """Return the store at a path or at ``file:///path``."""
    path = url
    if url.startswith("file://"):
        host, slash, rest = url.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            raise StoreError(f"The URL {url} names another machine", expected="file:///path")
        path = unquote(slash + rest)
    if not path:
        raise StoreError("The URL does not name a folder", expected="file:///path", found=url)
    return LocalStore(path, direct=read_settings().direct)
