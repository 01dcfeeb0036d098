"""The processes that descend from this one, read from ``/proc``."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Process:
    """One process. ``started`` is in seconds since the machine started, rounded down to 10 ms."""

    parent: int
    started: float
    ended: bool


def read_process(pid: int) -> Process:
    """Read ``/proc/PID/stat``. Raises ``OSError`` if there is no such process."""
    text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    # the second field is the name in parentheses, which may contain spaces and parentheses
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        raise OSError(errno.ESRCH, os.strerror(errno.ESRCH), f"/proc/{pid}/stat")
    return Process(
        parent=int(fields[1]),
        started=int(fields[19]) / os.sysconf("SC_CLK_TCK"),
        ended=fields[0] in ("Z", "X", "x"),  # a zombie, or dead
    )


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent has ended, such as the workers of a killed
    torchrun, so that ``descendants`` finds them. Raises ``OSError`` if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@dataclass(frozen=True, slots=True)
class Descendants:
    """The ids of live processes: those with this process as their parent, and all descendants."""

    children: frozenset[int]
    all: frozenset[int]


def descendants(excluded: frozenset[int] = frozenset()) -> Descendants:
    """Return the live descendants of this process without ``excluded`` and theirs. There are none
    if ``/proc`` shows the processes of another namespace, whose ids mean nothing here."""
    if Path("/proc/self").readlink().name != str(os.getpid()):
        return Descendants(frozenset(), frozenset())
    children: dict[int, list[int]] = {}
    ended: set[int] = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                process = read_process(int(entry))
            except OSError:
                continue  # it has ended since the folder was listed
            children.setdefault(process.parent, []).append(int(entry))
            if process.ended:
                ended.add(int(entry))
    found: set[int] = set()
    remaining = [os.getpid()]
    while remaining:
        for pid in children.get(remaining.pop(), ()):
            if pid not in excluded and pid not in found:
                found.add(pid)
                remaining.append(pid)
    return Descendants(
        children=frozenset(children.get(os.getpid(), ())) - excluded - ended,
        all=frozenset(found - ended),
    )
