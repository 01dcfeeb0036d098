"""The dense parameters and buffers of a model, distributed over the servers as whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from typing import Any

import torch

from limpet.errors import LimpetError
from limpet.tables.messages import Push


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers by name. Tied ones have their first name only."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def distribute(model: torch.nn.Module, servers: int) -> list[list[str]]:
    """Return the names of the tensors of each server: consecutive ones of about equal bytes, so
    that lists of the servers' parameters, in a row, have the order of the model."""
    parts: list[list[str]] = [[] for _ in range(servers)]
    sizes = {name: tensor.nbytes for name, tensor in named_tensors(model).items()}
    before, total = 0, sum(sizes.values())
    for name, size in sizes.items():
        parts[min((2 * before + size) * servers // (2 * total or 1), servers - 1)].append(name)
        before += size
    return parts


def check_updates(optimizer: Any, scheduler: Any) -> None:
    """Raise ``LimpetError`` for an optimizer that needs all gradients at once, and for a scheduler
    that needs more than the number of the step, or changes more than the learning rates, which are
    all that servers get."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise LimpetError(
            "dense= has the optimizer LBFGS, which needs all gradients at once; each server has the"
            " gradients of its own parameters only"
        )
    kind = type(scheduler).__name__
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise LimpetError(f"dense= has the scheduler {kind}, whose step() needs a metric")
    if getattr(scheduler, "cycle_momentum", False):
        todo = "use cycle_momentum=False"
        raise LimpetError(f"dense= has the scheduler {kind}, which changes momentum, too: {todo}")


def keep_part(model: torch.nn.Module, optimizer: torch.optim.Optimizer, names: list[str]) -> None:
    """Remove the other tensors from a model, which cannot be called then, and its optimizer."""
    kept = {id(tensor) for name, tensor in named_tensors(model).items() if name in names}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name in [n for n, t in tensors.items() if t is not None and id(t) not in kept]:
                del tensors[name]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in kept]


class DensePart:
    """The dense tensors of one server: those that its model has. ``lock``: a scheduler in this
    process changes the rates of the optimizer."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, lock: Any = None
    ) -> None:
        self.version = 1  # a worker begins with 0
        self._lock = RLock() if lock is None else lock
        self._optimizer, self._step = optimizer, 0
        self._parameters, self._buffers = (
            dict(model.named_parameters()),
            dict(model.named_buffers()),
        )

    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of the parameters and buffers."""
        with self._lock:
            tensors = {**self._parameters, **self._buffers}
            return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def restart(self) -> None:
        """Take the buffers of any step: an earlier one was restored."""
        self._step = 0

    def set_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates):
            group["lr"] = rate

    def update(self, pushes: Sequence[Push], step: int, rates: Sequence[float]) -> None:
        """Make one step with the average of the gradients of the pushes, in their order. Of the
        buffers, those of the newest step are kept."""
        with self._lock:
            current = [group["lr"] for group in self._optimizer.param_groups]
            self.set_rates(rates)
            for name, parameter in self._parameters.items():
                found = [push.dense[name] for push in pushes if name in push.dense]
                if found:
                    average = sum(found[1:], found[0]) / len(pushes)
                    parameter.grad = average.to(parameter.dtype)
            self._optimizer.step()
            self.set_rates(current)
            for parameter in self._parameters.values():
                parameter.grad = None
            if step >= self._step:
                self._step = step
                for name, newest in [item for push in pushes for item in push.buffers.items()]:
                    if name in self._buffers:
                        self._buffers[name].copy_(newest)
            self.version += 1
