"""The few calls to the operating system that ``LocalStore`` makes, each one method.

A test replaces them: ``holdfast.testing.FaultFs`` fails one of them, ``CrashFs`` cuts the power
between two. Every failure is an ``OSError`` with its errno. Python itself repeats what a signal
interrupted (EINTR), except for the calls made through libc.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from typing import NamedTuple

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1

UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
"""What a file system answers to a call that it does not know."""


class FileStat(NamedTuple):
    """``kind`` is "file", "folder" or "other"; ``size`` in bytes, ``modified`` in seconds since
    1970, ``inode`` the pair (device, inode) that tells two files apart."""

    kind: str
    size: int
    modified: float
    inode: tuple[int, int]


class Fs:
    """The real file system."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Bytes written: possibly fewer than given."""
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """Bytes read: possibly fewer than asked; 0 at the end of the file."""
        return os.preadv(fd, [into], offset)

    def fallocate(self, fd: int, length: int) -> bool:
        """Reserve ``length`` bytes and set the size; False where the file system cannot.

        The system call, not ``posix_fallocate``: where the former is missing, that one writes
        zeros over the whole file.
        """
        while True:
            try:
                _libc_call("fallocate", fd, 0, ctypes.c_int64(0), ctypes.c_int64(length))
                return True
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno in UNSUPPORTED:
                    return False
                raise

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fstat(self, fd: int) -> FileStat:
        return _file_stat(os.fstat(fd))

    def stat(self, path: str) -> FileStat:
        """Of the path itself: a symbolic link is "other"."""
        return _file_stat(os.lstat(path))

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def rename_noreplace(self, source: str, target: str) -> None:
        """Rename, or EEXIST; EINVAL, ENOSYS or EOPNOTSUPP where the file system cannot."""
        _libc_call(
            "renameat2",
            _AT_FDCWD,
            os.fsencode(source),
            _AT_FDCWD,
            os.fsencode(target),
            ctypes.c_uint(_RENAME_NOREPLACE),
        )

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def scandir(self, path: str) -> list[tuple[str, bool]]:
        """Names in a folder, each with whether it is a folder; only files and folders, so that
        neither symbolic links nor devices are followed."""
        with os.scandir(path) as entries:
            return [
                (entry.name, entry.is_dir(follow_symlinks=False))
                for entry in entries
                if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
            ]


def _libc_call(name: str, *arguments: object) -> None:
    function = getattr(_LIBC, name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"{name}: {os.strerror(errno.ENOSYS)}")
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _file_stat(found: os.stat_result) -> FileStat:
    if stat.S_ISREG(found.st_mode):
        kind = "file"
    else:
        kind = "folder" if stat.S_ISDIR(found.st_mode) else "other"
    return FileStat(kind, found.st_size, found.st_mtime, (found.st_dev, found.st_ino))
