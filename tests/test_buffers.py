"""Buffers and their pool."""

import ctypes
import mmap
import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from holdfast import buffers
from holdfast.buffers import Buffer, BufferPool, address_of, as_byte_view, direct_io_length
from holdfast.errors import HoldfastError, StoreError
from holdfast.storage.local import LocalStore
from holdfast.storage.os_calls import Fs

UNIT = 64 * 1024


@contextmanager
def blocked(pool, count=1):
    """Threads that wait in ``acquire``; yields their futures."""
    with ThreadPoolExecutor(count) as threads:
        waits = [threads.submit(pool.acquire, 10) for _ in range(count)]
        time.sleep(0.05)
        assert not any(wait.done() for wait in waits)
        yield waits


def test_a_buffer_is_aligned_writable_and_says_where_it_is():
    buffer = Buffer(UNIT)
    assert buffer.address % mmap.PAGESIZE == 0
    assert address_of(buffer.view) == buffer.address
    assert address_of(buffer.view[100:]) == buffer.address + 100
    assert (buffer.size, len(buffer.view), buffer.view.readonly) == (UNIT, UNIT, False)
    buffer.view[-1] = 7


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(("advice", "wiped"), [(buffers._MADV_WIPEONFORK, True), (9999, False)])
def test_no_fork_turns_a_buffer_copy_on_write(monkeypatch, advice, wiped):
    """Else its pages, under a direct write as well, would move at the next touch: a fault each. A
    kernel that cannot wipe memory gets shared memory."""
    monkeypatch.setattr(buffers, "_MADV_WIPEONFORK", advice)
    size = 1 << 20  # less than a huge page
    buffer = Buffer(size)
    buffer.view[:] = b"p" * size
    done, begin = os.pipe()
    child = os.fork()
    if not child:
        os.close(begin)
        os.read(done, 1)  # until the parent has touched all
        found = bytes(buffer.view[:3])
        buffer.view[0] = ord("c")
        del buffer
        os._exit(0 if found == (b"\0\0\0" if wiped else b"qqq") else 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ctypes.memset(buffer.address, ord("q"), size)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    os.close(begin)
    os.close(done)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(buffer.view[:2]) == (b"qq" if wiped else b"cq")
    assert faults < size // mmap.PAGESIZE // 4


def test_the_last_buffer_in_is_the_first_out():
    pool = BufferPool(3 * UNIT, UNIT)
    a, b = pool.acquire(), pool.acquire()
    assert (pool.allocated_bytes, pool.free_bytes, pool.budget) == (2 * UNIT, 0, 3 * UNIT)
    pool.release(a)
    pool.release(b)
    assert (pool.allocated_bytes, pool.free_bytes) == (2 * UNIT, 2 * UNIT)
    assert [pool.acquire(), pool.acquire()] == [b, a]


def test_acquire_waits_for_a_release():
    pool = BufferPool(UNIT, UNIT)
    held = pool.acquire()
    with blocked(pool) as (wait,):
        pool.release(held)
        assert wait.result(5) is held


def test_acquire_waits_for_a_larger_budget():
    pool = BufferPool(UNIT, UNIT)
    pool.acquire()
    with blocked(pool, 2) as waits:
        pool.budget = 3 * UNIT
        assert len({id(wait.result(5)) for wait in waits}) == 2
    assert pool.allocated_bytes == 3 * UNIT


def test_a_smaller_budget_takes_effect_as_buffers_come_back():
    pool = BufferPool(3 * UNIT, UNIT)
    held = [pool.acquire() for _ in range(3)]
    pool.budget = UNIT
    for buffer in held:
        pool.release(buffer)
    assert (pool.allocated_bytes, pool.free_bytes) == (UNIT, UNIT)


def test_acquire_gives_up_in_time():
    pool = BufferPool(UNIT, UNIT)
    pool.acquire()
    with pytest.raises(StoreError, match="Timed out while waiting for a free buffer"):
        pool.acquire(timeout=0.01)
    with pytest.raises(StoreError, match="Timed out while waiting for a free buffer"):
        pool.acquire(timeout=0)


def test_close_wakes_who_waits_and_gives_the_memory_back():
    pool = BufferPool(2 * UNIT, UNIT)
    pool.release(pool.acquire())
    held = [pool.acquire(), pool.acquire()]
    pool.release(held.pop())
    pool.close()
    assert pool.allocated_bytes == UNIT
    with pytest.raises(StoreError, match="closed"):
        pool.acquire()
    pool.release(held.pop())
    assert pool.allocated_bytes == 0
    pool = BufferPool(UNIT, UNIT)
    pool.acquire()
    with blocked(pool, 3) as waits:
        pool.close()
        for wait in waits:
            assert isinstance(wait.exception(5), StoreError)


def test_reserve_makes_buffers_ahead_and_never_too_many():
    made = []
    pool = BufferPool(4 * UNIT, UNIT, made.append)
    held = pool.acquire()
    pool.preallocate(2 * UNIT + 1)
    assert (pool.allocated_bytes, pool.free_bytes) == (3 * UNIT, 2 * UNIT)
    pool.preallocate(UNIT)
    pool.preallocate(100 * UNIT)
    assert (pool.allocated_bytes, len(made)) == (4 * UNIT, 4)
    pool.release(held)
    pool.close()
    pool.preallocate(100 * UNIT)
    assert pool.allocated_bytes == 0


def test_trim_keeps_as_much_as_is_said():
    pool = BufferPool(4 * UNIT, UNIT)
    held = [pool.acquire() for _ in range(4)]
    for buffer in held[:3]:
        pool.release(buffer)
    pool.trim(2 * UNIT)
    assert (pool.allocated_bytes, pool.free_bytes) == (2 * UNIT, UNIT)
    pool.trim(0)
    assert (pool.allocated_bytes, pool.free_bytes) == (UNIT, 0)
    again = [pool.acquire() for _ in range(3)]
    assert len({buffer.address for buffer in again}) == 3


def test_trimmed_memory_stays_while_a_view_of_it_is_held():
    pool = BufferPool(UNIT, UNIT)
    buffer = pool.acquire()
    view = buffer.view[10:20]
    pool.release(buffer)
    del buffer
    pool.trim(0)
    view[:] = b"still here"
    assert bytes(view) == b"still here"


def test_a_buffer_is_released_once():
    pool = BufferPool(UNIT, UNIT)
    buffer = pool.acquire()
    pool.release(buffer)
    with pytest.raises(HoldfastError, match="twice"):
        pool.release(buffer)


@pytest.mark.parametrize("budget", [0, UNIT - 1, -1])
def test_a_budget_for_no_buffer_is_an_error(budget):
    with pytest.raises(HoldfastError):
        BufferPool(budget, UNIT)


def test_memory_that_cannot_be_had_is_not_counted(monkeypatch):
    pool = BufferPool(UNIT, UNIT)

    def refuse(size):
        raise MemoryError

    monkeypatch.setattr("holdfast.buffers.Buffer", refuse)
    with pytest.raises(MemoryError):
        pool.acquire()
    monkeypatch.undo()
    pool.acquire(timeout=1)


def test_many_threads_share_few_buffers():
    pool, held, most = BufferPool(3 * UNIT, UNIT), set(), []

    def work(_):
        for _ in range(50):
            buffer = pool.acquire(10)
            assert id(buffer) not in held
            held.add(id(buffer))
            most.append(len(held))
            held.remove(id(buffer))
            pool.release(buffer)

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(work, range(12)))
    assert max(most) <= 3
    assert pool.allocated_bytes <= 3 * UNIT


@pytest.mark.parametrize(
    ("offset", "address", "length", "capacity", "span"),
    [
        (0, 0, 4096, 4096, 4096),
        (0, 0, 5000, 5000, 4096),
        (0, 0, 5000, 8192, 8192),
        (0, 0, 5000, 8191, 4096),
        (0, 0, 100, 4096, 4096),
        (0, 0, 100, 100, 0),
        (4096, 8192, 8192, 9999, 8192),
        (1, 0, 8192, 8192, 0),
        (0, 512, 8192, 8192, 0),
        (0, 0, 0, 4096, 0),
    ],
)
def test_what_may_be_asked_for_directly(offset, address, length, capacity, span):
    assert direct_io_length(offset, address, length, capacity) == span


def test_flat_gives_single_bytes_of_the_same_memory():
    data = bytearray(48)
    view = as_byte_view(memoryview(data).cast("d", (2, 3)))
    view[0] = 1
    assert (data[0], len(view), view.format) == (1, 48, "B")
    assert len(as_byte_view(memoryview(data)[:0].cast("d"))) == 0
    with pytest.raises(TypeError):
        as_byte_view(memoryview(data)[::2])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_forks_while_a_write_is_in_flight_harms_nothing(tmp_path):
    """The fork comes between the two halves of a direct write; both sides then touch the buffer's
    memory. With a private mapping the kernel could hand the device a copy of the wrong side."""
    forked, go = threading.Event(), threading.Event()

    class Slow(Fs):
        def pwrite(self, fd, data, offset):
            if go.is_set():
                return super().pwrite(fd, data, offset)
            half = super().pwrite(fd, data[: len(data) // 2], offset)
            go.set()
            forked.wait(10)
            return half

    folder = f"/var/tmp/holdfast-fork-{os.getpid()}"
    store, buffer = LocalStore(folder, fs=Slow()), BufferPool(1 << 20, 1 << 20).acquire()
    buffer.view[:] = b"a" * buffer.size

    def write():
        with store.put("a", buffer.size) as upload:
            upload.write_at(0, buffer.view)
            upload.commit()

    thread = threading.Thread(target=write)
    thread.start()
    go.wait(10)
    child = os.fork()
    if not child:
        buffer.view[0] = buffer.view[-1] = ord("c")
        os._exit(0)
    buffer.view[-4096:] = b"b" * 4096  # the second half, not yet given to the kernel
    forked.set()
    thread.join(10)
    assert os.waitpid(child, 0)[1] == 0
    try:
        assert store.get("a", buffer.size) == b"a" * (buffer.size - 4096) + b"b" * 4096
    finally:
        store.delete("a")
        os.rmdir(folder)
