"""A file system that fails at a chosen call."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

from holdfast.storage.os_calls import FileStat, Fs

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at the ``at``-th call (from 1) of ``kind``, a method of ``Fs``; None: any method.

    ``error``: the errno to raise. ``lost``: the call takes effect before the error is raised.
    ``short``: the maximum bytes that are written or read, instead of an error. ``lasting``: all
    later calls fail as well.
    """

    kind: str | None = None
    at: int = 1
    error: int = 0
    lost: bool = False
    short: int | None = None
    lasting: bool = False


class FaultFs(Fs):
    """A file system that forwards to ``inner`` and injects faults.

    ``counts``: the number of calls by method. ``fired``: the methods of the calls that failed.
    """

    def __init__(self, inner: Fs | None = None, *faults: Fault) -> None:
        self.inner = Fs() if inner is None else inner
        self.faults = list(faults)
        self.counts: Counter[str] = Counter()
        self.fired: list[str] = []
        self._lock = Lock()

    def open(self, path: str, flags: int) -> int:
        return self._call("open", lambda: self.inner.open(path, flags))

    def close(self, fd: int) -> None:
        self._call("close", lambda: self.inner.close(fd), always=True)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return self._transfer("pwrite", lambda part: self.inner.pwrite(fd, part, offset), data)

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        return self._transfer("preadv", lambda part: self.inner.preadv(fd, part, offset), into)

    def fallocate(self, fd: int, length: int) -> bool:
        return self._call("fallocate", lambda: self.inner.fallocate(fd, length))

    def fsync(self, fd: int) -> None:
        self._call("fsync", lambda: self.inner.fsync(fd))

    def fstat(self, fd: int) -> FileStat:
        return self._call("fstat", lambda: self.inner.fstat(fd))

    def stat(self, path: str) -> FileStat:
        return self._call("stat", lambda: self.inner.stat(path))

    def link(self, source: str, target: str) -> None:
        self._call("link", lambda: self.inner.link(source, target))

    def rename_noreplace(self, source: str, target: str) -> None:
        self._call("rename_noreplace", lambda: self.inner.rename_noreplace(source, target))

    def unlink(self, path: str) -> None:
        self._call("unlink", lambda: self.inner.unlink(path))

    def mkdir(self, path: str) -> None:
        self._call("mkdir", lambda: self.inner.mkdir(path))

    def rmdir(self, path: str) -> None:
        self._call("rmdir", lambda: self.inner.rmdir(path))

    def scandir(self, path: str) -> list[tuple[str, bool]]:
        return self._call("scandir", lambda: self.inner.scandir(path))

    def _call(self, kind: str, call: Callable[[], _T], *, always: bool = False) -> _T:
        fault = self._next_fault(kind)
        if fault is None or not fault.error:
            return call()
        if fault.lost or always:  # Linux frees the descriptor even if close reports an error
            call()
        raise OSError(fault.error, os.strerror(fault.error))

    def _transfer(self, kind: str, call: Callable[[memoryview], int], data: memoryview) -> int:
        fault = self._next_fault(kind)
        if fault is not None and fault.error:
            raise OSError(fault.error, os.strerror(fault.error))
        if fault is not None and fault.short is not None:
            return call(data[: fault.short]) if fault.short else 0
        return call(data)

    def _next_fault(self, kind: str) -> Fault | None:
        with self._lock:
            self.counts[kind] += 1
            for fault in self.faults:
                if fault.kind not in (None, kind):
                    continue
                calls = self.counts[kind] if fault.kind else self.counts.total()
                if calls == fault.at or (fault.lasting and calls > fault.at):
                    self.fired.append(kind)
                    return fault
        return None
