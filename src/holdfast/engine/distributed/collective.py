"""Operations that all ranks perform together, such as a save, with gather, scatter, and broadcast.

Rank 0 is the coordinator. A rank that fails notifies the others, which then raise an error too. If
a rank dies or hangs, rank 0 detects it, and the other ranks detect a failure of rank 0, both within
the bounds of ``Timeouts``. No collective of the training process group is ever called, so a
collective may continue in any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

from holdfast.engine.distributed.error_report import Arrival

T = TypeVar("T")


class Collective(Protocol):
    """A collective operation. All ranks call the same methods in the same order.

    It is a context manager that may be entered several times. An error within the context is sent
    to the other ranks and closes the collective.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def first_arrival(self) -> Arrival:
        """The first rank that joined."""
        ...

    def gather(self, value: T, value_type: type[T]) -> list[T] | None:
        """Return the values of all ranks in rank order on rank 0, and None on other ranks."""
        ...

    def scatter(self, values: Sequence[T] | None, value_type: type[T]) -> T:
        """Return this rank's value of the ``values`` that rank 0 passes, one for each rank."""
        ...

    def broadcast(self, value: T | None, value_type: type[T]) -> T:
        """Return the value that rank 0 passes."""
        ...

    def wait_for_ranks(self, pending_ranks: Callable[[], Sequence[int]], wait_number: int) -> None:
        """Wait until ``pending_ranks`` returns no ranks.

        Use this for a condition outside the store. ``wait_number``: the number of the wait, which
        increases with each such wait.
        """
        ...

    def begin_commit(self) -> None:
        """Mark the point of no return; rank 0 calls this directly before the commit.

        Raises the error of another rank if one has failed. From now on, the failure of another rank
        does not abort the operation.
        """
        ...

    def raise_if_aborted(self) -> None:
        """Raise the error of another rank if one has failed."""
        ...

    def abort(self, error: BaseException) -> bool:
        """Send the error of this rank to the other ranks.

        Returns True if the commit has not begun and never will. Returns False if it may have begun
        or if the other ranks cannot be notified.
        """
        ...

    def advance(self) -> None:
        """Record progress, so that other ranks do not consider this rank stuck."""
        ...

    def close(self) -> None:
        """End the collective for this rank and delete its keys in the store."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class LocalCollective:
    """The collective of one process."""

    rank = 0
    size = 1
    first_arrival = Arrival(0, "", "")

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
    def raise_if_aborted(self) -> None: ...
    def advance(self) -> None: ...
    def close(self) -> None: ...

    def abort(self, error: BaseException) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...
