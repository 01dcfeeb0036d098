"""The identity of this machine, its boot, and this process, and whether a function call runs."""

from __future__ import annotations

import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType


def process_identity() -> tuple[str, str, str]:
    """Return the machine, its boot id, and this process as ``pid:start time``.

    The start time is needed because the system reuses pids. The machine includes the pid
    namespace: a container whose processes are not visible from here counts as another machine.
    """
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return (
        f"{socket.gethostname()} {namespace}",
        _read_text("/proc/sys/kernel/random/boot_id"),
        pid_and_start_time(os.getpid()),
    )


def process_started_at() -> float:
    """Return the time of day at which this process started, or the current one if unknown."""
    ticks = pid_and_start_time(os.getpid()).partition(":")[2]
    age = 0.0
    if ticks.isdecimal():
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - max(age, 0.0)


def utc_now() -> str:
    """Return the current time in UTC as ISO 8601, for people to read."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def pid_and_start_time(pid: int) -> str:
    """Return ``pid:start time``, or ``pid:gone`` if the process has ended."""
    fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    # a zombie counts as ended: it holds no resources
    return f"{pid}:{fields[19] if fields and fields[0] not in ('Z', 'X') else 'gone'}"


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def is_running(frame: FrameType) -> bool:
    """Return True if a function call, in any thread, has not ended. A generator must not ask this.

    The variables of a call that has ended are cleared.
    """
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False
