"""Optimizers as nested dicts, keyed by parameter names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import PlanError
from holdfast.lazy_torch import torch_or_none
from holdfast.text import with_article

if TYPE_CHECKING:
    import torch


def is_standard_optimizer(value: object) -> bool:
    """Whether it is an optimizer whose state can be keyed by parameter names: one that keeps
    PyTorch's own ``state_dict`` and ``load_state_dict``, without hooks. Others are taken by
    their own."""
    torch = torch_or_none()
    if torch is None or not isinstance(value, torch.optim.Optimizer):
        return False
    own, base = type(value), torch.optim.Optimizer
    if own.state_dict is not base.state_dict or own.load_state_dict is not base.load_state_dict:
        return False
    return not (
        value._optimizer_state_dict_pre_hooks
        or value._optimizer_state_dict_post_hooks
        or value._optimizer_load_state_dict_pre_hooks
        or value._optimizer_load_state_dict_post_hooks
    )


def group_parameter_names(
    optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> list[list[str]]:
    """The names of the parameters of each group. One that belongs to no module in the state is
    called by its place (``0.3``: the fourth of the first group).

    Raises ``PlanError`` if two would have one name.
    """
    grouped = [
        [names.get(id(p), f"{i}.{j}") for j, p in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]
    flat = [name for group in grouped for name in group]
    if len(set(flat)) < len(flat):
        twice = next(name for name in flat if flat.count(name) > 1)
        raise PlanError(
            f"Two parameters of an optimizer would both be called {twice}",
            todo='Name the modules in the state so that their paths differ: {"a.b": x, "a": {"b":'
            " y}} gives both the same",
            leaf=twice,
        )
    return grouped


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[int, str], key: str
) -> dict[str, Any]:
    """``{"state": {parameter: {slot: value}}, "groups": [{option: value, "params": [...]}]}``."""
    grouped = group_parameter_names(optimizer, names)
    named: dict[int, str] = {}
    for group, members in zip(optimizer.param_groups, grouped, strict=True):
        named.update({id(p): n for p, n in zip(group["params"], members, strict=True)})
    state = {}
    for parameter, slots in optimizer.state.items():
        name = named.get(id(parameter))
        if name is None or not isinstance(slots, dict):
            raise PlanError(
                f"The optimizer at {key!r} has state of a kind that is not known",
                expected="for each parameter of its groups a dict of slots",
                found=f"{with_article(type(slots).__name__)} for "
                + ("what is in none of its groups" if name is None else name),
                todo="Give the optimizer a state_dict() and load_state_dict() of its own",
                leaf=key,
            )
        state[name] = dict(slots)
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} | {"params": members}
        for group, members in zip(optimizer.param_groups, grouped, strict=True)
    ]
    return {"state": state, "groups": groups}
