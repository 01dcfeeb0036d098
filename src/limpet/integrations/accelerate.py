"""Hugging Face Accelerate: a ``Checkpointer`` whose state is what an ``Accelerator`` has."""

from typing import Any

from limpet.convert.arrange import numbered_name
from limpet.data.loader import DataLoader
from limpet.errors import LimpetError
from limpet.integrations.frameworks import check_accelerator, check_arguments, check_release
from limpet.state.replication import as_ddp
from limpet.training.checkpointer import Checkpointer


class _Checkpointer(Checkpointer):
    accelerator: Any

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self.accelerator.sync_gradients:  # as for a prepared optimizer
            super().step(*args, **kwargs)


def checkpointer(accelerator: Any, run: Any, state: Any = None, **options: Any) -> Checkpointer:
    """Return ``Checkpointer(run, **options)`` for what is prepared and registered at the resume:
    ``model``, ``optimizer``, ``scheduler``, ``loader`` (if elastic), ``scaler``, ``registered``,
    and further ones as ``model_1`` and so on. ``state`` is a dict of more. ``step``, like that of a
    prepared optimizer, does nothing while gradients are accumulated.

    Raises ``LimpetError`` for DeepSpeed, Megatron-LM, XLA, FSDP1, tensor and context parallelism;
    at the resume, without a prepared model, or if loaders are prepared, but none is elastic.
    """
    check_arguments(options, {})
    check_release("accelerate", "1.10", "1.15")
    check_accelerator("checkpointer", accelerator)
    kind = accelerator.distributed_type.value

    def collect() -> dict[str, Any]:
        a, more, ddp = accelerator, dict(state or {}), accelerator.ddp_handler
        broadcasts = ddp is None or ddp.broadcast_buffers
        kinds = {
            "model": [as_ddp(m, broadcasts) if "MULTI" in kind else m for m in a._models],
            "optimizer": [prepared.optimizer for prepared in a._optimizers],
            "scheduler": [prepared.scheduler for prepared in a._schedulers],
            "loader": [m for m in a._dataloaders if isinstance(m, DataLoader)],
            "scaler": [a.scaler] if a.scaler else [],
            "registered": a._custom_objects,
        }
        own = {numbered_name(k, i): m for k, found in kinds.items() for i, m in enumerate(found)}
        if taken := own.keys() & more.keys():
            raise LimpetError(f"state= has {min(taken)!r}, which is the key of a prepared object")
        if not a._models:
            raise LimpetError("The Accelerator has no model: call prepare() before the resume")
        if a._dataloaders and not any(isinstance(m, DataLoader) for m in (own | more).values()):
            raise LimpetError("No loader has a position: use limpet.elastic(prepare(loader))")
        return own | more

    ckpt = _Checkpointer(run, collect, **options)
    ckpt.accelerator = accelerator
    return ckpt
