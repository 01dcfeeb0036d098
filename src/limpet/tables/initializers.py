"""Initial vectors: a function of (seed, table, id, column), the same on every machine.

So a look-up of an unseen id needs no row, and every server computes the same vector. All random
bits come from integer operations, and each float operation is exact or rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from limpet.arguments import real, require
from limpet.tables.hashing import random_words

_MOST = 1e30  # far from the limits of float32
ANY, POSITIVE = -_MOST, 1e-30


def check_floats(owner: object, **least: float) -> None:
    """Make fields of a dataclass floats, and refuse those that are less than ``least``."""
    for name, bound in least.items():
        value = getattr(owner, name)
        number = real(value)
        expected = {ANY: "a finite number", 0: "a number, 0 or more"}.get(bound)
        is_valid = number is not None and bound <= number <= _MOST
        expected = expected or "a number that is more than 0"
        require(f"{name} of {type(owner).__name__}", is_valid, expected, value)
        object.__setattr__(owner, name, float(value))


@dataclass(frozen=True)
class Constant:
    """Every element of an initial vector is ``value``."""

    value: float = 0.0

    def __post_init__(self) -> None:
        check_floats(self, value=ANY)

    def initial(self, ids: NDArray[np.int64], key: int, dim: int) -> NDArray[np.float32]:
        return np.full((len(ids), dim), self.value, np.float32)


@dataclass(frozen=True)
class Uniform:
    """Elements are uniform between ``-scale`` and ``scale``: one of 2**24 values, symmetric."""

    scale: float = 0.05

    def __post_init__(self) -> None:
        check_floats(self, scale=POSITIVE)

    def initial(self, ids: NDArray[np.int64], key: int, dim: int) -> NDArray[np.float32]:
        out = np.empty((len(ids), dim), np.float32)
        unit = np.float32(self.scale) * np.float32(2**-24)
        for part, words in random_words(ids, key, dim):
            odd = words.view(np.int32)
            odd >>= 7
            odd |= 1  # an odd number of 25 bits with its sign: exact as a float32
            np.multiply(odd, unit, out=out[part], dtype=np.float32, casting="unsafe")
        return out


@dataclass(frozen=True)
class Normal:
    """Elements have a normal distribution: one of its 65,536 quantiles."""

    mean: float = 0.0
    std: float = 0.05
    _cut: ClassVar[float | None] = None  # in standard deviations

    def __post_init__(self) -> None:
        check_floats(self, mean=ANY, std=POSITIVE)

    def initial(self, ids: NDArray[np.int64], key: int, dim: int) -> NDArray[np.float32]:
        scaled = _quantiles(self._cut) * np.float32(self.std) + np.float32(self.mean)
        out = np.empty((len(ids), dim), np.float32)
        for part, words in random_words(ids, key, dim):
            words >>= np.uint32(16)
            np.take(scaled, words, out=out[part], mode="clip")
        return out


@dataclass(frozen=True)
class TruncatedNormal(Normal):
    """Elements have a normal distribution that is cut at two standard deviations."""

    _cut: ClassVar[float | None] = 2.0


Initializer = Constant | Uniform | Normal | TruncatedNormal
"""``initial`` returns the initial vectors of ids, float32 ``[len(ids), dim]``; ``key`` is a hash of
the seed and the name of the table."""


@cache
def _quantiles(cut: float | None) -> NDArray[np.float32]:
    """The quantiles of the standard normal distribution, at the middles of 65,536 steps."""
    normal, half = NormalDist(), 1 << 15
    least = 0.0 if cut is None else normal.cdf(-cut)
    steps = [least + (0.5 - least) * (i + 0.5) / half for i in range(half)]
    lower = np.array([normal.inv_cdf(p) for p in steps])
    return np.concatenate([lower, -lower[::-1]]).astype(np.float32)
