"""Operations that all ranks perform together, such as a save, with gather, scatter, and broadcast.

Rank 0 is the coordinator. A rank that fails notifies the others, which then raise an error too. If
a rank dies or hangs, rank 0 detects it, and the other ranks detect a failure of rank 0, both within
the bounds of ``Timeouts``. No collective of the training process group is ever called, so a
collective may continue in any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar

from limpet.deadline import Deadline
from limpet.ranks.error_report import Arrival
from limpet.ranks.store_collective import StoreCollective

T = TypeVar("T")


class LocalCollective(nullcontext[None]):
    """The collective of one process, with the methods of ``StoreCollective``."""

    rank = 0
    size = 1
    first_arrival = Arrival(0, "", "")

    def __init__(self, deadline: Deadline | None = None) -> None:
        super().__init__()
        self._deadline = deadline

    def advance(self) -> None:
        if self._deadline is not None:
            self._deadline.check()

    def gather(self, value: T, value_type: type[T]) -> list[T] | None:
        return [value]

    def scatter(self, values: Sequence[T] | None, value_type: type[T]) -> T:
        if values is None:
            raise ValueError("Rank 0 must pass the values")
        return values[0]

    def broadcast(self, value: T | None, value_type: type[T]) -> T:
        if value is None:
            raise ValueError("Rank 0 must pass the value")
        return value

    def wait_for_ranks(
        self, pending_ranks: Callable[[], Sequence[int]], wait_number: int
    ) -> None: ...
    def begin_commit(self) -> None: ...

    raise_if_aborted = close = begin_commit  # no other rank can fail

    def abort(self, error: BaseException) -> bool:
        return True


Collective = LocalCollective | StoreCollective
"""A collective operation. All ranks call the same methods in the same order.

It is a context manager that may be entered several times. An error within the context is sent to
the other ranks and closes the collective.
"""


def await_all(collective: Collective) -> None:
    """Wait until all ranks are here. An error of one rank reaches all."""
    all_are_here = collective.gather(True, bool)
    collective.broadcast(None if all_are_here is None else True, bool)
