"""Copies of tensors and arrays for a ``Savepoint``, in memory that is reused from step to step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np

from limpet import lazy_torch
from limpet.state.sharding import is_distributed_tensor
from limpet.state.subclasses import is_subclass
from limpet.state.walk import to_local

AllocationKey = tuple[Any, Any, Any]
"""Shape, dtype, and device. A copy can reuse the memory of another copy with the same key."""


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
        self._copies_by_address: dict[int, Any] = {}
        self._copied_addresses: set[int] = set()

    def recycle(self) -> None:
        """Make the memory of all copies available for new copies."""
        self._free = defaultdict(list)
        for (_, allocation_key), tensor in self._in_use.items():
            self._free[allocation_key].append(tensor)
        self._in_use, self._copies_by_address = {}, {}
        self._copied_addresses = set()
        self._cloned_bytes = 0

    def add_copies(self, addresses: Sequence[int], copies: Sequence[Any]) -> bool:
        """Add copies that the caller makes of contiguous tensors at these addresses. Return False,
        and add nothing, if one may be tied to another or was copied before."""
        made = self._copies_by_address
        added = dict(zip(addresses, copies, strict=True))
        if len(added) < len(addresses) or not (
            self._copied_addresses.isdisjoint(added) and made.keys().isdisjoint(added)
        ):
            return False
        made.update(added)
        return True

    def copy_tensor(self, t: Any) -> Any:
        """Return a copy of a tensor, the same for tied ones. ``t`` MUST stay alive until the
        capture is done: another tensor at its address would be mistaken for it."""
        torch = lazy_torch.torch_or_none()
        if is_distributed_tensor(t):
            self._cloned_bytes += int(to_local(t).nbytes)
            self._check()
            return t.detach().clone()
        if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
            return self._copy_subclass(t)
        t = t.detach()
        if t.layout is not torch.strided or t.is_nested or t.is_quantized or t.is_meta:
            return t.clone()
        made = self._copies_by_address.get(t.data_ptr())
        if made is not None and (made.shape, made.dtype) == (t.shape, t.dtype) and is_plain(t):
            return made
        allocation_key = (t.shape, t.dtype, t.device)
        memory_key = ((t.data_ptr(), t.stride(), t.is_conj(), t.is_neg()), allocation_key)
        if memory_key not in self._in_use:
            target = self._allocate(
                allocation_key,
                t.numel() * t.element_size(),
                lambda: torch.empty(t.shape, dtype=t.dtype, device=t.device),
            )
            self._in_use[memory_key] = target.copy_(t)
            self._copied_addresses.add(t.data_ptr())
        return self._in_use[memory_key]

    def _copy_subclass(self, t: Any) -> Any:
        if not is_subclass(t):
            return t  # flatten rejects it and names it
        names, context = t.__tensor_flatten__()
        inner = {}
        for name in names:
            part = getattr(t, name)
            if is_subclass(part):
                inner[name] = self._copy_subclass(part)
            else:  # not into memory that is reused: the attribute may be a temporary tensor
                self._cloned_bytes += part.nbytes
                self._check()
                inner[name] = part.detach().clone()
        return type(t).__tensor_unflatten__(inner, context, t.shape, t.stride())

    def copy_array(self, a: np.ndarray[Any, Any]) -> Any:
        """Return a copy of an array."""
        if a.dtype.isbuiltin != 1 or a.dtype.metadata or a.dtype.hasobject:
            return a.copy()
        allocation_key = (a.shape, a.dtype, "array")
        target = self._allocate(allocation_key, a.nbytes, lambda: np.empty(a.shape, a.dtype))
        np.copyto(target, a)
        self._in_use[len(self._in_use), allocation_key] = target
        return target

    def _allocate(self, key: AllocationKey, nbytes: int, allocate: Callable[[], Any]) -> Any:
        if free := self._free.get(key):
            return free.pop()
        self._reused_bytes += nbytes
        self._check()
        return allocate()

    def _check(self) -> None:
        if self._reused_bytes + self._cloned_bytes > self.max_bytes:
            raise TooManyBytes


def is_plain(t: Any) -> bool:
    """Return True if a strided tensor is its memory, in the usual order, on the CPU."""
    return t.is_cpu and t.is_contiguous() and not (t.is_conj() or t.is_neg())
