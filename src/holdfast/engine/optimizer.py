"""Loading an optimizer: its state becomes exactly the snapshot's, slot by slot, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.engine import live
from holdfast.engine.select import ABSENT
from holdfast.format import tree
from holdfast.format.names import escape, join

if TYPE_CHECKING:
    from holdfast.engine.place import Binder, Settle


def bind_optimizer(binder: Binder, optimizer: Any, node: Any, key: str) -> Settle:
    """Bind an optimizer's slots and options.

    Slots that do not exist yet (before the first step) are made; slots of parameters that had
    none when the snapshot was saved are removed, so that resuming goes on as if never stopped.
    """
    if node is ABSENT:
        if binder.selected(key) or binder.selected(f"{key}/state"):
            binder.differences.missing.append(key)
        return lambda: optimizer
    members = {name: child for name, child, _ in tree.children(node, key)}
    grouped = live.group_names(optimizer, binder.names)
    params: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for group, names in zip(optimizer.param_groups, grouped, strict=True):
        for name, parameter in zip(names, group["params"], strict=True):
            params[name], options[name] = parameter, group
    settles: dict[str, dict[str, Settle]] = {}
    state_key = join(key, "state")
    for name, slots, k in tree.children(members["state"], state_key):
        parameter = params.get(name)
        if parameter is None:
            binder.unexpected({name: slots}, state_key)
            continue
        settles[name] = {}
        for slot, child, slot_key in tree.children(slots, k):
            if binder.selected(slot_key):
                made = _bind_slot(
                    binder,
                    optimizer.state.get(parameter, {}).get(slot),
                    child,
                    slot_key,
                    _device(parameter, options[name], slot),
                )
                settles[name][slot] = made
    groups = _bind_groups(binder, optimizer, grouped, members["groups"], join(key, "groups"))
    exact = binder.selected(state_key) or binder.selected(f"{state_key}/**")

    def settle() -> Any:
        if exact:
            for name, parameter in params.items():
                if name not in settles:
                    optimizer.state.pop(parameter, None)
        for name, slots in settles.items():
            if exact:
                optimizer.state[params[name]] = {}
            optimizer.state[params[name]].update({slot: s() for slot, s in slots.items()})
        for group, values in groups:
            group.update({option: s() for option, s in values.items()})
        return optimizer

    return settle


def _bind_slot(binder: Binder, old: Any, node: Any, key: str, device: Any) -> Settle:
    """In place where the live slot has the same shape and dtype, else into fresh memory."""
    torch = live.torch_or_none()
    if isinstance(old, torch.Tensor) and type(node) is dict and "tensor" in node:
        source, _ = binder.room.leaf(node, key)
        stored = binder.room.snapshot.leaves[source]
        same = (str(old.dtype).removeprefix("torch."), tuple(old.shape)) == stored
        if same and old.layout is torch.strided and old.device == torch.device(device):
            binder.into_tensor(old, source, key)
            return lambda: old
    return binder.room.make(node, key, device)


def _device(parameter: Any, group: dict[str, Any], slot: str) -> Any:
    """Where PyTorch keeps a slot: with its parameter, but step counters on the CPU unless the
    optimizer runs wholly on the device (torch/optim/optimizer.py, load_state_dict)."""
    if slot == "step" and not (group.get("capturable") or group.get("fused")):
        return "cpu"
    return parameter.device


def _bind_groups(
    binder: Binder, optimizer: Any, grouped: list[list[str]], node: Any, key: str
) -> list[tuple[dict[str, Any], dict[str, Settle]]]:
    """The options of each group. A group is recognised by its place; its parameters must be the
    same."""
    saved = node["list"]
    bound = []
    for i in range(max(len(saved), len(grouped))):
        k = join(key, str(i))
        if i >= len(saved) or i >= len(grouped):
            side = binder.differences.missing if i >= len(saved) else binder.differences.unexpected
            if binder.selected(k):
                side.append(k)
            continue
        members = {name: child for name, child, _ in tree.children(saved[i], k)}
        names = tree.decode(members.pop("params"), k, tree.refuse)
        for side, several in (
            (binder.differences.missing, [n for n in grouped[i] if n not in set(names)]),
            (binder.differences.unexpected, [n for n in names if n not in set(grouped[i])]),
        ):
            side += [s for n in several if binder.selected(s := f"{k}/params/{escape(n)}")]
        values = {
            option: binder.room.make(child, join(k, option), "cpu")
            for option, child in members.items()
            if binder.selected(join(k, option))
        }
        bound.append((optimizer.param_groups[i], values))
    return bound
