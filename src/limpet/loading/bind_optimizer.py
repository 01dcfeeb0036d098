"""Load an optimizer: its state becomes exactly the snapshot's, slot by slot, matched by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from math import prod
from typing import Any, TypeGuard

from limpet.format import tree
from limpet.format.names import escape_level, join_key
from limpet.layout.select import ABSENT, rename
from limpet.loading.bind_stateful import bind_stateful
from limpet.loading.binding import STATE_INVALID, Binding, Members
from limpet.loading.targets import Finalize
from limpet.state import composites, modules, optimizers, sharding
from limpet.state.arrays import library_of, part_library
from limpet.state.loadable import shares_elements
from limpet.state.walk import parameters_of
from limpet.text import format_list


def bind_optimizer(binding: Binding, optimizer: Any, node: Any, key: str) -> Finalize:
    """Bind an optimizer's slots and options; the snapshot may also have its ``state_dict()``.

    Missing slots are created, and slots that a parameter did not have yet when it was saved are
    removed, as if training had never stopped. A parameter of another shape keeps its live slots.
    """
    if node is ABSENT:
        if binding.selected(key) or binding.selected(f"{key}/state"):
            binding.differences.missing.append(key)
        return lambda: optimizer
    grouped = optimizers.group_parameter_names(optimizer, binding.parameter_names.name_of)
    members, numbered = _find_members(binding, optimizer, grouped, node, key)
    if members is None:
        return lambda: optimizer
    live = dict(zip(chain(*grouped), parameters_of(optimizer), strict=True))
    # they keep their slots: saved slots belong to the saved values, and all slots to one another
    kept = {name: shapes for name, shapes in binding.resized_names.items() if name in live}
    finalizers: dict[str, dict[str, Finalize]] = {}
    options = loaded_options(binding, optimizer, grouped, *members["groups"])
    saved, state_key = members["state"]
    exact = binding.selected(state_key) or binding.selected(f"{state_key}/**")
    in_groups = {*chain(*_parameters(members, "groups", str) or ())}
    others: dict[Any, Finalize] = {}  # of no parameter, or of one, but not a dict of slots
    for saved_name, slots, k in tree.children(saved, state_key):
        name = binding.live_name(saved_name)
        if saved_name not in in_groups or (name in live and not tree.is_dict(slots)):
            if binding.is_any_selected(slots, k):
                state_name = live.get(name, saved_name)
                device = getattr(optimizer.state.get(state_name), "device", "cpu")
                others[state_name] = binding.targets.add_fresh(slots, k, device)
        elif name not in live:
            binding.note_unexpected([(slots, k)])
        elif name in kept:
            binding.note_kept_slots(kept[name], tree.children(slots, k))
        else:
            owner = SlotOwner(optimizer, live[name], saved_name, *options[name])
            if numbered and _note_misfits(binding, owner, name, slots, k):
                continue
            bound = bind_slots(binding, owner, slots, k, exact)
            if bound is None:
                kept[name] = "a slot of another shape"
            else:
                finalizers[name] = bound
    groups = _bind_groups(binding, optimizer, grouped, *members["groups"])

    def finalize() -> Any:
        if exact:
            loaded_or_kept = {live[name] for name in (*finalizers, *kept)} | others.keys()
            for owner in [owner for owner in optimizer.state if owner not in loaded_or_kept]:
                del optimizer.state[owner]
        optimizer.state.update({owner: finalize() for owner, finalize in others.items()})
        loaded: list[dict[str, Any]] = []
        for name, slot_finalizers in finalizers.items():
            slots = {slot: finalize_slot() for slot, finalize_slot in slot_finalizers.items()}
            loaded.append(slots)
            if exact:
                optimizer.state[live[name]] = slots
            elif slots:
                optimizer.state[live[name]].update(slots)
        for group, values in groups:
            group.update({option: finalize_value() for option, finalize_value in values.items()})
        _convert_numbers(optimizer, loaded, key)
        return optimizer

    return finalize


def bind_own_optimizer(binding: Binding, optimizer: Any, node: Any, key: str) -> Finalize:
    """Bind an optimizer that has hooks or code of its own: its ``load_state_dict`` gets the saved
    state with the numbers of its own parameters in place of their names."""
    if node is ABSENT or not binding.is_any_selected(node, key):
        return bind_stateful(binding, optimizer, node, key)
    grouped = optimizers.group_parameter_names(optimizer, binding.parameter_names.name_of)
    live = dict(zip(chain(*grouped), parameters_of(optimizer), strict=True))
    for name in live:
        if (shapes := binding.resized_names.get(name)) is not None:
            binding.differences.kinds[key] = (
                f"the state of all parameters, live {type(optimizer).__name__} with {name} of"
                f" another shape ({shapes}), whose own load_state_dict cannot leave it out"
            )
            return lambda: optimizer
    members = binding.dict_members(optimizer, node, key) if tree.is_dict(node) else {}
    if members and _is_numbered(members):
        members = _name_parameters(binding, optimizer, grouped, members, key)
    if members is None:
        return lambda: optimizer
    if len(members) == 2 and _parameters(members, "groups", str) is not None:
        (state, _), (groups, groups_key) = members["state"], members["groups"]
        node = {"dict": {"state": state, "param_groups": rename(groups, {}, groups_key)}}
    to_live = binding.live_name
    for (state, state_key), (groups, groups_key) in _named_states(node, key):
        saved = ([*map(to_live, names)] for names in groups)
        for i, (saved_names, names) in enumerate(zip_longest(saved, grouped, fillvalue=())):
            _compare_names(binding, saved_names, names, f"{groups_key}/{i}")
        for saved_name, slots, k in tree.children(state, state_key):
            if (name := to_live(saved_name)) in live:
                add_slot(binding, SlotOwner(optimizer, live[name], saved_name), slots, k, "cpu")
    number = partial(optimizers.rename_parameters, kind=str, grouped=grouped, to_live=to_live)
    return bind_stateful(binding, optimizer, node, key, number)


def _named_states(node: Any, key: str) -> Iterator[tuple[tuple[Any, str], tuple[Any, str]]]:
    """Yield the state, and the parameters of each group, of each node of PyTorch's form whose
    parameters have names: both with their keys."""
    inner: Members = dict(enumerate(tree.members(node, key) or ()))
    if tree.is_dict(node):
        inner = {name: (child, k) for name, child, k in tree.children(node, key)}
    if groups := _parameters(inner, "param_groups", str):
        yield inner.pop("state"), (groups, inner.pop("param_groups")[1])
    for child, k in inner.values():
        yield from _named_states(child, k)


def _find_members(
    binding: Binding, optimizer: Any, grouped: list[list[str]], node: Any, key: str
) -> tuple[Members | None, bool]:
    """Return the slots and the groups of a saved optimizer, and whether it was saved with numbered
    parameters. Return None, and record a difference, if the node is of another kind."""
    members = binding.dict_members(optimizer, node, key)
    if members is None:
        return None, False
    if _is_numbered(members):
        return _name_parameters(binding, optimizer, grouped, members, key), True
    if "param_groups" in members and "groups" not in members:
        # from an optimizer with code of its own
        groups, groups_key = members.pop("param_groups")
        members["groups"] = rename(groups, {}, groups_key), f"{key}/groups"
    if len(members) != 2 or _parameters(members, "groups", str) is None:
        binding.note_other_kind(type(optimizer).__name__, node, key)
        return None, False
    return members, False


def _convert_numbers(optimizer: Any, loaded: list[dict[str, Any]], key: str) -> None:
    """Let the optimizer convert slots that are tensors today, but were numbers in early versions of
    PyTorch, such as ``step``. PyTorch's ``load_state_dict`` calls the same method."""
    import torch

    has_numbers = any(type(value) in (int, float) for slots in loaded for value in slots.values())
    if has_numbers and type(optimizer).__setstate__ is not torch.optim.Optimizer.__setstate__:
        with modules.calling(optimizer, key, "__setstate__", STATE_INVALID, live_state="not valid"):
            optimizer.__setstate__(
                {"state": optimizer.state, "param_groups": optimizer.param_groups}
            )


def _parameters(members: Members, groups_name: str, kind: type) -> list[list[Any]] | None:
    """Return the parameters in each group of a saved optimizer, which are all names or all numbers,
    by ``kind``. None: the members are not those of an optimizer."""
    (state, _), (groups, _) = (members.get(name, (None, "")) for name in ("state", groups_name))
    if not tree.is_dict(state) or tree.tag_of(groups) != "list":
        return None
    found = []
    for group in groups["list"]:
        params: Any = group["dict"].get("params") if tree.tag_of(group) == "dict" else None
        if tree.tag_of(params) != "list" or any(type(p) is not kind for p in params["list"]):
            return None
        found.append(params["list"])
    return found


def _bind_groups(
    binding: Binding, optimizer: Any, grouped: list[list[str]], node: Any, key: str
) -> list[tuple[dict[str, Any], dict[str, Finalize]]]:
    """Bind the options of each group. Groups are matched by position and must have the same
    parameters. A live option that the snapshot lacks is kept, as by PyTorch, and reported."""
    import torch

    missing, unexpected = binding.differences.missing, binding.differences.unexpected
    keys = [f"{key}/{i}" for i in range(max(len(node["list"]), len(grouped)))]
    bound = []
    for k, saved, group, live_names in zip(keys, node["list"], optimizer.param_groups, grouped):
        members = {name: child for name, child, _ in tree.children(saved, k)}
        saved_names = [binding.live_name(n) for n in members.pop("params")["list"]]
        _compare_names(binding, saved_names, live_names, k)
        if isinstance(optimizer, torch.optim.LBFGS) and saved_names != live_names:
            binding.differences.kinds[f"{k}/params"] = (
                f"in the order {format_list(saved_names, 5)}, live {format_list(live_names, 5)},"
                " which decides the meaning of the slots of L-BFGS"
            )
        # classes of other libraries add options in their first step
        adds_options = not type(optimizer).__module__.startswith("torch.") and (
            group.keys() <= {*members, "params", "param_names"}
        )
        values = {}
        for option, child in members.items():
            if option not in group and not _is_added_later(option) and not adds_options:
                # probably another class of optimizer, or an optimizer from a later PyTorch
                binding.note_unexpected([(child, join_key(k, option))])
            elif binding.selected(join_key(k, option)):
                values[option] = binding.targets.add_fresh(child, join_key(k, option), "cpu")
        binding.differences.options += [
            join_key(k, option)
            for option, value in group.items()
            if option not in ("params", "param_names", *members)
            and value is not None
            and value is not False  # a switch that is off, such as one of a later PyTorch
            and binding.selected(join_key(k, option))
        ]
        bound.append((group, values))
    missing += filter(binding.selected, keys[len(node["list"]) :])
    unexpected += filter(binding.selected, keys[len(grouped) :])
    return bound


def _compare_names(
    binding: Binding, saved: Sequence[str], live: Sequence[str], group_key: str
) -> None:
    """Record the parameters that only the saved or only the live group has."""
    for side, names, others in (
        (binding.differences.missing, live, {*saved}),
        (binding.differences.unexpected, saved, {*live}),
    ):
        one_sided = (f"{group_key}/params/{escape_level(n)}" for n in names if n not in others)
        side += filter(binding.selected, one_sided)


def _is_added_later(option: str) -> bool:
    """Return True for an option that a scheduler, which may be created after the load, or the first
    step (of timm and apex) adds to the groups."""
    names = ("max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "step")
    return option.startswith("initial_") or option in names


# -- a state_dict() of PyTorch, which numbers the parameters ---------------------------------------


def _is_numbered(members: Members) -> bool:
    """Return True if a node was made from ``optimizer.state_dict()`` of PyTorch."""
    numbered = _parameters(members, "param_groups", int)
    numbers = [*chain(*numbered or ())]
    return numbered is not None and len(members) == 2 and len({*numbers}) == len(numbers)


def _name_parameters(
    binding: Binding, optimizer: Any, grouped: Sequence[Sequence[str]], members: Members, key: str
) -> Members | None:
    """Return the members in Limpet's form, with the names of the live parameters at the same
    positions. If the groups have others, by number or name, record a difference and return None."""
    (state, state_key), (groups, groups_key) = members["state"], members["param_groups"]
    # the nodes of leaves name the keys of their bytes, because the names are in other keys
    state, groups = rename(state, {}, state_key), rename(groups, {}, groups_key)
    numbers = _parameters(members, "param_groups", int) or []
    sizes, live_sizes = [*map(len, numbers)], [*map(len, grouped)]
    if sizes != live_sizes:
        binding.differences.kinds[key] = (
            f"groups of {format_list(list(map(str, sizes)), 10)} parameters, live groups of"
            f" {format_list(list(map(str, live_sizes)), 10)}, and state_dict() numbers them"
        )
        return None
    for group, live_group in zip(groups["list"], optimizer.param_groups, strict=True):
        names, live_names = _recorded_names(group), live_group.get("param_names")
        if names and live_names and list(map(_bare, names)) != list(map(_bare, live_names)):
            binding.differences.kinds[key] = (
                f"parameters {format_list(names, 5)}, live {format_list(live_names, 5)}"
            )
            return None
    name_by_number = dict(zip(chain(*numbers), chain(*grouped), strict=True))
    children = tree.children(state, state_key)
    named_slots = {name_by_number.get(n, n): child for n, child, _ in children}
    named_groups = [
        {
            "dict": {k: v for k, v in group["dict"].items() if k != "param_names"}
            | {"params": {"list": list(names)}}
        }
        for group, names in zip(groups["list"], grouped, strict=True)
    ]
    return {
        "state": ({"dict": named_slots}, state_key),
        "groups": ({"list": named_groups}, f"{key}/groups"),
    }


def _recorded_names(group: Any) -> list[str]:
    """Return the names that a saved group has for its parameters, as of ``named_parameters()``."""
    names = group["dict"].get("param_names")
    return [*map(str, names["list"])] if tree.tag_of(names) == "list" else []


def _bare(name: str) -> str:
    return ".".join(n for n in name.split(".") if n not in ("module", "_orig_mod"))


def _note_misfits(binding: Binding, owner: SlotOwner, name: str, slots: Any, key: str) -> bool:
    """If slots do not fit the live parameter at their position, record differences and return True.
    A slot has the shape of its live slot or its parameter, or one element."""
    live_slots, parameter = owner.live_slots, owner.parameter
    misfits = {}
    for slot, child, k in tree.children(slots, key):
        source = binding.tensor_source(child, k)
        if source is None or not binding.selected(k):
            continue
        shape = binding.targets.snapshot.leaves[source][1]
        expected = tuple(getattr(live_slots.get(slot), "shape", parameter.shape))
        if shape != expected and prod(shape) != 1:
            misfits[k] = (
                f"{list(shape)}, live {list(expected)} for {name} at its position in the groups"
                " (step once before the load if its slots have shapes of their own)"
            )
    binding.differences.kinds |= misfits
    return bool(misfits)


# -- the slots of one parameter, after a comparison with its live slots ----------------------------

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
    options: Mapping[str, Any] = field(default_factory=dict)
    change_slots: bool = False

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
            finalizers[slot] = partial(live.get, slot)
    return finalizers


def _is_tensor(value: Any) -> TypeGuard[Any]:
    library = library_of(type(value))
    return library is not None and library.tag == "tensor"


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
    if live is None or node is None or tree.tag_of(node) in tree.PART_TAGS:
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
    if is_live_tensor and (composites.is_subclass(live) or tree.tag_of(node) == "subclass"):
        return binding.bind_subclass(live, node, key)
    if not (type(node) is dict and "tensor" in node):
        if is_live_tensor and slot == "step" and type(node) in (int, float):
            return lambda: torch.full_like(live, node, device=device)
        return add_slot(binding, owner, node, key, device)
    source, _ = binding.targets.resolve_leaf(node, key)
    stored, shape = binding.targets.snapshot.leaves[source]
    dtype: str | None = None
    if live is None:
        dtype = _converted_dtype(binding, owner, stored, shape)
        if dtype is not None:
            binding.differences.casts[key] = f"{stored} to {dtype}"
    elif is_live_tensor and tuple(live.shape) == shape:
        library = part_library(type(live))
        _, dtype = library.describe(live)
        castable = stored != dtype and library.can_cast(stored, live)
        # as PyTorch's load_state_dict does, which asks for no permission
        is_counter = slot == "step" and live.numel() == 1
        if castable and (binding.leniency.cast or is_counter):
            binding.differences.casts[key] = f"{stored} to {dtype}"
        elif stored != dtype and (owner.change_slots or is_counter):
            return add_slot(binding, owner, node, key, device)
        elif stored != dtype:
            binding.note_other_dtype(key, stored, dtype, castable)
            return lambda: live
        if (
            live.layout is torch.strided
            and not shares_elements(live)
            and live.device == torch.device(device)
        ):
            return binding.add_array(live, source, key)
    return add_slot(binding, owner, node, key, device, dtype)


def add_slot(
    binding: Binding, owner: SlotOwner, node: Any, key: str, device: Any, dtype: str | None = None
) -> Finalize:
    """Load a slot into new memory. One with the parameter's shape and saved order of dimensions
    gets its strides, because a fused step goes through the memory of both, and its placements.
    Another shape of a distributed parameter is a difference: only the optimizer distributes it."""
    parameter = owner.parameter
    is_distributed = sharding.is_distributed_tensor(parameter)
    for k, n in tree.walk(node, key) if is_distributed and type(node) is dict else ():
        if tree.is_leaf(n):
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
        _, order = binding.saved_leaves.get(owner.saved_name, ("", []))
        like = parameter, order
    return binding.targets.add_fresh(node, key, device, like, dtype)


def _live_slot(owner: SlotOwner, slot: str, node: Any, key: str) -> Any:
    """Return the live slot. If it does not exist yet and is saved as a tensor subclass, let the
    optimizer create it as its first step would, if it has torchao's method for that."""
    live = owner.live_slots.get(slot)
    create = getattr(owner.optimizer, "_new_buffer", None)
    if live is not None or tree.tag_of(node) != "subclass" or create is None:
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
    if not (binding.leniency.cast and shape):
        return None
    saved, _ = binding.saved_leaves.get(owner.saved_name, ("", []))
    library = part_library(type(owner.parameter))
    _, live = library.describe(owner.parameter)
    is_cast = live != stored == saved and library.can_cast(stored, owner.parameter)
    return live if is_cast else None
