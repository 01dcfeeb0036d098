"""Optimizers as nested dicts, keyed by parameter names."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import chain
from typing import Any

from limpet.errors import PlanError
from limpet.format.names import join_key
from limpet.format.rejected import unsupported
from limpet.lazy_torch import torch_or_none
from limpet.state.walk import find_instances, slots_of

NameOf = Callable[[Any], str | None]
"""Returns the name of a parameter (``ParameterNames.name_of``)."""


INNER = "inner_optimizers"
"""The member of an optimizer's saved state with the optimizers that it has as attributes."""


def is_standard_optimizer(value: object) -> bool:
    """Return True for an optimizer with PyTorch's own ``state_dict`` and ``load_state_dict``,
    without hooks. The state of any other is its ``state_dict()``."""
    torch = torch_or_none()
    if torch is None or not isinstance(value, torch.optim.Optimizer):
        return False
    own, base = type(value), torch.optim.Optimizer
    return (
        own.state_dict is base.state_dict
        and own.load_state_dict is base.load_state_dict
        and not value._optimizer_state_dict_pre_hooks
        and not value._optimizer_state_dict_post_hooks
        and not value._optimizer_load_state_dict_pre_hooks
        and not value._optimizer_load_state_dict_post_hooks
    )


def group_parameter_names(optimizer: Any, name_of: NameOf) -> list[list[str]]:
    """Return the names of the parameters of each group: those in the state, or else those that the
    optimizer was created with (``param_names``), or else positions: ``0.3`` is the fourth one of
    the first group. Raises ``PlanError`` if two names are equal."""
    grouped = []
    for i, group in enumerate(optimizer.param_groups):
        own = group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))]
        grouped.append([name_of(p) or o for p, o in zip(group["params"], own, strict=True)])
    flat = [name for group in grouped for name in group]
    if len(set(flat)) < len(flat):
        duplicate = next(name for name, count in Counter(flat).items() if count > 1)
        raise PlanError(
            f"Two parameters of an optimizer would both be named {duplicate}",
            todo='Give the modules in the state different paths; in {"a.b": x, "a": {"b": y}}, both'
            " modules have the path a.b",
            leaf=duplicate,
        )
    return grouped


def _require_names(optimizer: Any, grouped: list[list[str]], key: str) -> None:
    """Raise ``PlanError`` if parameters of one shape with slots have only their positions as names:
    after a restart in another order, each would get the slots of another one."""
    owners = getattr(optimizer, "state", {})
    shapes = Counter(str(list(p.shape)) for p in _unnamed(optimizer, grouped) if p in owners)
    for shape, count in shapes.most_common(1):
        if count > 1:
            raise PlanError(
                f"The optimizer at {key!r} has slots of {count} parameters of shape {shape} that"
                " have no names, because no module or tensor of the state has them",
                todo="Add their module, or create the optimizer with model.named_parameters()",
                leaf=key,
            )


def _unnamed(optimizer: Any, grouped: list[list[str]]) -> list[Any]:
    """Return the parameters that have only their positions as names."""
    return [
        parameter
        for i, (group, names) in enumerate(zip(optimizer.param_groups, grouped, strict=True))
        for j, (parameter, name) in enumerate(zip(group["params"], names, strict=True))
        if name == f"{i}.{j}"
    ]


def optimizer_state(optimizer: Any, name_of: NameOf, key: str) -> dict[str, Any]:
    """Return ``{"state": {parameter: {slot: value}}, "groups": [{option: value, "params":
    [...]}]}`` by parameter names. ``state`` also has what belongs to no parameter, by its own keys.
    Raises ``PlanError`` for state of a tensor that is in no group."""
    grouped = group_parameter_names(optimizer, name_of)
    _require_names(optimizer, grouped, key)
    with suppress(KeyError):
        state = optimizer.state_dict()
        named = rename_parameters(state, int, grouped)
        groups = named["param_groups"]
        for i, name in ((i, name) for i, group in enumerate(groups) for name in group):
            if type(name) is not str:
                option = join_key(join_key(key, f"groups/{i}"), repr(name))
                raise unsupported(name, option, "the name of an option must be a string")
        if len(named["state"]) == len(state["state"]):
            named = {"state": named["state"], "groups": groups}
            return named | _inner_states(optimizer, named, name_of, key)
    raise PlanError(
        f"The optimizer at {key!r} has state of an unknown kind",
        expected="state of parameters that are in its groups, or by other keys than their names",
        todo="Implement state_dict() and load_state_dict() in the optimizer's class",
        leaf=key,
    )


# -- optimizers with code of their own -------------------------------------------------------------


def has_groups(value: object) -> bool:
    """Return True for an optimizer, and for an object that behaves like one."""
    return _are_groups(getattr(value, "param_groups", None))


def name_parameters(optimizer: Any, state: Any, name_of: NameOf, key: str) -> Any:
    """Return an object's own ``state_dict()``, of an optimizer by parameter names, where it has
    PyTorch's form, also in inner ones. Raises ``PlanError`` if there are no names."""
    if not has_groups(optimizer):
        return state
    grouped = group_parameter_names(optimizer, name_of)
    if _is_state(state, int):
        _require_names(optimizer, grouped, key)
    named = state if _unnamed(optimizer, grouped) else rename_parameters(state, int, grouped)
    if type(named) is not dict:
        return named
    return named | _inner_states(optimizer, named, name_of, key)


def _inner_states(optimizer: Any, state: Any, name_of: NameOf, key: str) -> dict[str, Any]:
    """Return the states of the optimizers that an optimizer has as attributes, as a member of its
    own state, if that lacks their slots, as that of SAM does."""
    import torch

    attributes, own = getattr(optimizer, "__dict__", {}), getattr(optimizer, "state", None)
    inner = {
        name: value
        for name, value in attributes.items()
        if isinstance(value, torch.optim.Optimizer) and value.state is not own
    }
    saved = {id(t) for t in find_instances(state, torch.Tensor)} if inner else set()
    states = {
        name: optimizer_state(value, name_of, key)
        if is_standard_optimizer(value)
        else name_parameters(value, value.state_dict(), name_of, key)
        for name, value in inner.items()
        if {*map(id, slots_of(value))} - saved
    }
    return {INNER: states} if states else {}


def rename_parameters(
    value: Any, kind: type, grouped: list[list[str]], to_live: Callable[[Any], Any] = lambda k: k
) -> Any:
    """Replace the numbers of the parameters in a ``state_dict()`` and the states in it by names
    (``kind`` is int), or names by the numbers of the live parameters (``kind`` is str), whose names
    ``to_live`` returns for saved ones."""
    rename = partial(rename_parameters, kind=kind, grouped=grouped, to_live=to_live)
    if type(value) in (list, tuple):
        return type(value)(map(rename, value))
    if type(value) not in (dict, OrderedDict):
        return value
    saved = [group["params"] for group in value["param_groups"]] if _is_state(value, kind) else []
    if not saved or (kind is int and [*map(len, saved)] != [*map(len, grouped)]):
        saved, members = [], value
    else:
        members = {k: v for k, v in value.items() if k not in ("state", "param_groups")}
    renamed = copy(value)
    renamed.update({name: rename(member) for name, member in members.items()})
    if not saved:
        return renamed
    flat, known = [*chain(*grouped)], [*map(to_live, chain(*saved))]
    new = dict(zip(known, flat)) if kind is int else {name: i for i, name in enumerate(flat)}
    slots = [(to_live(name), slots) for name, slots in value["state"].items()]
    renamed["state"] = {new.get(k, k): v for k, v in slots if k in new or k not in known}
    renamed["param_groups"] = [
        {k: v for k, v in group.items() if k != "param_names"} | {"params": [new[n] for n in names]}
        for group, names in zip(value["param_groups"], saved if kind is int else grouped)
    ]
    return renamed


def _is_state(value: Any, kind: type) -> bool:
    """Return True for PyTorch's form of a state whose parameters are of a kind."""
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return False
    groups: Any = value.get("param_groups")
    is_state = _are_groups(groups)
    return is_state and {type(p) for group in groups for p in group["params"]} == {kind}


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )
