"""An upload to a store that only appends. What is written too early waits for its turn."""

from __future__ import annotations

import heapq
import itertools
import os
from threading import Lock
from typing import IO, Protocol

from limpet.buffers import as_byte_view
from limpet.errors import NoSpace
from limpet.machine import after_fork
from limpet.storage.checks import WrittenRanges, ended_error
from limpet.storage.store import Stat, Upload
from limpet.types import BLOCK_SIZE, MIB

WINDOW = 64 * MIB
"""The largest amount of bytes that all uploads of a process keep in memory, in bytes."""


class Appender(Protocol):
    """An object that is written from its first byte to its last. One call is made at a time."""

    def append(self, data: memoryview) -> None:
        """Write ``data`` behind what was appended before. ``data`` may change afterwards."""
        ...

    def commit(self) -> Stat:
        """Do what ``Upload.commit`` does. All bytes have been appended."""
        ...

    def abort(self) -> None:
        """Do what ``Upload.abort`` does. It is called once, unless ``commit`` has succeeded."""
        ...


class SequentialUpload(Upload):
    """Appends the ``length`` bytes of an object in order; ``write_at`` gets them in any order.

    A write at the end of what was appended is passed on without a copy. One beyond it is copied
    into memory while ``WINDOW`` allows it, and otherwise into a temporary file, whose space is
    released when all that is in it has had its turn. ``url``: the store, for messages.
    """

    def __init__(self, url: str, key: str, length: int, appender: Appender) -> None:
        self._url, self._key, self._length = url, key, length
        self._written = WrittenRanges(key, url, length)
        self._appender = appender
        self._lock = Lock()
        self._position = 0
        # a heap: offset, size, a number (bytes and None have no order), bytes
        self._early: list[tuple[int, int, int, bytes | None]] = []
        self._numbers = itertools.count()
        self._file: IO[bytes] | None = None  # has the bytes that are None above
        self._pieces_in_file = 0
        self._is_open = True
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
                stat = self._appender.commit()
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
            self._appender.append(view)
        except BaseException:
            self._is_open = False  # how much of it was appended is unknown
            raise
        self._position += len(view)

    def _keep(self, offset: int, view: memoryview) -> None:
        """Copy bytes whose turn has not come."""
        if _memory.take(len(view)):
            try:
                data = bytes(view)
            except BaseException:
                _memory.give(len(view))
                raise
            heapq.heappush(self._early, (offset, len(view), next(self._numbers), data))
            return
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
        heapq.heappush(self._early, (offset, len(view), next(self._numbers), None))
        self._pieces_in_file += 1

    def _append_early(self) -> None:
        """Append the kept bytes whose turn has come."""
        while self._early and self._early[0][0] <= self._position:
            offset, size, _, data = heapq.heappop(self._early)
            is_new = offset == self._position  # otherwise, it was written twice
            if data is not None:
                _memory.give(size)
                if is_new:
                    self._append(memoryview(data))
            elif self._file is not None:
                for start in range(offset, offset + size, BLOCK_SIZE) if is_new else ():
                    length = min(BLOCK_SIZE, offset + size - start)
                    self._append(memoryview(os.pread(self._file.fileno(), length, start)))
                self._pieces_in_file -= 1
                if not self._pieces_in_file:  # an export waits for the header of each large tensor
                    self._file.truncate(0)

    def _release(self, *, abort: bool) -> None:
        if self._is_released:
            return
        self._is_released = True
        _memory.give(sum(size for _, size, _, data in self._early if data is not None))
        self._early = []
        if self._file is not None:
            self._file.close()
        if abort:
            self._appender.abort()

    def _require_open(self) -> None:
        if not self._is_open:
            raise ended_error(self._key, self._url)


class _Memory:
    """The bytes that all uploads of this process may still keep in memory."""

    def __init__(self) -> None:
        self._left = WINDOW
        self._lock = Lock()

    def take(self, size: int) -> bool:
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def give(self, size: int) -> None:
        with self._lock:
            self._left += size


_memory = _Memory()


def _forget_parent() -> None:
    """The uploads of a forked process are not those of its parent."""
    global _memory
    _memory = _Memory()


after_fork(_forget_parent)
