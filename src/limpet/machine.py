"""The identity of this machine, its boot, and this process, and what the system lacks."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from limpet.errors import StoreError

IS_LINUX = sys.platform == "linux"
CAN_SEE_PROCESSES = hasattr(os, "fork")
"""False on Windows: whether another process runs cannot be asked."""

OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""The flags of every ``os.open``: for this process only, and without a conversion of bytes."""


def find_libc() -> Any:
    """Return the C library, or None on Windows, which has none of the functions used here."""
    return ctypes.CDLL(None, use_errno=True) if hasattr(os, "fork") else None


def path_text(name: str, path: object) -> str:
    """Return a path or a URL as text. Raises ``StoreError`` for anything else."""
    text = type(path).__fspath__(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or "\0" in text:
        found = repr(path)
        found = found if len(found) <= 120 else f"an object of the class {type(path).__name__}"
        raise StoreError(f"{name} must be a text without NUL characters, or a path, not {found}")
    return text


def full_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of what a path names now, for a program that changes its folder.

    ``..`` stays, because above a symbolic link it is not what precedes it in the text. Only at the
    end, where a name must be, the system resolves it. Raises ``StoreError``.
    """
    text = path_text("The path", path)
    if os.name == "nt":  # where the system itself edits the text
        return os.path.abspath(text)
    try:
        text = text if text.startswith("/") else f"{os.getcwd()}/{text}"
    except OSError as e:
        raise StoreError(
            f"The current folder, in which {text} should be, does not exist any more",
            todo="Change to an existing folder, or give an absolute path",
        ) from e
    levels = [level for level in text.split("/") if level not in ("", ".")]
    return os.path.realpath(text) if levels[-1:] == [".."] else "/" + "/".join(levels)


def count_processors() -> int:
    """Return the number of processors that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def after_fork(function: Callable[[], object]) -> None:
    """Call a function in every child that this process forks. Windows has no fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def process_identity() -> tuple[str, str, str]:
    """Return the machine with its pid namespace (a container whose processes cannot be seen is
    another machine), its boot id, and ``pid:start time``, because pids are reused."""
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
    if ticks.isdecimal() and IS_LINUX:
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - max(age, 0.0)


def utc_now() -> str:
    """Return the current time in UTC as ISO 8601, for people to read."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def pid_and_start_time(pid: int) -> str:
    """Return ``pid:start time``, or ``pid:gone`` if it has ended. Off Linux, the time is 0; on
    Windows, no process counts as ended."""
    if not IS_LINUX:
        if CAN_SEE_PROCESSES:  # on Windows, os.kill would end the process
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return f"{pid}:gone"
            except OSError:
                pass  # it is of another user
        return f"{pid}:0"
    fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    # a zombie counts as ended: it holds no resources
    return f"{pid}:{fields[19] if fields and fields[0] not in ('Z', 'X') else 'gone'}"


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
