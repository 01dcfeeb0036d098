"""Live objects as nested dicts: modules, optimizers, and whatever has ``state_dict()``.

Names are made free of what wraps a model: DDP, DataParallel, ``torch.compile``, FSDP and
activation checkpointing leave no trace in a key, so that a wrapped model's snapshot loads into a
bare one. The state of an optimizer is keyed by the qualified names of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.errors import PlanError
from holdfast.format.tree import child_keys
from holdfast.lazy_torch import torch_or_none

if TYPE_CHECKING:
    import torch

_WRAPPER_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
EXTRA_STATE = "_extra_state"


def is_module(value: object) -> bool:
    torch = torch_or_none()
    return torch is not None and isinstance(value, torch.nn.Module)


def is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


# -- modules -------------------------------------------------------------------------------------


def strip_wrapper_names(module: torch.nn.Module, names: list[str], key: str) -> list[str]:
    """State-dict names without the marks of wrappers. Raises ``PlanError`` if two become one."""
    torch = torch_or_none()
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    cuts = [
        f"{path}.module" if path else "module"
        for path, sub in module.named_modules()
        if isinstance(sub, wrappers)
    ]
    if cuts or any(mark in name for name in names for mark in _WRAPPER_ATTRIBUTES):
        plain = [_strip_wrappers(n, cuts) for n in names]
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


def _strip_wrappers(name: str, wrapped_paths: list[str]) -> str:
    for cut in sorted(wrapped_paths, key=len, reverse=True):
        if name.startswith(cut + "."):
            name = name[: len(cut) - len("module")] + name[len(cut) + 1 :]
    return ".".join(level for level in name.split(".") if level not in _WRAPPER_ATTRIBUTES)


def module_state(module: torch.nn.Module, key: str) -> dict[str, Any]:
    """``module.state_dict()`` under plain names; tensors share memory with the module's."""
    state = module.state_dict()
    return dict(zip(strip_wrapper_names(module, list(state), key), state.values(), strict=True))


# -- optimizers ----------------------------------------------------------------------------------


def parameter_names(state: Any) -> dict[int, str]:
    """``id(parameter)`` to qualified name, for all modules in the state.

    A parameter of the module at ``model`` is called ``model.layers.0.weight``, whatever else is
    in the state, so that adding a module renames nothing.
    """
    names: dict[int, str] = {}
    for path, module in named_modules_in(state, ""):
        found = dict(module.named_parameters(remove_duplicate=False))
        for name, parameter in zip(strip_wrapper_names(module, list(found), path), found.values()):
            names.setdefault(id(parameter), f"{path}.{name}")
    return names


def named_modules_in(
    value: Any, path: str, enclosing_ids: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """The modules in a state, with their paths. Most members of a dict are neither module nor
    container, and are passed over without being named."""
    if is_module(value):
        yield path, value
    elif isinstance(value, dict | list | tuple) and id(value) not in enclosing_ids:
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
            yield from named_modules_in(members[i], at, (*enclosing_ids, id(value)))
