"""Uploads that take pieces in any order, for stores that take an object in another way.

``BufferedUpload`` collects an object in memory, ``SequentialUpload`` passes it on from the first
byte to the last, and ``PartUpload`` in parts. The last two write to another ``Upload``.
"""

from __future__ import annotations

import heapq
import mmap
import os
from collections.abc import Callable, Sequence
from threading import Lock
from typing import IO

from limpet.buffers import as_byte_view
from limpet.errors import NoSpace, StoreError
from limpet.storage.store import Stat, Upload, WrittenRanges
from limpet.types import BLOCK_SIZE


def _allocate(length: int) -> memoryview:
    """Return so many bytes that return to the system at once when they are dropped: the allocator
    would keep those of a bytearray, once per thread."""
    # ACCESS_COPY: private memory, on every system
    return memoryview(mmap.mmap(-1, max(length, 1), access=mmap.ACCESS_COPY))[:length]


class _CheckedUpload(Upload):
    """What the uploads below share: what was written, and whether the upload is open."""

    def __init__(self, url: str, key: str, length: int) -> None:
        self._url, self._key, self._length = url, key, length
        self._written = WrittenRanges(key, url, length)
        self._lock = Lock()
        self._is_open = True

    def _require_open(self) -> None:
        if not self._is_open:
            raise StoreError(
                f"The upload of {self._key} is finished: it was committed or aborted, or it failed",
                key=self._key,
                store=self._url,
            )


class BufferedUpload(_CheckedUpload):
    """Collects the ``length`` bytes of an object, and passes them to ``create`` in ``commit``.

    ``url``: the store, for messages. ``create`` must not replace an object, and returns the status
    of the new one. It must copy bytes that it keeps: they are dropped when it returns.
    """

    def __init__(
        self, url: str, key: str, length: int, create: Callable[[memoryview], Stat]
    ) -> None:
        super().__init__(url, key, length)
        self._create = create
        self._data = _allocate(length)

    def write_at(self, offset: int, *data: memoryview) -> None:
        for view in map(as_byte_view, data):
            with self._lock:
                self._require_open()
                with self._written.adding(offset, len(view)):
                    self._data[offset : offset + len(view)] = view
            offset += len(view)

    def commit(self) -> Stat:
        try:
            with self._lock:
                self._require_open()
                self._is_open = False
            self._written.require_complete()
            return self._create(self._data)
        finally:
            self.abort()

    def abort(self) -> None:
        with self._lock:
            self._is_open = False
            self._data = memoryview(b"")


class SequentialUpload(_CheckedUpload):
    """Writes the ``length`` bytes of an object in order; ``write_at`` gets them in any order.

    A write at the end of what was written is passed on to ``target`` without a copy. One beyond it
    waits in a temporary file, whose space is released when all that is in it has had its turn.
    ``url``: the store, for messages.
    """

    def __init__(self, url: str, key: str, length: int, target: Upload) -> None:
        super().__init__(url, key, length)
        self._target = target
        self._position = 0
        self._early: list[tuple[int, int]] = []  # a heap: offset and size of what waits
        self._file: IO[bytes] | None = None  # has it, at the same offsets
        self._is_released = False

    def write_at(self, offset: int, *data: memoryview) -> None:
        for view in map(as_byte_view, data):
            with self._lock:
                self._require_open()
                with self._written.adding(offset, len(view)):
                    if offset == self._position:
                        self._append(view)
                        self._append_early()
                    elif offset > self._position and len(view):
                        self._keep(offset, view)
                    # bytes that were appended before: ``commit`` says which were written twice
            offset += len(view)

    def commit(self) -> Stat:
        with self._lock:
            self._require_open()
            self._is_open = False
            try:
                self._written.require_complete()
                stat = self._target.commit()
            except BaseException:
                self._release(abort=True)
                raise
            self._release(abort=False)
            return stat

    def abort(self) -> None:
        with self._lock:
            self._is_open = False
            self._release(abort=True)

    def _append(self, view: memoryview) -> None:
        try:
            if view:
                self._target.write_at(self._position, view)
        except BaseException:
            self._is_open = False  # how much of it was appended is unknown
            raise
        self._position += len(view)

    def _keep(self, offset: int, view: memoryview) -> None:
        """Keep bytes whose turn has not come."""
        try:
            if self._file is None:
                from tempfile import TemporaryFile

                self._file = TemporaryFile(prefix="limpet-")  # noqa: SIM115
            done = 0
            while done < len(view):
                done += os.pwrite(self._file.fileno(), view[done:], offset + done)
        except OSError as e:
            raise NoSpace(
                f"Cannot keep bytes of {self._key} in a temporary file: {e.strerror}",
                expected=f"up to {self._length} bytes, because {self._url} only appends, and some"
                " bytes are known before those in front of them",
                todo="Set TMPDIR to a folder with enough space",
                key=self._key,
                store=self._url,
            ) from e
        heapq.heappush(self._early, (offset, len(view)))

    def _append_early(self) -> None:
        """Append the kept bytes whose turn has come."""
        while self._file is not None and self._early and self._early[0][0] <= self._position:
            offset, size = heapq.heappop(self._early)
            if offset == self._position:  # otherwise, it was written twice
                for start in range(offset, offset + size, BLOCK_SIZE):
                    length = min(BLOCK_SIZE, offset + size - start)
                    self._append(memoryview(os.pread(self._file.fileno(), length, start)))
            if not self._early:
                self._file.truncate(0)

    def _release(self, *, abort: bool) -> None:
        if self._is_released:
            return
        self._is_released = True
        if self._file is not None:
            self._file.close()
        if abort:
            self._target.abort()


class PartUpload(_CheckedUpload):
    """Writes an object to ``target`` in whole parts, of which many threads may write one each.

    The first part has ``head`` bytes more than the others, which have ``part`` bytes. A write of
    exactly one part is passed on without a copy. Others are collected until they fill a part.
    """

    def __init__(
        self, url: str, key: str, length: int, *, head: int, part: int, target: Upload
    ) -> None:
        super().__init__(url, key, length)
        self._head, self._part, self._target = head, part, target
        self._active = 0
        self._collected: dict[int, tuple[memoryview, int]] = {}  # by first offset: bytes, filled

    def write_at(self, offset: int, *data: memoryview) -> None:
        views = [*map(as_byte_view, data)]
        size = sum(map(len, views))
        self._begin_call()
        try:
            with self._written.adding(offset, size):
                if self._bounds(offset) == (offset, offset + size):
                    self._target.write_at(offset, *views)
                else:
                    self._collect(offset, views)
        finally:
            with self._lock:
                self._active -= 1

    def commit(self) -> Stat:
        self._begin_call(last=True)
        try:
            self._written.require_complete()
            return self._target.commit()
        finally:
            self._release()

    def abort(self) -> None:
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._release()

    def _release(self) -> None:
        self._collected = {}
        self._target.abort()

    def _bounds(self, offset: int) -> tuple[int, int]:
        """Return the first offset of the part that contains an offset, and its end."""
        number = max(0, offset - self._head) // self._part
        start = self._head + number * self._part if number else 0
        return start, min(self._head + (number + 1) * self._part, self._length)

    def _collect(self, offset: int, views: Sequence[memoryview]) -> None:
        """Copy bytes into the parts to which they belong, and write the parts that are complete."""
        for view in views:
            while view:
                start, stop = self._bounds(offset)
                count = min(len(view), stop - offset)
                with self._lock:
                    if start not in self._collected:
                        self._collected[start] = (_allocate(stop - start), 0)
                    buffer = self._collected[start][0]
                buffer[offset - start : offset - start + count] = view[:count]
                with self._lock:
                    filled = self._collected[start][1] + count
                    self._collected[start] = (buffer, filled)
                    is_complete = filled == stop - start
                    if is_complete:
                        del self._collected[start]
                if is_complete:
                    self._target.write_at(start, buffer)
                offset, view = offset + count, view[count:]

    def _begin_call(self, *, last: bool = False) -> None:
        with self._lock:
            if last and self._active:
                raise StoreError(
                    f"Cannot commit {self._key}: its upload is in use",
                    expected="no active writes",
                    found=f"active writes: {self._active}",
                    key=self._key,
                    store=self._url,
                )
            self._require_open()
            self._is_open = not last
            self._active += 1
