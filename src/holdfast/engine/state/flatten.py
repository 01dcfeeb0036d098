"""Flattens a state into a tree and leaves: plain values for the manifest, leaves for the shards.

Tensors are not copied here. The source of a leaf is the live tensor. The exception is a view
without bytes of its own, such as a conjugate: its source is the resolved tensor.
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


# One is created for every leaf, and creating a frozen dataclass takes eight times as long.
class LocalLeaf(msgspec.Struct, frozen=True):
    """A box of a leaf that is about to be saved.

    ``shape`` is the shape of the global tensor. ``source`` is a strided torch tensor or a NumPy
    array of dtype ``dtype`` with the elements of ``box``. The elements of an array whose dtype has
    no name in the format are rows of uint8.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    source: Any
    box: Box
    replication: Replication = Replication.UNVERIFIED


@dataclass(slots=True)
class FlatState:
    """A flattened state: the tree for the manifest, and the leaves in the order of the tree.

    ``per_rank``: by key, the nodes of values that are stored per rank. ``from_first``: by key, the
    nodes of values that are taken from the first rank. The tree refers to them as
    ``{"own": key}`` and ``{"first": key}``. ``merged_lists``: keys of lists whose length may differ
    between ranks.
    """

    tree: Any
    leaves: list[LocalLeaf]
    per_rank: dict[str, Any] = field(default_factory=dict)
    from_first: dict[str, Any] = field(default_factory=dict)
    merged_lists: list[str] = field(default_factory=list)


def flatten(state: dict[str, Any], rank: int = 0) -> FlatState:
    """Flatten a state, as the rank ``rank`` of the save.

    Raises ``Unsupported``, which names the first value that cannot be saved faithfully.
    """
    if type(state) is not dict:
        raise Unsupported(
            f"The state is {with_article(type(state).__name__)}, not a dict",
            expected='a dict such as {"model": model, "optimizer": optimizer}',
            found=type(state).__name__,
        )
    flattener = _Flattener(modules.parameter_names(state), find_ddp_replication(state), rank)
    tree = nodes.encode(state, "", flattener.encode_value)
    return FlatState(
        tree,
        flattener.leaves,
        flattener.per_rank,
        flattener.from_first,
        flattener.merged_lists,
    )


@dataclass(slots=True)
class _Flattener:
    """Encodes the values that ``nodes.encode`` does not know, and collects the leaves."""

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
            # a copy, because a bytearray cannot be resized while a view of its memory exists
            raw = np.frombuffer(bytes(value), np.uint8)
            self._add_whole_leaf(key, "uint8", raw.shape, raw)
            return {"blob": [type(value).__name__, len(value)]}
        if isinstance(value, np.ndarray):
            raise unsupported(
                value, key, "it is a subclass of ndarray; convert it with numpy.asarray()"
            )
        return self._encode_object(value, key, depth)

    def _add_whole_leaf(self, key: str, dtype: str, shape: tuple[int, ...], source: Any) -> None:
        replication = self.forced_replication or Replication.UNVERIFIED
        self.leaves.append(LocalLeaf(key, dtype, shape, source, Box.whole(shape), replication))

    def _encode_rank_dependent(self, value: Any, key: str, depth: int) -> Any:
        """Encode a per-rank or replicated value, whose node is stored outside of the tree."""
        if self.forced_replication is not None:
            raise unsupported(
                value, key, "a PerRank or Replicated value cannot contain a Replicated value"
            )
        if isinstance(value, Replicated):
            self.forced_replication = Replication.FROM_FIRST
            self.from_first[key] = self._encode_nested(value.value, key, depth)
        else:
            self.forced_replication = Replication.REPLICATED
            rank_key = join_key(key, str(self.rank))
            self.per_rank[key] = (
                self._encode_nested(value.value, rank_key, depth)
                if isinstance(value, PerRank)
                else self._encode_object(value, rank_key, depth)
            )
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
                group_numbers = range(len(state["groups"]))
                self.merged_lists += [f"{join_key(groups, str(i))}/params" for i in group_numbers]
                return nodes.encode(state, key, self.encode_value, depth)
            if modules.is_stateful(value) and not isinstance(value, type):
                return self._encode_stateful(value, key, depth)
        finally:
            self.enclosing_ids.pop()
        raise unsupported(value, key, "it is not a tensor, an array, or a plain value")

    def _encode_stateful(self, value: Any, key: str, depth: int) -> Any:
        """Encode an object by its ``state_dict()``.

        An error for a value inside that state also names the object, because the user may not know
        the value.
        """
        state = value.state_dict()
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
                **e.fields,
            )
            raise error.with_advice(
                f"Or leave the whole of {key[:300]!r} out of the state, or wrap it in an object"
                " whose state_dict() and load_state_dict() convert it",
                member=key,
            ) from e

    def _encode_tensor(self, t: Any, key: str) -> Any:
        torch = self.torch
        if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
            if sharding.is_distributed_tensor(t):
                return self._encode_distributed(t, key)
            raise unsupported(
                t, key, "it is a subclass of Tensor whose structure Holdfast does not know"
            )
        if t.layout is not torch.strided or t.is_nested or t.is_quantized or t.is_meta:
            return self._encode_sparse(t, key)
        t, name, shape = self._to_plain_tensor(t, tuple(t.shape), key)
        replication = self.forced_replication
        if t.numel():
            address = t.data_ptr()
            if not address:
                raise unsupported(t, key, "its memory has been freed")
            first_key = self.key_by_memory.setdefault((address, name, shape, t.stride()), key)
            if first_key != key:
                return {"tied": first_key}
            if replication is None:
                replication = self.replication_by_address.get(address)
        self.leaves.append(
            LocalLeaf(key, name, shape, t, Box.whole(shape), replication or Replication.UNVERIFIED)
        )
        return {"tensor": [name, list(shape)]}

    def _to_plain_tensor(
        self, t: Any, shape: tuple[int, ...], key: str
    ) -> tuple[Any, str, tuple[int, ...]]:
        """Return a tensor whose memory has its elements' bytes, its dtype's name, and ``shape``.

        The tensor is detached, and conjugate and negative views are resolved.
        """
        name = lazy_torch.dtype_name(t.dtype)
        if name is None:
            raise unsupported(t, key, f"Holdfast cannot write the dtype {t.dtype}")
        if t.requires_grad:
            t = t.detach()
        if t.is_conj() or t.is_neg():
            t = t.resolve_conj().resolve_neg()
        if not nodes.is_valid_shape(name, shape):
            raise unsupported(
                t, key, f"the shape {shape[:8]} with {len(shape)} dimensions is too large"
            )
        return t, name, shape

    def _encode_distributed(self, value: Any, key: str) -> Any:
        """Encode a tensor that is distributed over ranks: add the boxes that this rank has."""
        parts = sharding.get_local_boxes(value, key)
        if parts is None:
            raise unsupported(
                value, key, "it does not describe which part of a global tensor it is"
            )
        name, shape = parts.dtype, parts.shape
        if name is None:
            raise unsupported(value, key, f"Holdfast cannot write the dtype {value.dtype}")
        if not nodes.is_valid_shape(name, shape):
            raise unsupported(
                value, key, f"the shape {shape[:8]} with {len(shape)} dimensions is too large"
            )
        # not the address of elements: a rank without elements must find the same ties
        first_key = self.key_by_memory.setdefault((parts.tie_key, name, shape), key)
        if first_key != key:
            return {"tied": first_key}
        replication = (
            Replication.REPLICATED if self.forced_replication is None else self.forced_replication
        )
        for box, part in parts.box_tensors:
            if not isinstance(part, np.ndarray) and (part.is_conj() or part.is_neg()):
                part = part.resolve_conj().resolve_neg()
            self.leaves.append(LocalLeaf(key, name, shape, part, box, replication))
        return {"array" if parts.is_numpy else "tensor": [name, list(shape)]}

    def _encode_sparse(self, t: Any, key: str) -> Any:
        torch = self.torch
        if t.is_meta:
            raise unsupported(t, key, "a meta tensor has no data; materialize it before the save")
        if t.is_quantized:
            raise unsupported(
                t, key, "it is a quantized tensor; save its int_repr(), scale, and zero point"
            )
        if t.is_nested:
            raise unsupported(t, key, "it is a nested tensor; save its values and offsets")
        t = t.detach()
        if t.layout is torch.sparse_coo:
            parts = {"indices": t._indices(), "values": t._values()}
        elif t.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = {"crow": t.crow_indices(), "col": t.col_indices(), "values": t.values()}
        elif t.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = {"ccol": t.ccol_indices(), "row": t.row_indices(), "values": t.values()}
        else:
            raise unsupported(t, key, f"its layout {t.layout} is opaque")
        encoded_parts = {
            name: self._encode_tensor(part, join_key(key, name)) for name, part in parts.items()
        }
        return {
            "sparse": {
                "layout": str(t.layout).removeprefix("torch."),
                "shape": list(t.shape),
                "coalesced": t.layout is torch.sparse_coo and t.is_coalesced(),
                "parts": encoded_parts,
            }
        }

    def _encode_array(self, a: np.ndarray[Any, Any], key: str) -> Any:
        name, rows = a.dtype.name, (*a.shape, a.dtype.itemsize)
        plain = name in DTYPES and a.dtype.isnative and not a.dtype.metadata
        if not nodes.is_valid_shape("uint8", rows):
            raise unsupported(
                a, key, f"the shape {a.shape[:8]} with {a.ndim} dimensions is too large"
            )
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
