"""State to tree and leaves: what is plain goes into the manifest, what has bytes into shards.

Tensors are taken as they are, never copied here: a leaf's source is the live tensor (or, for a
view that has no bytes of its own such as a conjugate, what it resolves to).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from holdfast.engine import live
from holdfast.errors import Unsupported
from holdfast.format import tree as nodes
from holdfast.format.names import join
from holdfast.format.tree import unsupported
from holdfast.words import DTYPES, an


# Made for every leaf: a frozen dataclass takes eight times as long to make.
class Leaf(msgspec.Struct, frozen=True):
    """A leaf on its way out. ``source`` is a strided torch tensor or a NumPy array of
    ``shape`` elements of ``dtype``; arrays of other dtypes come as rows of uint8."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    source: Any


@dataclass(slots=True)
class Flat:
    """A state taken apart: the tree for the manifest, and the leaves, in order of the tree."""

    tree: Any
    leaves: list[Leaf]


def flatten(state: dict[str, Any]) -> Flat:
    """Take a state apart.

    Raises ``Unsupported`` naming the first value that cannot be kept faithfully.
    """
    if type(state) is not dict:
        raise Unsupported(
            f"The state is {an(type(state).__name__)}",
            expected='a dict such as {"model": model, "optimizer": optimizer}',
            found=type(state).__name__,
        )
    taker = _Taker(live.parameter_names(state))
    return Flat(nodes.encode(state, "", taker.take), taker.leaves)


@dataclass(slots=True)
class _Taker:
    """Answers ``nodes.encode`` for whatever is not a plain value, and collects the leaves."""

    names: dict[int, str]
    leaves: list[Leaf] = field(default_factory=list)
    seen: dict[tuple[Any, ...], str] = field(default_factory=dict)
    inside: list[int] = field(default_factory=list)
    torch: Any = field(default_factory=live.torch_or_none)

    def take(self, value: Any, key: str, depth: int) -> Any:
        torch = self.torch
        if torch is not None and isinstance(value, torch.Tensor):
            return self._tensor(value, key)
        if type(value) is np.ndarray:
            return self._array(value, key)
        if type(value) in (bytes, bytearray):
            # a copy: while the memory of a bytearray is looked at, nobody can change its length
            raw = np.frombuffer(bytes(value), np.uint8)
            self.leaves.append(Leaf(key, "uint8", raw.shape, raw))
            return {"blob": [type(value).__name__, len(value)]}
        if isinstance(value, np.ndarray):
            raise unsupported(value, key, "a subclass of ndarray; numpy.asarray() makes it plain")
        return self._object(value, key, depth)

    def _object(self, value: Any, key: str, depth: int) -> Any:
        if id(value) in self.inside:
            raise unsupported(value, key, "its state contains itself")
        self.inside.append(id(value))
        try:
            if live.is_module(value):
                return nodes.encode(live.module_state(value, key), key, self.take, depth)
            if live.is_optimizer(value):
                state = live.optimizer_state(value, self.names, key)
                return nodes.encode(state, key, self.take, depth)
            if live.is_stateful(value) and not isinstance(value, type):
                return nodes.encode(value.state_dict(), key, self.take, depth)
        finally:
            self.inside.pop()
        raise unsupported(value, key, "neither a tensor, an array nor a plain value")

    def _tensor(self, t: Any, key: str) -> Any:
        torch = self.torch
        if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
            raise unsupported(t, key, "a subclass of Tensor whose inner parts are not known")
        if t.layout is not torch.strided or t.is_nested or t.is_quantized or t.is_meta:
            return self._special(t, key)
        name = dtype_name(t.dtype)
        if name is None:
            raise unsupported(t, key, f"the dtype {t.dtype} has no bytes that can be written")
        if t.requires_grad:
            t = t.detach()
        if t.is_conj() or t.is_neg():
            t = t.resolve_conj().resolve_neg()
        shape = tuple(t.shape)
        if not nodes.shape_fits(name, shape):
            raise unsupported(t, key, f"{len(shape)} dimensions of {shape[:8]} are too many")
        if t.numel():
            place = (t.data_ptr(), name, shape, t.stride())
            if not place[0]:
                raise unsupported(t, key, "its memory has been freed")
            first = self.seen.setdefault(place, key)
            if first != key:
                return {"tied": first}
        self.leaves.append(Leaf(key, name, shape, t))
        return {"tensor": [name, list(shape)]}

    def _special(self, t: Any, key: str) -> Any:
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
        taken = {name: self._tensor(part, join(key, name)) for name, part in parts.items()}
        return {
            "sparse": {
                "layout": str(t.layout).removeprefix("torch."),
                "shape": list(t.shape),
                "coalesced": t.layout is torch.sparse_coo and t.is_coalesced(),
                "parts": taken,
            }
        }

    def _array(self, a: np.ndarray[Any, Any], key: str) -> Any:
        name, rows = a.dtype.name, (*a.shape, a.dtype.itemsize)
        plain = name in DTYPES and a.dtype.isnative and not a.dtype.metadata
        if not nodes.shape_fits("uint8", rows):
            raise unsupported(a, key, f"{a.ndim} dimensions of {a.shape[:8]} are too many")
        if plain:
            self.leaves.append(Leaf(key, name, a.shape, a))
            return {"array": [name, list(a.shape)]}
        try:
            descr = nodes.to_descr(a.dtype)
        except ValueError as e:
            raise unsupported(a, key, str(e)) from e
        flat = np.ascontiguousarray(a).reshape(a.shape)
        raw = flat.reshape(-1).view(np.uint8).reshape(rows) if a.nbytes else np.empty(rows, "u1")
        self.leaves.append(Leaf(key, "uint8", rows, raw))
        return {"array": ["uint8", list(rows), descr]}


_dtype_names: dict[Any, str | None] = {}


def dtype_name(dtype: Any) -> str | None:
    """The name of a torch dtype if its elements are bytes that can be written."""
    if dtype not in _dtype_names:
        name = str(dtype).removeprefix("torch.")
        _dtype_names[dtype] = name if name in DTYPES else None
    return _dtype_names[dtype]
