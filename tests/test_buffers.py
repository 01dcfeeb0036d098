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
    shared_pool,
)
from limpet.errors import StoreError, Unavailable
from limpet.saving.image import Piece
from limpet.saving.staging import stage_pieces
from limpet.storage.local.os_calls import Fs
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.threads import Workers, in_parallel
from tests.pools import allocated_bytes, free_bytes
from tests.waiting import wait_until

UNIT = 64 * 1024


@contextmanager
def blocked_acquires(pool, count=1):
    """Start threads that wait in ``acquire``, and yield their futures."""
    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(pool.acquire) for _ in range(count)]
        time.sleep(0.05)
        assert not any(future.done() for future in futures)
        yield futures


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


def test_close_wakes_waiters_and_frees_the_memory():
    pool = BufferPool(2 * UNIT, UNIT)
    pool.release(pool.acquire())
    held = [pool.acquire(), pool.acquire()]
    pool.release(held.pop())
    pool.close()
    assert allocated_bytes(pool) == UNIT
    with pytest.raises(StoreError, match="closed"):
        pool.acquire()
    pool.release(held.pop())
    assert allocated_bytes(pool) == 0
    pool = BufferPool(UNIT, UNIT)
    pool.acquire()
    with blocked_acquires(pool, 3) as futures:
        pool.close()
        for future in futures:
            assert isinstance(future.exception(5), StoreError)


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
        wait_until(lambda: allocated_bytes(pool) >= 2 * UNIT)
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
    assert free_bytes(pool) == UNIT


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
