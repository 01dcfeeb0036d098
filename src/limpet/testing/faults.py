"""A file system that fails at a chosen call."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from typing import Concatenate, ParamSpec, TypeVar

from limpet.storage.local.os_calls import Fs

P = ParamSpec("P")
T = TypeVar("T")


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


def _with_faults(method: Callable[Concatenate[Fs, P], T]) -> Callable[Concatenate[FaultFs, P], T]:
    """Return the method of ``FaultFs`` that calls a method of ``inner`` or raises its fault."""
    kind = method.__name__

    @wraps(method)
    def call(self: FaultFs, /, *args: P.args, **kwargs: P.kwargs) -> T:
        forward: Callable[P, T] = getattr(self.inner, kind)
        fault = self._next_fault(kind)
        if fault is None or not fault.error:
            return forward(*args, **kwargs)
        # Linux frees the descriptor even if close reports an error
        if fault.lost or kind == "close":
            forward(*args, **kwargs)
        raise OSError(fault.error, os.strerror(fault.error))

    return call


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

    open = _with_faults(Fs.open)
    close = _with_faults(Fs.close)
    fallocate = _with_faults(Fs.fallocate)
    fsync = _with_faults(Fs.fsync)
    fstat = _with_faults(Fs.fstat)
    stat = _with_faults(Fs.stat)
    link = _with_faults(Fs.link)
    rename_noreplace = _with_faults(Fs.rename_noreplace)
    unlink = _with_faults(Fs.unlink)
    mkdir = _with_faults(Fs.mkdir)
    rmdir = _with_faults(Fs.rmdir)
    scandir = _with_faults(Fs.scandir)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return self._transfer("pwrite", lambda part: self.inner.pwrite(fd, part, offset), data)

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        return self._transfer("preadv", lambda part: self.inner.preadv(fd, part, offset), into)

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
