"""What ``DistributedDataParallel`` keeps in step, so that nobody need compare it."""

from __future__ import annotations

from typing import Any

from holdfast.engine import live
from holdfast.engine.spread import Held
from holdfast.engine.steady import found_in


def in_step(state: Any) -> dict[int, Held]:
    """How the ranks hold what ``DistributedDataParallel`` keeps in step, by the address of its
    memory: parameters and the slots of optimizers for them are the same; buffers are those of the
    first rank, if it broadcasts them before each forward pass."""
    torch = live.torch_or_none()
    if torch is None or not torch.distributed.is_available():
        return {}
    if not torch.distributed.is_initialized():
        return {}
    held: dict[int, Held] = {}
    params: set[int] = set()
    for _, module in live.modules(state, ""):
        for sub in module.modules():
            if isinstance(sub, torch.nn.parallel.DistributedDataParallel):
                params.update(map(id, sub.parameters()))
                held.update({p.data_ptr(): Held.SAME for p in sub.parameters()})
                if sub.broadcast_buffers:
                    held.update({b.data_ptr(): Held.FIRST for b in sub.buffers()})
    for optimizer in found_in(state, torch.optim.Optimizer) if params else ():
        for parameter, slots in optimizer.state.items():
            if id(parameter) in params:
                held.update({t.data_ptr(): Held.SAME for t in found_in(slots, torch.Tensor)})
    held.pop(0, None)
    return held
