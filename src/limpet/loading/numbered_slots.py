"""The ``state_dict()`` of an optimizer, which numbers the parameters, as Limpet saves it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from limpet.format import tree
from limpet.layout.select import rename
from limpet.loading.binding import Binding
from limpet.loading.targets import tag_of
from limpet.text import format_list

Members = dict[Any, tuple[Any, str]]
"""Nodes by name, each with its key."""

_WRAPPERS = ("module", "_orig_mod")


def is_numbered(members: Members) -> bool:
    """Return True if a node was made from ``optimizer.state_dict()`` of PyTorch."""
    if members.keys() != {"state", "param_groups"}:
        return False
    (state, state_key), (groups, _) = members["state"], members["param_groups"]
    if tag_of(state) not in ("dict", "items") or tag_of(groups) != "list":
        return False
    if not all(tag_of(g) == "dict" and _numbers(g) is not None for g in groups["list"]):
        return False
    numbers = [n for g in groups["list"] for n in _numbers(g) or ()]
    slots, known = tree.children(state, state_key), {*numbers}
    return len(known) == len(numbers) and all(
        type(n) is int and n in known and tag_of(child) == "dict" for n, child, _ in slots
    )


def _numbers(group: Any) -> list[int] | None:
    params = group["dict"].get("params")
    numbers = params["list"] if tag_of(params) == "list" else None
    return numbers if numbers is not None and all(type(n) is int for n in numbers) else None


def name_parameters(
    binding: Binding, optimizer: Any, grouped: Sequence[Sequence[str]], members: Members, key: str
) -> Members | None:
    """Return the members in the form in which Limpet saves an optimizer: with the names of the
    live parameters at the same positions of the groups.

    Record a difference, and return None, if the live groups have other parameters: another number
    of them, or other names where both sides record them.
    """
    (state, state_key), (groups, groups_key) = members["state"], members["param_groups"]
    # the nodes of leaves name the keys of their bytes, because the names are in other keys
    state, groups = rename(state, {}, state_key), rename(groups, {}, groups_key)
    numbers = [_numbers(group) or [] for group in groups["list"]]
    sizes, live_sizes = [*map(len, numbers)], [*map(len, grouped)]
    if sizes != live_sizes:
        binding.differences.kinds[key] = (
            f"groups of {format_list(list(map(str, sizes)), 10)} parameters, live groups of"
            f" {format_list(list(map(str, live_sizes)), 10)}, and state_dict() numbers them"
        )
        return None
    for group, live_group in zip(groups["list"], optimizer.param_groups, strict=True):
        names, live_names = _recorded_names(group), live_group.get("param_names")
        if names and live_names and list(map(_plain, names)) != list(map(_plain, live_names)):
            binding.differences.kinds[key] = (
                f"parameters {format_list(names, 5)}, live {format_list(live_names, 5)}"
            )
            return None
    name_by_number = {
        n: name
        for saved, names in zip(numbers, grouped, strict=True)
        for n, name in zip(saved, names, strict=True)
    }
    named_slots = {name_by_number[n]: child for n, child, _ in tree.children(state, state_key)}
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
    return [*map(str, names["list"])] if tag_of(names) == "list" else []


def _plain(name: str) -> str:
    return ".".join(level for level in name.split(".") if level not in _WRAPPERS)


def note_misfits(
    binding: Binding, optimizer: Any, parameter: Any, name: str, slots: Any, key: str
) -> bool:
    """If slots do not fit the live parameter at their position, record differences and return True.

    A slot has the shape of its live slot, or of its parameter, or one element.
    """
    live_slots = optimizer.state.get(parameter) or {}
    misfits = {}
    for slot, child, k in tree.children(slots, key):
        source = binding.leaf_source(child, k, "tensor")
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
