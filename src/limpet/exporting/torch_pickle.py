"""Pickle the tree of a snapshot as ``torch.save`` does, with the bytes of tensors in other records.

The pickle contains only what ``torch.load(weights_only=True)`` of torch 2.6 and later accepts. This
module never unpickles anything.
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

from limpet.errors import LimpetError
from limpet.format import torch_types, tree
from limpet.format.names import join_key
from limpet.loading.bind_optimizer import is_optimizer_node
from limpet.loading.targets import LEAF_NODE_TAGS
from limpet.snapshot.reader import SnapshotReader
from limpet.text import with_article
from limpet.types import DTYPES

_PROTOCOL = 2
_MAX_INT_BITS = 255 * 8 - 1
"""Bits of the longest integer that ``weights_only`` accepts."""

_STORAGE_CLASSES = {
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
"""Dtypes with their own storage class; a tensor of another dtype is pickled with its dtype."""

_SPARSE_PARTS = ("indices", "crow", "ccol", "col", "row", "values")
"""The parts of sparse tensors, in the order of the arguments that rebuild them."""

_PLAIN_TYPES = frozenset({type(None), str, bool, int, float, complex, bytes, bytearray})

_DICT_TYPES = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


@dataclass(frozen=True, slots=True, eq=False)
class _StorageStub:
    """Represents the bytes of a leaf: the data record ``record_number``."""

    record_number: int
    dtype: str
    elements: int


@dataclass(frozen=True, slots=True, eq=False)
class _TensorStub:
    """Represents a row-major tensor that spans its whole storage."""

    storage: _StorageStub
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _SparseStub:
    """Represents a sparse tensor: its layout, and the arguments that rebuild it."""

    layout: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _EmptyBytesStub:
    """Represents ``b""``, which pickle encodes as a call that ``weights_only`` refuses."""


@dataclass(slots=True)
class TorchPickle:
    """A tree converted to values that can be pickled.

    ``tensors``: the tensors by the key of their leaf, in the order of the data records.
    ``refused``: the keys of values that cannot be written, each with a description. ``value``: the
    root of the converted tree.
    """

    snapshot: SnapshotReader
    torch: Any
    tensors: dict[str, _TensorStub] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    value: Any = None

    def remove_prefix(self, prefix: str) -> None:
        """Remove a prefix of the names of the root's members, also from the module's metadata."""
        members, level = self.value, prefix.removesuffix(".")
        renamed = type(members)((n.removeprefix(prefix), v) for n, v in members.items())
        if hasattr(members, "_metadata"):
            renamed._metadata = type(members._metadata)(
                (name.removeprefix(level).removeprefix("."), value)
                for name, value in members._metadata.items()
                if name.startswith(level)
            )
        self.value = renamed

    def to_bytes(self) -> bytes:
        """Return the content of the record ``data.pkl``."""
        out = io.BytesIO()
        _Pickler(out, self.torch).dump(self.value)
        return out.getvalue()

    def build(self, node: Any, key: str) -> Any:
        """Return the value for a node of the tree."""
        tag = next(iter(node), "") if type(node) is dict else ""
        if tag == "dict" and is_optimizer_node(children := _children(node, key)):
            return self._build_optimizer(children, key)
        if tag in ("dict", "ordered", "items"):
            members = _DICT_TYPES[node["of"] if tag == "items" else tag]()
            for name, child, k in tree.children(node, key):
                members[self._build_plain(name, k)] = self.build(child, k)
            if "metadata" in node:
                members._metadata = self.build(node["metadata"], join_key(key, "~metadata"))
            return members
        if tag in ("list", "tuple"):
            values = [self.build(n, join_key(key, str(i))) for i, n in enumerate(node[tag])]
            return values if tag == "list" else tuple(values)
        if tag == "sparse":
            return self._build_sparse(node["sparse"], key)
        if tag == "tied" or tag in LEAF_NODE_TAGS:
            return self._build_tensor(node, key)
        if tag == "subclass":
            self.refused[key] = f"of class {node[tag]['class']}"
            return None
        if tag in torch_types.TAGS:
            return torch_types.decode(node, key)
        return self._build_plain(tree.decode(node, key, tree.reject_leaf), key)

    def _build_optimizer(self, members: dict[Any, tuple[Any, str]], key: str) -> dict[str, Any]:
        """Return what ``optimizer.load_state_dict`` accepts: parameters have numbers, in the order
        of the groups."""
        (state, state_key), (groups, groups_key) = members["state"], members["groups"]
        built_groups = self.build(groups, groups_key)
        names = [name for group in built_groups for name in group["params"]]
        numbers = {name: number for number, name in enumerate(names)}
        for group in built_groups:
            group["params"] = [numbers[name] for name in group.pop("params")]
        slots = {}
        for name, child, k in tree.children(state, state_key):
            built = self.build(child, k)
            if name in numbers and len(numbers) == len(names):
                slots[numbers[name]] = built
            else:
                self.refused[k] = f"state of {name}, which is not in one group of {key}"
        return {"state": dict(sorted(slots.items())), "param_groups": built_groups}

    def _build_tensor(self, node: Any, key: str) -> Any:
        source = node.get("tied", key)
        leaf = self.snapshot.nodes()[source] if LEAF_NODE_TAGS.isdisjoint(node) else node
        if "blob" in leaf or len(leaf.get("array", ())) == 3:
            self.refused[key] = "long bytes" if "blob" in leaf else "an array of another dtype"
            return None
        tensor = self.tensors.get(source)
        if tensor is None:
            dtype, shape = self.snapshot.leaves[source]
            if not hasattr(self.torch, dtype):
                self.refused[key] = f"{dtype}, which torch {self.torch.__version__} lacks"
                return None
            storage = _StorageStub(len(self.tensors), dtype, prod(shape))
            tensor = self.tensors[source] = _TensorStub(storage, shape)
        return tensor

    def _build_sparse(self, body: Any, key: str) -> _SparseStub:
        names = sorted(body["parts"], key=_SPARSE_PARTS.index)
        parts = [self._build_tensor(body["parts"][name], join_key(key, name)) for name in names]
        args = (*parts, self.torch.Size(body["shape"]))
        if body["layout"] == "sparse_coo":
            args = (*args, body["coalesced"])
        return _SparseStub(body["layout"], args)

    def _build_plain(self, value: Any, key: str) -> Any:
        """Return a plain value, or its stub; record it in ``refused`` if it cannot be written."""
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            value = value.item()  # returns a long double unchanged, which is then refused
        if value == b"" and type(value) is bytes:
            return _EmptyBytesStub()
        refused = _unsupported_reason(value)
        if refused is not None:
            self.refused[key] = refused
        return value


def _children(node: Any, key: str) -> dict[Any, tuple[Any, str]]:
    return {name: (child, k) for name, child, k in tree.children(node, key)}


def make_pickle(snapshot: SnapshotReader) -> TorchPickle:
    """Return an empty pickle. Raises ``LimpetError`` if torch is not installed."""
    try:
        import torch
    except ImportError as e:
        raise LimpetError(
            "Writing a file for torch.load needs torch",
            todo='Install it: pip install "limpet[torch]"; or export to safetensors',
        ) from e
    return TorchPickle(snapshot, torch)


def build_torch_pickle(
    snapshot: SnapshotReader, node: Any, key: str, prefix: str = ""
) -> TorchPickle:
    """Convert the tree below ``node``. Raises ``LimpetError`` if torch is not installed.

    ``prefix``: that of the names of an averaged model, which is removed.
    """
    pickled = make_pickle(snapshot)
    pickled.value = pickled.build(node, key)
    if prefix:
        pickled.remove_prefix(prefix)
    return pickled


def _unsupported_reason(value: Any) -> str | None:
    """Return what a plain value is if ``weights_only`` refuses it, else None."""
    if type(value) in (set, tuple):
        return next((r for r in map(_unsupported_reason, value) if r is not None), None)
    if type(value) is int and value.bit_length() > _MAX_INT_BITS:
        return "an integer of more than 2,000 bits"
    if value == b"" and type(value) is bytes:
        return "empty bytes within a set or a tuple"
    return None if type(value) in _PLAIN_TYPES else with_article(type(value).__name__)


class _Pickler(pickle.Pickler):
    """Pickles stubs as the tensors that they represent.

    The functions that rebuild a tensor, and their arguments, are those of ``torch.save`` itself.
    """

    def __init__(self, out: io.BytesIO, torch: Any) -> None:
        super().__init__(out, _PROTOCOL)
        self._torch = torch

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not _StorageStub:
            return None
        name = _STORAGE_CLASSES.get(value.dtype)
        kind = self._torch.UntypedStorage if name is None else getattr(self._torch, name)
        count = value.elements * (DTYPES[value.dtype].itemsize if name is None else 1)
        return "storage", kind, str(value.record_number), "cpu", count

    def reducer_override(self, value: Any) -> Any:
        torch = self._torch
        if type(value) is _TensorStub:
            dtype, shape = value.storage.dtype, value.shape
            strides = tuple(prod(max(n, 1) for n in shape[d + 1 :]) for d in range(len(shape)))
            args: tuple[Any, ...] = (value.storage, 0, shape, strides, False, OrderedDict())
            if dtype in _STORAGE_CLASSES:
                return torch._utils._rebuild_tensor_v2, args
            return torch._utils._rebuild_tensor_v3, (*args, getattr(torch, dtype))
        if type(value) is _SparseStub:
            layout = getattr(torch, value.layout)
            return torch._utils._rebuild_sparse_tensor, (layout, value.args)
        if type(value) is _EmptyBytesStub:
            return codecs.encode, ("", "latin1")
        return NotImplemented
