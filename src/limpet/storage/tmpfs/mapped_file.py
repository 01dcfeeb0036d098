"""A file that is mapped into this process, with all its pages allocated.

The pages are allocated before anything is written through the mapping: on a full file system, a
write to a page that does not exist ends the process with SIGBUS. Only a program that truncates the
file could still cause that.

A forked process gets neither the mapping nor the descriptor. Otherwise, the worker of a data loader
would keep the memory of a deleted file until it ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress

from limpet.buffers import Buffer
from limpet.machine import after_fork, find_libc
from limpet.types import MIB

if sys.platform != "win32":  # where nothing uses this module
    import fcntl

Allocate = Callable[[int, int], object]
"""Allocates the bytes of a file from the first offset up to the second one. Raises ``OSError``."""

_LIBC = find_libc()
if _LIBC is not None:
    _LIBC.mmap.restype = ctypes.c_void_p
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_WRITE = 23
_POPULATE_BYTES = 64 * MIB
"""The bytes that one call maps, so that a thread that ends the process does not wait for long."""

_F_SETSIG = 10
_IGNORED_SIGNAL: int = getattr(signal, "SIGURG", 0)
"""The signal of a broken lease. By default, it is SIGIO, which ends the process."""

_open_files: weakref.WeakSet[MappedFile] = weakref.WeakSet()


class MappedFile:
    """A file of ``length`` bytes that is mapped into memory.

    ``fd``: a descriptor for reading and writing, which this object closes; ``buffer``: the mapped
    bytes. ``on_map`` is called with each new ``buffer``.
    """

    def __init__(self, fd: int, on_map: Callable[[Buffer], object]) -> None:
        self.fd = fd
        self._on_map = on_map
        self.length = 0
        self.buffer = Buffer.over(memoryview(b""))
        self._close_fd = weakref.finalize(self, os.close, fd)
        _open_files.add(self)
        # a process that finds the file locked knows that another one uses it
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def resize(self, length: int, allocate: Allocate) -> None:
        """Set the length, and map the file. All bytes that it had before keep their pages.

        Raises ``OSError``. No other thread may use the file.
        """
        if length > self.length:
            # only the new bytes: to allocate those that exist takes seven times as long
            allocate(self.length, length)
            self.buffer = Buffer.over(_map(self.fd, length))
        elif length < self.length:
            self.buffer = Buffer.over(self.buffer.view[:length])
            os.ftruncate(self.fd, length)
        if length != self.length:
            self.length = length
            self._on_map(self.buffer)

    def populate(self) -> None:
        """Map all pages now. Otherwise, the first access to each page takes most of the time of a
        copy."""
        for start in range(0, self.length, _POPULATE_BYTES):
            address = ctypes.c_void_p(self.buffer.address + start)
            length = ctypes.c_size_t(min(_POPULATE_BYTES, self.length - start))
            _LIBC.madvise(address, length, _MADV_POPULATE_WRITE)  # before Linux 5.14, it fails

    def close(self) -> None:
        """Close the file, and release its memory once no view of it is left."""
        self._close_fd()
        self.buffer = Buffer.over(memoryview(b""))

    def is_unused_elsewhere(self) -> bool:
        """Return True if the file has one name, and nobody else has it open or mapped.

        The kernel grants a write lease on a file only then. False also if it cannot tell.
        """
        with suppress(OSError):
            fcntl.fcntl(self.fd, _F_SETSIG, _IGNORED_SIGNAL)
            try:
                fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            finally:
                fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return os.fstat(self.fd).st_nlink == 1
        return False

    def is_deleted(self) -> bool:
        """Return True if no name is left: another process has deleted the file."""
        return os.fstat(self.fd).st_nlink == 0


def _map(fd: int, length: int) -> memoryview:
    """Return the first ``length`` bytes of a file as memory that a forked process does not have.

    Not ``mmap.mmap``, which would also unmap this address in a forked process that has other memory
    there.
    """
    flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
    address = _LIBC.mmap(None, ctypes.c_size_t(length), *flags, fd, ctypes.c_int64(0))
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap: {os.strerror(code)}")
    memory = (ctypes.c_char * length).from_address(address)
    weakref.finalize(memory, _unmap, address, length, os.getpid()).atexit = False
    size = ctypes.c_size_t(length)
    _LIBC.madvise(ctypes.c_void_p(address), size, mmap.MADV_DONTFORK)
    return memoryview(memory).cast("B")


def _unmap(address: int, length: int, pid: int) -> None:
    if pid == os.getpid():
        _LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))


def _close_in_child() -> None:
    for file in list(_open_files):
        file.close()


after_fork(_close_in_child)
