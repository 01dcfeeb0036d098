"""``MemoryTier`` and ``LocalTier``: the settings of the tiers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from limpet.arguments import require, whole
from limpet.errors import LimpetError
from limpet.machine import CAN_SEE_PROCESSES, IS_LINUX, path_text
from limpet.run.policy import EveryEpoch, EverySteps

_INTERFACE = "the name of an interface, an IP address, or None"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTier:
    """Keeps the newest two states in memory, from which a training resumes in seconds.

    ``every`` says when a snapshot is made: ``EverySteps(10)``. ``copies`` is the number of hosts
    that hold each part of it, including the one on which it was made. ``path`` is a folder on
    tmpfs, which outlives the process. ``interface`` is the network interface, or the IP address,
    through which copies go to other hosts; by default, the one that reaches the job's store.
    ``domain`` is the label of what fails as a whole with this host, such as its rack; by default,
    the host itself.

    A snapshot in memory is not a version of the run: it is lost with its host and its peers. Raises
    ``LimpetError`` for an invalid argument.
    """

    every: EverySteps | EveryEpoch
    copies: int = 2
    path: str | os.PathLike[str] = "/dev/shm"
    interface: str | None = None
    domain: str | None = None

    def __post_init__(self) -> None:
        checks = {
            "every=": (isinstance(self.every, EverySteps | EveryEpoch), "EverySteps(10)"),
            "copies=": (whole(self.copies, 1) is not None, "a whole number, 1 or more"),
            "path=": (bool(path_text("path= of MemoryTier", self.path)),
                      "a folder on tmpfs, such as /dev/shm"),
            "interface=": (isinstance(self.interface, str | None), _INTERFACE),
            "domain=": (self.domain is None or isinstance(self.domain, str), "a label, or None"),
        }  # fmt: skip
        if not IS_LINUX:
            raise LimpetError(
                f"A MemoryTier needs Linux: {sys.platform} lacks a file system in memory whose"
                " files outlive their process, and leases on them",
                todo="Use LocalTier, or no tier",
            )
        _require(self, checks)
        object.__setattr__(self, "copies", whole(self.copies))


@dataclass(frozen=True, slots=True)
class LocalTier:
    """Saves to a fast disk of each host first, and from there to the run in the background.

    ``path`` is a folder on the local disk of each host, under the same name on all. ``interface``
    is the network interface, or the IP address, through which ranks of other hosts read when a
    training resumes; by default, the one that reaches the job's store.

    What is only on a local disk is not a version of the run yet: ``wait()``, retention, and
    ``Run`` know it once it is in the run. Raises ``LimpetError`` for an invalid argument.
    """

    path: str | os.PathLike[str]
    interface: str | None = None

    def __post_init__(self) -> None:
        if not CAN_SEE_PROCESSES:
            raise LimpetError(
                f"A LocalTier needs Linux or macOS: {sys.platform} lacks file locks by flock",
                todo="Save to the run directly, without tiers",
            )
        path = path_text("path= of LocalTier", self.path)
        checks = {
            "path=": (bool(path) and "://" not in path, "a folder on a local disk"),
            "interface=": (isinstance(self.interface, str | None), _INTERFACE),
        }
        _require(self, checks)


def _require(tier: object, checks: Mapping[str, tuple[bool, str]]) -> None:
    """Raise ``LimpetError`` for the first argument that is not valid. ``checks``: for each, whether
    it is, and what it may be."""
    for name, (is_valid, expected) in checks.items():
        require(f"{name} of {type(tier).__name__}", is_valid, expected, getattr(tier, name[:-1]))
