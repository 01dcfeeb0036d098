"""A snapshot's tree as ``torch.save`` pickles it, with tensors whose bytes are elsewhere.

Only what ``torch.load(weights_only=True)`` accepts is written, by torch 2.6 and later. Nothing is
ever unpickled here.
"""

from __future__ import annotations

import codecs
import io
import pickle
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from holdfast.engine.loading.targets import LEAVES
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import HoldfastError
from holdfast.format import tree
from holdfast.format.names import join
from holdfast.text import an
from holdfast.types import DTYPES

_PROTOCOL = 2
_LONGEST = 255 * 8 - 1
"""Bits of the longest integer that ``weights_only`` reads."""

_STORAGES = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""Dtypes that had a storage class of their own; tensors of the others name their dtype."""

_PARTS = ("indices", "crow", "ccol", "col", "row", "values")
"""The parts of sparse tensors in the order in which they are made from them."""

_PLAIN = frozenset({type(None), str, bool, int, float, complex, bytes, bytearray})

_DICTS = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """Stands for the bytes of a leaf: the n-th record of data."""

    number: int
    dtype: str
    elements: int


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """Stands for a tensor that is all of its storage, row-major."""

    storage: _Storage
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Sparse:
    """Stands for a sparse tensor: its layout, and what it is made from."""

    layout: str
    made_from: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _NoBytes:
    """Stands for ``b""``, which the usual pickle makes by a call that is refused."""


@dataclass(slots=True)
class Pickled:
    """A tree taken to what can be pickled. ``sources``: the key of the leaf whose bytes are the
    n-th record of data; ``refused``: keys of what cannot be written, each with what it is."""

    snapshot: Snapshot
    torch: Any
    sources: dict[str, _Tensor] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    value: Any = None

    def data(self) -> bytes:
        """The record ``data.pkl``."""
        out = io.BytesIO()
        _Pickler(out, self.torch).dump(self.value)
        return out.getvalue()

    def build(self, node: Any, key: str) -> Any:
        """The value of a node."""
        tag = next(iter(node), "") if type(node) is dict else ""
        if tag in ("dict", "ordered", "items"):
            made = _DICTS[node["of"] if tag == "items" else tag]()
            for name, child, k in tree.children(node, key):
                made[self._plain(name, k)] = self.build(child, k)
            if "metadata" in node:
                where = join(key, "~metadata")
                made._metadata = self.build(node["metadata"], where)
            return made
        if tag in ("list", "tuple"):
            several = [self.build(n, join(key, str(i))) for i, n in enumerate(node[tag])]
            return several if tag == "list" else tuple(several)
        if tag == "sparse":
            return self._sparse(node["sparse"], key)
        if tag == "tied" or tag in LEAVES:
            return self._leaf(node, key)
        return self._plain(tree.decode(node, key, tree.refuse_leaf), key)

    def _leaf(self, node: Any, key: str) -> Any:
        source = node.get("tied", key)
        leaf = self.snapshot.nodes()[source] if LEAVES.isdisjoint(node) else node
        if "blob" in leaf or len(leaf.get("array", ())) == 3:
            self.refused[key] = "long bytes" if "blob" in leaf else "an array of another dtype"
            return None
        made = self.sources.get(source)
        if made is None:
            dtype, shape = self.snapshot.leaves[source]
            if not hasattr(self.torch, dtype):
                self.refused[key] = f"{dtype}, which torch {self.torch.__version__} lacks"
                return None
            storage = _Storage(len(self.sources), dtype, prod(shape))
            made = self.sources[source] = _Tensor(storage, shape)
        return made

    def _sparse(self, body: Any, key: str) -> _Sparse:
        names = sorted(body["parts"], key=_PARTS.index)
        parts = [self._leaf(body["parts"][name], join(key, name)) for name in names]
        made_from = (*parts, self.torch.Size(body["shape"]))
        if body["layout"] == "sparse_coo":
            made_from = (*made_from, body["coalesced"])
        return _Sparse(body["layout"], made_from)

    def _plain(self, value: Any, key: str) -> Any:
        """A plain value, or what stands for it."""
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            value = value.item()  # a long double stays what it is, and is refused
        if value == b"" and type(value) is bytes:
            return _NoBytes()
        refused = _refused(value)
        if refused is not None:
            self.refused[key] = refused
        return value


def pickled(snapshot: Snapshot, node: Any, key: str) -> Pickled:
    """The tree below ``node``. Raises ``HoldfastError`` where torch is not installed."""
    try:
        import torch
    except ImportError as e:
        raise HoldfastError(
            "A file for torch.load cannot be made without torch",
            todo='Install it: pip install "holdfast[torch]"; or export to safetensors',
        ) from e
    made = Pickled(snapshot, torch)
    made.value = made.build(node, key)
    return made


def _refused(value: Any) -> str | None:
    """What a plain value is, if ``weights_only`` refuses it."""
    if type(value) in (set, tuple):
        return next((r for r in map(_refused, value) if r is not None), None)
    if type(value) is int and value.bit_length() > _LONGEST:
        return "an integer of over 2,000 bits"
    if value == b"" and type(value) is bytes:
        return "empty bytes within a set or a tuple"
    return None if type(value) in _PLAIN else an(type(value).__name__)


class _Pickler(pickle.Pickler):
    """Writes what stands for tensors as tensors. The functions that make a tensor again, and what
    they are given, are the format of ``torch.save`` itself: every such file names them."""

    def __init__(self, out: io.BytesIO, torch: Any) -> None:
        super().__init__(out, _PROTOCOL)
        self._torch = torch

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not _Storage:
            return None
        name = _STORAGES.get(value.dtype)
        kind = self._torch.UntypedStorage if name is None else getattr(self._torch, name)
        count = value.elements * (DTYPES[value.dtype].itemsize if name is None else 1)
        return "storage", kind, str(value.number), "cpu", count

    def reducer_override(self, value: Any) -> Any:
        torch = self._torch
        if type(value) is _Tensor:
            dtype, shape = value.storage.dtype, value.shape
            strides = tuple(prod(max(n, 1) for n in shape[d + 1 :]) for d in range(len(shape)))
            made_from: tuple[Any, ...] = (value.storage, 0, shape, strides, False, OrderedDict())
            if dtype in _STORAGES:
                return torch._utils._rebuild_tensor_v2, made_from
            return torch._utils._rebuild_tensor_v3, (*made_from, getattr(torch, dtype))
        if type(value) is _Sparse:
            layout = getattr(torch, value.layout)
            return torch._utils._rebuild_sparse_tensor, (layout, value.made_from)
        if type(value) is _NoBytes:
            return codecs.encode, ("", "latin1")
        return NotImplemented
