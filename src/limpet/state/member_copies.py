"""Copies of the members of a module that may change between two optimizer steps.

Most are small, such as buffers of thousands of layers, and are read all at once. They are found
again at every copy: code may replace, add, or remove them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from limpet import lazy_torch
from limpet.state.arrays import part_library
from limpet.state.copy_pool import CopyPool, is_plain
from limpet.state.memory_ranges import read_ranges
from limpet.state.walk import storage_address

if TYPE_CHECKING:
    import torch

PrefixedModules = list[tuple[str, Any]]
"""Submodules, each with the prefix of its members' names."""

_MAX_RANGE_BYTES = 4096
"""Larger tensors are copied one at a time, each into memory of its own."""

_metadata_of = attrgetter("dtype", "shape", "is_cpu")


class MemberCopies:
    """Copies the mutable members of submodules that PyTorch's own code saves: each with its prefix,
    and True if its parameters may change, too. ``stable_addresses`` need no copy."""

    def __init__(
        self, submodules: list[tuple[str, Any, bool]], stable_addresses: frozenset[int]
    ) -> None:
        self.submodules: PrefixedModules = [(prefix, sub) for prefix, sub, _ in submodules]
        self._submodules = submodules
        self._stable_addresses = stable_addresses
        self._metadata: list[Any] | None = None
        self._small: list[int] = []
        self._others: list[int] = []
        self._copies: list[Any] = []
        self._groups: list[tuple[NDArray[np.void], NDArray[np.int64]]] = []

    def copy(self, pool: CopyPool) -> dict[str, Any] | None:
        """Return a copy of each member by its name, or None if some need ``pool``, one by one. Each
        call overwrites the small copies of the call before it."""
        names, tensors = self._find_members()
        torch: Any = lazy_torch.torch_or_none()
        if not {*map(type, tensors)} <= {torch.Tensor, torch.nn.Parameter}:
            return None
        try:
            addresses = [*map(torch.Tensor.data_ptr, tensors)]
            metadata = [
                *map(_metadata_of, tensors),
                *map(torch.Tensor.is_contiguous, tensors),
                *map(torch.Tensor.is_neg, tensors),
            ]
        except (RuntimeError, NotImplementedError):  # a sparse or nested tensor
            return None
        if metadata != self._metadata:
            self._metadata = None  # in case the next line is interrupted
            self._allocate(tensors)
            self._metadata = metadata
        if self._others:
            addresses = [addresses[i] for i in self._small]
        if not (
            self._stable_addresses.isdisjoint(addresses)
            and pool.add_copies(addresses, self._copies)
        ):
            return None
        table = np.array(addresses, np.int64)
        for copies, positions in self._groups:
            (copies[:],) = read_ranges([(copies.itemsize, table[positions])])
        if not self._others:
            return dict(zip(names, self._copies, strict=True))
        made = dict(zip(self._small, self._copies, strict=True))
        copy_tensor = part_library(type(tensors[0])).copy
        made.update((i, copy_tensor(tensors[i], pool)) for i in self._others)
        return {name: made[i] for i, name in enumerate(names)}

    def _find_members(self) -> tuple[list[str], list[Any]]:
        """Return the names and the tensors of the members that ``state_dict`` returns now."""
        names: list[str] = []
        tensors: list[Any] = []
        for prefix, sub, with_parameters in self._submodules:
            members = sub._buffers
            transient = sub._non_persistent_buffers_set
            for name, member in members.items():
                if member is not None and name not in transient:
                    names.append(prefix + name)
                    tensors.append(member)
            if with_parameters:
                for name, member in sub._parameters.items():
                    if member is not None:
                        names.append(prefix + name)
                        tensors.append(member)
        return names, tensors

    def _allocate(self, tensors: Sequence[Any]) -> None:
        """Allocate the copies of the small members, of each size in one array."""
        torch: Any = lazy_torch.torch_or_none()
        self._small, self._others = [], []
        by_size: dict[int, list[int]] = {}
        for i, t in enumerate(tensors):
            is_small = 0 < t.nbytes <= _MAX_RANGE_BYTES and not t.is_complex()
            if is_small and is_plain(t) and lazy_torch.dtype_name(t.dtype) is not None:
                by_size.setdefault(t.nbytes, []).append(len(self._small))
                self._small.append(i)
            else:
                self._others.append(i)
        copies: dict[int, Any] = {}
        self._groups = []
        for size, positions in by_size.items():
            memory = np.empty((len(positions), size), np.uint8)
            self._groups.append((memory.view(f"V{size}").reshape(-1), np.array(positions)))
            for row, position in zip(torch.from_numpy(memory), positions, strict=True):
                t = tensors[self._small[position]]
                copies[position] = row.view(t.dtype).view(t.shape)
        self._copies = [copies[i] for i in range(len(self._small))]


def find_mutable_members(
    module: torch.nn.Module, stable_storages: Container[int], stable_addresses: frozenset[int]
) -> tuple[PrefixedModules, MemberCopies] | None:
    """Return the submodules with members that may change: those with code of their own, and the
    others. None: hooks or an overridden ``state_dict`` build the state dict."""
    base: Any = lazy_torch.torch_or_none().nn.Module
    custom: PrefixedModules = []
    plain: list[tuple[str, Any, bool]] = []
    for path, sub in module.named_modules(remove_duplicate=False):
        cls: Any = type(sub)
        if (
            cls.state_dict is not base.state_dict
            or sub._state_dict_hooks
            or sub._state_dict_pre_hooks
        ):
            return None
        prefix = f"{path}." if path else ""
        stable = {
            storage_address(p) in stable_storages for p in sub._parameters.values() if p is not None
        }
        if (
            cls.get_extra_state is not base.get_extra_state
            or cls._save_to_state_dict is not base._save_to_state_dict
            or len(stable) == 2
        ):
            custom.append((prefix, sub))
        elif sub._buffers or False in stable:
            plain.append((prefix, sub, False in stable))
    return custom, MemberCopies(plain, stable_addresses)
