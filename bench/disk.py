"""Raw disk speed, and functions that make a measurement durable or cold."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CHUNK = 8 << 20
THREADS = (1, 4, 6)
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


def file_system(folder: Path) -> str:
    """Return the type of the file system that contains ``folder`` (the longest matching mount)."""
    real, best, kind = str(folder.resolve()), "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        point, name = line.split()[1:3]
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, name
    return kind


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a folder on a real disk, and remove it at the end.

    Raises ``SystemExit`` if ``parent`` is on a memory file system.
    """
    kind = file_system(parent)
    if kind in _IN_MEMORY:
        raise SystemExit(f"The scratch folder is on {kind}; choose one on a disk with --folder")
    folder = Path(tempfile.mkdtemp(prefix="limpet-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [Path(root) / name for root, _, names in os.walk(path) for name in names]


def fsync_tree(path: Path) -> None:
    """Sync every file and folder below ``path``, and the parent folder of ``path``."""
    folders = [Path(root) for root, _, _ in os.walk(path)] if path.is_dir() else []
    for each in [*files_of(path), *folders, path.parent]:
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Delete ``path`` and sync, so that no later measurement pays for the deletion."""
    shutil.rmtree(path, ignore_errors=True)
    parent = os.open(path.parent, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


def drop_page_cache(path: Path) -> float:
    """Drop the cached pages of all files of ``path``; return the fraction that is still cached."""
    fsync_tree(path)
    resident = total = 0
    for each in files_of(path):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            here, pages = _resident_pages(descriptor)
            resident, total = resident + here, total + pages
        finally:
            os.close(descriptor)
    return resident / max(total, 1)


def _resident_pages(descriptor: int) -> tuple[int, int]:
    size = os.fstat(descriptor).st_size
    if size == 0:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    # ctypes can only take the address of a writable buffer, so the private mapping is writable.
    with mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as held:
        anchor = ctypes.c_char.from_buffer(held)
        marks = (ctypes.c_ubyte * pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        start = ctypes.c_void_p(ctypes.addressof(anchor))
        failed = libc.mincore(start, ctypes.c_size_t(size), marks)
        del anchor
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(mark & 1 for mark in marks), pages


def aligned_memory(size: int) -> mmap.mmap:
    """Return touched memory that suits direct I/O: aligned, with huge pages if available.

    The contents are random, so that the disk cannot compress them.
    """
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = os.urandom(CHUNK)
    for at in range(0, size, CHUNK):
        memory[at : at + CHUNK] = block[: size - at]
        memory[at : at + 8] = at.to_bytes(8, "little")
    return memory


def run_in_threads(threads: int, chunks: int, work: Callable[[int], None]) -> None:
    """Run ``work(number)`` for each chunk number, in several threads.

    Raises the first exception of a thread.
    """
    numbers, failures = itertools.count(), []

    def loop() -> None:
        try:
            while (number := next(numbers)) < chunks:
                work(number)
        except Exception as failure:  # noqa: BLE001  # passed to the caller
            failures.append(failure)

    team = [threading.Thread(target=loop) for _ in range(threads)]
    for member in team:
        member.start()
    for member in team:
        member.join()
    if failures:
        raise failures[0]


def time_raw_write(path: Path, memory: mmap.mmap, threads: int) -> float:
    """Return the seconds of a durable O_DIRECT write: fallocate, pwrite, fsync file and folder."""
    view, size = memoryview(memory), len(memory)
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size)

        def write(number: int) -> None:
            at = number * CHUNK
            if os.pwrite(descriptor, view[at : at + CHUNK], at) != min(CHUNK, size - at):
                raise OSError("short write")

        run_in_threads(threads, -(-size // CHUNK), write)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    return time.perf_counter() - start


def time_raw_read(path: Path, memory: mmap.mmap, threads: int) -> float:
    """Return the seconds of an O_DIRECT read of ``path`` into ``memory``, already touched."""
    view, size = memoryview(memory), len(memory)
    start = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:

        def read(number: int) -> None:
            at = number * CHUNK
            if os.preadv(descriptor, [view[at : at + CHUNK]], at) != min(CHUNK, size - at):
                raise OSError("short read")

        run_in_threads(threads, -(-size // CHUNK), read)
    finally:
        os.close(descriptor)
    return time.perf_counter() - start


def measure_raw(
    folder: str, size: int, writers: list[int], readers: list[int]
) -> dict[str, dict[str, float]]:
    """Return the seconds of the raw write and the raw cold read, by number of threads.

    Runs in a child process.
    """
    memory, path = aligned_memory(size), Path(folder) / "raw"
    found: dict[str, dict[str, float]] = {"save": {}, "load": {}}
    for threads in writers:
        found["save"][str(threads)] = time_raw_write(path, memory, threads)
    drop_page_cache(path)
    for threads in readers:
        found["load"][str(threads)] = time_raw_read(path, memory, threads)
    path.unlink()
    return found
