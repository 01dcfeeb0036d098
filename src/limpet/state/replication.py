"""How the ranks replicate values: wrappers such as DDP, ``PerRank``, and ``Replicated``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from limpet import lazy_torch
from limpet.errors import Unsupported
from limpet.state.walk import find_instances, modules_in, optimizers_in

if TYPE_CHECKING:
    import torch


def find_ddp_replication(state: Any) -> dict[int, Replication]:
    """Return by address how the ranks replicate what DDP synchronizes: parameters and their slots,
    and buffers if it broadcasts them. Raises ``Unsupported`` for flat parameters of FSDP1."""
    torch = lazy_torch.torch_or_none()
    if lazy_torch.rank_and_world_size()[1] == 1:
        return {}
    replication: dict[int, Replication] = {}
    ddp_parameter_ids: set[int] = set()
    flat_parameter_ids: set[int] = set()
    for sub in (sub for module in modules_in(state) for sub in module.modules()):
        if isinstance(sub, torch.nn.parallel.DistributedDataParallel):
            ignored, members = sub.parameters_to_ignore, sub.module
            params = [p for name, p in members.named_parameters() if name not in ignored]
            ddp_parameter_ids.update(map(id, params))
            replication.update({p.data_ptr(): Replication.REPLICATED for p in params})
            if sub.broadcast_buffers:
                buffers = [b for name, b in members.named_buffers() if name not in ignored]
                replication.update({b.data_ptr(): Replication.FROM_FIRST for b in buffers})
        elif type(sub).__name__ == "FullyShardedDataParallel":
            flat_parameter_ids.update(map(id, sub.parameters()))
    for optimizer in optimizers_in(state) if ddp_parameter_ids or flat_parameter_ids else ():
        for group in optimizer.param_groups:
            if not flat_parameter_ids.isdisjoint(map(id, group["params"])):
                raise _flat_parameter_error(optimizer)
        slots = [
            s for parameter, s in optimizer.state.items() if id(parameter) in ddp_parameter_ids
        ]
        tensors = find_instances(slots, torch.Tensor)
        replication.update({t.data_ptr(): Replication.REPLICATED for t in tensors})
    replication.pop(0, None)
    return replication


def as_ddp(module: Any, broadcast_buffers: bool) -> Any:
    """Return a ``DistributedDataParallel`` around a module for a state, for one that a framework
    does not give. It tells how the ranks replicate the module, and cannot be called."""
    torch = lazy_torch.torch_or_none()
    ddp = torch.nn.parallel.DistributedDataParallel
    wrapper = ddp.__new__(ddp)
    torch.nn.Module.__init__(wrapper)
    wrapper.module, wrapper.broadcast_buffers = module, broadcast_buffers
    wrapper.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return wrapper


def _flat_parameter_error(optimizer: torch.optim.Optimizer) -> Unsupported:
    name = type(optimizer).__name__
    return Unsupported(
        f"The {name} optimizes flat parameters of FullyShardedDataParallel (FSDP1), which do not"
        " record which part of the model's parameters they hold",
        expected="fully_shard(model) (FSDP2), whose parameters are DTensors",
        found=f"{name} with flat parameters",
        todo="Use fully_shard, or save the result of"
        " FullyShardedDataParallel.optim_state_dict(model, optimizer)",
    )


T = TypeVar("T")


class Replication(IntEnum):
    """How the ranks that have the same box of a leaf replicate it.

    ``UNVERIFIED``: they compare digests before it is stored once. ``REPLICATED``: equal by
    declaration (DTensor, DDP, ``Boxed``), or of one rank only. ``FROM_FIRST``: that of the lowest
    rank is stored.
    """

    UNVERIFIED = 0
    REPLICATED = 1
    FROM_FIRST = 2


@dataclass(eq=False)
class PerRank(Generic[T]):
    """Marks a value in a state as different on each rank, such as the position of a data loader::

        state = {"model": model, "loader": limpet.PerRank(loader)}

    The value of each rank is stored under the rank's number (``loader/3/...``). If a load uses more
    ranks than the save, each new rank keeps its current value. If it uses fewer, the values of the
    missing ranks are ignored. In both cases, rank 0 issues an ``InexactResume`` warning. A load
    without a live state returns a dict that maps rank numbers, as strings, to values.
    """

    value: T


@dataclass(eq=False)
class Replicated(Generic[T]):
    """Marks a value in a state as the same on all ranks; rank 0's is saved without a comparison.

    Use it for a value that differs slightly without a need to, such as the running statistics of
    BatchNorm without ``SyncBatchNorm``: otherwise, a difference is an error that names the ranks.
    """

    value: T


def keeps_per_rank(value: Any) -> bool:
    """Return True for a ``PerRank`` and for an object whose ``keeps_per_rank`` is True."""
    return isinstance(value, PerRank) or getattr(value, "keeps_per_rank", False) is True
