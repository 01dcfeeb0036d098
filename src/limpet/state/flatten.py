"""Flattens a state into a tree and leaves: plain values for the manifest, leaves for the shards.

Tensors are not copied, except views without bytes of their own, such as a conjugate.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from limpet.errors import LimpetError, Unsupported
from limpet.format import torch_types
from limpet.format import tree as nodes
from limpet.format.names import escape_level, join_key, to_dotted
from limpet.format.rejected import NOT_PLAIN, nested_too_deeply, rejections_within, unsupported
from limpet.state import modules, optimizers
from limpet.state.arrays import (
    LIBRARIES,
    ArrayLibrary,
    LocalBoxes,
    leaf_node,
    library_of,
    part_library,
)
from limpet.state.replication import (
    PerRank,
    Replicated,
    Replication,
    find_ddp_replication,
    keeps_per_rank,
)
from limpet.state.streamed import Streamed
from limpet.state.walk import as_dict, map_containers, storage_address, to_local
from limpet.text import with_article
from limpet.threads import gc_paused
from limpet.types import Box

for _package, _library in LIBRARIES.items():
    if sys.modules.get(_package) is not None:  # None blocks the import
        import_module(_library)  # now, because a step must not import anything

_UNVERIFIED = Replication.UNVERIFIED  # faster to look up


# One is created for every leaf, and creating a frozen dataclass takes eight times as long.
class LocalLeaf(msgspec.Struct, frozen=True, gc=False):
    """A box of a leaf that is about to be saved. ``source``: the part of an array (``arrays``) with
    its elements; those of an array whose dtype has no name are rows of uint8."""

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
    names: ParameterNames = field(default_factory=lambda: ParameterNames({}))
    states: dict[tuple[int, str], Any] = field(default_factory=dict)
    """What ``state_dict()`` of each object has returned, by ``id`` and key."""
    streamed: tuple[str, ...] = ()  # how the keys in the streamed members begin

    def devices(self) -> dict[str, Any]:
        """Return the devices of the tensors by key; only one tensor if all are on one device; none
        if a tensor is in a file of another library."""
        classes = {*map(type, map(attrgetter("source"), self.leaves))}
        known = {c: part_library(c).has_device for c in classes if not getattr(c, "is_held", False)}
        if None in known.values() or True not in known.values():
            return {}
        devices = {s.key: s.source.device for s in self.leaves if known.get(type(s.source))}
        return devices if len({*devices.values()}) > 1 else dict([devices.popitem()])


class ParameterNames:
    """The qualified names (``model.layers.0.weight``) of the parameters in a state."""

    def __init__(self, state: Any) -> None:
        self._state = as_dict(state)

    def name_of(self, parameter: Any) -> str | None:
        """Return a parameter's name: that of a tensor of the state in its memory if no module has
        it, as in a dict of tensors or in the ``state_dict()`` of an object."""
        found = self._name_by_id.get(id(parameter))
        return found or self._name_by_memory.get(_memory_of(parameter))

    @cached_property
    def _name_by_id(self) -> dict[int, str]:
        return modules.parameter_names(self._state)

    @cached_property
    def _name_by_memory(self) -> dict[Any, str]:
        with suppress(LimpetError):  # a save raises it
            leaves = flatten(map_containers(self._state, _leave_out, {})).leaves
            tensors = [leaf for leaf in leaves if hasattr(leaf.source, "untyped_storage")]
            return {_memory_of(t.source): to_dotted(t.key) for t in reversed(tensors)}
        return {}


def _leave_out(value: Any, depth: int) -> Any:
    """Leave out optimizers, which need the names, and loaders, whose state may begin a pass."""
    if isinstance(value, PerRank | Replicated):
        return type(value)(map_containers(value.value, _leave_out, {}))
    is_loader = hasattr(value, "state_dict") and hasattr(value, "__iter__")
    return None if is_loader or optimizers.has_groups(value) else value


def _memory_of(t: Any) -> Any:
    local, address = to_local(t), storage_address(t)
    return (address, local.storage_offset(), local.shape, local.dtype) if address else id(t)


@gc_paused
def flatten(state: Mapping[str, Any], rank: int = 0) -> FlatState:
    """Flatten a state, as the rank ``rank`` of the save. Raises ``Unsupported``, which names all
    values that cannot be saved faithfully."""
    state = as_dict(state)
    if type(state) is not dict:
        expected = 'a dict, such as {"model": model, "optimizer": optimizer}'
        found = with_article(type(state).__name__)
        raise Unsupported(f"The state must be {expected}, not {found}")
    names = ParameterNames(state)
    flattener = _Flattener(rank, FlatState(names=names), find_ddp_replication(state))
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

    rank: int
    flat: FlatState
    replication_by_address: dict[int, Replication] = field(default_factory=dict)
    forced_replication: Replication | None = None
    inside_object: bool = False  # with its own state_dict()
    key_by_memory: dict[tuple[Any, ...], str] = field(default_factory=dict)
    enclosing_ids: list[int] = field(default_factory=list)
    first_leaves: dict[Any, int] = field(default_factory=dict)
    """By the tie key of an array in one piece: the number of the first leaf that has it."""

    def encode_value(self, value: Any, key: str, depth: int) -> Any:
        """Encode a value. This is called for every leaf of a model: keep it short."""
        library = library_of(type(value))
        if library is None:
            return self._encode_object(value, key, depth)
        boxes = library.boxes_to_save(value, key)
        if boxes is None:
            return self._encode_composite(library, value, key)
        shape, dtype, node, tie_key = boxes.shape, boxes.dtype, boxes.node, boxes.tie_key
        if node is None:
            node = leaf_node(value, boxes, key)
        leaves, replication = self.flat.leaves, self.forced_replication
        if boxes.is_declared:
            replication = replication or Replication.REPLICATED
            tied = self.key_by_memory.setdefault((tie_key, dtype, shape), key) if tie_key else key
        else:
            tied = key
            if tie_key:
                first = self.first_leaves.setdefault(tie_key, len(leaves))
                if first != len(leaves):
                    tied = self._find_tied(leaves[first], boxes, key)
                if self.replication_by_address and not replication:
                    replication = self.replication_by_address.get(tie_key)
        if tied != key:
            return {"tied": tied}
        for box, part in boxes.box_tensors:
            leaves.append(LocalLeaf(key, dtype, shape, part, box, replication or _UNVERIFIED))
        return node

    def _encode_rank_dependent(self, value: Any, key: str, depth: int) -> Any:
        """Encode a per-rank or replicated value, whose node is stored outside of the tree."""
        if self.forced_replication is not None:
            raise unsupported(
                value, key, "a PerRank or Replicated value cannot contain a Replicated value"
            )
        first = isinstance(value, Replicated)
        self.forced_replication = Replication.FROM_FIRST if first else Replication.REPLICATED
        own_key = key if first else join_key(key, str(self.rank))
        inner = value.value if isinstance(value, PerRank | Replicated) else value
        try:
            node = nodes.encode(inner, own_key, self.encode_value, depth + 1)
        finally:
            self.forced_replication = None
        (self.flat.from_first if first else self.flat.per_rank)[key] = node
        return {"first" if first else "own": key}

    def _encode_object(self, value: Any, key: str, depth: int) -> Any:
        if type(value) in (bytes, bytearray):
            # a copy, because a bytearray cannot be resized while a view of its memory exists
            self.encode_value(np.frombuffer(bytes(value), np.uint8), key, depth)
            return {"blob": [type(value).__name__, len(value)]}
        if (node := torch_types.encode(value)) is not None:
            return node
        is_stateful = modules.is_stateful(value) and not isinstance(value, type)
        if self.enclosing_ids and (is_stateful or isinstance(value, PerRank | Replicated)):
            why = "it is an object in the state of another one, which would get a dict instead"
            advice = "Return its state_dict() there, and pass that to its load_state_dict()"
            raise unsupported(value, key, why, advice)
        if isinstance(value, Replicated) or (
            keeps_per_rank(value) and self.forced_replication is None
        ):
            return self._encode_rank_dependent(value, key, depth)
        is_streamed = isinstance(value, Streamed)
        if is_streamed and depth != 1:
            raise unsupported(value, key, "it is streamed", "Put it itself into the state's dict")
        modules.require_complete(value, key)
        self.enclosing_ids.append(id(value))
        if is_streamed:  # each rank declares which elements it has
            self.flat.streamed += (f"{key}/",)
            self.forced_replication = Replication.REPLICATED
        try:
            if modules.is_module(value):
                raw = self.flat.states[id(value), key] = modules.state_dict_of(value, key)
                state = modules.unwrap_state(value, raw, key)
            elif optimizers.is_standard_optimizer(value):
                state = optimizers.optimizer_state(value, self.flat.names.name_of, key)
                groups = join_key(key, "groups")
                params = (f"{groups}/{i}/params" for i in range(len(state["groups"])))
                self.flat.merged_lists += [groups, *params]
            elif is_streamed:
                state = modules.state_dict_of(value, key)
            elif is_stateful:
                return self._encode_stateful(value, key, depth)
            else:
                raise unsupported(value, key, NOT_PLAIN)
            return nodes.encode(state, key, self.encode_value, depth)
        finally:
            self.enclosing_ids.pop()
            if is_streamed:
                self.forced_replication = None

    def _encode_stateful(self, value: Any, key: str, depth: int) -> Any:
        """Encode an object by its ``state_dict()``. An error for a value in it names both."""
        raw = self.flat.states[id(value), key] = modules.state_dict_of(value, key)
        state = optimizers.name_parameters(value, raw, self.flat.names.name_of, key)
        self.inside_object = True
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
            self.inside_object = False

    def _find_tied(self, first: LocalLeaf, boxes: LocalBoxes, key: str) -> str:
        """Return the key of the first array with the same elements, which may be this one."""
        ((_, part),) = boxes.box_tensors
        tied = key
        for k, p, dtype in ((first.key, first.source, first.dtype), (key, part, boxes.dtype)):
            memory = (boxes.tie_key, part_library(type(p)).memory(p), dtype, tuple(p.shape))
            tied = self.key_by_memory.setdefault(memory, k)
        return tied

    def _encode_composite(self, library: ArrayLibrary, value: Any, key: str) -> Any:
        """Encode a value that consists of others, such as a sparse tensor."""
        if len(self.enclosing_ids) > nodes.MAX_DEPTH // 2 or id(value) in self.enclosing_ids:
            raise nested_too_deeply(value, key, "it contains itself")
        tag, body, parts = library.split(value, key)
        if self.inside_object and tag == "subclass":
            raise unsupported(
                value,
                key,
                "no load could pass it to the load_state_dict() of the object that has it",
                "Save tensor.dequantize(), if the class has it",
            )
        self.enclosing_ids.append(id(value))
        try:
            encoded = {
                name: self.encode_value(part, join_key(key, escape_level(name)), 0)
                for name, part in parts.items()
            }
        finally:
            self.enclosing_ids.pop()
        if tag == "subclass" and any("sparse" in part for part in encoded.values()):
            raise unsupported(value, key, "one of its inner tensors is sparse")
        return {tag: {**body, "parts": encoded}}
