"""Where loaded bytes go: into live objects in place, or into fresh tensors for the caller.

Binding compares a snapshot's tree with the live state, collects every difference, and decides
for each leaf its target. Nothing of the live state is touched before all differences are known;
``settle`` sets values and calls ``load_state_dict`` once the bytes are in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from holdfast import lazy_torch
from holdfast.engine.loading.bind_module import bind_module
from holdfast.engine.loading.bind_optimizer import bind_optimizer
from holdfast.engine.loading.bind_ranks import bind_inside, bind_per_rank
from holdfast.engine.loading.differences import Differences
from holdfast.engine.loading.targets import BYTES, Room, Settle
from holdfast.engine.planning.select import ABSENT, Selected
from holdfast.engine.state import modules, optimizers, sharding
from holdfast.engine.state.replication import Replicated, keeps_per_rank
from holdfast.engine.state.sharding import Boxed
from holdfast.errors import PlanError
from holdfast.format import tree
from holdfast.format.names import join
from holdfast.lazy_torch import dtype_name
from holdfast.types import Box

_NO_VALUES = frozenset(
    {"tensor", "array", "tied", "sparse", "dict", "ordered", "items", "list", "tuple"}
)


@dataclass(frozen=True, slots=True)
class Leniency:
    """What a load may overlook; nothing, unless it is asked for by name."""

    missing: Literal["error", "keep"] = "error"
    unexpected: Literal["error", "ignore"] = "error"
    cast: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.missing not in ("error", "keep") or self.unexpected not in ("error", "ignore"):
            raise PlanError(
                "This leniency is not known",
                expected='missing="error" or "keep", unexpected="error" or "ignore"',
                found=f"missing={self.missing!r}, unexpected={self.unexpected!r}",
            )


STRICT = Leniency()
"""Nothing is overlooked."""


@dataclass(slots=True)
class Binder:
    """Binds a live state to the nodes of a snapshot's tree.

    Every ``bind`` returns a function that gives the value which then belongs in the live
    state's place: the live object itself wherever it could be filled in place.
    """

    room: Room
    selected: Selected
    names: dict[int, str]
    rank: int = 0
    cast: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    differences: Differences = field(default_factory=Differences)
    bound: dict[tuple[Any, ...], str] = field(default_factory=dict)
    torch: Any = field(default_factory=lazy_torch.torch_or_none)
    inside: bool = False

    def bind(self, value: Any, node: Any, key: str) -> Settle:
        torch = self.torch
        # tensors first: there are many of them, and asking them for attributes is slow
        if torch is not None and isinstance(value, torch.Tensor):
            return self._place(self._tensor, value, node, key)
        if isinstance(value, np.ndarray):
            return self._place(self._array, value, node, key)
        if isinstance(value, dict) and (type(value) is dict or not modules.is_stateful(value)):
            return self._dict(value, node, key)
        if type(value) in (list, tuple):
            return self._sequence(value, node, key)
        if isinstance(value, Boxed):
            return self._place(self._boxed, value, node, key)
        if isinstance(value, Replicated):
            return bind_inside(self, value, node, key)
        if keeps_per_rank(value) and not self.inside:
            return bind_per_rank(self, value, node, key)
        if modules.is_module(value):
            return bind_module(self, value, node, key)
        if optimizers.is_optimizer(value):
            return bind_optimizer(self, value, node, key)
        if modules.is_stateful(value):
            return self.bind_stateful(value, node, key)
        return self._place(self._value, value, node, key)

    def _place(
        self, bind: Callable[[Any, Any, str], Settle], value: Any, node: Any, key: str
    ) -> Settle:
        """Bind one leaf or plain value, if it is selected and there."""
        if node is not ABSENT and self.selected(key):
            return bind(value, node, key)
        if node is ABSENT and self.selected(key):
            self.differences.missing.append(key)
        return lambda: value

    def _value(self, value: Any, node: Any, key: str) -> Settle:
        """A plain value is replaced by another one; None, where there is nothing yet, by all."""
        if value is not None and type(node) is dict and next(iter(node)) in _NO_VALUES:
            self.other_kind(type(value).__name__, node, key)
            return lambda: value
        return self.room.make(node, key)

    # -- containers ----------------------------------------------------------------------------

    def _dict(self, value: Any, node: Any, key: str) -> Settle:
        members = self.members(value, node, key)
        if members is None:
            return lambda: value
        settles = {}
        for name, own in zip(value, tree.child_keys(list(value), key), strict=True):
            # the snapshot's own key: where two names are equal as text, it tells which is which
            child, k = members.pop(name, (ABSENT, own))
            settles[name] = self.bind(value[name], child, k)
        self.unexpected(members)

        def settle() -> Any:
            for name, s in settles.items():
                value[name] = s()
            return value

        return settle

    def unexpected(self, members: dict[Any, tuple[Any, str]]) -> None:
        """Note members of the snapshot that the live state lacks."""
        for child, key in members.values():
            self.differences.unexpected += [k for k, _ in tree.walk(child, key) if self.selected(k)]

    def members(self, value: Any, node: Any, key: str) -> dict[Any, tuple[Any, str]] | None:
        """The members of a dict's node by name, each with its key; None (and a difference) if it
        is no dict."""
        if node is ABSENT:
            return {}
        tag = next(iter(node), None) if type(node) is dict else None
        if tag not in ("dict", "ordered", "items"):
            if self.selected(key):
                self.other_kind(type(value).__name__, node, key)
            return None
        return {name: (child, k) for name, child, k in tree.children(node, key)}

    def _sequence(self, value: Any, node: Any, key: str) -> Settle:
        tag = next(iter(node), None) if type(node) is dict else None
        nodes = node[tag] if tag in ("list", "tuple") else None
        if nodes is None and node is not ABSENT:
            if self.selected(key):
                self.other_kind(type(value).__name__, node, key)
            return lambda: value
        if nodes is not None and len(nodes) != len(value) and not any(map(_has_place, value)):
            return self._other_length(value, node, key)
        settles = [
            self.bind(v, nodes[i] if nodes and i < len(nodes) else ABSENT, join(key, str(i)))
            for i, v in enumerate(value)
        ]
        more = (nodes or ())[len(value) :]
        self.unexpected({i: (n, join(key, str(i))) for i, n in enumerate(more, len(value))})

        def settle() -> Any:
            made = [s() for s in settles]
            if type(value) is list:
                value[:] = made
                return value
            return tuple(made)

        return settle

    def _other_length(self, value: Any, node: Any, key: str) -> Settle:
        """A list of plain values (a history, say) takes the length that it was saved with."""
        if not self.wanted(node, key):
            return lambda: value
        make = self.room.make(node, key)

        def settle() -> Any:
            if type(value) is list:
                value[:] = make()
                return value
            return make()

        return settle

    def wanted(self, node: Any, key: str) -> bool:
        """Whether something of a node is selected."""
        return self.selected(key) or any(self.selected(k) for k, _ in tree.walk(node, key))

    # -- leaves --------------------------------------------------------------------------------

    def _tensor(self, value: Any, node: Any, key: str) -> Settle:
        if type(node) is dict and "sparse" in node:
            return self._sparse(value, node, key)
        source = self.tensor_source(value, node, key)
        if source is not None:
            self.into_tensor(value, source, key)
        return lambda: value

    def tensor_source(self, value: Any, node: Any, key: str) -> str | None:
        """The key of the bytes for a live tensor; None (and a difference) if they do not fit."""
        source = self._source(node, key, "tensor")
        if source is None or value.layout is not self.torch.strided:
            self.other_kind(str(value.layout).replace("torch.", "tensor "), node, key)
            return None
        return source if self.fits(value, source, key) else None

    def _boxed(self, value: Boxed, node: Any, key: str) -> Settle:
        local = value.tensor
        array = isinstance(local, np.ndarray)
        source = self._source(node, key, "array" if array else "tensor")
        if source is None:
            self.other_kind("array" if array else "tensor", node, key)
        elif self.fits(local, source, key, value.shape):
            self.into_tensor(value, source, key)
        return lambda: value

    def _sparse(self, value: Any, node: Any, key: str) -> Settle:
        """A sparse tensor is replaced: the number of its elements is its own."""
        body = node["sparse"]
        shape, layout = list(value.shape), str(value.layout).removeprefix("torch.")
        source = self.room.leaf(body["parts"]["values"], join(key, "values"))[0]
        stored, live_dtype = self.room.snapshot.leaves[source][0], dtype_name(value.dtype)
        if layout != body["layout"]:
            self.other_kind(f"tensor {layout}", node, key)
        elif shape != body["shape"]:
            self.differences.shapes[key] = f"{body['shape']}, live {shape}"
        elif stored != live_dtype:
            self.differences.dtypes[key] = f"{stored}, live {live_dtype}"
        return self.room.make(node, key, value.device)

    def _source(self, node: Any, key: str, tag: str) -> str | None:
        """The key under which the leaf's bytes are stored; None if it is no leaf of that kind."""
        if not _is_leaf(node):
            return None
        source, leaf = self.room.leaf(node, key)
        return source if tag in leaf else None

    def into_tensor(self, value: Any, source: str, key: str) -> None:
        """Have a live tensor of the right shape filled in place; of one that is spread over ranks
        what this rank has."""
        parts = sharding.parts(value, key)
        if parts is None:
            self._fill(value.detach() if value.requires_grad else value, source, key)
        else:
            for box, part in parts.pieces:
                if isinstance(part, np.ndarray):
                    self.room.add(source, part, box)
                else:
                    self._fill(part, source, key, box)

    def _fill(self, value: Any, source: str, key: str, box: Box | None = None) -> None:
        stride = () if value.is_contiguous() else value.stride()
        if 0 in stride and any(n > 1 and s == 0 for n, s in zip(value.shape, stride, strict=True)):
            raise PlanError(
                f"The live tensor {key!r} is expanded: many of its elements share one place",
                todo="Give the live state a tensor with memory of its own: tensor.contiguous()",
                leaf=key,
            )
        if pointer := value.data_ptr():
            first = self.bound.setdefault((pointer, value.shape, stride, value.dtype), source)
            if first != source:
                raise PlanError(
                    f"The live tensor {key!r} is tied to another, but the snapshot holds two",
                    expected=f"one leaf for both, {first}",
                    found=f"{first} and {source}",
                    todo="Untie them in the live state, or leave one out with keys=",
                    leaf=key,
                )
        elif value.numel():
            raise PlanError(
                f"The live tensor {key!r} has no memory that could be filled",
                found=f"a tensor on {value.device} whose memory was freed or never made",
                todo="A module on the meta device gets memory by module.to_empty(device=...)",
                leaf=key,
            )
        self.room.add(source, value, box)

    def _array(self, value: np.ndarray[Any, Any], node: Any, key: str) -> Settle:
        source = self._source(node, key, "array")
        if source is None:
            self.other_kind("array", node, key)
            return lambda: value
        name, shape, *descr = self.room.leaf(node, key)[1]["array"]
        dtype = tree.from_descr(descr[0]) if descr else np.dtype(name)
        shape = shape[:-1] if descr else shape
        if list(value.shape) != shape:
            self.differences.shapes[key] = f"{shape}, live {list(value.shape)}"
        elif value.dtype != dtype and not (self.cast and _numbers_fit(dtype, value.dtype)):
            self.differences.dtypes[key] = f"{dtype}, live {value.dtype}"
        elif value.flags.writeable and not descr:
            self.room.add(source, value)
        else:
            make = self.room.make(node, key)
            return lambda: _assigned(value, make())
        return lambda: value

    def fits(self, value: Any, source: str, key: str, whole: tuple[int, ...] | None = None) -> bool:
        """Whether a leaf's shape and dtype are those of a live tensor (of the global one, of which
        ``whole`` is the shape); notes what differs."""
        stored, shape = self.room.snapshot.leaves[source]
        own = value.shape if whole is None else whole
        if own != shape:
            self.differences.shapes[key] = f"{list(shape)}, live {list(own)}"
            return False
        array = isinstance(value, np.ndarray)
        name = value.dtype.name if array else dtype_name(value.dtype)
        if name == stored or (self.cast and not array and _can_cast(stored, value.dtype)):
            return True
        self.differences.dtypes[key] = f"{stored}, live {name or value.dtype}"
        return False

    def other_kind(self, expected: str, node: Any, key: str) -> None:
        tag = next(iter(node), "nothing") if type(node) is dict else type(node).__name__
        self.differences.kinds[key] = f"{tag}, live {expected}"

    # -- objects -------------------------------------------------------------------------------

    def bind_stateful(self, value: Any, node: Any, key: str) -> Settle:
        """An object takes its state when the bytes are in. One that has ``check_state_dict`` is
        given it now already, to refuse while nothing is changed, if it is of plain values."""
        if node is ABSENT:
            if self.selected(key):
                self.differences.missing.append(key)
            return lambda: value
        if not self.wanted(node, key):
            return lambda: value
        made = self.room.make(node, key, "cpu")
        check = getattr(value, "check_state_dict", None)
        if check is not None and not any(_is_leaf(n) for _, n in tree.walk(node, key)):
            check(made())

        def settle() -> Any:
            value.load_state_dict(made())
            return value

        return settle


def _can_cast(stored: str, dtype: Any) -> bool:
    """Whether elements become others of the same kind: no imaginary part is thrown away, no
    fraction, and what is packed is not unpacked."""
    import torch

    packed = "float4_e2m1fn_x2"
    fits: bool = torch.can_cast(getattr(torch, stored), dtype)
    return fits and packed not in (stored, dtype_name(dtype))


def _numbers_fit(stored: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """As ``_can_cast``, for arrays."""
    return {stored.kind, dtype.kind} <= set("biufc") and np.can_cast(stored, dtype, "same_kind")


def _assigned(value: np.ndarray[Any, Any], made: Any) -> Any:
    """The live array with new elements; the new one where the live one may not be written."""
    if not value.flags.writeable:
        return made
    value[...] = made
    return value


def _is_leaf(node: Any) -> bool:
    return type(node) is dict and not BYTES.isdisjoint(node)


def _has_place(value: Any) -> bool:
    """Whether a live value is filled in place rather than replaced."""
    torch = lazy_torch.torch_or_none()
    if torch is not None and isinstance(value, torch.Tensor):
        return True
    return isinstance(value, np.ndarray | dict | list | tuple) or modules.is_stateful(value)
