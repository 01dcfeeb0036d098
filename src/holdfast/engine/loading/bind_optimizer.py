"""Load an optimizer: its state becomes exactly the snapshot's, slot by slot, matched by name."""

from __future__ import annotations

from math import prod
from typing import Any

from holdfast.engine.loading.bind_subclass import bind_subclass
from holdfast.engine.loading.binding import Binding, can_cast
from holdfast.engine.loading.targets import Finalize, tag_of
from holdfast.engine.planning.select import (
    ABSENT,
    NumberedRenames,
    find_renames,
    number_renames,
)
from holdfast.engine.state import optimizers, sharding
from holdfast.engine.state.loadable import shares_elements
from holdfast.engine.state.tensors import subclasses
from holdfast.format import tree
from holdfast.format.names import escape_level, join_key
from holdfast.lazy_torch import dtype_name

_MIN_DIFFERING_OPTIONS = 2


def bind_optimizer(binding: Binding, optimizer: Any, node: Any, key: str) -> Finalize:
    """Bind an optimizer's slots and options.

    Slots that do not exist yet (before the first step) are created. If a parameter had no slots
    when the snapshot was saved, its live slots are removed, so that training continues as if it had
    never stopped. A parameter that keeps its live value because it has another shape also keeps
    its live slots, or has none.
    """
    if node is ABSENT:
        if binding.selected(key) or binding.selected(f"{key}/state"):
            binding.differences.missing.append(key)
        return lambda: optimizer
    members = binding.dict_members(optimizer, node, key)
    if members is None or _note_other_object(binding, optimizer, members, node, key):
        return lambda: optimizer
    grouped = optimizers.group_parameter_names(optimizer, binding.parameter_names)
    live = {
        name: (parameter, group)
        for group, names in zip(optimizer.param_groups, grouped, strict=True)
        for name, parameter in zip(names, group["params"], strict=True)
    }
    # a parameter's name is its path in the state, with dots
    renames = number_renames({old.replace("/", "."): new for old, new in binding.renames.items()})
    kept = _resized_parameters(binding, live)
    finalizers: dict[str, dict[str, Finalize]] = {}
    saved, state_key = members["state"]
    exact = binding.selected(state_key) or binding.selected(f"{state_key}/**")
    for saved_name, slots, k in tree.children(saved, state_key):
        name = _rename_parameter(saved_name, renames)
        if name not in live:
            binding.note_unexpected([(slots, k)])
            continue
        parameter, group = live[name]
        if name in kept:
            binding.note_kept_slots(kept[name], tree.children(slots, k))
            continue
        live_slots = optimizer.state.get(parameter, {})
        finalizers[name] = {}
        for slot, child, slot_key in tree.children(slots, k):
            if binding.selected(slot_key):
                device = _slot_device(parameter, group, slot)
                old = _live_slot(optimizer, live_slots.get(slot), parameter, child, slot_key)
                place = old, parameter, device, child, slot_key
                finalizers[name][slot] = _bind_slot(binding, *place, saved_name)
    groups = _bind_groups(binding, optimizer, grouped, renames, *members["groups"])

    def finalize() -> Any:
        if exact:
            for name in live.keys() - finalizers.keys() - kept.keys():
                optimizer.state.pop(live[name][0], None)
        for name, slot_finalizers in finalizers.items():
            slots = {slot: finalize_slot() for slot, finalize_slot in slot_finalizers.items()}
            if exact:
                optimizer.state[live[name][0]] = slots
            elif slots:
                optimizer.state[live[name][0]].update(slots)
        for group, values in groups:
            group.update({option: finalize_value() for option, finalize_value in values.items()})
        return optimizer

    return finalize


def _resized_parameters(
    binding: Binding, live: dict[str, tuple[Any, dict[str, Any]]]
) -> dict[str, str]:
    """Return the parameters that keep their live values because of their shapes. Their slots are
    kept as well: saved slots belong to the saved values, and all slots to one another."""
    found = {name: binding.resized_parameter(value, name) for name, (value, _) in live.items()}
    return {name: shapes for name, shapes in found.items() if shapes is not None}


def _note_other_object(
    binding: Binding, optimizer: Any, members: dict[Any, tuple[Any, str]], node: Any, key: str
) -> bool:
    """If the saved value is not an optimizer of this class, record a difference and return True."""
    if is_optimizer_node(members):
        return _note_other_class(binding, optimizer, *members["groups"], key)
    binding.note_other_kind(type(optimizer).__name__, node, key)
    return True


def is_optimizer_node(members: dict[Any, tuple[Any, str]]) -> bool:
    """Return True if a node was made by ``optimizers.optimizer_state``. A PyTorch ``state_dict`` of
    an optimizer has a different structure."""
    if members.keys() != {"state", "groups"}:
        return False
    (state, _), (groups, _) = members["state"], members["groups"]
    return (
        tag_of(state) == "dict"
        and all(tag_of(slots) == "dict" for slots in state["dict"].values())
        and tag_of(groups) == "list"
        and all(
            tag_of(g) == "dict" and tag_of(g["dict"].get("params")) == "list"
            for g in groups["list"]
        )
    )


def _note_other_class(
    binding: Binding, optimizer: Any, node: Any, groups_key: str, key: str
) -> bool:
    """If an optimizer of another class was saved, record a difference of kind and return True.

    A snapshot does not store the class. For most pairs of classes, each class has several options
    that the other lacks. (This fails if one class has only additional options, such as Adam and
    RAdam.) Between two versions of PyTorch, by contrast, options are only added, and one may be
    renamed.
    """
    saved = {option for group in node["list"] for option in group["dict"]}
    live = {option for group in optimizer.param_groups for option in group}
    saved_only = sorted(option for option in saved - live if not _is_added_later(option))
    live_only = sorted((set(optimizer.defaults) & live) - saved)
    is_other_class = min(len(saved_only), len(live_only)) >= _MIN_DIFFERING_OPTIONS and any(
        binding.selected(f"{groups_key}/{i}/{saved_only[0]}") for i in range(len(node["list"]))
    )
    if is_other_class:
        binding.differences.kinds[key] = (
            f"saved with {', '.join(saved_only)}, live {type(optimizer).__name__} with"
            f" {', '.join(live_only)}"
        )
    return is_other_class


def _rename_parameter(name: Any, renames: NumberedRenames) -> Any:
    """Apply ``rename`` to a parameter's name."""
    matches = find_renames(name, renames)
    if not matches:
        return name
    _, old, new = matches[-1]
    return new.replace("/", ".") + name[len(old) :]


def _live_slot(optimizer: Any, live: Any, parameter: Any, node: Any, key: str) -> Any:
    """Return the live slot. If it does not exist yet and is saved as a tensor subclass, let the
    optimizer create it as its first step would, if it has torchao's method for that."""
    create = getattr(optimizer, "_new_buffer", None)
    if live is not None or tag_of(node) != "subclass" or create is None:
        return live
    for signed in (True, False):
        slot = create(parameter, signed)
        if subclasses.is_subclass(slot) and subclasses.fits(slot, node, key):
            return slot
    return None


def _bind_slot(
    binding: Binding, live: Any, parameter: Any, device: Any, node: Any, key: str, saved: Any
) -> Finalize:
    """Fill the live slot in place if it has the saved shape and dtype (or one to which it may be
    converted) and is on ``device``; otherwise, load the slot into fresh memory. ``saved``: the name
    of the parameter in the snapshot."""
    torch = binding.torch
    if isinstance(live, torch.Tensor) and (
        subclasses.is_subclass(live) or tag_of(node) == "subclass"
    ):
        return bind_subclass(binding, live, node, key)
    if not (type(node) is dict and "tensor" in node):
        return binding.targets.add_fresh(node, key, device)
    source, _ = binding.targets.resolve_leaf(node, key)
    stored, shape = binding.targets.snapshot.leaves[source]
    if live is None:
        dtype = _converted_dtype(binding, parameter, saved, stored, shape)
        live = _empty_slot_like(binding, parameter, dtype or stored, shape, key)
        if live is None and dtype is not None:
            live = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    if isinstance(live, torch.Tensor):
        live_dtype = dtype_name(live.dtype)
        is_cast = live_dtype != stored and binding.cast and can_cast(stored, live.dtype)
        same = tuple(live.shape) == shape and (live_dtype == stored or is_cast)
        writable = live.layout is torch.strided and not shares_elements(live)
        if same and writable and live.device == torch.device(device):
            if is_cast:
                binding.differences.casts[key] = f"{stored} to {live_dtype}"
            binding.add_tensor(live, source, key)
            return lambda: live
    return binding.targets.add_fresh(node, key, device)


def _converted_dtype(
    binding: Binding, parameter: Any, saved: Any, stored: str, shape: tuple[int, ...]
) -> str | None:
    """Return the dtype to which a new slot is converted, if ``cast=True`` converts its parameter.

    Only a slot that was saved in the dtype of its parameter is converted with it, as PyTorch's
    ``load_state_dict`` does. Numbers, such as step counters, and slots that were kept in a higher
    precision on purpose keep their dtypes.
    """
    if not binding.cast or not shape or binding.saved_dtypes.get(saved) != stored:
        return None
    live = dtype_name(parameter.dtype)
    return live if live != stored and can_cast(stored, parameter.dtype) else None


def _empty_slot_like(
    binding: Binding, parameter: Any, dtype: str, shape: tuple[int, ...], key: str
) -> Any:
    """Allocate a slot that does not exist yet, distributed over the ranks like its parameter.

    Return None if the parameter is not distributed, or if the slot has one element. Also return
    None, and record a difference, for a slot of another shape, because only the optimizer knows how
    to distribute it.
    """
    if not sharding.is_distributed_tensor(parameter):
        return None
    if shape == tuple(parameter.shape):
        return sharding.empty_like(parameter, getattr(binding.torch, dtype))
    if len(shape) and prod(shape) > 1:
        binding.differences.kinds[key] = (
            f"a slot of shape {list(shape)}, live no slot yet for a parameter of shape"
            f" {list(parameter.shape)} that is distributed over ranks (let the optimizer step once"
            " before the load)"
        )
    return None


def _slot_device(parameter: Any, group: dict[str, Any], slot: str) -> Any:
    """Return the device on which PyTorch keeps a slot: that of its parameter, or the CPU for a step
    counter unless the optimizer is capturable or fused (see ``load_state_dict`` in
    torch/optim/optimizer.py)."""
    is_on_cpu = slot == "step" and not (group.get("capturable") or group.get("fused"))
    return "cpu" if is_on_cpu else parameter.device


def _bind_groups(
    binding: Binding,
    optimizer: Any,
    grouped: list[list[str]],
    renames: NumberedRenames,
    node: Any,
    key: str,
) -> list[tuple[dict[str, Any], dict[str, Finalize]]]:
    """Bind the options of each group. Groups are matched by position and must have the same
    parameters."""
    missing, unexpected = binding.differences.missing, binding.differences.unexpected
    keys = [f"{key}/{i}" for i in range(max(len(node["list"]), len(grouped)))]
    bound = []
    for k, saved, group, live_names in zip(keys, node["list"], optimizer.param_groups, grouped):
        members = {name: child for name, child, _ in tree.children(saved, k)}
        saved_names = [
            _rename_parameter(n, renames)
            for n in tree.decode(members.pop("params"), k, tree.reject_value)
        ]
        for side, names, others in (
            (missing, live_names, set(saved_names)),
            (unexpected, saved_names, set(live_names)),
        ):
            one_sided = (f"{k}/params/{escape_level(n)}" for n in names if n not in others)
            side += filter(binding.selected, one_sided)
        values = {}
        for option, child in members.items():
            if option not in group and not _is_added_later(option):
                # probably another class of optimizer, or an optimizer from a later PyTorch
                binding.note_unexpected([(child, join_key(k, option))])
            elif binding.selected(join_key(k, option)):
                values[option] = binding.targets.add_fresh(child, join_key(k, option), "cpu")
        bound.append((group, values))
    missing += filter(binding.selected, keys[len(node["list"]) :])
    unexpected += filter(binding.selected, keys[len(grouped) :])
    return bound


def _is_added_later(option: str) -> bool:
    """Return True for an option that is added to the groups after the optimizer is created: by a
    scheduler, which may be created after the load, or by the optimizer in its first step (those of
    timm and apex count their steps in the groups)."""
    names = ("max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "step")
    return option.startswith("initial_") or option in names
