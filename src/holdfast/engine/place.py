"""Where loaded bytes go: into live objects in place, or into fresh tensors for the caller.

Binding compares a snapshot's tree with the live state, collects every difference, and decides
for each leaf its target. Nothing of the live state is touched before all differences are known;
``settle`` sets values and calls ``load_state_dict`` once the bytes are in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast.engine import live
from holdfast.engine.cover import Want
from holdfast.engine.read import Target
from holdfast.engine.select import ABSENT, Selected
from holdfast.engine.snapshot import Snapshot, allocate
from holdfast.engine.tree import dtype_name
from holdfast.errors import (
    DTypeMismatch,
    MissingLeaf,
    PlanError,
    ShapeMismatch,
    UnexpectedLeaf,
)
from holdfast.format import tree
from holdfast.format.names import MANIFEST, escape, join
from holdfast.words import Box

Settle = Callable[[], Any]

_LEAF_TAGS = frozenset(tree.LEAVES)
_BYTES_TAGS = frozenset({*tree.LEAVES, "tied"})


@dataclass(slots=True)
class Room:
    """All targets of one load. Leaves that have no live place get fresh memory here."""

    snapshot: Snapshot
    device: Any = None
    wants: list[Want] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    fresh: dict[str, Any] = field(default_factory=dict)

    def leaf(self, node: Any, key: str) -> tuple[str, Any]:
        """The key under which a leaf's bytes are stored, and the node that says what it is."""
        source = node.get("tied", key)
        if not _LEAF_TAGS.isdisjoint(node):
            return source, node
        return source, self.snapshot.nodes()[source]

    def add(self, source: str, into: Any) -> None:
        """Have the whole leaf read into ``into``."""
        dtype, shape = self.snapshot.leaves[source]
        if 0 not in shape:
            self.wants.append(Want(source, Box((0,) * len(shape), shape)))
            self.targets.append(Target.of(dtype, shape, into))

    def make(self, node: Any, key: str, device: Any = None) -> Settle:
        """Fresh memory for all leaves of a node; the result gives the node's value, later."""
        for k, n in tree.walk(node, key):
            if type(n) is dict and not _BYTES_TAGS.isdisjoint(n):
                source, leaf = self.leaf(n, k)
                if source not in self.fresh:
                    dtype, shape = self.snapshot.leaves[source]
                    at = self.device if device is None else device
                    self.fresh[source] = allocate(leaf, k, dtype, shape, at)
                    self.add(source, self.fresh[source])
        return lambda: tree.decode(node, key, self.value)

    def value(self, node: Any, key: str) -> Any:
        """For ``tree.decode``: the value of a leaf whose bytes are in."""
        if "sparse" in node:
            file = self.snapshot.place.key(MANIFEST)
            return _sparse(node["sparse"], key, self.value, file)
        source, leaf = self.leaf(node, key)
        made = self.fresh[source]
        if "blob" in leaf:
            return {"bytes": bytes, "bytearray": bytearray}[leaf["blob"][0]](made.data)
        if "array" in leaf and len(leaf["array"]) == 3:
            dtype = tree.from_descr(leaf["array"][2])
            return np.ndarray(made.shape[:-1], dtype, made.data if made.size else b"")
        return made


def _sparse(body: Any, key: str, value: Callable[[Any, str], Any], file: str) -> Any:
    import torch

    parts = {n: value(p, join(key, n)) for n, p in body["parts"].items()}
    shape = tuple(body["shape"])
    try:
        if body["layout"] == "sparse_coo":
            made = torch.sparse_coo_tensor(
                parts["indices"], parts["values"], shape, check_invariants=True
            )
            return made._coalesced_(body["coalesced"])
        compressed, plain = ("crow", "col") if "crow" in parts else ("ccol", "row")
        return torch.sparse_compressed_tensor(
            parts[compressed],
            parts[plain],
            parts["values"],
            shape,
            layout=getattr(torch, body["layout"]),
            check_invariants=True,
        )
    except (RuntimeError, TypeError, ValueError) as e:
        raise tree.no_node({"sparse": body}, key, file) from e


@dataclass(slots=True)
class Differences:
    """How a snapshot differs from the live state that it is to be loaded into."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)

    def raise_any(self, url: str) -> None:
        """Raise one error that lists all differences, of the narrowest class that fits them."""
        kinds: list[tuple[type[PlanError], str, list[str]]] = [
            (MissingLeaf, "missing in the snapshot", self.missing),
            (UnexpectedLeaf, "unexpected in the snapshot", self.unexpected),
            (ShapeMismatch, "of another shape", self.shapes),
            (DTypeMismatch, "of another dtype or kind", self.dtypes),
        ]
        found = [(kind, said, several) for kind, said, several in kinds if several]
        if not found:
            return
        kind = found[0][0] if len(found) == 1 else PlanError
        lines = [
            f"{len(several)} {said}: {', '.join(several[:20])}"
            + (f" and {len(several) - 20} more" if len(several) > 20 else "")
            for _, said, several in found
        ]
        raise kind(
            f"The snapshot {url} does not fit the live state; nothing was changed. "
            + ". ".join(lines),
            todo="Load into the same state as was saved, or ask for leniency by name:"
            ' missing="keep", unexpected="ignore", cast=True, rename={...}, keys="..."',
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
        )


@dataclass(slots=True)
class Binder:
    """Binds a live state to the nodes of a snapshot's tree.

    Every ``bind`` returns a function that gives the value which then belongs in the live
    state's place: the live object itself wherever it could be filled in place.
    """

    room: Room
    selected: Selected
    names: dict[int, str]
    cast: bool = False
    differences: Differences = field(default_factory=Differences)
    bound: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def bind(self, value: Any, node: Any, key: str) -> Settle:
        torch = live.torch_or_none()
        # tensors first: there are many of them, and asking them for attributes is slow
        if torch is not None and isinstance(value, torch.Tensor):
            return self._place(self._tensor, value, node, key)
        if isinstance(value, np.ndarray):
            return self._place(self._array, value, node, key)
        if isinstance(value, dict):
            return self._dict(value, node, key)
        if type(value) in (list, tuple):
            return self._sequence(value, node, key)
        if live.is_module(value):
            return self._module(value, node, key)
        if live.is_optimizer(value):
            from holdfast.engine.optimizer import bind_optimizer

            return bind_optimizer(self, value, node, key)
        if live.is_stateful(value):
            return self._stateful(value, node, key)
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
        if value is not None and _is_leaf(node) and "blob" not in node:
            self._other_kind(type(value).__name__, node, key)
            return lambda: value
        return self.room.make(node, key)

    # -- containers ----------------------------------------------------------------------------

    def _dict(self, value: Any, node: Any, key: str) -> Settle:
        members = self._members(value, node, key)
        if members is None:
            return lambda: value
        names = list(value)
        settles = {
            name: self.bind(value[name], members.pop(name, ABSENT), k)
            for name, k in zip(names, tree.child_keys(names, key), strict=True)
        }
        extra = self.unexpected(members, key)

        def settle() -> Any:
            for name, s in settles.items():
                value[name] = s()
            for name, s in extra.items():
                value[name] = s()
            return value

        return settle

    def unexpected(self, members: dict[Any, Any], key: str) -> dict[Any, Settle]:
        """Note members of the snapshot that the live dict lacks."""
        for name, child in members.items():
            for k, _ in tree.walk(child, join(key, escape(str(name)))):
                if self.selected(k):
                    self.differences.unexpected.append(k)
        return {}

    def _members(self, value: Any, node: Any, key: str) -> dict[Any, Any] | None:
        """The members of a dict's node by name; None (and a difference) if it is no dict."""
        if node is ABSENT:
            return {}
        tag = next(iter(node), None) if type(node) is dict else None
        if tag not in ("dict", "ordered", "items"):
            if self.selected(key):
                self._other_kind(type(value).__name__, node, key)
            return None
        return {name: child for name, child, _ in tree.children(node, key)}

    def _sequence(self, value: Any, node: Any, key: str) -> Settle:
        tag = next(iter(node), None) if type(node) is dict else None
        nodes = node[tag] if tag in ("list", "tuple") else None
        if nodes is None and node is not ABSENT:
            if self.selected(key):
                self._other_kind(type(value).__name__, node, key)
            return lambda: value
        if nodes is not None and len(nodes) != len(value) and not any(map(_has_place, value)):
            return self.room.make(node, key)
        settles = [
            self.bind(v, nodes[i] if nodes and i < len(nodes) else ABSENT, join(key, str(i)))
            for i, v in enumerate(value)
        ]
        for i in range(len(value), len(nodes or ())):
            self.unexpected({i: (nodes or ())[i]}, key)

        def settle() -> Any:
            made = [s() for s in settles]
            if type(value) is list:
                value[:] = made
                return value
            return tuple(made)

        return settle

    # -- leaves --------------------------------------------------------------------------------

    def _tensor(self, value: Any, node: Any, key: str) -> Settle:
        if type(node) is dict and "sparse" in node:
            return self.room.make(node, key, value.device)
        source = self._source(node, key, "tensor")
        if source is None:
            self._other_kind("tensor", node, key)
        elif self.fits(value.shape, dtype_name(value.dtype), source, key):
            self.into_tensor(value, source, key)
        return lambda: value

    def _source(self, node: Any, key: str, tag: str) -> str | None:
        """The key under which the leaf's bytes are stored; None if it is no leaf of that kind."""
        if not _is_leaf(node):
            return None
        source, leaf = self.room.leaf(node, key)
        return source if tag in leaf else None

    def into_tensor(self, value: Any, source: str, key: str) -> None:
        """Have a live tensor of the right shape filled in place."""
        if value.requires_grad:
            value = value.detach()
        stride = () if value.is_contiguous() else value.stride()
        if 0 in stride and any(n > 1 and s == 0 for n, s in zip(value.shape, stride, strict=True)):
            raise PlanError(
                f"The live tensor {key!r} is expanded: many of its elements share one place",
                todo="Give the live state a tensor with memory of its own: tensor.contiguous()",
                leaf=key,
            )
        if pointer := value.data_ptr():
            first = self.bound.setdefault((pointer, value.shape, stride), source)
            if first != source:
                raise PlanError(
                    f"The live tensor {key!r} is tied to another, but the snapshot holds two",
                    expected=f"one leaf for both, {first}",
                    found=f"{first} and {source}",
                    todo="Untie them in the live state, or leave one out with keys=",
                    leaf=key,
                )
        self.room.add(source, value)

    def _array(self, value: np.ndarray[Any, Any], node: Any, key: str) -> Settle:
        source = self._source(node, key, "array")
        if source is None:
            self._other_kind("array", node, key)
            return lambda: value
        leaf = self.room.leaf(node, key)[1]
        plain = len(leaf["array"]) == 2 and type(value) is np.ndarray and value.flags.writeable
        if not plain:
            return self.room.make(node, key)
        if self.fits(value.shape, value.dtype.name, source, key):
            self.room.add(source, value)
        return lambda: value

    def fits(self, shape: tuple[int, ...], dtype: str | None, source: str, key: str) -> bool:
        """Whether a leaf's shape and dtype are those of the live place; notes what differs."""
        stored, stored_shape = self.room.snapshot.leaves[source]
        if shape == stored_shape and (dtype == stored or self.cast):
            return True
        if shape != stored_shape:
            told = f"{key} {list(stored_shape)}, live {list(shape)}"
            self.differences.shapes.append(told)
        else:
            self.differences.dtypes.append(f"{key} {stored}, live {dtype}")
        return False

    def _other_kind(self, expected: str, node: Any, key: str) -> None:
        tag = next(iter(node), "nothing") if type(node) is dict else type(node).__name__
        self.differences.dtypes.append(f"{key} {tag}, live {expected}")

    # -- objects -------------------------------------------------------------------------------

    def _stateful(self, value: Any, node: Any, key: str) -> Settle:
        if node is ABSENT:
            if self.selected(key):
                self.differences.missing.append(key)
            return lambda: value
        if not any(self.selected(k) for k, _ in tree.walk(node, key)):
            return lambda: value
        made = self.room.make(node, key, "cpu")

        def settle() -> Any:
            value.load_state_dict(made())
            return value

        return settle

    def _module(self, module: Any, node: Any, key: str) -> Settle:
        members = self._members(module, node, key)
        if members is None:
            return lambda: module
        state = module.state_dict()
        own = {t.data_ptr() for t in _own_tensors(module)}
        given: dict[str, Settle] = {}
        for raw, plain in zip(state, live.plain_names(module, list(state), key), strict=True):
            value, k = state[raw], join(key, escape(plain))
            child = members.pop(plain, ABSENT)
            if not self.selected(k):
                continue
            if child is ABSENT:
                self.differences.missing.append(k)
            elif _in_place(value, own):
                self._tensor(value, child, k)
            else:
                given[raw] = self.room.make(child, k)
        self.unexpected(members, key)

        def settle() -> Any:
            if given or _has_hooks(module):
                # what is not a parameter's or buffer's own memory goes through the module's code
                state.update({raw: make() for raw, make in given.items()})
                module.load_state_dict(state)
            return module

        return settle


def _own_tensors(module: Any) -> list[Any]:
    import torch

    several = [*module.parameters(), *module.buffers()]
    return [t for t in several if not torch.nn.parameter.is_lazy(t)]


def _in_place(value: Any, own: set[int]) -> bool:
    """Whether writing into this member of a module's state dict changes the module."""
    import torch

    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return False
    return value.numel() == 0 or value.data_ptr() in own


def _has_hooks(module: Any) -> bool:
    return any(
        m._load_state_dict_pre_hooks or m._load_state_dict_post_hooks for m in module.modules()
    )


def _is_leaf(node: Any) -> bool:
    return type(node) is dict and not _BYTES_TAGS.isdisjoint(node)


def _has_place(value: Any) -> bool:
    """Whether a live value is filled in place rather than replaced."""
    torch = live.torch_or_none()
    if torch is not None and isinstance(value, torch.Tensor):
        return True
    return isinstance(value, np.ndarray | dict | list | tuple) or live.is_stateful(value)
