"""Parameters that an optimizer of the state changes, and that no member of the state saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.engine.state.walk import find_instances, find_named_instances, storage_address
from holdfast.lazy_torch import dtype_name, torch_or_none
from holdfast.text import format_count, format_list

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
    if not modules:
        return ""
    saved = [tensor for module in modules for tensor in module.parameters()]
    identities = set(map(id, saved))
    lacking: dict[str, list[Any]] = {}
    for path, optimizer in find_named_instances(state, torch.optim.Optimizer, separator="/"):
        found = [p for group in optimizer.param_groups for p in group["params"]]
        found = [p for p in found if id(p) not in identities]
        if found:
            lacking[path] = found
    if not lacking:
        return ""
    saved += [buffer for module in modules for buffer in module.buffers()]
    # a tensor of the state, such as one of module.state_dict(), may share the memory
    addresses = {0, *map(storage_address, [*saved, *find_instances(state, torch.Tensor)])}
    described = [
        f"{format_count(len(unsaved), 'parameter')} of {path} ({format_list(shapes, _MAX_NAMES)})"
        for path, found in lacking.items()
        if (unsaved := [p for p in found if storage_address(p) not in addresses])
        and (shapes := [f"{dtype_name(p.dtype)} {[*p.shape]}" for p in unsaved])
    ]
    if not described:
        return ""
    return (
        f"It lacks {format_list(described, _MAX_NAMES)}. Add the module that has them to the state."
        " If its parameters were replaced after the optimizer was created (a new layer,"
        " fully_shard), create the optimizer again: it does not train the new ones"
    )
