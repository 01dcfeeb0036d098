"""Live objects as nested dicts: modules, optimizers, and whatever has ``state_dict()``.

Names are made free of what wraps a model: DDP, DataParallel, ``torch.compile``, FSDP and
activation checkpointing leave no trace in a key, so that a wrapped model's snapshot loads into a
bare one. The state of an optimizer is keyed by the qualified names of its parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.errors import PlanError
from holdfast.format.tree import child_keys
from holdfast.words import DTYPES, an

if TYPE_CHECKING:
    import torch

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
EXTRA_STATE = "_extra_state"


def torch_or_none() -> Any:
    """The torch module if the program has loaded it. What is no torch object needs no torch."""
    return sys.modules.get("torch")


_dtype_names: dict[Any, str | None] = {}


def dtype_name(dtype: Any) -> str | None:
    """The name of a torch dtype if its elements are bytes that can be written."""
    if dtype not in _dtype_names:
        name = str(dtype).removeprefix("torch.")
        _dtype_names[dtype] = name if name in DTYPES else None
    return _dtype_names[dtype]


def is_module(value: object) -> bool:
    torch = torch_or_none()
    return torch is not None and isinstance(value, torch.nn.Module)


def is_optimizer(value: object) -> bool:
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


def is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


# -- modules -------------------------------------------------------------------------------------


def plain_names(module: torch.nn.Module, names: list[str], key: str) -> list[str]:
    """State-dict names without the marks of wrappers. Raises ``PlanError`` if two become one."""
    torch = torch_or_none()
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    cuts = [
        f"{path}.module" if path else "module"
        for path, sub in module.named_modules()
        if isinstance(sub, wrappers)
    ]
    if cuts or any(mark in name for name in names for mark in _WRAPPED):
        plain = [_without_wrappers(n, cuts) for n in names]
    else:
        plain = names
    if len(set(plain)) < len(plain):
        twice = sorted({n for n in plain if plain.count(n) > 1})
        raise PlanError(
            f"Leaves of the module at {key!r} become one when wrappers are removed",
            found=", ".join(twice[:5]),
            todo="Give the submodules other names",
            leaf=key,
        )
    return plain


def _without_wrappers(name: str, cuts: list[str]) -> str:
    for cut in sorted(cuts, key=len, reverse=True):
        if name.startswith(cut + "."):
            name = name[: len(cut) - len("module")] + name[len(cut) + 1 :]
    return ".".join(level for level in name.split(".") if level not in _WRAPPED)


def module_state(module: torch.nn.Module, key: str) -> dict[str, Any]:
    """``module.state_dict()`` under plain names; tensors share memory with the module's."""
    state = module.state_dict()
    return dict(zip(plain_names(module, list(state), key), state.values(), strict=True))


# -- optimizers ----------------------------------------------------------------------------------


def parameter_names(state: Any) -> dict[int, str]:
    """``id(parameter)`` to qualified name, for all modules in the state.

    A parameter of the module at ``model`` is called ``model.layers.0.weight``, whatever else is
    in the state, so that adding a module renames nothing.
    """
    names: dict[int, str] = {}
    for path, module in modules(state, ""):
        found = dict(module.named_parameters(remove_duplicate=False))
        for name, parameter in zip(plain_names(module, list(found), path), found.values()):
            names.setdefault(id(parameter), f"{path}.{name}")
    return names


def modules(value: Any, path: str, inside: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The modules in a state, with their paths. Most members of a dict are neither module nor
    container, and are passed over without being named."""
    if is_module(value):
        yield path, value
    elif isinstance(value, dict | list | tuple) and id(value) not in inside:
        members = list(value.values()) if isinstance(value, dict) else list(value)
        torch = torch_or_none()
        kinds = (dict, list, tuple) if torch is None else (dict, list, tuple, torch.nn.Module)
        deeper = [i for i, member in enumerate(members) if isinstance(member, kinds)]
        if not deeper:
            return
        try:
            levels = list(value) if isinstance(value, dict) else list(range(len(value)))
            names = child_keys(levels, "")
        except ValueError:  # an integer too long for text, which is refused by its place
            return
        for i in deeper:
            at = f"{path}.{names[i]}" if path else names[i]
            yield from modules(members[i], at, (*inside, id(value)))


def group_names(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[list[str]]:
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
    grouped = group_names(optimizer, names)
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
                found=f"{an(type(slots).__name__)} for "
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
