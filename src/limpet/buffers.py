"""Page-aligned buffers for direct I/O, a pool of buffers, and alignment arithmetic.

A fork, as of a data loader's worker during a save, must not make a buffer copy-on-write: a direct
write in flight could read a page that this process no longer owns. Buffers are therefore wiped in
the child. Such memory can be private and use huge pages, which are ten times as fast to create.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Lock
from typing import Any, Self

import numpy as np

from limpet.errors import LimpetError, StoreError
from limpet.lazy_torch import torch_or_none
from limpet.machine import IS_LINUX, after_fork, find_libc
from limpet.types import ALIGNMENT, BLOCK_SIZE, MIB

_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23
_LIBC = find_libc()

_WAIT_PART = 0.5
"""Seconds of a wait after which it is checked whether the wait must end."""


_NO_MEMORY = re.compile("out of memory|not enough memory|(?:can't|cannot) allocate memory", re.I)


@contextmanager
def enough_memory(operation: str) -> Iterator[None]:
    """Raise ``LimpetError`` if the block runs out of memory: in Python, a library, or the system.
    ``operation``: "the load of runs/a/version_1"."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as e:
        is_system = isinstance(e, OSError) and e.errno == errno.ENOMEM
        if not (isinstance(e, MemoryError) or is_system or _NO_MEMORY.search(str(e))):
            raise
        raise LimpetError(
            f"There is not enough memory for {operation}",
            found=str(e) or type(e).__name__,
            todo="Free memory, or raise the limit of this process or its container; limpet.load"
            " needs less with keys=, and to load into= a state",
        ) from e


class Buffer:
    """A page-aligned block of ``size`` bytes at ``address``, whose pages are allocated. The memory
    returns to the system when the buffer and all views of it are gone."""

    def __init__(self, size: int) -> None:
        mapping = _map_for_linux(size) if IS_LINUX else mmap.mmap(-1, size)
        self.size = size
        self.view = memoryview(mapping)
        self.address = address_of(self.view)
        self.is_free = False
        self.is_pooled = True
        # Call madvise through ctypes: mmap.madvise holds the GIL while the kernel allocates pages.
        start, length = ctypes.c_void_p(self.address), ctypes.c_size_t(size)
        # before Linux 5.14, it fails
        if not IS_LINUX or _LIBC.madvise(start, length, _MADV_POPULATE_WRITE) != 0:
            ctypes.memset(self.address, 0, size)

    @classmethod
    def over(cls, view: memoryview) -> Self:
        """Return a buffer that is a part of other memory. A pool does not keep it."""
        buffer = cls.__new__(cls)
        buffer.size, buffer.view, buffer.address = len(view), view, address_of(view)
        buffer.is_free = buffer.is_pooled = False
        return buffer


def _map_for_linux(size: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(_MADV_WIPEONFORK)
    except OSError:  # before Linux 4.14
        mapping = mmap.mmap(-1, size)  # shared memory
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class BufferPool:
    """A thread-safe pool of equal-sized buffers under a byte budget, reused last in, first out.
    ``on_create`` is called with every new buffer."""

    def __init__(
        self,
        budget: int,
        buffer_size: int = BLOCK_SIZE,
        on_create: Callable[[Buffer], object] | None = None,
    ) -> None:
        self.buffer_size = buffer_size
        self.budget = budget
        self._limit = max(1, budget // buffer_size)
        self._on_create = on_create
        self._lock = Lock()  # ``with`` on a Condition can leave it acquired (see ``Latch``)
        self._condition = Condition(self._lock)
        self._may_collect = Condition(self._lock)
        self._collector: object = None
        self._free: list[Buffer] = []
        self._count = 0
        self._closed = False

    def acquire(self, check: Callable[[], object] = lambda: None) -> Buffer:
        """Return a buffer; wait while the budget is used up. ``check`` is called regularly during
        the wait, and raises to end it. Raises ``StoreError`` if the pool is closed."""
        with self._lock:
            while not (self._closed or self._free or self._count < self._limit):
                self._condition.wait(_WAIT_PART)  # an exception may have prevented a notification
                check()
            if self._closed:
                raise StoreError("Cannot acquire a buffer: the pool is closed")
            if self._free:
                buffer = self._free.pop()
                buffer.is_free = False
                return buffer
            self._count += 1
        return self._create_buffer()

    def acquire_many(self, count: int, check: Callable[[], object] = lambda: None) -> list[Buffer]:
        """Return ``count`` buffers, or fewer if the budget is smaller. Only one thread at a time
        collects several: two could each wait for what the other has."""
        buffers: list[Buffer] = []
        own = object()  # not a lock: the wait for a lock cannot call ``check``
        try:
            with self._lock:
                while self._collector is not None:
                    self._may_collect.wait(_WAIT_PART)
                    check()
                self._collector = own
            while len(buffers) < count:
                buffers.append(self.acquire(check))
        except BaseException:
            for buffer in buffers:
                self.release(buffer)
            raise
        finally:
            if self._collector is own:
                self._collector = None
                with self._lock:
                    self._may_collect.notify()
        return buffers

    def _create_buffer(self) -> Buffer:
        """Create a buffer that is counted already, without the lock: it takes milliseconds."""
        try:
            buffer = Buffer(self.buffer_size)
            if self._on_create is not None:
                self._on_create(buffer)
        except BaseException:
            with self._lock:
                self._count -= 1
                self._condition.notify()
            raise
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Return a buffer, also after ``close``; ``LimpetError`` if it was already released."""
        with self._lock:
            if buffer.is_free:
                raise LimpetError("A buffer was released twice: its bytes may be in use")
            buffer.is_free = True
            if not buffer.is_pooled:
                return
            if self._closed:
                self._count -= 1
            else:
                self._free.append(buffer)
                self._condition.notify()

    def close(self) -> None:
        """Make all waiting and later calls of ``acquire`` raise, and free all unused buffers."""
        with self._lock:
            self._closed = True
            self._count -= len(self._free)
            self._free.clear()
            self._condition.notify_all()


POOL_BUDGET = 128 * MIB
"""Half of the memory that a synchronous save or a load may use beyond the state, in bytes."""


def page_lock(buffer: Buffer) -> None:
    """Page-lock a buffer's memory for its lifetime, if the program uses CUDA: copies from and to
    devices are then three times as fast. If the driver refuses, the memory stays pageable."""
    torch = torch_or_none()
    # registering memory would otherwise create a CUDA context, which takes memory of the device
    if torch is not None and torch.cuda.is_initialized():
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(buffer.address, buffer.size, 0)) == 0:
            weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.address)


_pool = BufferPool(POOL_BUDGET, on_create=page_lock)


def shared_pool() -> BufferPool:
    """Return the pool of this process."""
    return _pool


def _replace_pool() -> None:
    """Replace the pool that a forked child inherits: if its buffers are shared memory, the child
    would write into the parent's files, and its lock may be locked forever."""
    global _pool
    _pool = BufferPool(POOL_BUDGET, on_create=page_lock)


after_fork(_replace_pool)


def as_byte_view(data: memoryview) -> memoryview:
    """Return a view of the same memory as single bytes; ``TypeError`` unless it is contiguous."""
    data = memoryview(data)
    return data.cast("B") if data.nbytes else memoryview(bytearray())


def address_of(data: memoryview) -> int:
    """Return the memory address at which a flat view begins, or 0 if it is empty."""
    if not len(data):
        return 0
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def direct_io_length(offset: int, address: int, length: int, capacity: int) -> int:
    """Return how many bytes direct I/O can transfer; 0 if none. ``length`` is rounded up to the
    alignment if ``capacity`` allows it, and down if not."""
    if offset % ALIGNMENT or address % ALIGNMENT:
        return 0
    span = -(-length // ALIGNMENT) * ALIGNMENT
    return span if span <= capacity else length // ALIGNMENT * ALIGNMENT
