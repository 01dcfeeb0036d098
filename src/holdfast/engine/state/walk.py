"""What lies in the containers of a state: optimizers, modules, and whose memory it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from holdfast import lazy_torch
from holdfast.format.tree import MAX_DEPTH

if TYPE_CHECKING:
    import torch


def optimizers_in(state: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in the containers of a state, each once, those with a ``state_dict`` of
    their own included."""
    torch = lazy_torch.torch_or_none()
    return [] if torch is None else list(find_instances(state, torch.optim.Optimizer))


def modules_in(state: Any) -> list[torch.nn.Module]:
    """The modules in the containers of a state, each once; not what is inside them."""
    torch = lazy_torch.torch_or_none()
    return [] if torch is None else list(find_instances(state, torch.nn.Module))


def parameters_and_slots(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """The parameters of the optimizers, and the tensors among their slots."""
    for optimizer in optimizers:
        yield from parameters_of(optimizer)
        yield from slots_of(optimizer)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def slots_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors among an optimizer's slots, in lists and dicts too."""
    torch = lazy_torch.torch_or_none()
    for slots in optimizer.state.values():
        for slot in slots.values() if isinstance(slots, dict) else (slots,):
            if type(slot) is torch.Tensor:  # nearly always, and quickly told
                yield slot
            else:
                yield from find_instances(slot, torch.Tensor)


def find_stable_storages(
    tensors: Iterable[torch.Tensor], modules: Sequence[torch.nn.Module]
) -> frozenset[int]:
    """The storages of the tensors, without those of what a forward pass of the modules changes
    (buffers, and the weights of embeddings with ``max_norm``), and of inference tensors, whose
    changes nobody counts."""
    loose = {0}
    for sub in (sub for module in modules for sub in module.modules()):
        loose.update(storage_address(b) for b in sub._buffers.values() if b is not None)
        if getattr(sub, "max_norm", None) is not None:
            loose.update(storage_address(p) for p in sub.parameters(recurse=False))
    return frozenset(
        s for t in tensors if (s := storage_address(t)) not in loose and not t.is_inference()
    )


def storage_address(t: torch.Tensor) -> int:
    """Where a tensor's storage begins; 0 if it has no memory that can be named."""
    try:
        return to_local(t).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0  # sparse, a wrapper subclass, not materialised: nothing holds still there


def to_local(t: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor: of a DTensor its local part."""
    local: torch.Tensor = getattr(t, "_local_tensor", t)
    return local


def find_instances(value: Any, kind: type[Any]) -> Iterator[Any]:
    """What is of a kind in nested dicts, lists and tuples, each object once."""
    seen: dict[int, Any] = {}  # held: what a container makes while it is read might share its id

    def walk(value: Any, depth: int) -> Iterator[Any]:
        found = isinstance(value, kind)
        if not found and (depth >= MAX_DEPTH or not isinstance(value, dict | list | tuple)):
            return
        if id(value) in seen:
            return
        seen[id(value)] = value
        if found:
            yield value
        else:
            for member in value.values() if isinstance(value, dict) else value:
                yield from walk(member, depth + 1)

    return walk(value, 0)
