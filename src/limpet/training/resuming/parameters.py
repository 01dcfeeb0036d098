"""Parameters that an optimizer of the state changes, and that no member of the state saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from limpet.lazy_torch import dtype_name, torch_or_none
from limpet.state.walk import storage_address
from limpet.text import format_count, format_list
from limpet.training.resuming.members import find_members

_MAX_NAMES = 3


def find_unsaved_parameters(state: dict[str, Any], members: Sequence[Any]) -> str:
    """Describe the parameters of the optimizers of a state that are not in it; empty if there are
    none, or no modules.

    ``members``: the objects with a ``state_dict`` in the state. Usual causes are a layer that was
    replaced, or ``fully_shard``, after the optimizer was created: the new parameters are not
    trained either.
    """
    torch: Any = torch_or_none()
    modules = [m for m in members if isinstance(m, torch.nn.Module)]
    if not modules or any(_saves_other_values(sub, torch) for m in modules for sub in m.modules()):
        return ""
    saved = [tensor for module in modules for tensor in module.parameters()]
    identities = set(map(id, saved))
    lacking: dict[str, list[Any]] = {}
    for key, optimizer in find_members(state, torch.optim.Optimizer):
        found = [p for p in _parameters(optimizer) if id(p) not in identities]
        # fully_shard replaces the sharded parameters of the module during a forward pass
        if found := [p for p in found if not hasattr(p, "_local_tensor")]:
            lacking[key] = found
    if not lacking:
        return ""
    saved += [buffer for module in modules for buffer in module.buffers()]
    saved += [tensor for _, tensor in find_members(state, torch.Tensor)]
    # a tensor or an array of the state, such as one of module.state_dict(), may share the memory
    addresses = {0, *map(storage_address, saved)}
    addresses.update(array.ctypes.data for _, array in find_members(state, np.ndarray))
    described = [
        f"{format_count(len(unsaved), 'parameter')} of {key} ({format_list(shapes, _MAX_NAMES)})"
        for key, found in lacking.items()
        if (unsaved := [p for p in found if storage_address(p) not in addresses])
        and (shapes := [f"{dtype_name(p.dtype)} {[*p.shape]}" for p in unsaved])
    ]
    if not described:
        return ""
    return (
        f"It lacks {format_list(described, _MAX_NAMES)}: no module in the state has them. Add their"
        " module, not a copy of it. If the parameters of a module were replaced after the optimizer"
        " was created (a new layer, fully_shard), create the optimizer afterwards: it does not"
        " train the new parameters"
    )


def _parameters(optimizer: Any) -> list[Any]:
    groups = getattr(optimizer, "param_groups", ())
    return [p for group in groups if isinstance(group, dict) for p in group.get("params", ())]


def _saves_other_values(module: Any, torch: Any) -> bool:
    """Return True if a module may save more than its parameters and buffers."""
    own, base = type(module), torch.nn.Module
    return (
        own.state_dict is not base.state_dict
        or own._save_to_state_dict is not base._save_to_state_dict
        or own.get_extra_state is not base.get_extra_state
        or bool(module._state_dict_hooks)
    )
