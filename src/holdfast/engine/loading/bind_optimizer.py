"""Loading an optimizer: its state becomes exactly the snapshot's, slot by slot, by name."""

from __future__ import annotations

from math import prod
from typing import Any

from holdfast import lazy_torch
from holdfast.engine.loading.binding import Binding
from holdfast.engine.loading.targets import Finalize
from holdfast.engine.planning.select import ABSENT
from holdfast.engine.state import optimizers, sharding
from holdfast.format import tree
from holdfast.format.names import escape_level, join_key

_MIN_DIFFERING_OPTIONS = 2


def bind_optimizer(binding: Binding, optimizer: Any, node: Any, key: str) -> Finalize:
    """Bind an optimizer's slots and options.

    Slots that do not exist yet (before the first step) are made; slots of parameters that had
    none when the snapshot was saved are removed, so that resuming goes on as if never stopped.
    """
    if node is ABSENT:
        if binding.selected(key) or binding.selected(f"{key}/state"):
            binding.differences.missing.append(key)
        return lambda: optimizer
    members = binding.dict_members(optimizer, node, key)
    if members is None or _note_other_object(binding, optimizer, members, node, key):
        return lambda: optimizer
    grouped = optimizers.group_parameter_names(optimizer, binding.parameter_names)
    params: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for group, names in zip(optimizer.param_groups, grouped, strict=True):
        for name, parameter in zip(names, group["params"], strict=True):
            params[name], options[name] = parameter, group
    settles: dict[str, dict[str, Finalize]] = {}
    saved, state_key = members["state"]
    exact = binding.selected(state_key) or binding.selected(f"{state_key}/**")
    for name, slots, k in tree.children(saved, state_key):
        name = _rename_parameter(name, binding)
        parameter = params.get(name)
        if parameter is None:
            binding.note_unexpected({name: (slots, k)})
            continue
        settles[name] = {}
        for slot, child, slot_key in tree.children(slots, k):
            if binding.selected(slot_key):
                old = optimizer.state.get(parameter, {}).get(slot)
                if old is None:
                    old = _empty_slot_like(binding, parameter, child, slot_key)
                device = _slot_device(parameter, options[name], slot)
                made = _bind_slot(binding, old, child, slot_key, device)
                settles[name][slot] = made
    groups = _bind_groups(binding, optimizer, grouped, *members["groups"])

    def settle() -> Any:
        if exact:
            for name, parameter in params.items():
                if name not in settles:
                    optimizer.state.pop(parameter, None)
        for name, slots in settles.items():
            made = {slot: s() for slot, s in slots.items()}
            if exact:
                optimizer.state[params[name]] = made
            elif made:
                optimizer.state[params[name]].update(made)
        for group, values in groups:
            group.update({option: s() for option, s in values.items()})
        return optimizer

    return settle


def _note_other_object(
    binding: Binding, optimizer: Any, members: dict[Any, tuple[Any, str]], node: Any, key: str
) -> bool:
    """Whether something else was saved than an optimizer of this class, which is noted."""
    if _is_optimizer_node(members):
        return _note_other_class(binding, optimizer, *members["groups"], key)
    if binding.selected(key):
        binding.note_other_kind(type(optimizer).__name__, node, key)
    return True


def _is_optimizer_node(members: dict[Any, tuple[Any, str]]) -> bool:
    """Whether a node is what ``live.optimizer_state`` makes, not a ``state_dict`` of PyTorch's."""

    def kind(node: Any) -> Any:
        return next(iter(node), None) if type(node) is dict else None

    if members.keys() != {"state", "groups"}:
        return False
    (state, _), (groups, _) = members["state"], members["groups"]
    return (
        kind(state) == "dict"
        and all(kind(slots) == "dict" for slots in state["dict"].values())
        and kind(groups) == "list"
        and all(
            kind(g) == "dict" and kind(g["dict"].get("params")) == "list" for g in groups["list"]
        )
    )


def _note_other_class(
    binding: Binding, optimizer: Any, node: Any, groups_key: str, key: str
) -> bool:
    """Whether an optimizer of another class was saved, which is noted as a difference of kind.

    The class is not in a snapshot, but each has several options that the other lacks, for most
    pairs of classes (not for those where one only has more, such as Adam and RAdam). From one
    version of PyTorch to the next options only come, and one may get another name.
    """
    saved = {option for group in node["list"] for option in group["dict"]}
    own = {option for group in optimizer.param_groups for option in group}
    gone = sorted(option for option in saved - own if not _is_added_later(option))
    new = sorted((set(optimizer.defaults) & own) - saved)
    if len(gone) < _MIN_DIFFERING_OPTIONS or len(new) < _MIN_DIFFERING_OPTIONS:
        return False
    chosen = (join_key(join_key(groups_key, str(i)), gone[0]) for i in range(len(node["list"])))
    if any(map(binding.selected, chosen)):
        binding.differences.kinds[key] = (
            f"saved with {', '.join(gone)}, live {type(optimizer).__name__} with {', '.join(new)}"
        )
        return True
    return False


def _rename_parameter(name: Any, binding: Binding) -> Any:
    """A parameter's name after ``rename``: the path in the state, with dots."""
    for old, new in binding.renames.items():
        start = old.replace("/", ".")
        if name == start or name.startswith(start + "."):
            return new.replace("/", ".") + name[len(start) :]
    return name


def _bind_slot(binding: Binding, old: Any, node: Any, key: str, device: Any) -> Finalize:
    """In place where the live slot has the same shape and dtype, else into fresh memory."""
    torch = lazy_torch.torch_or_none()
    if isinstance(old, torch.Tensor) and type(node) is dict and "tensor" in node:
        source, _ = binding.targets.resolve_leaf(node, key)
        stored = binding.targets.snapshot.leaves[source]
        same = (str(old.dtype).removeprefix("torch."), tuple(old.shape)) == stored
        if same and old.layout is torch.strided and old.device == torch.device(device):
            binding.add_tensor(old, source, key)
            return lambda: old
    return binding.targets.add_fresh(node, key, device)


def _empty_slot_like(binding: Binding, parameter: Any, node: Any, key: str) -> Any:
    """Memory for a slot that does not exist yet, of a parameter that is spread over ranks: it is
    spread alike. None where one tensor is enough, and (with a difference) for a slot of another
    shape, of which nobody but the optimizer knows how it is spread."""
    if not (type(node) is dict and "tensor" in node and sharding.is_distributed_tensor(parameter)):
        return None
    torch = lazy_torch.torch_or_none()
    name, shape = binding.targets.snapshot.leaves[binding.targets.resolve_leaf(node, key)[0]]
    if shape == tuple(parameter.shape):
        return sharding.empty_like(parameter, getattr(torch, name))
    if len(shape) and prod(shape) > 1:
        binding.differences.kinds[key] = (
            f"a slot of shape {list(shape)}, live none yet for a parameter of shape"
            f" {list(parameter.shape)} that is spread over ranks (let the optimizer step once"
            " before)"
        )
    return None


def _slot_device(parameter: Any, group: dict[str, Any], slot: str) -> Any:
    """Where PyTorch keeps a slot: with its parameter, but step counters on the CPU unless the
    optimizer runs wholly on the device (torch/optim/optimizer.py, load_state_dict)."""
    if slot == "step" and not (group.get("capturable") or group.get("fused")):
        return "cpu"
    return parameter.device


def _bind_groups(
    binding: Binding, optimizer: Any, grouped: list[list[str]], node: Any, key: str
) -> list[tuple[dict[str, Any], dict[str, Finalize]]]:
    """The options of each group. A group is recognised by its place; its parameters must be the
    same."""
    saved = node["list"]
    bound = []
    for i in range(max(len(saved), len(grouped))):
        k = join_key(key, str(i))
        if i >= len(saved) or i >= len(grouped):
            side = (
                binding.differences.missing if i >= len(saved) else binding.differences.unexpected
            )
            if binding.selected(k):
                side.append(k)
            continue
        members = {name: child for name, child, _ in tree.children(saved[i], k)}
        names = [
            _rename_parameter(n, binding)
            for n in tree.decode(members.pop("params"), k, tree.reject_value)
        ]
        for side, several in (
            (binding.differences.missing, [n for n in grouped[i] if n not in set(names)]),
            (binding.differences.unexpected, [n for n in names if n not in set(grouped[i])]),
        ):
            side += [s for n in several if binding.selected(s := f"{k}/params/{escape_level(n)}")]
        group, values = optimizer.param_groups[i], {}
        for option, child in members.items():
            if option not in group and not _is_added_later(option):
                # another kind of optimizer, most likely, or one from a later PyTorch
                binding.note_unexpected({option: (child, join_key(k, option))})
            elif binding.selected(join_key(k, option)):
                values[option] = binding.targets.add_fresh(child, join_key(k, option), "cpu")
        bound.append((group, values))
    return bound


def _is_added_later(option: str) -> bool:
    """Whether a scheduler adds the option to the groups, which may be made after the load, or an
    optimizer at its first step (those of timm and apex count their steps there)."""
    names = ("max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "step")
    return option.startswith("initial_") or option in names
