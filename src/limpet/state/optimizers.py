"""Optimizers as nested dicts, keyed by parameter names."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from limpet.errors import PlanError
from limpet.format.names import join_key
from limpet.format.rejected import unsupported
from limpet.lazy_torch import torch_or_none
from limpet.text import with_article

if TYPE_CHECKING:
    import torch


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


def group_parameter_names(
    optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> list[list[str]]:
    """Return the names of the parameters of each group; ``0.3`` is the fourth parameter of the
    first group if no module in the state has it. Raises ``PlanError`` if two names are equal."""
    grouped = [
        [names.get(id(p), f"{i}.{j}") for j, p in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]
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


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[int, str], key: str
) -> dict[str, Any]:
    """Return ``{"state": {parameter: {slot: value}}, "groups": [{option: value, "params":
    [...]}]}`` by parameter names. Raises ``PlanError`` for state that is no dict of slots."""
    grouped = group_parameter_names(optimizer, names)
    name_by_id = {
        id(parameter): name
        for group, members in zip(optimizer.param_groups, grouped, strict=True)
        for parameter, name in zip(group["params"], members, strict=True)
    }
    state = {}
    for parameter, slots in optimizer.state.items():
        name = name_by_id.get(id(parameter))
        if name is None or not isinstance(slots, dict):
            raise PlanError(
                f"The optimizer at {key!r} has state of an unknown kind",
                expected="a dict of slots for each parameter of its groups",
                found=f"{with_article(type(slots).__name__)} for "
                + ("an object that is not in any of its groups" if name is None else name),
                todo="Implement state_dict() and load_state_dict() in the optimizer's class",
                leaf=key,
            )
        state[name] = dict(slots)
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} | {"params": members}
        for group, members in zip(optimizer.param_groups, grouped, strict=True)
    ]
    for i, name in ((i, name) for i, group in enumerate(groups) for name in group):
        if type(name) is not str:
            option = join_key(join_key(key, f"groups/{i}"), repr(name))
            raise unsupported(name, option, "the name of an option must be a string")
    return {"state": state, "groups": groups}
