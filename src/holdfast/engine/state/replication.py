"""What wrappers of modules tell of how the ranks hold parameters, buffers and slots."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from holdfast import lazy_torch
from holdfast.engine.state import modules
from holdfast.engine.state.walk import find_instances, optimizers_in
from holdfast.errors import Unsupported

if TYPE_CHECKING:
    import torch


def find_ddp_replication(state: Any) -> dict[int, Replication]:
    """How the ranks hold what ``DistributedDataParallel`` keeps in step, by the address of its
    memory: parameters and the slots of optimizers for them are the same; buffers are those of the
    first rank, if it broadcasts them before each forward pass.

    Raises ``Unsupported`` for an optimizer of the flat parameters of the first FSDP.
    """
    torch = lazy_torch.torch_or_none()
    if torch is None or not torch.distributed.is_available():
        return {}
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return {}
    held: dict[int, Replication] = {}
    alike: set[int] = set()
    flat: set[int] = set()
    for _, module in modules.named_modules_in(state, ""):
        for sub in module.modules():
            if isinstance(sub, torch.nn.parallel.DistributedDataParallel):
                alike.update(_record_ddp_members(sub, held))
            elif type(sub).__name__ == "FullyShardedDataParallel":
                flat.update(map(id, sub.parameters()))
    for optimizer in optimizers_in(state) if alike or flat else ():
        for group in optimizer.param_groups:
            if not flat.isdisjoint(map(id, group["params"])):
                raise _flat_parameter_error(optimizer)
        for parameter, slots in optimizer.state.items():
            if id(parameter) in alike:
                held.update(
                    {
                        t.data_ptr(): Replication.REPLICATED
                        for t in find_instances(slots, torch.Tensor)
                    }
                )
    held.pop(0, None)
    return held


def _record_ddp_members(module: Any, replication: dict[int, Replication]) -> set[int]:
    """Note how a DDP module's members are held; the ids of the parameters that it keeps alike."""
    left_out = module.parameters_to_ignore
    params = [p for name, p in module.module.named_parameters() if name not in left_out]
    replication.update({p.data_ptr(): Replication.REPLICATED for p in params})
    if module.broadcast_buffers:
        buffers = [b for name, b in module.module.named_buffers() if name not in left_out]
        replication.update({b.data_ptr(): Replication.FROM_FIRST for b in buffers})
    return {id(p) for p in params}


def _flat_parameter_error(optimizer: torch.optim.Optimizer) -> Unsupported:
    name = type(optimizer).__name__
    return Unsupported(
        f"The {name} steps parameters of FullyShardedDataParallel (the first FSDP), which are parts"
        " of one flat tensor and do not say where they belong",
        expected="fully_shard(model), the second FSDP, whose parameters are DTensors",
        found=f"{name} of flat parameters",
        todo="Use fully_shard, or save what FullyShardedDataParallel.optim_state_dict(model,"
        " optimizer) gives",
    )


T = TypeVar("T")


class Replication(IntEnum):
    """How the ranks that have a box of a leaf hold it.

    ``ALIKE``: by value, nobody has said that it is the same: their digests are compared before it
    is stored once. ``SAME``: it is by declaration (DTensor, DDP, ``Boxed``), or cannot be another.
    ``FIRST``: the lowest of the ranks that have it counts, whatever the others hold.
    """

    UNVERIFIED = 0
    REPLICATED = 1
    FROM_FIRST = 2


@dataclass(eq=False)
class PerRank(Generic[T]):
    """In a state: each rank keeps its own ``value``, such as the position of its data loader::

        state = {"model": model, "loader": holdfast.PerRank(loader)}

    It is stored under the number of its rank (``loader/3/...``). A rank that was not there when
    the snapshot was saved keeps the value that it has; what ranks saved that are not there any more
    is passed over; a ``RanksChanged`` warning on rank 0 tells of both. Read without a live state it
    is a dict of the ranks' values by number, as text.
    """

    value: T


@dataclass(eq=False)
class Replicated(Generic[T]):
    """In a state: ``value`` is meant to be the same on all ranks, and rank 0's is taken unseen.

    For what differs a little although it need not, such as the running statistics of BatchNorm
    without ``SyncBatchNorm``; without it a difference is an error that names the ranks.
    """

    value: T


def keeps_per_rank(value: Any) -> bool:
    """Whether each rank has one of its own: a ``PerRank``, or an object whose class says so."""
    return isinstance(value, PerRank) or bool(getattr(type(value), "keeps_per_rank", False))
