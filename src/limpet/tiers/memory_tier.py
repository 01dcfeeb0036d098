"""``MemoryTier``: the settings of snapshots in memory."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from limpet.errors import LimpetError
from limpet.machine import IS_LINUX
from limpet.run.policy import EveryEpoch, EverySteps
from limpet.text import to_repr


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTier:
    """Keeps the newest two states in memory, from which a training resumes in seconds.

    ``every`` says when a state is captured: ``EverySteps(10)``. ``copies`` is the number of hosts
    that hold each part of it, including the one on which it was captured. ``path`` is a folder on
    tmpfs, which outlives the process. ``interface`` is the network interface, or the IP address,
    through which copies go to other hosts; by default, the one that reaches the job's store.
    ``domain`` is the label of what fails as a whole with this host, such as its rack; by default,
    the host itself.

    A captured state is not a committed version: it is lost with its host and its peers. Raises
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
            "copies=": (type(self.copies) is int and self.copies >= 1, "a whole number, 1 or more"),
            "path=": (isinstance(self.path, str | os.PathLike) and bool(os.fspath(self.path)),
                      "a folder on tmpfs, such as /dev/shm"),
            "interface=": (self.interface is None or isinstance(self.interface, str),
                           "the name of an interface, an IP address, or None"),
            "domain=": (self.domain is None or isinstance(self.domain, str), "a label, or None"),
        }  # fmt: skip
        if not IS_LINUX:
            raise LimpetError(
                f"A MemoryTier needs Linux: {sys.platform} lacks a file system in memory whose"
                " files outlive their process, and leases on them",
                todo="Use LocalTier, or no tier",
            )
        for name, (is_valid, expected) in checks.items():
            if not is_valid:
                raise LimpetError(
                    f"Invalid value for {name} of MemoryTier",
                    expected=expected,
                    found=to_repr(getattr(self, name[:-1]))[:200],
                    todo="For example, write MemoryTier(every=EverySteps(10), copies=2)",
                )
