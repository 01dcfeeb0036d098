"""State to tree and leaves: what is plain goes into the manifest, what has bytes into shards.

Tensors are taken as they are, never copied here: a leaf's source is the live tensor (or, for a
view that has no bytes of its own such as a conjugate, what it resolves to).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from holdfast import lazy_torch
from holdfast.engine.state import modules, optimizers, sharding
from holdfast.engine.state.replication import (
    PerRank,
    Replicated,
    Replication,
    find_ddp_replication,
    keeps_per_rank,
)
from holdfast.errors import Unsupported
from holdfast.format import tree as nodes
from holdfast.format.names import join_key
from holdfast.format.tree import unsupported
from holdfast.text import with_article
from holdfast.types import DTYPES, Box


# Made for every leaf: a frozen dataclass takes eight times as long to make.
class LocalLeaf(msgspec.Struct, frozen=True):
    """A box of a leaf on its way out. ``shape`` is that of the whole (global) tensor; ``source`` is
    a strided torch tensor or a NumPy array with the elements of the ``box``, of ``dtype``; arrays
    of other dtypes come as rows of uint8."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    source: Any
    box: Box
    replication: Replication = Replication.UNVERIFIED


@dataclass(slots=True)
class FlatState:
    """A state taken apart: the tree for the manifest, and the leaves, in order of the tree.

    ``own``: nodes of values that each rank keeps for itself, by key; ``first``: of values of which
    the first rank's are taken. In the tree ``{"own": key}`` and ``{"first": key}`` stand for them.
    ``unions``: keys of lists that may be longer or shorter on other ranks.
    """

    tree: Any
    leaves: list[LocalLeaf]
    per_rank: dict[str, Any] = field(default_factory=dict)
    from_first: dict[str, Any] = field(default_factory=dict)
    merged_lists: list[str] = field(default_factory=list)


def flatten(state: dict[str, Any], rank: int = 0) -> FlatState:
    """Take a state apart, as ``rank`` of those that save it.

    Raises ``Unsupported`` naming the first value that cannot be kept faithfully.
    """
    if type(state) is not dict:
        raise Unsupported(
            f"The state is {with_article(type(state).__name__)}",
            expected='a dict such as {"model": model, "optimizer": optimizer}',
            found=type(state).__name__,
        )
    taker = _Flattener(modules.parameter_names(state), find_ddp_replication(state), rank)
    tree = nodes.encode(state, "", taker.encode_value)
    return FlatState(tree, taker.leaves, taker.per_rank, taker.from_first, taker.merged_lists)


@dataclass(slots=True)
class _Flattener:
    """Answers ``nodes.encode`` for whatever is not a plain value, and collects the leaves."""

    parameter_names: dict[int, str]
    replication_by_address: dict[int, Replication]
    rank: int
    leaves: list[LocalLeaf] = field(default_factory=list)
    per_rank: dict[str, Any] = field(default_factory=dict)
    from_first: dict[str, Any] = field(default_factory=dict)
    merged_lists: list[str] = field(default_factory=list)
    forced_replication: Replication | None = None
    key_by_memory: dict[tuple[Any, ...], str] = field(default_factory=dict)
    enclosing_ids: list[int] = field(default_factory=list)
    torch: Any = field(default_factory=lazy_torch.torch_or_none)

    def encode_value(self, value: Any, key: str, depth: int) -> Any:
        torch = self.torch
        if torch is not None and isinstance(value, torch.Tensor):
            return self._encode_tensor(value, key)
        if type(value) is np.ndarray:
            return self._encode_array(value, key)
        if type(value) in (bytes, bytearray):
            # a copy: while the memory of a bytearray is looked at, nobody can change its length
            raw = np.frombuffer(bytes(value), np.uint8)
            self._add_whole_leaf(key, "uint8", raw.shape, raw)
            return {"blob": [type(value).__name__, len(value)]}
        if isinstance(value, np.ndarray):
            raise unsupported(value, key, "a subclass of ndarray; numpy.asarray() makes it plain")
        return self._encode_object(value, key, depth)

    def _add_whole_leaf(self, key: str, dtype: str, shape: tuple[int, ...], source: Any) -> None:
        held = (
            Replication.UNVERIFIED if self.forced_replication is None else self.forced_replication
        )
        self.leaves.append(LocalLeaf(key, dtype, shape, source, Box.whole(shape), held))

    def _encode_rank_dependent(self, value: Any, key: str, depth: int) -> Any:
        """A value that the ranks do not have in common: kept beside the tree."""
        if self.forced_replication is not None:
            raise unsupported(value, key, "what is of one rank cannot hold more of the kind")
        inner = value.value if isinstance(value, PerRank | Replicated) else None
        if isinstance(value, Replicated):
            self.forced_replication = Replication.FROM_FIRST
            self.from_first[key] = self._encode_nested(inner, key, depth)
        else:
            self.forced_replication, k = Replication.REPLICATED, join_key(key, str(self.rank))
            if inner is None:
                self.per_rank[key] = self._encode_object(value, k, depth)
            else:
                self.per_rank[key] = self._encode_nested(inner, k, depth)
        self.forced_replication = None
        return {"first" if isinstance(value, Replicated) else "own": key}

    def _encode_nested(self, value: Any, key: str, depth: int) -> Any:
        return nodes.encode(value, key, self.encode_value, depth + 1)

    def _encode_object(self, value: Any, key: str, depth: int) -> Any:
        if sharding.is_distributed_tensor(value):
            return self._encode_distributed(value, key)
        if isinstance(value, Replicated) or (
            keeps_per_rank(value) and self.forced_replication is None
        ):
            return self._encode_rank_dependent(value, key, depth)
        if id(value) in self.enclosing_ids:
            raise unsupported(value, key, "its state contains itself")
        self.enclosing_ids.append(id(value))
        try:
            if modules.is_module(value):
                return nodes.encode(modules.module_state(value, key), key, self.encode_value, depth)
            if optimizers.is_standard_optimizer(value):
                state = optimizers.optimizer_state(value, self.parameter_names, key)
                groups = join_key(key, "groups")
                self.merged_lists.append(groups)
                several = range(len(state["groups"]))
                self.merged_lists += [f"{join_key(groups, str(i))}/params" for i in several]
                return nodes.encode(state, key, self.encode_value, depth)
            if modules.is_stateful(value) and not isinstance(value, type):
                return self._encode_stateful(value, key, depth)
        finally:
            self.enclosing_ids.pop()
        raise unsupported(value, key, "neither a tensor, an array nor a plain value")

    def _encode_stateful(self, value: Any, key: str, depth: int) -> Any:
        """An object by its own state. What is refused deep in that, the caller may never have
        heard of, so the object is named as well."""
        state = value.state_dict()
        try:
            return nodes.encode(state, key, self.encode_value, depth)
        except Unsupported as e:
            if e.fields.get("member") or e.fields.get("leaf") == key:
                raise
            what = f"{key[:300]!r}, {with_article(type(value).__qualname__)}, cannot be kept"
            why = Unsupported(
                f"{what}, for what its state_dict() gives: {e.what}",
                expected=e.expected,
                found=e.found,
                todo=e.todo,
                **e.fields,
            )
            raise why.with_advice(
                f"Or leave {key[:300]!r} out of the state as a whole, or wrap it in an object whose"
                " own state_dict() and load_state_dict() translate it",
                member=key,
            ) from e

    def _encode_tensor(self, t: Any, key: str) -> Any:
        torch = self.torch
        if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
            if sharding.is_distributed_tensor(t):
                return self._encode_distributed(t, key)
            raise unsupported(t, key, "a subclass of Tensor whose inner parts are not known")
        if t.layout is not torch.strided or t.is_nested or t.is_quantized or t.is_meta:
            return self._encode_sparse(t, key)
        t, name, shape = self._to_plain_tensor(t, tuple(t.shape), key)
        held = self.forced_replication
        if t.numel():
            place = (t.data_ptr(), name, shape, t.stride())
            if not place[0]:
                raise unsupported(t, key, "its memory has been freed")
            first = self.key_by_memory.setdefault(place, key)
            if first != key:
                return {"tied": first}
            held = self.replication_by_address.get(place[0]) if held is None else held
        self.leaves.append(
            LocalLeaf(key, name, shape, t, Box.whole(shape), held or Replication.UNVERIFIED)
        )
        return {"tensor": [name, list(shape)]}

    def _to_plain_tensor(
        self, t: Any, shape: tuple[int, ...], key: str
    ) -> tuple[Any, str, tuple[int, ...]]:
        """A tensor whose bytes are those of its elements, its dtype's name, and ``shape``, that of
        the whole."""
        name = lazy_torch.dtype_name(t.dtype)
        if name is None:
            raise unsupported(t, key, f"the dtype {t.dtype} has no bytes that can be written")
        if t.requires_grad:
            t = t.detach()
        if t.is_conj() or t.is_neg():
            t = t.resolve_conj().resolve_neg()
        if not nodes.is_valid_shape(name, shape):
            raise unsupported(t, key, f"{len(shape)} dimensions of {shape[:8]} are too many")
        return t, name, shape

    def _encode_distributed(self, value: Any, key: str) -> Any:
        """A tensor that is spread over ranks: of its boxes those that this rank has."""
        parts = sharding.get_local_boxes(value, key)
        if parts is None:
            raise unsupported(value, key, "it does not say which part of a tensor it is")
        name, shape = parts.dtype, parts.shape
        if name is None:
            raise unsupported(value, key, f"the dtype {value.dtype} has no bytes to be written")
        if not nodes.is_valid_shape(name, shape):
            raise unsupported(value, key, f"{len(shape)} dimensions of {shape[:8]} are too many")
        # not by the address of elements: a rank that has none must find the same ties
        first = self.key_by_memory.setdefault((parts.tie_key, name, shape), key)
        if first != key:
            return {"tied": first}
        held = (
            Replication.REPLICATED if self.forced_replication is None else self.forced_replication
        )
        for box, part in parts.box_tensors:
            if not isinstance(part, np.ndarray) and (part.is_conj() or part.is_neg()):
                part = part.resolve_conj().resolve_neg()
            self.leaves.append(LocalLeaf(key, name, shape, part, box, held))
        return {"array" if parts.is_numpy else "tensor": [name, list(shape)]}

    def _encode_sparse(self, t: Any, key: str) -> Any:
        torch = self.torch
        if t.is_meta:
            raise unsupported(t, key, "a meta tensor has no data; materialise it before saving")
        if t.is_quantized:
            raise unsupported(t, key, "a quantised tensor; save int_repr(), scale and zero point")
        if t.is_nested:
            raise unsupported(t, key, "a nested tensor; save its values and offsets")
        t = t.detach()
        if t.layout is torch.sparse_coo:
            parts = {"indices": t._indices(), "values": t._values()}
        elif t.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = {"crow": t.crow_indices(), "col": t.col_indices(), "values": t.values()}
        elif t.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = {"ccol": t.ccol_indices(), "row": t.row_indices(), "values": t.values()}
        else:
            raise unsupported(t, key, f"the layout {t.layout} is opaque")
        taken = {
            name: self._encode_tensor(part, join_key(key, name)) for name, part in parts.items()
        }
        return {
            "sparse": {
                "layout": str(t.layout).removeprefix("torch."),
                "shape": list(t.shape),
                "coalesced": t.layout is torch.sparse_coo and t.is_coalesced(),
                "parts": taken,
            }
        }

    def _encode_array(self, a: np.ndarray[Any, Any], key: str) -> Any:
        name, rows = a.dtype.name, (*a.shape, a.dtype.itemsize)
        plain = name in DTYPES and a.dtype.isnative and not a.dtype.metadata
        if not nodes.is_valid_shape("uint8", rows):
            raise unsupported(a, key, f"{a.ndim} dimensions of {a.shape[:8]} are too many")
        if plain:
            self._add_whole_leaf(key, name, a.shape, a)
            return {"array": [name, list(a.shape)]}
        try:
            descr = nodes.to_descr(a.dtype)
        except ValueError as e:
            raise unsupported(a, key, str(e)) from e
        flat = np.ascontiguousarray(a).reshape(a.shape)
        raw = flat.reshape(-1).view(np.uint8).reshape(rows) if a.nbytes else np.empty(rows, "u1")
        self._add_whole_leaf(key, "uint8", rows, raw)
        return {"array": ["uint8", list(rows), descr]}
