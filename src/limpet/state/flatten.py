"""Flattens a state into a tree and leaves: plain values for the manifest, leaves for the shards.

Tensors are not copied, except views without bytes of their own, such as a conjugate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from limpet import lazy_torch
from limpet.errors import Unsupported
from limpet.format import torch_types
from limpet.format import tree as nodes
from limpet.format.names import escape_level, join_key
from limpet.format.numpy_dtypes import to_descr
from limpet.format.rejected import NOT_PLAIN, nested_too_deeply, rejections_within, unsupported
from limpet.generators import DeferredIsolation
from limpet.state import modules, optimizers, sharding, sparse, subclasses
from limpet.state.replication import (
    PerRank,
    Replicated,
    Replication,
    find_ddp_replication,
    keeps_per_rank,
)
from limpet.state.source import Source
from limpet.text import with_article
from limpet.threads import gc_paused
from limpet.types import DTYPES, Box


# One is created for every leaf, and creating a frozen dataclass takes eight times as long.
class LocalLeaf(msgspec.Struct, frozen=True, gc=False):
    """A box of a leaf that is about to be saved. ``source``: a strided tensor, an array, or a
    ``Source`` with its elements; those of an array whose dtype has no name are rows of uint8."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    source: Any
    box: Box
    replication: Replication = Replication.UNVERIFIED


@dataclass(slots=True)
class FlatState:
    """A flattened state: the tree for the manifest, and the leaves in the order of the tree, which
    has ``{"own": key}`` for ``per_rank`` nodes, and ``{"first": key}`` for ``from_first``."""

    tree: Any = None
    leaves: list[LocalLeaf] = field(default_factory=list)
    per_rank: dict[str, Any] = field(default_factory=dict)
    from_first: dict[str, Any] = field(default_factory=dict)
    merged_lists: list[str] = field(default_factory=list)  # may differ in length between ranks

    def devices(self) -> dict[str, Any]:
        """Return the devices of the tensors by key; only one tensor if all are on one device; none
        if a tensor is in a file of another library."""
        devices: dict[str, Any] = {}
        for leaf in self.leaves:
            if type(leaf.source) is not np.ndarray:
                if (device := getattr(leaf.source, "device", None)) is None:
                    return {}
                devices[leaf.key] = device
        if len({*devices.values()}) == 1:
            key, device = devices.popitem()
            return {key: device}
        return devices


@gc_paused
def flatten(state: dict[str, Any], rank: int = 0) -> FlatState:
    """Flatten a state, as the rank ``rank`` of the save. Raises ``Unsupported``, which names all
    values that cannot be saved faithfully."""
    if type(state) is not dict:
        raise Unsupported(
            f"The state is {with_article(type(state).__name__)}, not a plain dict",
            expected='a dict such as {"model": model, "optimizer": optimizer}',
            found=type(state).__name__,
            todo="Give it a name in a dict, or pass dict(state)"
            if isinstance(state, dict)
            else None,
        )
    torch = lazy_torch.torch_or_none()
    classes = () if torch is None else (torch.Tensor, torch.nn.Parameter)
    with DeferredIsolation() as isolation:
        flattener = _Flattener(state, rank, isolation, torch, classes[:1], classes)
        if (
            torch is not None
            and torch.distributed.is_available()
            and torch.distributed.is_initialized()
        ):
            flattener.replication_by_address = find_ddp_replication(state)
        try:
            flattener.flat.tree = nodes.encode_root(state, "", flattener.encode_value)
        except RecursionError as e:
            raise Unsupported(
                "The state is nested too deeply for Python's recursion limit",
                todo="Use fewer levels, or raise the limit with sys.setrecursionlimit()",
            ) from e
        return flattener.flat


@dataclass
class _Flattener:
    """Encodes the values that ``nodes.encode`` does not know, and collects the leaves."""

    state: dict[str, Any]
    rank: int
    isolation: DeferredIsolation
    torch: Any
    tensor_class: tuple[Any, ...]
    plain_classes: tuple[Any, ...]
    flat: FlatState = field(default_factory=FlatState)
    replication_by_address: dict[int, Replication] = field(default_factory=dict)
    forced_replication: Replication | None = None
    inside_object: int = 0
    """The number of objects with their own ``state_dict()`` around the value."""
    key_by_memory: dict[tuple[Any, ...], str] = field(default_factory=dict)
    enclosing_ids: list[int] = field(default_factory=list)
    tensor_by_address: dict[int, tuple[str, str, Any]] = field(default_factory=dict)
    """By address: the key, the name of the dtype, and the first tensor that begins there."""
    leaf_types: dict[tuple[Any, Any], tuple[str, tuple[int, ...], Box, Any]] = field(
        default_factory=dict
    )
    """By dtype and shape: the name of the dtype, the shape, the box, and the node of a tensor."""

    @cached_property
    def parameter_names(self) -> dict[int, str]:
        """The names of the parameters. Only optimizers need them."""
        return modules.parameter_names(self.state)

    def encode_value(self, value: Any, key: str, depth: int) -> Any:
        if isinstance(value, self.tensor_class):
            return self._encode_tensor(value, key)
        if type(value) is np.ndarray:
            return self._encode_array(value, key)
        if type(value) in (bytes, bytearray):
            # a copy, because a bytearray cannot be resized while a view of its memory exists
            self._add_array(key, np.frombuffer(bytes(value), np.uint8))
            return {"blob": [type(value).__name__, len(value)]}
        if isinstance(value, np.ndarray):
            raise unsupported(value, key, "it is a subclass of ndarray")
        if isinstance(value, Source):
            return self._encode_source(value, key)
        return self._encode_object(value, key, depth)

    def _add_array(self, key: str, a: np.ndarray[Any, Any]) -> None:
        replication = self.forced_replication or Replication.UNVERIFIED
        leaf = LocalLeaf(key, a.dtype.name, a.shape, a, Box.whole(a.shape), replication)
        self.flat.leaves.append(leaf)

    def _encode_source(self, source: Source, key: str) -> Any:
        first_key = self.key_by_memory.setdefault((id(source),), key)
        if first_key != key:
            return {"tied": first_key}
        name = _require_storable(source, source.dtype, source.shape, key)
        replication = self.forced_replication or Replication.UNVERIFIED
        box = Box.whole(source.shape)
        self.flat.leaves.append(LocalLeaf(key, name, source.shape, source, box, replication))
        return {"tensor": [name, list(source.shape)]}

    def _encode_rank_dependent(self, value: Any, key: str, depth: int) -> Any:
        """Encode a per-rank or replicated value, whose node is stored outside of the tree."""
        if self.forced_replication is not None:
            raise unsupported(
                value, key, "a PerRank or Replicated value cannot contain a Replicated value"
            )
        first = isinstance(value, Replicated)
        self.forced_replication = Replication.FROM_FIRST if first else Replication.REPLICATED
        own_key = key if first else join_key(key, str(self.rank))
        try:
            node = (
                nodes.encode(value.value, own_key, self.encode_value, depth + 1)
                if isinstance(value, PerRank | Replicated)
                else self._encode_object(value, own_key, depth + 1)
            )
        finally:
            self.forced_replication = None
        (self.flat.from_first if first else self.flat.per_rank)[key] = node
        return {"first" if first else "own": key}

    def _encode_object(self, value: Any, key: str, depth: int) -> Any:
        if (node := torch_types.encode(value)) is not None:
            return node
        self.isolation.begin()  # what its code draws is undone
        if sharding.is_distributed_tensor(value):
            return self._encode_distributed(value, key)
        if isinstance(value, Replicated) or (
            keeps_per_rank(value) and self.forced_replication is None
        ):
            return self._encode_rank_dependent(value, key, depth)
        if id(value) in self.enclosing_ids:
            raise unsupported(value, key, "its state contains itself")
        if len(self.enclosing_ids) > nodes.MAX_DEPTH:
            raise nested_too_deeply(value, key, "each object's state has another object")
        modules.require_complete(value, key)
        self.enclosing_ids.append(id(value))
        try:
            if modules.is_module(value):
                state = modules.module_state(value, key)
            elif optimizers.is_standard_optimizer(value):
                state = optimizers.optimizer_state(value, self.parameter_names, key)
                groups = join_key(key, "groups")
                params = (f"{groups}/{i}/params" for i in range(len(state["groups"])))
                self.flat.merged_lists += [groups, *params]
            elif modules.is_stateful(value) and not isinstance(value, type):
                return self._encode_stateful(value, key, depth)
            else:
                raise unsupported(value, key, NOT_PLAIN)
            return nodes.encode(state, key, self.encode_value, depth)
        finally:
            self.enclosing_ids.pop()

    def _encode_stateful(self, value: Any, key: str, depth: int) -> Any:
        """Encode an object by its ``state_dict()``. An error for a value in it names the object,
        too."""
        with modules.calling(value, key, "state_dict", f"Nothing was saved. {modules.UNCHANGED}"):
            state = value.state_dict()
        self.inside_object += 1
        try:
            return nodes.encode(state, key, self.encode_value, depth)
        except Unsupported as e:
            if e.fields.get("member") or e.fields.get("leaf") == key:
                raise
            name = f"{key[:300]!r}, {with_article(type(value).__qualname__)}"
            error = Unsupported(
                f"{name}, cannot be saved because of a value in its state_dict(): {e.what}",
                expected=e.expected,
                found=e.found,
                todo=e.todo,
                **{**e.fields, "rejections": rejections_within(e, name)},
            )
            raise error.with_advice(
                f"Or leave the whole of {key[:300]!r} out of the state, or wrap it in an object"
                " whose state_dict() and load_state_dict() convert it",
                member=key,
            ) from e
        finally:
            self.inside_object -= 1

    def _encode_tensor(self, t: Any, key: str) -> Any:
        """Encode a tensor. This is called for every leaf of a model: keep it short."""
        torch = self.torch
        if type(t) not in self.plain_classes:
            if sharding.is_distributed_tensor(t):
                return self._encode_distributed(t, key)
            return self._encode_subclass(t, key)
        if t.layout is not torch.strided or t.is_nested:
            return self._encode_sparse(t, key)
        leaf_type = self.leaf_types.get((t.dtype, t.shape))
        if leaf_type is None:
            if t.is_quantized or t.is_meta:
                return self._encode_sparse(t, key)
            shape = tuple(t.shape)
            name = _require_storable(t, lazy_torch.dtype_name(t.dtype), shape, key)
            node = {"tensor": [name, list(shape)]}
            leaf_type = self.leaf_types[t.dtype, t.shape] = name, shape, Box.whole(shape), node
        name, shape, box, node = leaf_type
        if t.requires_grad:
            t = t.detach()
        if t.is_neg() or t.is_conj():
            t = t.resolve_conj().resolve_neg()
        replication = self.forced_replication or Replication.UNVERIFIED
        if 0 not in shape:
            address = t.data_ptr()
            if not address:
                if t.is_meta:
                    return self._encode_sparse(t, key)
                raise unsupported(t, key, "its memory has been freed")
            first = self.tensor_by_address.setdefault(address, (key, name, t))
            if first[0] != key and (tied := self._find_tied(address, key, name, t)) != key:
                return {"tied": tied}
            if self.forced_replication is None and self.replication_by_address:
                replication = self.replication_by_address.get(address, replication)
        elif t.is_meta:
            return self._encode_sparse(t, key)
        self.flat.leaves.append(LocalLeaf(key, name, shape, t, box, replication))
        return node

    def _find_tied(self, address: int, key: str, name: str, t: Any) -> str:
        """Return the key of the first tensor with the same memory as ``t``, which may be ``t``."""
        first_key, first_name, first = self.tensor_by_address[address]
        memory = (address, first_name, first.shape, first.stride())
        self.key_by_memory.setdefault(memory, first_key)
        return self.key_by_memory.setdefault((address, name, t.shape, t.stride()), key)

    def _encode_distributed(self, value: Any, key: str) -> Any:
        """Encode a tensor that is distributed over ranks: add the boxes that this rank has."""
        parts = sharding.get_local_boxes(value, key)
        if parts is None:
            raise unsupported(
                value, key, "it does not describe which part of a global tensor it is"
            )
        shape = parts.shape
        name = _require_storable(value, parts.dtype, shape, key)
        # not the address of elements: a rank without elements must find the same ties
        first_key = self.key_by_memory.setdefault((parts.tie_key, name, shape), key)
        if first_key != key:
            return {"tied": first_key}
        replication = self.forced_replication or Replication.REPLICATED
        for box, part in parts.box_tensors:
            if subclasses.is_subclass(part):
                why = f"its local tensor is a {subclasses.class_name(part)}"
                raise unsupported(value, key, why, "Save it from an optimizer that is not sharded")
            if not isinstance(part, np.ndarray) and (part.is_conj() or part.is_neg()):
                part = part.resolve_conj().resolve_neg()
            self.flat.leaves.append(LocalLeaf(key, name, shape, part, box, replication))
        return {"array" if parts.is_numpy else "tensor": [name, list(shape)]}

    def _encode_subclass(self, t: Any, key: str) -> Any:
        """Encode a tensor of another class by its inner tensors."""
        if not subclasses.is_subclass(t):
            raise unsupported(
                t,
                key,
                "it is a subclass of Tensor without __tensor_flatten__",
                "Save tensor.as_subclass(torch.Tensor)",
            )
        if self.inside_object:
            raise unsupported(
                t,
                key,
                "no load could pass it to the load_state_dict() of the object that has it",
                "Save tensor.dequantize(), if the class has it",
            )
        self.isolation.begin()
        inner = subclasses.inner_tensors(t, key)
        if len(self.enclosing_ids) > nodes.MAX_DEPTH // 2 or any(
            id(part) in self.enclosing_ids for part in inner.values()
        ):
            raise nested_too_deeply(t, key, "it contains itself")
        self.enclosing_ids.append(id(t))
        try:
            parts = {
                name: self._encode_tensor(part, join_key(key, escape_level(name)))
                for name, part in inner.items()
            }
        finally:
            self.enclosing_ids.pop()
        if any("sparse" in part for part in parts.values()):
            raise unsupported(t, key, "one of its inner tensors is sparse")
        return {"subclass": {**subclasses.describe(t, key), "parts": parts}}

    def _encode_sparse(self, t: Any, key: str) -> Any:
        layout = str(t.layout).removeprefix("torch.")
        sparse.check(t, layout, key)
        t = t.detach()
        return {
            "sparse": {
                "layout": layout,
                "shape": list(t.shape),
                "coalesced": layout == "sparse_coo" and t.is_coalesced(),
                "parts": {
                    name: self._encode_tensor(getattr(t, method)(), join_key(key, name))
                    for name, method in sparse.PARTS[layout].items()
                },
            }
        }

    def _encode_array(self, a: np.ndarray[Any, Any], key: str) -> Any:
        name, rows = a.dtype.name, (*a.shape, a.dtype.itemsize)
        if not nodes.is_valid_shape("uint8", rows):
            raise unsupported(
                a, key, f"the shape {a.shape[:8]} with {a.ndim} dimensions is too large"
            )
        if name in DTYPES and a.dtype.isnative and not a.dtype.metadata:
            self._add_array(key, a)
            return {"array": [name, list(a.shape)]}
        try:
            descr = to_descr(a.dtype)
        except ValueError as e:
            advice = "Save array.tolist(), or convert it to a dtype without objects"
            raise unsupported(a, key, str(e), advice * a.dtype.hasobject) from e
        flat = np.ascontiguousarray(a).reshape(-1)
        raw = flat.view(np.uint8).reshape(rows) if a.nbytes else np.empty(rows, "u1")
        self._add_array(key, raw)
        return {"array": ["uint8", list(rows), descr]}


def _require_storable(value: Any, dtype: str | None, shape: tuple[int, ...], key: str) -> str:
    """Return the dtype's name. Raise ``Unsupported`` if it is None or the shape is too large."""
    if dtype is None:
        raise unsupported(value, key, f"Limpet cannot write the dtype {value.dtype}")
    if not nodes.is_valid_shape(dtype, shape):
        raise unsupported(
            value, key, f"the shape {shape[:8]} with {len(shape)} dimensions is too large"
        )
    return dtype
