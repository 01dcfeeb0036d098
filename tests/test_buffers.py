"""Test buffers and their pool."""

import ctypes
import mmap
import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

import limpet
from limpet import buffers
from limpet.buffers import (
    Buffer,
    BufferPool,
    address_of,
    as_byte_view,
    direct_io_length,
    shared_pool,
)
from limpet.errors import LimpetError, StoreError, Unavailable
from limpet.saving.image import Piece
from limpet.saving.staging import stage_pieces
from limpet.storage.local.os_calls import Fs
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.threads import Workers, in_parallel

UNIT = 64 * 1024


@contextmanager
def blocked_acquires(pool, count=1):
    """Start threads that wait in ``acquire``, and yield their futures."""
    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(pool.acquire) for _ in range(count)]
        time.sleep(0.05)
        assert not any(future.done() for future in futures)
        yield futures


def test_buffer_is_aligned_and_writable_and_reports_its_address():
    buffer = Buffer(UNIT)
    assert buffer.address % mmap.PAGESIZE == 0
    assert address_of(buffer.view) == buffer.address
    assert address_of(buffer.view[100:]) == buffer.address + 100
    assert (buffer.size, len(buffer.view), buffer.view.readonly) == (UNIT, UNIT, False)
    buffer.view[-1] = 7


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(("advice", "wiped"), [(buffers._MADV_WIPEONFORK, True), (9999, False)])
def test_fork_does_not_make_a_buffer_copy_on_write(monkeypatch, advice, wiped):
    """If a fork made the pages copy-on-write, the parent's next write to each page would cause a
    fault and move the page, even under a direct write. The second case is a kernel that cannot
    wipe memory on fork; the buffer is then shared memory."""
    monkeypatch.setattr(buffers, "_MADV_WIPEONFORK", advice)
    size = 1 << 20  # smaller than a huge page
    buffer = Buffer(size)
    buffer.view[:] = b"p" * size
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(write_end)
        os.read(read_end, 1)  # returns when the parent has written to all pages
        found = bytes(buffer.view[:3])
        buffer.view[0] = ord("c")
        del buffer
        os._exit(0 if found == (b"\0\0\0" if wiped else b"qqq") else 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ctypes.memset(buffer.address, ord("q"), size)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    os.close(write_end)
    os.close(read_end)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(buffer.view[:2]) == (b"qq" if wiped else b"cq")
    assert faults < size // mmap.PAGESIZE // 4


def test_acquire_returns_the_most_recently_released_buffer():
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
    with blocked_acquires(pool) as (future,):
        pool.release(held)
        assert future.result(5) is held


def test_close_wakes_waiters_and_frees_the_memory():
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
    with blocked_acquires(pool, 3) as futures:
        pool.close()
        for future in futures:
            assert isinstance(future.exception(5), StoreError)


def test_preallocate_creates_buffers_within_the_budget():
    created = []
    pool = BufferPool(4 * UNIT, UNIT, created.append)
    held = pool.acquire()
    pool.preallocate(2 * UNIT + 1)
    assert (pool.allocated_bytes, pool.free_bytes) == (3 * UNIT, 2 * UNIT)
    pool.preallocate(UNIT)
    pool.preallocate(100 * UNIT)
    assert (pool.allocated_bytes, len(created)) == (4 * UNIT, 4)
    pool.release(held)
    pool.close()
    pool.preallocate(100 * UNIT)
    assert pool.allocated_bytes == 0


def test_memory_of_a_closed_pool_stays_valid_while_a_view_refers_to_it():
    pool = BufferPool(UNIT, UNIT)
    buffer = pool.acquire()
    view = buffer.view[10:20]
    pool.release(buffer)
    del buffer
    pool.close()
    view[:] = b"still here"
    assert bytes(view) == b"still here"


def test_releasing_a_buffer_twice_raises():
    pool = BufferPool(UNIT, UNIT)
    buffer = pool.acquire()
    pool.release(buffer)
    with pytest.raises(LimpetError, match="twice"):
        pool.release(buffer)


def test_failed_allocation_does_not_count_toward_the_budget(monkeypatch):
    pool = BufferPool(UNIT, UNIT)

    def refuse(size):
        raise MemoryError

    monkeypatch.setattr("limpet.buffers.Buffer", refuse)
    with pytest.raises(MemoryError):
        pool.acquire()
    monkeypatch.undo()
    pool.acquire()


def test_many_threads_share_few_buffers():
    pool, held, held_counts = BufferPool(3 * UNIT, UNIT), set(), []

    def work(_):
        for _ in range(50):
            buffer = pool.acquire()
            assert id(buffer) not in held
            held.add(id(buffer))
            held_counts.append(len(held))
            held.remove(id(buffer))
            pool.release(buffer)

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(work, range(12)))
    assert max(held_counts) <= 3
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
def test_direct_io_length_depends_on_alignment_and_capacity(
    offset, address, length, capacity, span
):
    assert direct_io_length(offset, address, length, capacity) == span


def test_as_byte_view_returns_the_single_bytes_of_the_same_memory():
    data = bytearray(48)
    view = as_byte_view(memoryview(data).cast("d", (2, 3)))
    view[0] = 1
    assert (data[0], len(view), view.format) == (1, 48, "B")
    assert len(as_byte_view(memoryview(data)[:0].cast("d"))) == 0
    with pytest.raises(TypeError):
        as_byte_view(memoryview(data)[::2])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_during_a_direct_write_does_not_corrupt_the_file(tmp_path):
    """The process forks between the two halves of a direct write. Then both processes write to the
    buffer's memory. With a copy-on-write mapping, the kernel could pass a page of the wrong process
    to the device."""
    forked, go = threading.Event(), threading.Event()

    class Slow(Fs):
        def pwrite(self, fd, data, offset):
            if go.is_set():
                return super().pwrite(fd, data, offset)
            half = super().pwrite(fd, data[: len(data) // 2], offset)
            go.set()
            forked.wait(10)
            return half

    folder = f"/var/tmp/limpet-fork-{os.getpid()}"
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
    buffer.view[-4096:] = b"b" * 4096  # the second half, which the kernel does not have yet
    forked.set()
    thread.join(10)
    assert os.waitpid(child, 0)[1] == 0
    try:
        assert store.get("a", buffer.size) == b"a" * (buffer.size - 4096) + b"b" * 4096
    finally:
        store.delete("a")
        os.rmdir(folder)


@pytest.fixture
def one_shared_buffer(monkeypatch):
    """The only buffer of the pool that the synchronous operations share; another one has it."""
    pool = BufferPool(buffers.BLOCK_SIZE)
    monkeypatch.setattr(buffers, "_pool", pool)
    return pool.acquire()


def test_a_save_and_a_load_end_in_time_while_another_operation_has_all_buffers(one_shared_buffer):
    state = {"w": np.arange(3000)}
    saved = MemoryStore()
    shared_pool().release(one_shared_buffer)
    limpet.save(saved, state)
    shared_pool().acquire()
    target = MemoryStore()
    for name, call in (
        ("save", lambda: limpet.save(target, state, timeout=0.1)),
        ("load", lambda: limpet.load(saved, timeout=0.1)),
    ):
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(call)
            with pytest.raises(Unavailable, match=f"The time is over for the {name}"):
                future.result(10)
    assert list(target.list("")) == []


def test_many_buffers_are_not_awaited_behind_a_thread_that_collects_for_longer():
    pool = BufferPool(2 * UNIT, UNIT)
    held = pool.acquire()

    def check():
        raise Unavailable("the time is over")

    with ThreadPoolExecutor(1) as threads:
        collecting = threads.submit(pool.acquire_many, 2)
        while pool.allocated_bytes < 2 * UNIT:
            time.sleep(0.001)
        with pytest.raises(Unavailable):
            pool.acquire_many(2, check)
        with pytest.raises(Unavailable):
            pool.acquire(check)
        pool.release(held)
        for buffer in collecting.result(10):
            pool.release(buffer)
    assert len(pool.acquire_many(2, check)) == 2  # the next one may collect


def test_the_copy_of_a_save_waits_for_a_buffer_until_its_deadline():
    pool = BufferPool(UNIT, UNIT)
    held = pool.acquire()

    def check():
        raise Unavailable("the time is over")

    pieces = [Piece(0, 1)]
    image = SimpleNamespace(
        length=1, split_by_device=lambda found: ([], found), copy_piece=lambda *_: None
    )
    with pytest.raises(Unavailable):
        stage_pieces(image, pieces, Workers(pool, 1, check_time=check))
    assert pieces[0].buffer is None
    pool.release(held)
    assert pool.free_bytes == UNIT


def test_a_wait_for_a_buffer_ends_when_another_thread_of_the_operation_has_failed(
    one_shared_buffer,
):
    workers, waiting = Workers.create(), threading.Event()

    def work(item):
        if item == "fails":
            waiting.wait(10)
            raise KeyError(item)
        waiting.set()
        with workers.buffer():
            pass

    with pytest.raises(KeyError):
        in_parallel(["waits", "fails"], work, 2)
