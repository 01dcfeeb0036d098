"""Compare the cost of the memory tier with the memory that there is, before training starts.

It is limited by the file system, by the free memory, and by the control groups of this process, to
which its pages of tmpfs are charged. At a limit, the kernel would end the training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from limpet.errors import LimpetError, NoSpace
from limpet.text import format_size
from limpet.types import MIB

GIB = 1024 * MIB

_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_ROOT = Path("/")
"""Above the files of the system in ``proc`` and ``sys``, which tests replace."""

_NO_LIMIT = 1 << 62
"""Version 1 of control groups shows no limit as a number of about 2**63."""


@dataclass(frozen=True, slots=True)
class TierCost:
    """What a tier needs on one host, in bytes: ``held_bytes`` for one snapshot, with the copies for
    other hosts, times ``snapshots`` and one more. It replaces what is in the folder before."""

    held_bytes: int
    snapshots: int = 2
    present_bytes: int = 0

    @property
    def total(self) -> int:
        return self.held_bytes * (self.snapshots + 1)

    def __str__(self) -> str:
        one = format_size(self.held_bytes)
        return (
            f"{format_size(self.total)} ({self.snapshots} snapshots of {one}, and one more while it"
            " is staged)"
        )


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit of the memory, the bytes that the tier can use, with those that it has, and those
    that others use. ``remedy``: what to set, with the fields of ``_sizes``."""

    name: str
    available: int
    used: int
    remedy: str


def check_memory(folder: str, cost: TierCost) -> list[MemoryLimit]:
    """Return the limits, the tightest first. Raises ``NoSpace``, with all limits that the memory
    tier exceeds, and ``LimpetError`` if the folder is not in memory."""
    limits = sorted(find_limits(folder, cost.present_bytes), key=attrgetter("available"))
    exceeded = [limit for limit in limits if limit.available < cost.total]
    if exceeded:
        remedies = [x.remedy.format(**_sizes(cost.total + x.used)) for x in exceeded]
        raise NoSpace(
            f"The memory tier in {folder} does not fit into the memory of this host",
            expected=str(cost),
            found="; ".join(
                f"{format_size(limit.available)} in {limit.name}" for limit in exceeded
            ),
            todo=". ".join([*remedies, "Or use fewer copies, or no MemoryTier"]),
            store=folder,
            needed=cost.total,
            available=exceeded[0].available,
        )
    return limits


def find_limits(folder: str, present_bytes: int = 0) -> Iterator[MemoryLimit]:
    """Yield every limit of the memory that files in ``folder`` can use (see ``check_memory``)."""
    mounts = _read_mounts()
    path = os.path.realpath(folder)
    mount = _mount_of(mounts, path)
    if mount is not None and mount.kind not in _MEMORY_FILE_SYSTEMS:
        raise LimpetError(
            f"The folder {path} of the memory tier is not in memory",
            expected="a folder on tmpfs",
            found=f"{mount.kind}, mounted at {mount.point}",
            todo="Use a folder in /dev/shm, or LocalTier for a local disk",
        )
    point = path if mount is None else mount.point
    shown = point.replace("{", "{{").replace("}", "}}")
    size = os.statvfs(path)
    if size.f_blocks:  # 0: without a limit
        yield MemoryLimit(
            f"the file system at {point}",
            size.f_bavail * size.f_frsize + present_bytes,
            (size.f_blocks - size.f_bavail) * size.f_frsize - present_bytes,
            "Make it larger: docker run --shm-size={docker}; in Kubernetes, the volume emptyDir:"
            f" {{{{medium: Memory, sizeLimit: {{kubernetes}}}}}} mounted at {shown}; else, mount -o"
            f" remount,size={{docker}} {shown}",
        )
    free = _read_fields(_ROOT / "proc/meminfo").get("MemAvailable:")
    if free is not None:
        yield MemoryLimit(
            "the free memory of the machine (MemAvailable)",
            free * 1024 + present_bytes,
            0,
            "Use a machine with {kubernetes} of free memory",
        )
    yield from _group_limits(mounts, present_bytes)


class _Mount(NamedTuple):
    """A line of ``mountinfo``: where the folder ``root`` of a file system is mounted."""

    root: str
    point: str
    kind: str
    options: str


def _read_mounts() -> list[_Mount]:
    """Return the mounted file systems in the order in which they were mounted."""
    mounts = []
    for line in _read_lines(_ROOT / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (kind, *rest) = before.split(" "), after.split(" ")
        if len(fields) > 4:
            # a space in a name is \040
            top, point = (f.encode().decode("unicode_escape") for f in fields[3:5])
            mounts.append(_Mount(top, point, kind, rest[-1] if rest else ""))
    return mounts


def _mount_of(mounts: list[_Mount], path: str) -> _Mount | None:
    """Return the file system that a path is on: the last one at the longest mount point."""
    pure = PurePosixPath(path)
    above = [m for m in mounts if pure.is_relative_to(m.point)]
    return max(reversed(above), key=lambda m: len(m.point), default=None)


_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""The files with a limit, in versions 2 and 1 of control groups. Above ``memory.high``, the kernel
stops the processes for longer and longer."""


def _group_limits(mounts: list[_Mount], present: int) -> Iterator[MemoryLimit]:
    """Yield the limits of the control groups of this process, from its own one to the root."""
    for mount in mounts:
        if mount.kind == "cgroup2" or (
            mount.kind == "cgroup" and "memory" in mount.options.split(",")
        ):
            top = _ROOT / mount.point.lstrip("/")
            folder = top / _group_path(mount)
            yield from _limits_of(folder, present)
            while folder != top:
                folder = folder.parent
                yield from _limits_of(folder, present)


def _group_path(mount: _Mount) -> str:
    """Return the control group of this process below a mount point: "." in a container that sees
    the path of the host, or one above its namespace, and whose own group is mounted."""
    controller = "memory" if mount.kind == "cgroup" else ""
    for line in _read_lines(_ROOT / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            pure = PurePosixPath(path)
            if pure.is_relative_to(mount.root) and ".." not in pure.parts:
                return str(pure.relative_to(mount.root))
    return "."


def _limits_of(folder: Path, present: int) -> Iterator[MemoryLimit]:
    """Yield the limits of one control group. As for the kubelet, pages of files that were not read
    lately are not used: the kernel drops them first."""
    usage = _read_number(folder / "memory.current")
    if usage is None:
        usage = _read_number(folder / "memory.usage_in_bytes") or 0
    stat = _read_fields(folder / "memory.stat")
    reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    used = max(0, usage - reclaimable - present)
    for name in _LIMITS:
        limit = _read_number(folder / name)
        if limit is not None and limit < _NO_LIMIT:
            yield MemoryLimit(
                f"the control group of this process ({folder / name})",
                max(0, limit - used),
                used,
                "Raise the memory limit of the container to {kubernetes}, to which the files of the"
                " memory tier count: resources.limits.memory in Kubernetes, docker run"
                " --memory={docker}, MemoryMax in systemd",
            )


def _read_lines(path: Path) -> list[str]:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().splitlines()
    return []


def _read_number(path: Path) -> int | None:
    """Return the number in a file. None: there is none ("max"), or no such file."""
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _read_fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    fields = (line.split() for line in _read_lines(path))
    return {f[0]: int(f[1]) for f in fields if len(f) > 1 and f[1].isdecimal()}


def _sizes(nbytes: int) -> dict[str, str]:
    """Return a size, rounded up, as docker and mount (``13g``) and Kubernetes (``13Gi``) do."""
    number, unit = (-(-nbytes // GIB), "g") if nbytes > GIB else (-(-nbytes // MIB), "m")
    return {"docker": f"{number}{unit}", "kubernetes": f"{number}{unit.upper()}i"}
