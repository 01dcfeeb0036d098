"""A file system in memory that loses unsynced data in a simulated power cut.

It guarantees less than any real file system (``tests/storage/test_power_cut.py`` compares it with
ext4 and xfs). ``fsync`` of a file makes its bytes durable, not its name; ``fsync`` of a folder, the
names in it. Of pages written since, any subset survives, with the old or the new size; of the names
created, renamed, or removed since, any subset, in their order.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from functools import cache, wraps
from itertools import count, product
from threading import RLock
from typing import Concatenate, ParamSpec, TypeVar

from limpet.buffers import address_of
from limpet.storage.local.os_calls import FileStat, Fs
from limpet.types import ALIGNMENT

P = ParamSpec("P")
T = TypeVar("T")

PAGE = 4096
_inodes = count(1)


class PowerCut(BaseException):
    """A simulated power cut: this call and all later calls have no effect."""


class _File:
    def __init__(self, durable: bytes = b"") -> None:
        self.data = bytearray(durable)
        self.durable = durable
        self.dirty_pages: set[int] = set()
        self.modified = time.time()
        self.inode = (0, next(_inodes))

    def write(self, data: memoryview, offset: int) -> None:
        self.grow(offset + len(data))
        self.data[offset : offset + len(data)] = data
        self.dirty_pages.update(range(offset // PAGE, -(-(offset + len(data)) // PAGE)))
        self.modified = time.time()

    def grow(self, size: int) -> None:
        self.data.extend(bytes(max(0, size - len(self.data))))

    def sync(self) -> None:
        self.durable = bytes(self.data)
        self.dirty_pages.clear()

    def after_crash(self, keep: Callable[[str], bool]) -> _File:
        resized = len(self.data) != len(self.durable)
        size = len(self.data) if resized and keep("size of a file") else len(self.durable)
        remaining = bytearray(self.durable)[:size].ljust(size, b"\0")
        for page in sorted(self.dirty_pages):
            if page * PAGE < size and keep(f"page {page}"):
                end = min((page + 1) * PAGE, size)
                remaining[page * PAGE : end] = self.data[page * PAGE : end]
        return _File(bytes(remaining))


class _Folder:
    def __init__(self) -> None:
        self.entries: dict[str, _File | _Folder] = {}
        self.durable_entries: dict[str, _File | _Folder] = {}
        self.unsynced: list[_NameOperation] = []
        self.modified = time.time()
        self.inode = (0, next(_inodes))


_NameChange = tuple[_Folder, str, _File | _Folder | None]


class _NameOperation:
    """An atomic set of changes of names. A change to None removes the name."""

    def __init__(self, description: str, *changes: _NameChange) -> None:
        self.description = description
        self.changes = changes
        for folder, name, node in changes:
            _set_entry(folder.entries, name, node)
            folder.unsynced.append(self)
            folder.modified = time.time()

    def sync(self) -> None:
        for folder, name, node in self.changes:
            _set_entry(folder.durable_entries, name, node)
            folder.unsynced.remove(self)


_WITHOUT_EFFECT = ("open", "close", "preadv", "fstat", "stat", "scandir")
"""The calls after which a power cut leaves the same as before (``open`` counts what it creates)."""


def _counted(
    call: Callable[Concatenate[CrashFs, P], T],
) -> Callable[Concatenate[CrashFs, P], T]:
    """Count each call, let one thread at a time make it, and cut the power if it is due."""

    @wraps(call)
    def counted_call(self: CrashFs, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            if self.cut_at is not None and self.operations + 1 >= self.cut_at:
                raise PowerCut(f"at call {self.cut_at}")
            self.operations += 1
            result = call(self, *args, **kwargs)
            self.changes += call.__name__ not in _WITHOUT_EFFECT
            return result

    return counted_call


class CrashFs(Fs):
    """An empty file system with the folder ``/``. Thread-safe.

    ``operations`` counts the calls. ``changes`` counts those that changed what a power cut can
    leave: after the others, ``crashes`` has the same file systems to choose from as before. If
    ``cut_at`` is n, the n-th call (from 1) and all later calls raise ``PowerCut`` and have no
    effect. As on a disk, O_DIRECT raises EINVAL unless address, offset, and length are aligned.
    """

    def __init__(self, cut_at: int | None = None) -> None:
        self.cut_at = cut_at
        self.operations = 0
        self.changes = 0
        self._root = _Folder()
        self._fds: dict[int, tuple[_File | _Folder, int]] = {}
        self._fd_numbers = count(1_000_000)  # never the number of a real file descriptor
        self._lock = RLock()

    # After a power cut.

    def crash(self, keep: Callable[[str], bool]) -> CrashFs:
        """Return the file system after a power cut at this point.

        ``keep`` gets a description of each unsynced change, and returns True if it survives.
        """
        with self._lock:

            @cache  # keep is asked once about a rename between two folders
            def survives(operation: _NameOperation) -> bool:
                return keep(operation.description)

            @cache  # all names of a file lead to the same copy
            def file_after(file: _File) -> _File:
                return file.after_crash(keep)

            def folder_after(folder: _Folder) -> _Folder:
                names = dict(folder.durable_entries)
                for operation in filter(survives, folder.unsynced):
                    for changed, name, node in operation.changes:
                        if changed is folder:
                            _set_entry(names, name, node)
                copy = _Folder()
                copy.entries = {
                    name: file_after(node) if isinstance(node, _File) else folder_after(node)
                    for name, node in names.items()
                }
                copy.durable_entries = dict(copy.entries)
                return copy

            after = CrashFs()
            after._root = folder_after(self._root)
            return after

    def crashes(self, limit: int = 64, seed: int = 0) -> Iterator[CrashFs]:
        """Yield every file system that may remain after a power cut at this point.

        If there are more than ``limit``, yield ``limit`` of them: the one that keeps no unsynced
        change, the one that keeps all of them, and random ones.
        """
        changes: list[str] = []

        def keep(description: str) -> bool:
            changes.append(description)
            return True

        self.crash(keep)
        if 2 ** len(changes) <= limit:
            for choice in product((False, True), repeat=len(changes)):
                # a lost name hides the changes of its file, so fewer choices may be used
                choices = iter(choice)
                yield self.crash(lambda _, choices=choices: next(choices, False))  # type: ignore[misc]
            return
        yield self.crash(lambda _: False)
        yield self.crash(lambda _: True)
        for number in range(limit - 2):
            rng = random.Random(seed + number)
            share = rng.random()
            yield self.crash(lambda _, rng=rng, share=share: rng.random() < share)  # type: ignore[misc]

    # File system calls.

    @_counted
    def open(self, path: str, flags: int) -> int:
        folder, name = self._locate(path)
        if flags & os.O_CREAT and name and name not in folder.entries:
            _NameOperation(f"create {path}", (folder, name, _File()))
            self.changes += 1
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise _os_error(errno.EEXIST)
        node = self._find(path)
        if flags & os.O_DIRECTORY and isinstance(node, _File):
            raise _os_error(errno.ENOTDIR)
        fd = next(self._fd_numbers)
        self._fds[fd] = (node, flags)
        return fd

    @_counted
    def close(self, fd: int) -> None:
        del self._fds[fd]

    @_counted
    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._file(fd, address_of(data), offset, len(data)).write(data, offset)
        return len(data)

    @_counted
    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        node = self._file(fd, address_of(into), offset, len(into))
        data = node.data[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    @_counted
    def fallocate(self, fd: int, length: int) -> bool:
        self._file(fd).grow(length)
        return True

    @_counted
    def fsync(self, fd: int) -> None:
        node, _ = self._fds[fd]
        if isinstance(node, _File):
            node.sync()
        else:
            for operation in list(node.unsynced):
                operation.sync()

    @_counted
    def fstat(self, fd: int) -> FileStat:
        return _stat(self._fds[fd][0])

    @_counted
    def stat(self, path: str, *, follow: bool = True) -> FileStat:
        return _stat(self._find(path))  # there are no links

    @_counted
    def link(self, source: str, target: str) -> None:
        node = self._find(source)
        folder, name = self._locate_new(target)
        _NameOperation(f"link {target}", (folder, name, node))

    @_counted
    def rename_noreplace(self, source: str, target: str) -> None:
        node = self._find(source)
        folder, name = self._locate_new(target)
        _NameOperation(f"rename {target}", (*self._locate(source), None), (folder, name, node))

    @_counted
    def unlink(self, path: str) -> None:
        if isinstance(self._find(path), _Folder):
            raise _os_error(errno.EISDIR)
        _NameOperation(f"unlink {path}", (*self._locate(path), None))

    @_counted
    def mkdir(self, path: str, mode: int = 0o777) -> None:
        folder, name = self._locate_new(path)
        _NameOperation(f"mkdir {path}", (folder, name, _Folder()))

    @_counted
    def rmdir(self, path: str) -> None:
        node = self._find(path)
        if isinstance(node, _File):
            raise _os_error(errno.ENOTDIR)
        if node.entries:
            raise _os_error(errno.ENOTEMPTY)
        _NameOperation(f"rmdir {path}", (*self._locate(path), None))

    @_counted
    def scandir(self, path: str) -> list[tuple[str, str]]:
        node = self._find(path)
        if isinstance(node, _File):
            raise _os_error(errno.ENOTDIR)
        return [(name, _stat(child).kind) for name, child in node.entries.items()]

    def _locate(self, path: str) -> tuple[_Folder, str]:
        """Return the folder of a path and the name in it; the name of the root is empty."""
        *folders, name = path.strip("/").split("/")
        folder = self._root
        for segment in folders:
            node = folder.entries.get(segment)
            if node is None:
                raise _os_error(errno.ENOENT)
            if isinstance(node, _File):
                raise _os_error(errno.ENOTDIR)
            folder = node
        if len(os.fsencode(name)) > 255:
            raise _os_error(errno.ENAMETOOLONG)
        return folder, name

    def _find(self, path: str) -> _File | _Folder:
        folder, name = self._locate(path)
        node = folder.entries.get(name) if name else self._root
        if node is None:
            raise _os_error(errno.ENOENT)
        return node

    def _locate_new(self, path: str) -> tuple[_Folder, str]:
        folder, name = self._locate(path)
        if not name or name in folder.entries:
            raise _os_error(errno.EEXIST)
        return folder, name

    def _file(self, fd: int, *aligned: int) -> _File:
        """Return the open file. With O_DIRECT, the numbers ``aligned`` must be aligned."""
        node, flags = self._fds[fd]
        if isinstance(node, _Folder):
            raise _os_error(errno.EISDIR)
        if flags & os.O_DIRECT and any(number % ALIGNMENT for number in aligned):
            raise _os_error(errno.EINVAL)
        return node


def _set_entry(
    entries: dict[str, _File | _Folder], name: str, node: _File | _Folder | None
) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


def _stat(node: _File | _Folder) -> FileStat:
    kind, size = ("file", len(node.data)) if isinstance(node, _File) else ("folder", PAGE)
    return FileStat(kind, size, node.modified, node.inode)


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
