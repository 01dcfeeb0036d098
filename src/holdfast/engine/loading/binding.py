"""The part that all binders of a load share: options, differences, and targets of leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from holdfast import lazy_torch
from holdfast.engine.loading.differences import Differences
from holdfast.engine.loading.targets import LoadTargets, is_leaf, tag_of
from holdfast.engine.planning.select import ABSENT, KeyFilter
from holdfast.engine.state import sharding
from holdfast.engine.state.loadable import shares_elements
from holdfast.errors import PlanError
from holdfast.format import tree
from holdfast.lazy_torch import dtype_name
from holdfast.text import warn_user
from holdfast.types import Box


@dataclass(frozen=True, slots=True)
class Leniency:
    """The differences that a load tolerates: none, unless the caller requests them by option."""

    missing: Literal["error", "keep"] = "error"
    unexpected: Literal["error", "ignore"] = "error"
    cast: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.missing not in ("error", "keep") or self.unexpected not in ("error", "ignore"):
            raise PlanError(
                "Invalid value for missing= or unexpected=",
                expected='missing="error" or "keep", unexpected="error" or "ignore"',
                found=f"missing={self.missing!r}, unexpected={self.unexpected!r}",
            )


STRICT = Leniency()
"""No difference is tolerated."""


STATE_INVALID = (
    "The live state may be partly overwritten and is not valid; load an intact version into it"
    " before training continues"
)
"""The advice after a load that failed once it had begun to write."""


def warn_of_share(share: bool | None) -> None:
    """Warn of the deprecated option ``share=``."""
    if share is not None:
        warn_user(
            "share= has no effect: the ranks of a host share reads of large snapshots. Remove the"
            " argument",
            DeprecationWarning,
        )


@dataclass(slots=True)
class Binding:
    """One binding of a live state to the nodes of a snapshot's tree, and the differences between
    the two."""

    targets: LoadTargets
    selected: KeyFilter
    parameter_names: dict[int, str]
    rank: int = 0
    cast: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)
    differences: Differences = field(default_factory=Differences)
    bound_sources: dict[tuple[Any, ...], str] = field(default_factory=dict)
    torch: Any = field(default_factory=lazy_torch.torch_or_none)
    inside_wrapper: bool = False
    depth: int = 0
    """The number of containers around the value that is bound."""

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
        if pointer := value.data_ptr():
            first = self.bound_sources.setdefault(
                (pointer, value.shape, stride, value.dtype), source
            )
            if first != source:
                raise PlanError(
                    f"The live tensor {key!r} is tied to another tensor, but the snapshot holds two"
                    " leaves",
                    expected=f"one leaf for both tensors, {first}",
                    found=f"{first} and {source}",
                    todo="Untie the tensors in the live state, or exclude one of them with keys=",
                    leaf=key,
                )
        elif value.numel():
            raise PlanError(
                f"The live tensor {key!r} has no memory to load into",
                found=f"a tensor on {value.device} whose memory was freed or never allocated",
                todo="If the module is on the meta device, allocate its memory with"
                " module.to_empty(device=...)",
                leaf=key,
            )
        self.targets.add(source, value, box)

    def check_fits(self, value: Any, source: str, key: str, live_shape: tuple[int, ...]) -> bool:
        """Return True if a leaf has the shape ``live_shape`` and the dtype of a live tensor.
        Otherwise, record the difference."""
        stored, shape = self.targets.snapshot.leaves[source]
        if live_shape != shape:
            self.differences.shapes[key] = f"{list(shape)}, live {list(live_shape)}"
            return False
        is_array = isinstance(value, np.ndarray)
        name = value.dtype.name if is_array else dtype_name(value.dtype)
        if name == stored or (self.cast and not is_array and _can_cast(stored, value.dtype)):
            return True
        self.differences.dtypes[key] = f"{stored}, live {name or value.dtype}"
        return False

    def note_other_kind(self, expected: str, node: Any, key: str) -> None:
        """Record that the node is of another kind than the live value, if ``key`` is selected."""
        if self.selected(key):
            tag = next(iter(node), "nothing") if type(node) is dict else type(node).__name__
            self.differences.kinds[key] = f"{tag}, live {expected}"


def _can_cast(stored: str, dtype: Any) -> bool:
    """Return True if ``cast=True`` allows this conversion of a tensor's elements. It discards no
    imaginary part and no fraction, and does not convert to or from a packed dtype."""
    import torch

    packed = "float4_e2m1fn_x2"
    fits: bool = torch.can_cast(getattr(torch, stored), dtype)
    return fits and packed not in (stored, dtype_name(dtype))
