"""Optimizers of rows. Each works on some rows at once, as torch.optim on one parameter per row.

The result of a row does not depend on the rows that are updated with it, nor on the machine: each
float operation is rounded once (no fused operations, whose vectors and remainders may differ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from limpet.arguments import real, require
from limpet.tables.initializers import ANY, POSITIVE, check_floats

Slots = Mapping[str, torch.Tensor]
"""Slots of the rows of an update, by name: each float32 ``[rows, width]``."""


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, as torch.optim.SGD (momentum without dampening)."""

    lr: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        check_floats(self, lr=0, momentum=0)

    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        return {"momentum": (dim, 0.0)} if self.momentum else {}

    def update(self, values: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float) -> None:
        if self.momentum:
            grads = slots["momentum"].mul_(self.momentum).add_(grads)
        values.sub_(grads * lr)


@dataclass(frozen=True)
class Adagrad:
    """Adagrad (Duchi et al., 2011), as torch.optim.Adagrad."""

    lr: float
    initial_accumulator: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        check_floats(self, lr=0, initial_accumulator=0, eps=POSITIVE)

    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        return {"sum": (dim, self.initial_accumulator)}

    def update(self, values: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float) -> None:
        total = slots["sum"].add_(grads * grads)
        values.sub_((grads * lr).div_(total.sqrt().add_(self.eps)))


@dataclass(frozen=True)
class RowwiseAdagrad:
    """Adagrad with one accumulator per row: the sum of the mean squares of its gradients, as
    EXACT_ROWWISE_ADAGRAD of FBGEMM."""

    lr: float
    eps: float = 1e-10

    def __post_init__(self) -> None:
        check_floats(self, lr=0, eps=POSITIVE)

    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        return {"sum": (1, 0.0)}

    def update(self, values: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float) -> None:
        total = slots["sum"].add_(_row_sums(grads * grads).div_(values.shape[1]))
        values.sub_((grads * lr).div_(total.sqrt().add_(self.eps)))


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015), as torch.optim.Adam. The bias of a row is corrected by the number
    of its own updates; a row without a gradient does not change."""

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_floats(self, lr=0, eps=POSITIVE)
        is_pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        numbers = [real(beta) for beta in self.betas] if is_pair else []
        is_valid = is_pair and all(beta is not None and 0 <= beta < 1 for beta in numbers)
        require("betas of Adam", is_valid, "two numbers, 0 or more and less than 1", self.betas)
        object.__setattr__(self, "betas", tuple(map(float, self.betas)))

    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        return {"step": (1, 0.0), "exp_avg": (dim, 0.0), "exp_avg_sq": (dim, 0.0)}

    def update(self, values: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float) -> None:
        beta1, beta2 = self.betas
        mean, square = slots["exp_avg"], slots["exp_avg_sq"]
        mean.mul_(beta1).add_(grads * (1 - beta1))
        square.mul_(beta2).add_((grads * (1 - beta2)).mul_(grads))
        # NumPy's power has the same result wherever an element is; torch's vectors have not
        steps = slots["step"].add_(1).numpy().astype(np.float64)
        rates = torch.from_numpy((lr / (1 - np.power(beta1, steps))).astype(np.float32))
        roots = torch.from_numpy(np.sqrt(1 - np.power(beta2, steps)).astype(np.float32))
        values.sub_((mean * rates).div_(square.sqrt().div_(roots).add_(self.eps)))


@dataclass(frozen=True)
class FTRL:
    """Follow the regularized leader (McMahan et al., 2013), as tf.keras.optimizers.Ftrl: ``l2``
    is counted twice, and the rates are per coordinate. An update with ``lr`` 0 changes nothing."""

    lr: float
    lr_power: float = -0.5
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator: float = 0.1

    def __post_init__(self) -> None:
        check_floats(self, lr=0, l1=0, l2=0, lr_power=ANY, initial_accumulator=POSITIVE)
        require("lr_power of FTRL", self.lr_power <= 0, "a number, 0 or less", self.lr_power)

    def slots(self, dim: int) -> dict[str, tuple[int, float]]:
        return {"accumulator": (dim, self.initial_accumulator), "linear": (dim, 0.0)}

    def update(self, values: torch.Tensor, slots: Slots, grads: torch.Tensor, lr: float) -> None:
        if lr == 0:
            return
        total, linear = slots["accumulator"], slots["linear"]
        before = self._power(total)
        after = self._power(total.add_(grads * grads))
        linear.add_(grads).sub_((after - before).div_(lr).mul_(values))
        excess = linear.clamp(-self.l1, self.l1).sub_(linear)  # 0 where |linear| <= l1
        values.copy_(excess.div_(after.div_(lr).add_(2 * self.l2)))

    def _power(self, total: torch.Tensor) -> torch.Tensor:
        if self.lr_power == -0.5:
            return total.sqrt()
        powers = np.power(total.numpy().astype(np.float64), -self.lr_power)
        return torch.from_numpy(powers.astype(np.float32))


Optimizer = SGD | Adagrad | RowwiseAdagrad | Adam | FTRL
"""``slots`` returns the width and the initial value of each slot. ``update`` changes values
(float32 ``[rows, dim]``) and their slots in place."""


def _row_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, ``[rows, 1]``, in an order that depends on the width only."""
    while (width := x.shape[1]) > 1:
        half = width // 2
        folded = x[:, :half] + x[:, half : 2 * half]
        x = torch.cat([folded, x[:, 2 * half :]], dim=1) if width % 2 else folded
    return x
