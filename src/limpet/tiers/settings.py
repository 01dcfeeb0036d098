"""``MemoryTier`` and ``LocalTier``: the settings of the tiers."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from limpet.arguments import require, whole
from limpet.errors import LimpetError
from limpet.machine import CAN_SEE_PROCESSES, IS_LINUX, path_text
from limpet.run.policy import EveryEpoch, EverySteps


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTier:
    """Keeps the newest two states in memory, from which a training resumes in seconds.

    ``every`` says when a snapshot is made: ``EverySteps(10)``. ``copies`` is the number of hosts
    that hold each part of it, including the one on which it was made. ``path`` is a folder on
    tmpfs, which outlives the process. ``domain`` is the label of what fails as a whole with this
    host, such as its rack; by default, the host itself.

    A snapshot in memory is not a version of the run: it is lost with its host and its peers. Raises
    ``LimpetError`` for an invalid argument.
    """

    every: EverySteps | EveryEpoch
    copies: int = 2
    path: str | os.PathLike[str] = "/dev/shm"
    domain: str | None = None

    def __post_init__(self) -> None:
        checks = {
            "every=": (isinstance(self.every, EverySteps | EveryEpoch), "EverySteps(10)"),
            "copies=": (whole(self.copies, 1) is not None, "a whole number, 1 or more"),
            "path=": (bool(path_text("path= of MemoryTier", self.path)),
                      "a folder on tmpfs, such as /dev/shm"),
            "domain=": (self.domain is None or isinstance(self.domain, str), "a label, or None"),
        }  # fmt: skip
        if not IS_LINUX:
            raise LimpetError(
                f"A MemoryTier needs Linux: {sys.platform} lacks a file system in memory whose"
                " files outlive their process, and leases on them",
                todo="Use LocalTier, or no tier",
            )
        for name, (is_valid, expected) in checks.items():
            require(f"{name} of MemoryTier", is_valid, expected, getattr(self, name[:-1]))
        object.__setattr__(self, "copies", whole(self.copies))


@dataclass(frozen=True, slots=True)
class LocalTier:
    """Saves to a fast disk of each host first, and from there to the run in the background.

    ``path`` is a folder on the local disk of each host, under the same name on all.

    What is only on a local disk is not a version of the run yet: ``wait()``, retention, and
    ``Run`` know it once it is in the run. Raises ``LimpetError`` for an invalid argument.
    """

    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if not CAN_SEE_PROCESSES:
            raise LimpetError(
                f"A LocalTier needs Linux or macOS: {sys.platform} lacks file locks by flock",
                todo="Save to the run directly, without tiers",
            )
        path = path_text("path= of LocalTier", self.path)
        is_valid = bool(path) and "://" not in path
        require("path= of LocalTier", is_valid, "a folder on a local disk", self.path)
