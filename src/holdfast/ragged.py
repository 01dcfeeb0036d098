"""Short rows of numbers by the million, one after the other in a flat array; no loop goes over
them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def int_array(row: Sequence[int]) -> Ints:
    return np.fromiter(row, np.int64, len(row))


def flatten_rows(rows: Iterable[tuple[int, ...]]) -> Ints:
    return int_array(list(chain.from_iterable(rows)))


def row_products(sizes: NDArray[Any], ndims: Ints) -> NDArray[Any]:
    """The product of each box's ``dims`` sizes, which lie one after the other; 1 for none."""
    made = np.ones(len(ndims), sizes.dtype)
    some = ndims > 0
    if some.any():
        made[some] = np.multiply.reduceat(sizes, exclusive_cumsum(ndims)[some])
    return made


def ranges(starts: Ints, counts: Ints) -> Ints:
    """``counts[i]`` numbers from ``starts[i]`` on, for one i after the other."""
    made: Ints = np.repeat(starts - exclusive_cumsum(counts), counts)
    made += np.arange(len(made))
    return made


def exclusive_cumsum(counts: Ints) -> Ints:
    """The sum of all those before each."""
    made: Ints = np.cumsum(counts) - counts
    return made
