"""The system calls of ``LocalStore``, one method for each.

Tests replace them: ``limpet.testing.FaultFs`` makes one call fail, and ``CrashFs`` simulates a
power failure between two calls. Every failure is an ``OSError`` with its errno. Python repeats
calls that a signal interrupts (EINTR), except for the calls through libc.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import weakref
from threading import Lock
from typing import Any, NamedTuple

from limpet.machine import OPEN_FLAGS, find_libc

_LIBC = find_libc()
if _LIBC is not None:
    _LIBC.mmap.restype = ctypes.c_void_p
CAN_MAP = _LIBC is not None
"""Whether ``map_file`` works: not on Windows."""

_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_WRITE = 23
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1

UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
"""The errors of a call that the file system does not support."""
INVALID_OR_UNSUPPORTED = UNSUPPORTED | {errno.EINVAL}
"""The same for O_DIRECT and ``renameat2``, which some file systems do not accept as arguments."""


O_DIRECT = getattr(os, "O_DIRECT", 0)
O_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
O_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_O_PATH = getattr(os, "O_PATH", 0)
"""Flags of ``open``, 0 on a system without them: only Linux has the first, Windows has none."""

_position_lock = Lock()
"""Held while a descriptor has the position of one call, on Windows."""


class FileStat(NamedTuple):
    """The status of a file. ``kind``: "file", "folder", "link", or "other"; ``modified``: seconds
    since 1970; ``inode``: (device, inode), unique for each file."""

    kind: str
    size: int
    modified: float
    inode: tuple[int, int]


class Fs:
    """The real file system."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | OPEN_FLAGS, 0o666)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write, and return the number of bytes written, which may be less than requested."""
        if hasattr(os, "pwrite"):
            return os.pwrite(fd, data, offset)
        with _position_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, data)

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """Read, and return how many bytes: maybe fewer than requested, 0 at the end of the file."""
        if hasattr(os, "preadv"):
            return os.preadv(fd, [into], offset)
        with _position_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(into))
        into[: len(data)] = data
        return len(data)

    def fallocate(self, fd: int, length: int) -> bool:
        """Reserve ``length`` bytes and set the size, or return False. Unlike this system call,
        ``posix_fallocate`` writes zeros where it is not supported."""
        if not hasattr(_LIBC, "fallocate"):
            return False
        while _LIBC.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(length)) != 0:
            code = ctypes.get_errno()
            if code in UNSUPPORTED:
                return False
            if code != errno.EINTR:
                raise _libc_error("fallocate", code)
        return True

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fstat(self, fd: int) -> FileStat:
        return _file_stat(os.fstat(fd))

    def stat(self, path: str, *, follow: bool = True) -> FileStat:
        """Return the status of a file, or with ``follow`` of a link's target: ``FileNotFoundError``
        or ELOOP if there is none."""
        return _file_stat(os.stat(path, follow_symlinks=follow))

    def link(self, source: str, target: str) -> None:
        if os.link in os.supports_follow_symlinks:
            os.link(source, target, follow_symlinks=False)
        else:
            os.link(source, target)

    def rename_noreplace(self, source: str, target: str) -> None:
        """Rename. Raises ``OSError``: EEXIST if the target exists; EINVAL, ENOSYS, or EOPNOTSUPP if
        the file system cannot do it."""
        if not hasattr(_LIBC, "renameat2"):
            raise _libc_error("renameat2", errno.ENOSYS)
        old, new = os.fsencode(source), os.fsencode(target)
        flags = ctypes.c_uint(_RENAME_NOREPLACE)
        if _LIBC.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, flags) != 0:
            raise _libc_error("renameat2", ctypes.get_errno())

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        os.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def scandir(self, path: str) -> list[tuple[str, str]]:
        """Return the names in a folder with their kinds (see ``FileStat``), in any order."""
        with os.scandir(path) as entries:
            return [
                (entry.name, "folder" if entry.is_dir(follow_symlinks=False) else _kind(entry))
                for entry in entries
            ]


class BeneathFs(Fs):
    """The files below a folder, to read. No symbolic link below it is followed, also if one
    replaces a file or folder meanwhile."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def open(self, path: str, flags: int) -> int:
        *levels, name = os.path.relpath(path, self._folder).split(os.sep)
        fd = os.open(self._folder, os.O_RDONLY | O_DIRECTORY | OPEN_FLAGS)
        try:
            for level in levels:
                above = fd
                fd = os.open(level, O_DIRECTORY | _O_NOFOLLOW | OPEN_FLAGS, dir_fd=above)
                os.close(above)
            return os.open(name, flags | _O_NOFOLLOW | OPEN_FLAGS, dir_fd=fd)
        finally:
            os.close(fd)

    def stat(self, path: str, *, follow: bool = True) -> FileStat:
        fd = self.open(path, _O_PATH | O_NONBLOCK)
        try:
            return _file_stat(os.fstat(fd))
        finally:
            os.close(fd)


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "link"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


def map_file(fd: int, length: int, *, writable: bool) -> Any:
    """Return a file's first bytes as shared memory: a ctypes array, which unmaps them at its end.

    A fork does not get it if writable. ``mmap.mmap`` would keep a descriptor of the file, and unmap
    this address in a fork that has other memory there.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    size = ctypes.c_size_t(length)
    address = _LIBC.mmap(None, size, protection, mmap.MAP_SHARED, fd, ctypes.c_int64(0))
    if address == _MAP_FAILED:
        raise _libc_error("mmap", ctypes.get_errno())
    memory = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(memory, _unmap, address, length, os.getpid()).atexit = False
    if writable:
        _LIBC.madvise(ctypes.c_void_p(address), size, mmap.MADV_DONTFORK)
    return memory


def _unmap(address: int, length: int, pid: int) -> None:
    if pid == os.getpid():
        _LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))


def populate(address: int, length: int) -> None:
    """Map all pages of writable memory now. Before Linux 5.14, this does nothing."""
    size = ctypes.c_size_t(length)
    _LIBC.madvise(ctypes.c_void_p(address), size, _MADV_POPULATE_WRITE)


def _libc_error(name: str, code: int) -> OSError:
    return OSError(code, f"{name}: {os.strerror(code)}")


def _file_stat(result: os.stat_result) -> FileStat:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    kind = kinds.get(stat.S_IFMT(result.st_mode), "other")
    return FileStat(kind, result.st_size, result.st_mtime, (result.st_dev, result.st_ino))
