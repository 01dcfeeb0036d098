"""The part that all binders of a load share: options, differences, and targets of leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from limpet.format import tree
from limpet.format.names import to_dotted
from limpet.format.numpy_dtypes import from_descr
from limpet.layout.select import ABSENT, KeyFilter, NumberedRenames, find_renames, number_renames
from limpet.loading.differences import SLOT_OF, STRICT, Differences, Leniency
from limpet.loading.shared_memory import Claim
from limpet.loading.targets import Finalize, LoadTargets
from limpet.state import composites
from limpet.state.arrays import Memory, part_library
from limpet.state.flatten import ParameterNames
from limpet.types import Box

Members = dict[Any, tuple[Any, str]]
"""The nodes of saved members by name, each with its key."""

STATE_INVALID = (
    "The live state may be partly overwritten and is not valid; load an intact version into it"
    " before training continues"
)
"""The advice after a load that failed once it had begun to write."""


@dataclass
class Binding:
    """One binding of a live state to a snapshot's tree. ``resized``: leaves of another shape on any
    rank, with both shapes; they and the slots of these parameters keep their live values.
    ``taken``: leaves that no rank has, of dicts that take them; None if there is one rank."""

    targets: LoadTargets
    selected: KeyFilter
    parameter_names: ParameterNames
    rank: int = 0
    leniency: Leniency = STRICT
    resized: Mapping[str, str] = field(default_factory=dict)
    taken: frozenset[str] | None = None
    differences: Differences = field(default_factory=Differences)
    claims: dict[Memory | None, dict[Any, Claim]] = field(default_factory=dict)
    """What the memory of live arrays gets, each once."""
    states: Mapping[tuple[int, str], Any] = field(default_factory=dict)
    """What ``state_dict()`` of live objects has returned, by ``id`` and key, if it was called."""
    inside_wrapper: bool = False
    depth: int = 0
    """The number of containers around the value that is bound."""

    @cached_property
    def keeps_missing(self) -> KeyFilter:
        return self.leniency.tolerates("missing")

    def dict_members(self, value: Any, node: Any, key: str) -> Members | None:
        """Return the members of a dict's node by name, each with its key. Return None, and record a
        difference, if the node is not a dict."""
        if node is ABSENT:
            return {}
        if not tree.is_dict(node):
            self.note_other_kind(type(value).__name__, node, key)
            return None
        return {name: (child, k) for name, child, k in tree.children(node, key)}

    def live_state(self, value: Any, key: str) -> Any:
        """Return the ``state_dict()`` of a live object, which is not called again."""
        known = id(value), key
        return self.states[known] if known in self.states else value.state_dict()

    def note_missing(self, key: str) -> None:
        """Record a key of the live state that the snapshot lacks, if it is selected."""
        if self.selected(key):
            self.differences.missing.append(key)

    def note_unexpected(self, members: Iterable[tuple[Any, str]]) -> None:
        """Record members of the snapshot that the live state lacks: nodes, each with its key."""
        for child, key in members:
            self.differences.unexpected += [k for k, _ in tree.walk(child, key) if self.selected(k)]

    def takes(self, node: Any, key: str) -> bool:
        """Return True if a dict of plain values takes a member of the snapshot that it lacks. With
        several ranks, it is first unexpected, because another one may have it."""
        keys = [k for k, _ in tree.walk(node, key) if self.selected(k)]
        keys = keys or [key] * self.selected(key)  # of an empty container
        if self.taken is None or not self.taken.isdisjoint(keys):
            return bool(keys)
        self.differences.unexpected += keys
        self.differences.growing += keys
        return False

    def is_any_selected(self, node: Any, key: str) -> bool:
        """Return True if any part of a node is selected."""
        return self.selected(key) or any(self.selected(k) for k, _ in tree.walk(node, key))

    def array_source(self, value: Any, node: Any, key: str) -> str | None:
        """Return the key of the bytes for a live array. Return None, and record the difference, if
        their kind, shape, or dtype does not fit the array."""
        library = part_library(type(value))
        kind, name = library.describe(value)
        source, leaf = self.targets.resolve_leaf(node, key) if tree.is_leaf(node) else (key, {})
        if kind not in leaf:
            self.note_other_kind(kind, node, key)
            return None
        stored, shape = self.targets.snapshot.leaves[source]
        if kind == "array" and len(leaf[kind]) > 2:  # rows of bytes
            stored, shape = str(from_descr(leaf[kind][2])), shape[:-1]
        if (value.shape != shape and tuple(value.shape) != shape) or key in self.resized:
            self.note_resized(value, key, shape, value.shape)
            return None
        if name == stored:
            return source
        castable = library.can_cast(stored, value)
        if self.leniency.cast and castable:
            self.differences.casts[key] = f"{stored} to {name}"
            return source
        self.note_other_dtype(key, stored, name, castable)
        return None

    def tensor_source(self, node: Any, key: str) -> str | None:
        """Return the key of a tensor's bytes, or None for a node of another kind."""
        source, leaf = self.targets.resolve_leaf(node, key) if tree.is_leaf(node) else (key, {})
        return source if "tensor" in leaf else None

    def add_array(self, value: Any, source: str, key: str) -> Finalize:
        """Make a live array of the right shape a target: the boxes that this rank has. Return the
        function that returns the loaded value."""
        if self.targets.is_dry:
            return lambda: value
        library = part_library(type(value))
        targets, is_filled = [], True
        for box, part in library.local_boxes(value, key).box_tensors:
            into = library.target(value, part, key)
            self._claim_memory(into, source, box, key)
            self.targets.add(source, into, box)
            targets.append((box, into))
            is_filled = is_filled and into is part
        return (lambda: value) if is_filled else partial(library.loaded, value, targets)

    def claim(self, value: Any, source: str | None, key: str) -> None:
        """Note what a live array gets that is no target; without a ``source``, its live value."""
        for box, part in part_library(type(value)).local_boxes(value, key).box_tensors:
            self._claim_memory(part, source, box, key)

    def _claim_memory(self, part: Any, source: str | None, box: Box, key: str) -> None:
        """Note what the memory of a live array gets; without a ``source``, its live value."""
        if (memory := part_library(type(part)).memory(part)) is not None:
            claim = Claim(key, source, box, part, memory)
            self.claims.setdefault(memory, {}).setdefault((source, box), claim)

    def bind_subclass(self, value: Any, node: Any, key: str) -> Finalize:
        """Bind a live tensor and a node, one or both of a subclass: its name, inner tensors, dtype,
        shape, and context must be the saved ones. No class is looked up by its name."""
        tag = tree.tag_of(node)
        if tag != "subclass" or not composites.is_subclass(value):
            saved = node["subclass"]["class"] if tag == "subclass" else tag
            self.differences.kinds[key] = f"{saved}, live {composites.class_name(value)}"
            return lambda: value
        if misfit := composites.misfit(value, node, key):
            self.differences.kinds[key] = misfit
            return lambda: value
        inner = composites.inner_tensors(value, key).values()
        for (part, k), tensor in zip(tree.parts(node, key), inner, strict=True):
            kind, name = part_library(type(tensor)).describe(tensor)
            if "subclass" in (kind, tree.tag_of(part)):
                self.bind_subclass(tensor, part, k)
            elif (source := self.array_source(tensor, part, k)) is not None:
                stored = self.targets.snapshot.leaves[source][0]
                if stored == name:
                    self.add_array(tensor, source, k)
                else:  # cast=True would change the meaning of the elements
                    self.differences.dtypes[k] = f"{stored}, live {name}"
        return lambda: value

    def is_filled(self, value: Any) -> bool:
        """Return True if a live tensor shares its memory with another one that gets a leaf."""
        if value is None:
            return False
        library = part_library(type(value))
        memory = library.memory(value) if type(value) in library.plain_types else None
        return any(claim.source for claim in self.claims.get(memory, {}).values())

    def note_resized(self, value: Any, key: str, saved: Sequence[int], live: Sequence[int]) -> None:
        """Record that a leaf has another shape than the live value, here or on another rank."""
        text = self.resized.get(key, f"{list(saved)}, live {list(live)}")
        self.differences.resized[key] = text
        if not self.selected(key):
            return
        self.differences.shapes[key] = text
        if key in self.resized and value is not None:
            self.claim(value, None, key)

    def note_unselected(self, value: Any, node: Any, key: str) -> None:
        """Record another shape of a live tensor that is not loaded: an optimizer may refer to it,
        whose slots do not fit it then."""
        source = self.tensor_source(node, key)
        if source is not None:
            _, shape = self.targets.snapshot.leaves[source]
            if tuple(value.shape) != shape or key in self.resized:
                self.note_resized(value, key, shape, value.shape)

    def note_kept_slots(self, shapes: str, slots: Iterable[tuple[Any, Any, str]]) -> None:
        """Record that the slots of a parameter do not fit, because its shapes differ."""
        for _, _, key in slots:
            if self.selected(key):
                self.differences.shapes[key] = f"{SLOT_OF} {shapes}"

    def live_name(self, name: Any) -> Any:
        """Apply ``rename`` to a parameter's name."""
        matches = find_renames(name, self._parameter_renames)
        if not matches:
            return name
        _, old, new = matches[-1]
        return new.replace("/", ".") + name[len(old) :]

    @cached_property
    def _parameter_renames(self) -> NumberedRenames:
        # a parameter's name is its path in the state, with dots
        renames = self.leniency.rename.items()
        return number_renames({old.replace("/", "."): new for old, new in renames})

    @cached_property
    def saved_leaves(self) -> dict[Any, tuple[str, list[Any]]]:
        """The dtype of each leaf, and its order of dimensions in memory if that is unusual, by the
        leaf's name as a parameter."""
        nodes, leaves = self.targets.snapshot.nodes(), self.targets.snapshot.leaves
        orders = {key: nodes[key].get("tensor", [])[2:] for key in leaves}
        return {to_dotted(key): (dtype, orders[key]) for key, (dtype, _) in leaves.items()}

    @cached_property
    def resized_names(self) -> dict[str | None, str]:
        """Both shapes of the parameters that differ in shape, by their names."""
        return {to_dotted(key): text for key, text in self.resized.items()}

    def note_other_dtype(self, key: str, stored: object, live: object, can_cast: bool) -> None:
        """Record that a leaf has another dtype. If it cannot be converted, it is of another kind,
        which no option tolerates."""
        differences = self.differences
        (differences.dtypes if can_cast else differences.kinds)[key] = f"{stored}, live {live}"

    def note_other_kind(self, expected: str, node: Any, key: str) -> None:
        """Record that the node is of another kind than the live value, if ``key`` is selected."""
        if self.selected(key):
            tag = next(iter(node), "nothing") if type(node) is dict else type(node).__name__
            self.differences.kinds[key] = f"{tag}, live {expected}"
