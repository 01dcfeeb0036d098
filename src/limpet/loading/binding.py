"""The part that all binders of a load share: options, differences, and targets of leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np

from limpet import lazy_torch
from limpet.errors import PlanError
from limpet.format import tree
from limpet.format.names import to_dotted
from limpet.layout.select import ABSENT, KeyFilter
from limpet.lazy_torch import dtype_name
from limpet.loading.differences import SLOT_OF, Differences
from limpet.loading.targets import Finalize, LoadTargets, is_leaf, tag_of
from limpet.state import sharding, subclasses
from limpet.state.loadable import shares_elements
from limpet.types import Box


@dataclass(frozen=True, slots=True)
class Leniency:
    """The differences that a load tolerates: none, unless the caller requests them by option."""

    missing: Literal["error", "keep"] = "error"
    unexpected: Literal["error", "ignore"] = "error"
    cast: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)
    mismatched: Literal["error", "keep"] = "error"

    def __post_init__(self) -> None:
        lenient = {"missing": "keep", "unexpected": "ignore", "mismatched": "keep"}
        for name, choice in lenient.items():
            if (value := getattr(self, name)) not in ("error", choice):
                raise PlanError(
                    f"Invalid value for {name}=",
                    expected=f'{name}="error" or "{choice}"',
                    found=f"{name}={value!r}",
                )
        if type(self.cast) is not bool:
            raise PlanError(
                "Invalid value for cast=",
                expected="True or False; the dtypes are those of the live tensors",
                found=f"cast={self.cast!r}",
            )


STRICT = Leniency()
"""No difference is tolerated."""


STATE_INVALID = (
    "The live state may be partly overwritten and is not valid; load an intact version into it"
    " before training continues"
)
"""The advice after a load that failed once it had begun to write."""


@dataclass
class Binding:
    """One binding of a live state to a snapshot's tree. ``resized``: leaves of another shape on any
    rank, with both shapes; they and the slots of these parameters keep their live values."""

    targets: LoadTargets
    selected: KeyFilter
    parameter_names: dict[int, str]
    rank: int = 0
    cast: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)
    resized: Mapping[str, str] = field(default_factory=dict)
    resized_ids: dict[int, str] = field(default_factory=dict)
    differences: Differences = field(default_factory=Differences)
    bound_sources: dict[tuple[Any, ...], str | None] = field(default_factory=dict)
    torch: Any = field(default_factory=lazy_torch.torch_or_none)
    inside_wrapper: bool = False
    depth: int = 0
    """The number of containers around the value that is bound."""

    def with_resized(self, resized: Mapping[str, str]) -> Self:
        """Return a binding of the same states that knows what keeps its live value."""
        return replace(
            self,
            resized=resized,
            differences=Differences(),
            bound_sources={},
        )

    def dict_members(self, value: Any, node: Any, key: str) -> dict[Any, tuple[Any, str]] | None:
        """Return the members of a dict's node by name, each with its key. Return None, and record a
        difference, if the node is not a dict."""
        if node is ABSENT:
            return {}
        if tag_of(node) not in ("dict", "ordered", "items"):
            self.note_other_kind(type(value).__name__, node, key)
            return None
        return {name: (child, k) for name, child, k in tree.children(node, key)}

    def note_missing(self, key: str) -> None:
        """Record a key of the live state that the snapshot lacks, if it is selected."""
        if self.selected(key):
            self.differences.missing.append(key)

    def note_unexpected(self, members: Iterable[tuple[Any, str]]) -> None:
        """Record members of the snapshot that the live state lacks: nodes, each with its key."""
        for child, key in members:
            self.differences.unexpected += [k for k, _ in tree.walk(child, key) if self.selected(k)]

    def is_any_selected(self, node: Any, key: str) -> bool:
        """Return True if any part of a node is selected."""
        return self.selected(key) or any(self.selected(k) for k, _ in tree.walk(node, key))

    def tensor_source(self, value: Any, node: Any, key: str) -> str | None:
        """Return the key of the bytes for a live tensor. Return None, and record a difference, if
        the bytes do not fit the tensor."""
        source = self.leaf_source(node, key, "tensor")
        if source is None or value.layout is not self.torch.strided:
            self.note_other_kind(str(value.layout).replace("torch.", "tensor "), node, key)
            return None
        return source if self.check_fits(value, source, key, value.shape) else None

    def leaf_source(self, node: Any, key: str, tag: str) -> str | None:
        """Return the key under which the leaf's bytes are stored, or None if the node is not a leaf
        of the kind ``tag``."""
        if not is_leaf(node):
            return None
        source, leaf = self.targets.resolve_leaf(node, key)
        return source if tag in leaf else None

    def add_tensor(self, value: Any, source: str, key: str) -> None:
        """Make a live tensor of the right shape a target. For a tensor that is distributed over
        ranks, the targets are the boxes that this rank has."""
        boxes = sharding.get_local_boxes(value, key)
        if boxes is None:
            self._add_target(value.detach() if value.requires_grad else value, source, key)
        else:
            for box, part in boxes.box_tensors:
                if isinstance(part, np.ndarray):
                    self.targets.add(source, part, box)
                else:
                    self._add_target(part, source, key, box)

    def _add_target(self, value: Any, source: str, key: str, box: Box | None = None) -> None:
        stride = () if value.is_contiguous() else value.stride()
        if stride and shares_elements(value):
            raise PlanError(
                f"The live tensor {key!r} is expanded: several of its elements share memory",
                todo="Put a tensor with its own memory into the live state:"
                " tensor.clone(memory_format=torch.contiguous_format)",
                leaf=key,
            )
        if value.data_ptr():
            self._claim_memory(value, stride, source, key)
        elif value.numel():
            raise PlanError(
                f"The live tensor {key!r} has no memory to load into",
                found=f"a tensor on {value.device} whose memory was freed or never allocated",
                todo="If the module is on the meta device, allocate its memory with"
                " module.to_empty(device=...)",
                leaf=key,
            )
        self.targets.add(source, value, box)

    def _claim_memory(
        self, value: Any, stride: tuple[int, ...], source: str | None, key: str
    ) -> None:
        """Raise ``PlanError`` if the memory of a live tensor gets the bytes of two leaves, or if it
        is also that of a tensor that keeps its live value (``source`` is None)."""
        memory = value.data_ptr(), value.shape, stride, value.dtype
        first = self.bound_sources.setdefault(memory, source)
        if first != source:
            raise PlanError(
                f"The live tensor {key!r} is tied to another tensor, but the snapshot holds two"
                " leaves",
                expected=f"one leaf for both tensors, {first or source}",
                found=f"{first} and {source}"
                if first and source
                else "that one of them would keep its live value",
                todo="Untie the tensors in the live state, or exclude one of them with keys=",
                leaf=key,
            )

    def bind_subclass(self, value: Any, node: Any, key: str) -> Finalize:
        """Bind a live tensor and a node, one or both of a subclass: its name, inner tensors, dtype,
        shape, and context must be the saved ones. No class is looked up by its name."""
        if tag_of(node) != "subclass" or not subclasses.is_subclass(value):
            saved = node["subclass"]["class"] if tag_of(node) == "subclass" else tag_of(node)
            self.differences.kinds[key] = f"{saved}, live {subclasses.class_name(value)}"
            return lambda: value
        body, inner = node["subclass"], subclasses.inner_tensors(value, key)
        live = {**subclasses.describe(value, key), "parts": list(inner)}
        for name, found in live.items():
            expected = list(body[name]) if name == "parts" else body[name]
            if repr(expected) != repr(found):  # 1 and True are different
                self.differences.kinds[key] = f"{name} {expected}, live {found}"
                return lambda: value
        for (part, k), tensor in zip(tree.parts(node, key), inner.values(), strict=True):
            if subclasses.is_subclass(tensor) or tag_of(part) == "subclass":
                self.bind_subclass(tensor, part, k)
            elif (source := self.tensor_source(tensor, part, k)) is not None:
                stored = self.targets.snapshot.leaves[source][0]
                if stored == dtype_name(tensor.dtype):
                    self.add_tensor(tensor, source, k)
                else:  # cast=True would change the meaning of the elements
                    self.differences.dtypes[k] = f"{stored}, live {dtype_name(tensor.dtype)}"
        return lambda: value

    def is_filled(self, value: Any) -> bool:
        """Return True if a live tensor shares its memory with another one that gets a leaf."""
        if value is None or sharding.get_local_boxes(value, "") is not None:
            return False
        stride = () if value.is_contiguous() else value.stride()
        memory = value.data_ptr(), value.shape, stride, value.dtype
        return bool(value.numel()) and self.bound_sources.get(memory) is not None

    def note_resized(self, value: Any, key: str, saved: Sequence[int], live: Sequence[int]) -> None:
        """Record that a leaf has another shape than the live value, here or on another rank."""
        text = self.resized.get(key, f"{list(saved)}, live {list(live)}")
        self.differences.resized[key] = text
        if getattr(value, "requires_grad", False):  # not a temporary of a state dict
            self.resized_ids[id(value)] = text
        if not self.selected(key):
            return
        self.differences.shapes[key] = text
        if key in self.resized and not (value is None or isinstance(value, np.ndarray)):
            boxes = sharding.get_local_boxes(value, key)
            parts = [value] if boxes is None else [part for _, part in boxes.box_tensors]
            for part in parts:
                if not isinstance(part, np.ndarray) and part.data_ptr():
                    stride = () if part.is_contiguous() else part.stride()
                    self._claim_memory(part, stride, None, key)

    def note_unselected(self, value: Any, node: Any, key: str) -> None:
        """Record another shape of a live tensor that is not loaded: an optimizer may refer to it,
        whose slots do not fit it then."""
        source = self.leaf_source(node, key, "tensor")
        if source is not None:
            _, shape = self.targets.snapshot.leaves[source]
            if tuple(value.shape) != shape or key in self.resized:
                self.note_resized(value, key, shape, value.shape)

    def note_kept_slots(self, shapes: str, slots: Iterable[tuple[Any, Any, str]]) -> None:
        """Record that the slots of a parameter do not fit, because its shapes differ."""
        for _, _, key in slots:
            if self.selected(key):
                self.differences.shapes[key] = f"{SLOT_OF} {shapes}"

    def resized_parameter(self, parameter: Any, name: str | None) -> str | None:
        """Return both shapes of a parameter if they differ. One in no module is found by its
        ``id``."""
        if not (self.resized or self.resized_ids):
            return None
        return self._resized_names.get(name) or self.resized_ids.get(id(parameter))

    @cached_property
    def saved_dtypes(self) -> dict[Any, str]:
        """The dtypes of the saved leaves, by their names as parameters."""
        return {to_dotted(key): dtype for key, (dtype, _) in self.targets.snapshot.leaves.items()}

    @cached_property
    def _resized_names(self) -> dict[str | None, str]:
        return {to_dotted(key): text for key, text in self.resized.items()}

    def check_fits(self, value: Any, source: str, key: str, live_shape: tuple[int, ...]) -> bool:
        """Return True if a leaf has the shape ``live_shape`` and the dtype of a live tensor.
        Otherwise, record the difference."""
        stored, shape = self.targets.snapshot.leaves[source]
        if live_shape != shape or key in self.resized:
            self.note_resized(value, key, shape, live_shape)
            return False
        is_array = isinstance(value, np.ndarray)
        name = value.dtype.name if is_array else dtype_name(value.dtype)
        if name == stored:
            return True
        castable = not is_array and can_cast(stored, value.dtype)
        if self.cast and castable:
            self.differences.casts[key] = f"{stored} to {name}"
            return True
        self.note_other_dtype(key, stored, name or value.dtype, castable)
        return False

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


def can_cast(stored: str, dtype: Any) -> bool:
    """Return True if ``cast=True`` allows this conversion of a tensor's elements. It discards no
    imaginary part and no fraction, and does not convert to or from a packed dtype."""
    import torch

    packed = "float4_e2m1fn_x2"
    fits: bool = hasattr(torch, stored) and torch.can_cast(getattr(torch, stored), dtype)
    return fits and packed not in (stored, dtype_name(dtype))
