"""Ragged arrays: millions of short rows of numbers, concatenated in a flat array.

All functions are vectorized; no Python loop goes over the rows.
"""

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


def sorted_unique(values: NDArray[Any]) -> NDArray[Any]:
    """Return the different values, ascending. ``np.unique`` imports ``numpy.ma``, for 11 ms."""
    ordered = np.sort(values, axis=None)
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]


def row_products(sizes: NDArray[Any], ndims: Ints) -> NDArray[Any]:
    """Return the product of each row, 1 for an empty one. ``sizes``: the rows, concatenated;
    ``ndims``: their lengths."""
    products = np.ones(len(ndims), sizes.dtype)
    nonempty = ndims > 0
    if nonempty.any():
        products[nonempty] = np.multiply.reduceat(sizes, exclusive_cumsum(ndims)[nonempty])
    return products


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Return ``starts[i], starts[i] + 1, ...`` (``counts[i]`` numbers) for each i in order."""
    indices: Ints = np.repeat(starts - exclusive_cumsum(counts), counts)
    indices += np.arange(len(indices))
    return indices


def exclusive_cumsum(counts: Ints) -> Ints:
    """Return, for each element, the sum of all elements before it."""
    return np.cumsum(counts) - counts
