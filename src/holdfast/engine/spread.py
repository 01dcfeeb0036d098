"""What a state may say of how the ranks hold a value, where PyTorch does not say it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Held(IntEnum):
    """How the ranks that have a box of a leaf hold it.

    ``ALIKE``: by value, nobody has said that it is the same: their digests are compared before it
    is stored once. ``SAME``: it is by declaration (DTensor, DDP, ``Boxed``), or cannot be another.
    ``FIRST``: the lowest of the ranks that have it counts, whatever the others hold.
    """

    ALIKE = 0
    SAME = 1
    FIRST = 2


@dataclass(eq=False)
class PerRank(Generic[T]):
    """In a state: each rank keeps its own ``value``, such as the position of its data loader::

        state = {"model": model, "loader": holdfast.PerRank(loader)}

    It is stored under the number of its rank (``loader/3/...``). A rank that was not there when
    the snapshot was saved keeps the value that it has; what ranks saved that are not there any more
    is passed over; a ``RanksChanged`` warning on rank 0 tells of both. Read without a live state it
    is a dict of the ranks' values by number, as text.
    """

    value: T


@dataclass(eq=False)
class Replicated(Generic[T]):
    """In a state: ``value`` is meant to be the same on all ranks, and rank 0's is taken unseen.

    For what differs a little although it need not, such as the running statistics of BatchNorm
    without ``SyncBatchNorm``; without it a difference is an error that names the ranks.
    """

    value: T


def keeps_per_rank(value: Any) -> bool:
    """Whether each rank has one of its own: a ``PerRank``, or an object whose class says so."""
    return isinstance(value, PerRank) or bool(getattr(type(value), "keeps_per_rank", False))
