"""The system calls of ``LocalStore``, one method for each.

Tests replace them: ``holdfast.testing.FaultFs`` makes one call fail, and ``CrashFs`` simulates a
power failure between two calls. Every failure is an ``OSError`` with its errno. Python repeats
calls that a signal interrupts (EINTR), except for the calls through libc.
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
"""The errors of a call that the file system does not support."""


class FileStat(NamedTuple):
    """The status of a file.

    ``kind`` is "file", "folder", or "other". ``size`` is in bytes, and ``modified`` in seconds
    since 1970. ``inode`` is the pair (device, inode), which is unique for each file.
    """

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
        """Write, and return the number of bytes written, which may be less than requested."""
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """Read, and return the number of bytes read.

        It may be less than requested, and it is 0 at the end of the file.
        """
        return os.preadv(fd, [into], offset)

    def fallocate(self, fd: int, length: int) -> bool:
        """Reserve ``length`` bytes and set the file size.

        Return False if the file system does not support it. This uses the system call and not
        ``posix_fallocate``, which writes zeros to the whole file if the call is not supported.
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
        """Return the status of the path itself: a symbolic link is "other"."""
        return _file_stat(os.lstat(path))

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def rename_noreplace(self, source: str, target: str) -> None:
        """Rename without replacing an existing file.

        Raises ``OSError`` with EEXIST if the target exists, and with EINVAL, ENOSYS, or EOPNOTSUPP
        if the file system does not support the call.
        """
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
        """Return the files and folders in a folder, each as (name, is a folder).

        Symbolic links and devices are omitted, so that they are never followed.
        """
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
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _file_stat(result: os.stat_result) -> FileStat:
    if stat.S_ISREG(result.st_mode):
        kind = "file"
    else:
        kind = "folder" if stat.S_ISDIR(result.st_mode) else "other"
    return FileStat(kind, result.st_size, result.st_mtime, (result.st_dev, result.st_ino))
