"""Hugging Face Accelerate: a ``Checkpointer`` whose state is what an ``Accelerator`` has."""

from typing import Any

from limpet.data.loader import DataLoader
from limpet.errors import LimpetError
from limpet.integrations import frameworks
from limpet.state.replication import as_ddp
from limpet.training.checkpointer import Checkpointer


class _Checkpointer(Checkpointer):
    accelerator: Any

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self.accelerator.sync_gradients:  # as for a prepared optimizer
            super().step(*args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> Any:
        if self.accelerator.sync_gradients:  # else the buffers of the model belong to no step
            return super().save(*args, **kwargs)
        raise LimpetError("save() within a step is refused: call it if accelerator.sync_gradients")


def checkpointer(accelerator: Any, run: Any, state: Any = None, **options: Any) -> Checkpointer:
    """Return ``Checkpointer(run, **options)`` for what is prepared and registered at the resume:
    ``model``, ``optimizer``, ``scheduler``, ``loader`` (if elastic), ``scaler``, ``registered``,
    a second ``model_1``, and so on. ``state``: a dict of more. While gradients are accumulated,
    ``step`` does nothing, and ``save`` is refused. Raises ``LimpetError`` for DeepSpeed, Megatron,
    XLA, FSDP1, and tensor and context parallelism; at the resume, without a model, an optimizer, or
    an elastic one of prepared loaders.
    """
    frameworks.check_arguments(options, {})
    frameworks.check_release("accelerate", "1.10", "1.15")
    frameworks.check_accelerator("checkpointer", accelerator)

    def collect() -> dict[str, Any]:
        a, more, kind = accelerator, dict(state or {}), accelerator.distributed_type.value
        broadcasts = a.ddp_handler is None or a.ddp_handler.broadcast_buffers
        kinds = {
            "model": [as_ddp(m, broadcasts) if "MULTI" in kind else m for m in a._models],
            "optimizer": [prepared.optimizer for prepared in a._optimizers],
            "scheduler": [prepared.scheduler for prepared in a._schedulers],
            "loader": [m for m in a._dataloaders if isinstance(m, DataLoader)],
            "scaler": [a.scaler] if a.scaler else [],
            "registered": a._custom_objects,
        }
        own = frameworks.number_members(kinds)
        if taken := own.keys() & more.keys():
            raise LimpetError(f"state= has {min(taken)!r}, which is the key of a prepared object")
        if lacking := {"model", "optimizer"} - (own | more).keys():
            raise LimpetError(f"The Accelerator has no {min(lacking)}: prepare() it before this")
        if a._dataloaders and not any(isinstance(m, DataLoader) for m in (own | more).values()):
            raise LimpetError("No loader has a position: use limpet.elastic(prepare(loader))")
        return own | more

    ckpt = _Checkpointer(run, collect, **options)
    ckpt.accelerator = accelerator
    return ckpt
