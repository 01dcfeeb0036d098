"""``LocalTier``: the settings of saves to a fast local disk."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from limpet.errors import LimpetError
from limpet.machine import CAN_SEE_PROCESSES
from limpet.text import to_repr


@dataclass(frozen=True, slots=True)
class LocalTier:
    """Saves to a fast disk of each host first, and from there to the run in the background.

    ``path`` is a folder on the local disk of each host, under the same name on all. ``interface``
    is the network interface, or the IP address, through which ranks of other hosts read when a
    training resumes; by default, the one that reaches the job's store.

    What is only on a local disk is captured, not committed: ``wait()``, retention, and ``Run`` know
    a version once it is in the run. Raises ``LimpetError`` for an invalid argument.
    """

    path: str | os.PathLike[str]
    interface: str | None = None

    def __post_init__(self) -> None:
        if not CAN_SEE_PROCESSES:
            raise LimpetError(
                f"A LocalTier needs Linux or macOS: {sys.platform} lacks file locks by flock",
                todo="Save to the run directly, without tiers",
            )
        is_path = isinstance(self.path, str | os.PathLike) and bool(os.fspath(self.path))
        if not is_path or "://" in os.fspath(self.path):
            raise LimpetError(
                "Invalid value for path= of LocalTier",
                expected="a folder on a local disk",
                found=to_repr(self.path)[:200],
                todo='For example, write LocalTier("/local/nvme")',
            )
        if not isinstance(self.interface, str | None):
            raise LimpetError(
                "Invalid value for interface= of LocalTier",
                expected="the name of an interface, an IP address, or None",
                found=to_repr(self.interface)[:200],
            )
