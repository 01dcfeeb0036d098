"""Bound what a foreign file may expand to by what it really contains.

A pickle of a few bytes can refer to one list thousands of times at every level, and a tensor with
stride 0 can have any number of elements. A snapshot has no shared lists and no strides, so an
import would write everything in full.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from limpet.errors import Unsupported
from limpet.format.tree import MAX_DEPTH
from limpet.state.composites import SPARSE_PARTS
from limpet.types import MIB

_FREE_NODES = 1 << 17
"""The values that any file may expand to. A larger one may expand to one value per byte."""

_FREE_BYTES = 64 * MIB
_MAX_EXPANSION = 8
"""Any file may expand to ``_FREE_BYTES``, plus this multiple of its length."""


def check_extent(value: Any, nbytes: int, name: str) -> None:
    """Raise ``Unsupported`` if a value from ``nbytes`` bytes contains itself, or would expand to
    far more. The time is proportional to the objects in memory, however often each occurs."""
    _Extent(name, nbytes).add_containers(value)


def check_bytes(expanded: int, nbytes: int, name: str) -> None:
    """Raise ``Unsupported`` if data of ``nbytes`` bytes would expand to ``expanded`` bytes."""
    limit = _FREE_BYTES + _MAX_EXPANSION * nbytes
    if expanded > limit:
        raise _too_large_error(name, nbytes, f"{limit} bytes", f"{expanded} bytes or more")


class _Extent:
    """The values that a foreign value expands to, and their bytes."""

    def __init__(self, name: str, nbytes: int) -> None:
        self._name, self._nbytes = name, nbytes
        self._tensor_bytes = self._storage_bytes = 0
        self._tensors: set[Any] = set()
        self._storages: set[int] = set()

    def add_containers(self, root: Any) -> None:
        """Visit every container once, after its members, without recursion."""
        sizes: dict[int, tuple[int, int]] = {}
        visiting: set[int] = set()
        pending = [root]
        while pending:
            value = pending[-1]
            if id(value) not in sizes and id(value) not in visiting:
                visiting.add(id(value))
                if len(visiting) > 2 * MAX_DEPTH:  # before a recursive function sees it
                    raise self._nesting_error(f"is nested deeper than {2 * MAX_DEPTH} levels")
                for member in filter(_is_container, _members(value)):
                    if id(member) in visiting:
                        raise self._nesting_error("contains itself")
                    if id(member) not in sizes:
                        pending.append(member)
                continue
            pending.pop()
            if id(value) in visiting:
                sizes[id(value)] = self._measure(value, sizes)
                visiting.remove(id(value))

    def _measure(self, value: Any, sizes: dict[int, tuple[int, int]]) -> tuple[int, int]:
        """Return the number of values that a container expands to, and their bytes."""
        nodes, nbytes = 1, 0
        for member in _members(value):
            if _is_container(member):
                size = sizes[id(member)]
                nodes, nbytes = nodes + size[0], nbytes + size[1]
            else:
                nodes, nbytes = nodes + 1, nbytes + self._leaf_bytes(member)
        limit = _FREE_NODES + self._nbytes
        if nodes > limit:
            raise _too_large_error(self._name, self._nbytes, f"{limit} values", f"{nodes} or more")
        check_bytes(nbytes + self._tensor_bytes, self._nbytes, self._name)
        return nodes, nbytes

    def _leaf_bytes(self, value: Any) -> int:
        """Return the bytes that each occurrence of a value takes. A tensor is stored once."""
        if isinstance(value, str | bytes | bytearray):
            return len(value)
        if type(value) is int:
            return value.bit_length() // 8
        if hasattr(value, "layout") and hasattr(value, "untyped_storage"):
            self._add_tensor(value)
        return 0

    def _add_tensor(self, t: Any) -> None:
        methods = SPARSE_PARTS.get(str(t.layout).removeprefix("torch."))
        if methods is not None:
            for method in methods.values():
                self._add_tensor(getattr(t.detach(), method)())
            return
        import torch

        if t.layout is not torch.strided or t.is_meta or t.is_nested:
            return  # refused later
        key = t.data_ptr(), t.dtype, t.shape, t.stride()
        if key not in self._tensors:
            self._tensors.add(key)
            self._tensor_bytes += t.numel() * t.element_size()
        storage = t.untyped_storage()
        if storage.data_ptr() not in self._storages:
            self._storages.add(storage.data_ptr())
            self._storage_bytes += storage.nbytes()
        if self._storage_bytes > self._nbytes:
            raise _too_large_error(
                self._name, self._nbytes, "storages within it", f"{self._storage_bytes} bytes"
            )

    def _nesting_error(self, problem: str) -> Unsupported:
        return Unsupported(
            f"{self._name} has a list or dict that {problem}, which no snapshot can hold",
            expected=f"a tree of at most {MAX_DEPTH} levels",
        )


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | set | frozenset)


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (m for pair in value.items() for m in pair)
    return value if _is_container(value) else (value,)


def _too_large_error(name: str, nbytes: int, expected: str, found: str) -> Unsupported:
    return Unsupported(
        f"{name} would expand to far more than it contains: lists that occur many times, or"
        " tensors whose elements share memory",
        expected=f"at most {expected} for {nbytes} bytes",
        found=found,
        todo="If you trust the origin of the file, load it in Python, and pass what you need to"
        " limpet.save",
    )
