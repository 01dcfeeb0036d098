"""Page-aligned buffers for direct I/O, a pool of them, and the arithmetic of alignment.

No fork turns a buffer copy-on-write (a data loader starts a worker while a save runs): a direct
write in flight could then read from a page that is no longer ours. The child finds zeros in its
place. Such memory may be private, and so of huge pages, which are made ten times as fast as small
ones; shared memory, which is the other way to this end, is of small ones by default.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Lock

import numpy as np

from holdfast.errors import HoldfastError, StoreError
from holdfast.types import ALIGNMENT, BLOCK_SIZE, MIB

POOL_BUDGET = 128 * MIB
"""Half of what a synchronous save or a load may use beyond the state, in bytes."""

_pool: BufferPool | None = None
_lock = Lock()


def shared_pool() -> BufferPool:
    """The process's pool; made when it is first asked for."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = BufferPool(POOL_BUDGET)
        return _pool


def _reset_after_fork() -> None:
    """In a forked child the buffers are its parent's: where they are shared memory, whatever the
    child wrote into them would stand in the parent's files. And a lock may be held for ever."""
    global _pool, _lock
    _pool, _lock = None, Lock()


os.register_at_fork(after_in_child=_reset_after_fork)

_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None)


class Buffer:
    """``size`` bytes at ``address``, page-aligned, already touched; ``view`` is their memory.

    The memory is given back to the system when the buffer and every view of it are gone.
    """

    __slots__ = ("__weakref__", "address", "is_free", "size", "view")

    def __init__(self, size: int) -> None:
        mapping = _map_memory(size)
        self.size = size
        self.view = memoryview(mapping)
        self.address = address_of(self.view)
        self.is_free = False
        # Through ctypes, because mmap.madvise keeps the interpreter's lock while pages are made.
        where, length = ctypes.c_void_p(self.address), ctypes.c_size_t(size)
        if _LIBC.madvise(where, length, _MADV_POPULATE_WRITE) != 0:  # before Linux 5.14
            ctypes.memset(self.address, 0, size)


def _map_memory(size: int) -> mmap.mmap:
    """Anonymous memory that a fork leaves alone."""
    mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(_MADV_WIPEONFORK)
    except OSError:  # before Linux 4.14
        mapping = mmap.mmap(-1, size)
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class BufferPool:
    """Buffers of one size under a byte budget, reused last in, first out. Safe for threads.

    ``budget`` may be set at any time: a larger one wakes who waits, a smaller one takes effect
    as buffers come back. ``allocated`` counts the bytes of all buffers, ``free`` of those that
    nobody holds. ``prepare`` is called with every buffer that is made.
    """

    def __init__(
        self,
        budget: int,
        buffer_size: int = BLOCK_SIZE,
        on_create: Callable[[Buffer], object] | None = None,
    ) -> None:
        self.buffer_size = buffer_size
        self._on_create = on_create
        self._condition = Condition()
        self._free: list[Buffer] = []
        self._count = 0
        self._closed = False
        self._limit = self._buffers_in(budget)

    @property
    def budget(self) -> int:
        return self._limit * self.buffer_size

    @budget.setter
    def budget(self, budget: int) -> None:
        with self._condition:
            self._limit = self._buffers_in(budget)
            self._condition.notify_all()

    @property
    def allocated_bytes(self) -> int:
        return self._count * self.buffer_size

    @property
    def free_bytes(self) -> int:
        return len(self._free) * self.buffer_size

    def acquire(self, timeout: float | None = None) -> Buffer:
        """A buffer, waiting for one while the budget is used up.

        Raises ``StoreError`` when ``timeout`` (seconds) has passed, or when the pool is closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while True:
                if self._closed:
                    raise StoreError("No buffer is given out any more: the pool is closed")
                if self._free:
                    buffer = self._free.pop()
                    buffer.is_free = False
                    return buffer
                if self._count < self._limit:
                    self._count += 1
                    break
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not self._condition.wait(left):
                    raise StoreError(
                        "No buffer became free in time",
                        expected=f"one within {timeout} s",
                        found=f"{self.allocated_bytes} bytes in use, which is the budget",
                        todo="See what holds the writes up, or give a larger budget",
                    )
        return self._create_buffer()

    def preallocate(self, nbytes: int) -> None:
        """Make buffers until there are so many bytes of them, or the budget is used up, or the
        pool is closed. For a thread that has nothing better to do; others are not held up."""
        while True:
            with self._condition:
                enough = self._count >= min(-(-nbytes // self.buffer_size), self._limit)
                if enough or self._closed:
                    return
                self._count += 1
            self.release(self._create_buffer())

    def _create_buffer(self) -> Buffer:
        """A buffer that is counted already. Outside the lock: touching its pages takes
        milliseconds."""
        try:
            buffer = Buffer(self.buffer_size)
            if self._on_create is not None:
                self._on_create(buffer)
        except BaseException:
            with self._condition:
                self._count -= 1
                self._condition.notify()
            raise
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Give a buffer back. Also after ``close``; twice is an error."""
        with self._condition:
            if buffer.is_free:
                raise HoldfastError("A buffer was released twice: its bytes may be in use")
            buffer.is_free = True
            if self._closed or self._count > self._limit:
                self._count -= 1
            else:
                self._free.append(buffer)
                self._condition.notify()

    def trim(self, max_bytes: int) -> None:
        """Give free buffers back to the system until at most ``keep`` bytes are allocated."""
        with self._condition:
            while self._free and self.allocated_bytes > max_bytes:
                self._free.pop(0)
                self._count -= 1
            self._condition.notify_all()

    def close(self) -> None:
        """Make every present and later ``acquire`` raise, and give all free buffers back."""
        with self._condition:
            self._closed = True
        self.trim(0)

    def _buffers_in(self, budget: int) -> int:
        if budget < self.buffer_size:
            raise HoldfastError(
                "The budget of a pool holds no buffer",
                expected=f"at least {self.buffer_size} bytes",
                found=budget,
            )
        return budget // self.buffer_size


def as_byte_view(data: memoryview) -> memoryview:
    """The same memory as single bytes. Raises ``TypeError`` if it is not contiguous."""
    data = memoryview(data)
    if data.format == "B" and data.ndim == 1 and data.contiguous:
        return data
    return data.cast("B") if data.nbytes else memoryview(b"")


def address_of(data: memoryview) -> int:
    """Where a flat view begins in memory; 0 if it is empty."""
    if not len(data):
        return 0
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def direct_io_length(offset: int, address: int, length: int, capacity: int) -> int:
    """How many bytes from here may be asked for directly; 0 if none.

    ``length`` are wanted; up to ``capacity`` may be transferred, so that an end that is not
    aligned is rounded up where there is room for it, and left over where there is none.
    """
    if offset % ALIGNMENT or address % ALIGNMENT:
        return 0
    span = -(-length // ALIGNMENT) * ALIGNMENT
    return span if span <= capacity else length // ALIGNMENT * ALIGNMENT
