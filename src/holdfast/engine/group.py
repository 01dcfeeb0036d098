"""The ranks that save or load together. One process is a group of one."""

from __future__ import annotations

from typing import Protocol, TypeVar

from holdfast.engine.live import torch_or_none
from holdfast.errors import Unsupported

T = TypeVar("T")


class Group(Protocol):
    """Ranks that act together. Every method is called by all of them, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: T) -> list[T] | None:
        """On rank 0 the values of all ranks, in order of ranks; None on the others."""
        ...

    def scatter(self, values: list[T] | None) -> T:
        """Rank 0 gives a list with one value per rank; every rank gets its own."""
        ...


class Solo:
    """The group of one process."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T] | None:
        return [value]

    def scatter(self, values: list[T] | None) -> T:
        if values is None:
            raise ValueError("the only rank is rank 0, which gives the values")
        return values[0]


def current_group() -> Group:
    """The group that this process saves and loads with.

    Raises ``Unsupported`` under torch.distributed with several ranks: saving them apart would
    make several snapshots that each look whole.
    """
    torch = torch_or_none()
    if torch is not None and torch.distributed.is_available():
        dist = torch.distributed
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise Unsupported(
                "This version of Holdfast saves and loads in one process only",
                expected="a torch.distributed world of 1",
                found=f"a world of {dist.get_world_size()}",
                todo="Save on one rank alone, before the process group is initialised,"
                " or wait for the version with sharded saves",
            )
    return Solo()
