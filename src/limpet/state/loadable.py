"""Members of a state that a save accepts, but that no load restores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from limpet import lazy_torch
from limpet.ragged import sorted_unique
from limpet.state.memory_ranges import find_read_only
from limpet.state.walk import find_named_instances

if TYPE_CHECKING:
    import torch

_MAX_COUNTED_ELEMENTS = 1 << 20


def may_repeat(sizes: Sequence[int], strides: Sequence[int], itemsize: int = 1) -> bool:
    """Return True unless the elements of an array surely have no memory in common."""
    span = itemsize - 1  # from the first to the last byte of the dimensions so far
    for stride, n in sorted(zip(map(abs, strides), sizes, strict=True)):
        if n > 1 and stride <= span:
            return True
        span += stride * (n - 1)
    return False


def shares_elements(t: torch.Tensor) -> bool:
    """Return True if several elements of a strided tensor share memory, as in an expanded tensor,
    so that it cannot be written to."""
    if t.is_contiguous() or not may_repeat(t.shape, t.stride()):
        return False
    dims = [(s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1]
    if any(s == 0 for s, _ in dims) or t.numel() > _MAX_COUNTED_ELEMENTS:
        return True
    offsets = np.zeros((1,), np.int64)
    for stride, n in dims:
        offsets = np.add.outer(offsets, stride * np.arange(n))
    return len(sorted_unique(offsets)) < t.numel()


def find_unwritable(state: Any) -> list[str]:
    """Return the names of the parameters, persistent buffers, and tensors in containers whose
    elements share memory or are read-only: they can be saved, but not loaded in place."""
    torch = lazy_torch.torch_or_none()
    if torch is None:
        return []
    members = [
        (f"{path}.{name}", t)
        for path, module in find_named_instances(state, torch.nn.Module)
        for name, t in _saved_tensors(module)
    ]
    members += find_named_instances(state, torch.Tensor)
    dense = [
        (name, t)
        for name, t in members
        if type(t) in (torch.Tensor, torch.nn.Parameter)
        and t.layout is torch.strided
        and not t.is_nested
    ]
    starts = [t.data_ptr() if t.is_cpu else 0 for _, t in dense]
    read_only = find_read_only((start, start + 1) for start in starts)
    return [name for (name, t), no_write in zip(dense, read_only) if no_write or shares_elements(t)]


def _saved_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers of a module and its submodules, by name."""
    for path, sub in module.named_modules():
        for name, t in (*sub._parameters.items(), *sub._buffers.items()):
            if t is not None and name not in sub._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, t
