"""CPU seconds and memory of a process, including its children."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> list[int]:
    """Return the processes below ``root``. It is cheap: its cost is part of what is measured."""
    found, queue = [], [root]
    while queue:
        children = _children(queue.pop())
        found += children
        queue += children
    return found


def _children(pid: int) -> list[int]:
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(child) for child in file.read().split()]
    except OSError:  # it has ended
        pass
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def own_cpu_seconds() -> float:
    """Return the user and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_seconds() -> float:
    """Return the user and system time of this process, ended children, and live descendants."""
    total = 0.0
    for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(whose)
        total += used.ru_utime + used.ru_stime
    for pid in descendants(os.getpid()):
        total += sum(int(each) for each in _stat(pid)[11:15]) / _TICK
    return total


def _status(field: str, pid: int | str = "self", name: str = "status") -> int:
    """Return the bytes of ``field`` in ``/proc/PID/<name>``."""
    for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


class PeakMemory:
    """Peak resident memory above the start: anonymous, shared and mapped-file pages together.

    Uses the kernel's high-water mark of this process, so no peak between samples is missed. With
    ``children``, the private memory of descendants is sampled and added.
    """

    def __init__(self, *, children: bool = False) -> None:
        self._stopped = threading.Event()
        self._sampler = threading.Thread(target=self._sample) if children else None

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5")
        self._start, self._private = _status("VmRSS"), 0
        if self._sampler:
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._sampler:
            self._sampler.join()

    def resident_bytes(self) -> int:
        return _status("VmRSS") - self._start

    def peak_bytes(self) -> int:
        return _status("VmHWM") - self._start + self._private

    def _sample(self) -> None:
        while not self._stopped.wait(0.1):
            private = 0
            for pid in descendants(os.getpid()):
                try:
                    private += _status("Private_Dirty", pid, "smaps_rollup")
                    private += _status("Private_Clean", pid, "smaps_rollup")
                except (OSError, LookupError):
                    continue
            self._private = max(self._private, private)
