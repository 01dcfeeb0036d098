"""Bind the slots of one parameter, after a comparison with its live slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

from limpet.format import tree
from limpet.format.names import escape_level, join_key
from limpet.loading.binding import Binding
from limpet.loading.targets import Finalize, is_leaf, tag_of
from limpet.state import composites, sharding
from limpet.state.arrays import library_of, part_library
from limpet.state.loadable import shares_elements

_INDEPENDENT_OF_SLOTS = frozenset(
    {"lr", "weight_decay", "eps", "maximize", "foreach", "fused", "capturable", "differentiable"}
)
"""Options that do not decide which slots an optimizer has."""


def loaded_options(
    binding: Binding, optimizer: Any, grouped: list[list[str]], node: Any, key: str
) -> dict[str, tuple[Mapping[str, Any], bool]]:
    """Return, by parameter name, the options after the load of the saved groups, and True if one of
    them may decide which slots the optimizer has: then, the saved slots are those that fit."""
    found: dict[str, tuple[Mapping[str, Any], bool]] = {}
    for i, (group, names) in enumerate(zip(optimizer.param_groups, grouped, strict=True)):
        saved = tree.children(node["list"][i], f"{key}/{i}") if i < len(node["list"]) else ()
        loaded = {
            name: child
            for name, child, k in saved
            # a plain value is its own node
            if name in group and type(child) is not dict and binding.selected(k)
        }
        changes = (_may_change_slots(name, value, group[name]) for name, value in loaded.items())
        found.update(dict.fromkeys(names, ({**group, **loaded}, any(changes))))
    return found


def _may_change_slots(name: str, saved: Any, live: Any) -> bool:
    """Return True if this option may decide which slots exist. Most such options are switches, as
    ``amsgrad``, or are off at zero, as ``momentum``; some are sizes, such as a rank."""
    if name in _INDEPENDENT_OF_SLOTS or name.startswith("initial_"):
        return False
    return bool(saved) != bool(live) or (type(saved) in (int, str) and saved != live)


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """A parameter of a live optimizer. ``saved_name``: its name in the snapshot; ``options``,
    ``change_slots``: its ``loaded_options``."""

    optimizer: Any
    parameter: Any
    saved_name: Any
    options: Mapping[str, Any]
    change_slots: bool

    @property
    def live_slots(self) -> Mapping[str, Any]:
        """Its slots. They are empty before the first step."""
        live = self.optimizer.state.get(self.parameter)
        return live if isinstance(live, dict) else {}

    def device_of(self, slot: str) -> Any:
        """Return the device where PyTorch keeps a slot: its parameter's, or the CPU for a step
        counter unless capturable or fused (``load_state_dict`` in torch/optim/optimizer.py)."""
        is_on_device = self.options.get("capturable") or self.options.get("fused")
        return self.parameter.device if slot != "step" or is_on_device else "cpu"


def bind_slots(
    binding: Binding, owner: SlotOwner, node: Any, key: str, is_exact: bool
) -> dict[str, Finalize] | None:
    """Bind the saved slots of a parameter, in place of the live ones if ``is_exact``, else added to
    them. Return None if it keeps its live slots, because one of them has another shape.

    The live slots show what the next step expects, so the saved ones are compared with them, if
    there are any, unless an option is loaded that may change the slots.
    """
    live, saved = owner.live_slots, tree.children(node, key)
    selected = [(slot, child, k) for slot, child, k in saved if binding.selected(k)]
    comparable = {} if owner.change_slots else live
    resized = dict(_find_resized(binding, comparable, selected))
    if resized:
        shapes = next(iter(resized.values()))
        binding.note_kept_slots(shapes, selected)
        binding.differences.shapes |= resized
        return None
    if not live and 0 < len(selected) < len(saved):
        left_out = [str(slot) for slot, _, k in saved if not binding.selected(k)]
        binding.differences.kinds[key] = (
            f"{', '.join(str(slot) for slot, _, _ in selected)} selected, live no slots yet;"
            f" its step also needs {', '.join(left_out)}"
        )
    finalizers = {
        slot: _bind_slot(binding, owner, slot, child, k)
        for slot, child, k in selected
        if not _note_other_kind(binding, comparable.get(slot), child, k)
    }
    names = {slot for slot, _, _ in saved}
    for slot, value in comparable.items() if is_exact and saved else ():
        if slot not in names and value is not None:
            binding.note_missing(join_key(key, escape_level(str(slot))))
            finalizers[slot] = _return_value(value)
    return finalizers


def _is_tensor(value: Any) -> TypeGuard[Any]:
    library = library_of(type(value))
    return library is not None and library.tag == "tensor"


def _return_value(value: Any) -> Finalize:
    return lambda: value


def _find_resized(
    binding: Binding, live: Mapping[str, Any], selected: list[tuple[str, Any, str]]
) -> Iterator[tuple[str, str]]:
    """Yield the key of each slot that has another shape than the live one, with both shapes. The
    shapes of one element are all alike."""
    for slot, child, key in selected:
        value = live.get(slot)
        source = binding.tensor_source(child, key)
        if source is not None and _is_tensor(value):
            shape, live_shape = binding.targets.snapshot.leaves[source][1], tuple(value.shape)
            if shape != live_shape and not prod(shape) == prod(live_shape) == 1:
                yield key, f"{list(shape)}, live {list(live_shape)}"


def _note_other_kind(binding: Binding, live: Any, node: Any, key: str) -> bool:
    """If only one side is a tensor, record a difference and return True. None is a slot not created
    yet; a number may be a tensor of one element (early PyTorch, L-BFGS), and the reverse."""
    if live is None or node is None or tag_of(node) in tree.PART_TAGS:
        return False
    source = binding.tensor_source(node, key)
    is_number = type(node) in (int, float)
    if _is_tensor(live):
        fits = source is not None or (is_number and live.numel() == 1)
        expected = "tensor"
    else:
        one_element = source is None or prod(binding.targets.snapshot.leaves[source][1]) == 1
        fits = source is None or (one_element and type(live) in (int, float))
        expected = type(live).__name__
    if not fits:
        binding.note_other_kind(expected, node, key)
    return not fits


def _bind_slot(binding: Binding, owner: SlotOwner, slot: str, node: Any, key: str) -> Finalize:
    """Fill the live slot in place if it has the saved shape and dtype (or one to which it may be
    converted) and is on the right device; otherwise, load the slot into fresh memory."""
    import torch

    device = owner.device_of(slot)
    live = _live_slot(owner, slot, node, key)
    is_live_tensor = _is_tensor(live)
    if is_live_tensor and (composites.is_subclass(live) or tag_of(node) == "subclass"):
        return binding.bind_subclass(live, node, key)
    if not (type(node) is dict and "tensor" in node):
        if is_live_tensor and slot == "step" and type(node) in (int, float):
            return lambda: torch.full_like(live, node, device=device)
        return add_slot(binding, owner.parameter, owner.saved_name, node, key, device)
    source, _ = binding.targets.resolve_leaf(node, key)
    stored, shape = binding.targets.snapshot.leaves[source]
    is_replaced = is_live_tensor and tuple(live.shape) != shape
    if is_live_tensor and not is_replaced:
        library = part_library(type(live))
        _, live_dtype = library.describe(live)
        castable = stored != live_dtype and library.can_cast(stored, live)
        # as PyTorch's load_state_dict does, which asks for no permission
        is_counter = slot == "step" and live.numel() == 1
        if castable and (binding.cast or is_counter):
            binding.differences.casts[key] = f"{stored} to {live_dtype}"
        elif stored != live_dtype and (owner.change_slots or is_counter):
            is_replaced = True
        elif stored != live_dtype:
            binding.note_other_dtype(key, stored, live_dtype, castable)
            return lambda: live
    dtype = None
    if live is None:
        dtype = _converted_dtype(binding, owner, stored, shape)
        if dtype is not None:
            binding.differences.casts[key] = f"{stored} to {dtype}"
    elif is_live_tensor and not is_replaced:
        if (
            live.layout is torch.strided
            and not shares_elements(live)
            and live.device == torch.device(device)
        ):
            return binding.add_array(live, source, key)
        dtype = live_dtype
    return add_slot(binding, owner.parameter, owner.saved_name, node, key, device, dtype)


def add_slot(
    binding: Binding,
    parameter: Any,
    saved_name: Any,
    node: Any,
    key: str,
    device: Any,
    dtype: str | None = None,
) -> Finalize:
    """Load a slot into new memory. One with the parameter's shape and saved order of dimensions
    gets its strides, because a fused step goes through the memory of both, and its placements.
    Another shape of a distributed parameter is a difference: only the optimizer distributes it."""
    is_distributed = sharding.is_distributed_tensor(parameter)
    for k, n in tree.walk(node, key) if is_distributed and type(node) is dict else ():
        if is_leaf(n):
            source, _ = binding.targets.resolve_leaf(n, k)
            _, shape = binding.targets.snapshot.leaves[source]
            if prod(shape) > 1 and shape != tuple(parameter.shape):
                binding.differences.kinds[k] = (
                    f"a slot of shape {list(shape)}, live no slot yet for a parameter of shape"
                    f" {list(parameter.shape)} that is distributed over ranks (let the optimizer"
                    " step once before the load)"
                )
    is_plain = type(parameter) in part_library(type(parameter)).plain_types
    like = None
    if is_plain or sharding.is_dtensor(parameter):
        like = parameter, binding.saved_orders.get(saved_name, [])
    return binding.targets.add_fresh(node, key, device, like, dtype)


def _live_slot(owner: SlotOwner, slot: str, node: Any, key: str) -> Any:
    """Return the live slot. If it does not exist yet and is saved as a tensor subclass, let the
    optimizer create it as its first step would, if it has torchao's method for that."""
    live = owner.live_slots.get(slot)
    create = getattr(owner.optimizer, "_new_buffer", None)
    if live is not None or tag_of(node) != "subclass" or create is None:
        return live
    for signed in (True, False):
        created = create(owner.parameter, signed)
        if composites.is_subclass(created) and not composites.misfit(created, node, key):
            return created
    return None


def _converted_dtype(
    binding: Binding, owner: SlotOwner, stored: str, shape: tuple[int, ...]
) -> str | None:
    """Return the dtype to which ``cast=True`` converts a new slot with its parameter: if it was
    saved in the parameter's dtype, as PyTorch does. Numbers and higher precision keep theirs."""
    if not binding.cast or not shape or binding.saved_dtypes.get(owner.saved_name) != stored:
        return None
    library = part_library(type(owner.parameter))
    _, live = library.describe(owner.parameter)
    return live if live != stored and library.can_cast(stored, owner.parameter) else None
