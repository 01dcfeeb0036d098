"""This machine, this boot, this process."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from pathlib import Path


def process_identity() -> tuple[str, str, str]:
    """This machine, this boot of it, and this process as ``pid:start`` (a pid alone returns).

    A container whose processes cannot be seen from here counts as another machine.
    """
    try:
        seen = os.readlink("/proc/self/ns/pid")
    except OSError:
        seen = ""
    host = f"{socket.gethostname()} {seen}"
    return host, _read_text("/proc/sys/kernel/random/boot_id"), pid_and_start_time(os.getpid())


def utc_now() -> str:
    """The time of day in UTC, for people to read."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def pid_and_start_time(pid: int) -> str:
    fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    # a zombie or a vanished process holds nothing
    if not fields or fields[0] in ("Z", "X"):
        return f"{pid}:gone"
    return f"{pid}:{fields[19]}"


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
