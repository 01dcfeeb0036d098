"""Copies of tensors and arrays for a ``Savepoint``, in memory that is reused from step to step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

AllocationKey = tuple[Any, ...]
"""Shape, strides, dtype, device. A copy can reuse the memory of another with the same key."""


class TooManyBytes(Exception):
    """The copies of a capture would take more memory than they may."""


class CopyPool:
    """The copies of one capture, which reuse memory of the copies of the capture before it. Methods
    raise ``TooManyBytes`` before all copies take more than ``max_bytes``."""

    def __init__(self) -> None:
        self.max_bytes = inf
        self._reused_bytes = self._cloned_bytes = 0
        self._in_use: dict[tuple[Any, AllocationKey], Any] = {}
        self._free: dict[AllocationKey, list[Any]] = {}
        self.copies_by_address: dict[int, Any] = {}
        self.copied_addresses: set[int] = set()
        self.stable_storages: frozenset[int] = frozenset()

    def recycle(self, stable_storages: frozenset[int]) -> None:
        """Make the memory of all copies available for new copies."""
        self.stable_storages = stable_storages
        self._free = defaultdict(list)
        for (_, allocation_key), tensor in self._in_use.items():
            self._free[allocation_key].append(tensor)
        self._in_use, self.copies_by_address = {}, {}
        self.copied_addresses = set()
        self._cloned_bytes = 0

    def add_copies(self, addresses: Sequence[int], copies: Sequence[Any]) -> bool:
        """Add copies that the caller makes of contiguous tensors at these addresses. Return False,
        and add nothing, if one may be tied to another or was copied before."""
        made = self.copies_by_address
        added = dict(zip(addresses, copies, strict=True))
        if len(added) < len(addresses) or not (
            self.copied_addresses.isdisjoint(added) and made.keys().isdisjoint(added)
        ):
            return False
        made.update(added)
        return True

    def copy(
        self,
        memory: Any,
        allocation_key: AllocationKey,
        nbytes: int,
        allocate: Callable[[], Any],
        fill: Callable[[Any], object],
    ) -> Any:
        """Return a copy that ``fill`` has filled, the same if ``memory`` is copied again. It MUST
        stay alive until the capture is done: another at its address would be mistaken for it."""
        copy = self._in_use.get((memory, allocation_key))
        if copy is None:
            if free := self._free.get(allocation_key):
                copy = free.pop()
            else:
                self._reused_bytes += nbytes
                self.count(0)
                copy = allocate()
            fill(copy)
            self._in_use[memory, allocation_key] = copy
        return copy

    def count(self, nbytes: int) -> None:
        """Count the bytes of a copy in memory that is not reused. Raises ``TooManyBytes``."""
        self._cloned_bytes += nbytes
        if self._reused_bytes + self._cloned_bytes > self.max_bytes:
            raise TooManyBytes


def is_plain(t: Any) -> bool:
    """Return True if a strided tensor is its memory, in the usual order, on the CPU."""
    return t.is_cpu and t.is_contiguous() and not (t.is_conj() or t.is_neg())
