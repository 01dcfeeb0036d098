"""Box algebra: rectangles of row-major arrays."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np

from limpet.errors import PlanError
from limpet.types import Box

TensorIndex = int | slice | EllipsisType


def box_from_index(index: Any, shape: tuple[int, ...]) -> tuple[Box, set[int]]:
    """Return the box of a tensor that an index selects, and the dimensions that integers drop.
    Raises ``IndexError`` for an index that is invalid for a tensor of ``shape``."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if sum(p is Ellipsis for p in parts) > 1 or len(parts) - (Ellipsis in parts) > len(shape):
        raise IndexError(f"Index {index!r} is invalid for a tensor of shape {list(shape)}")
    ellipsis_at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    tail = parts[ellipsis_at + 1 :]
    parts = parts[:ellipsis_at] + [slice(None)] * (len(shape) - ellipsis_at - len(tail)) + tail
    offsets, sizes, dropped_dims = [], [], set()
    for d, (part, n) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            start, stop, step = part.indices(n)
            if step != 1:
                raise IndexError(f"A slice of a leaf must have step 1, not {step}")
            stop = max(start, stop)
        elif isinstance(part, int | np.integer) and not isinstance(part, bool):
            start = int(part) + n if part < 0 else int(part)
            stop = start + 1
            dropped_dims.add(d)
            if not 0 <= start < n:
                raise IndexError(f"Index {part} is out of range for dimension {d} of size {n}")
        else:
            raise IndexError(f"An index of a leaf takes integers, slices, and ..., not {part!r}")
        offsets.append(start)
        sizes.append(stop - start)
    return Box(tuple(offsets), tuple(sizes)), dropped_dims


def contiguous_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Split elements ``start`` to ``stop`` of a row-major array into at most ``2 * len(shape) - 1``
    contiguous boxes (one for a scalar) in memory order. Raises ``PlanError`` if they exceed it."""
    if not 0 <= start <= stop <= prod(shape):
        raise PlanError(
            "A range of elements exceeds its array",
            expected=f"a range within 0 to {prod(shape)}",
            found=f"{start} to {stop}",
        )
    return [Box(o, s) for o, s in _iter_contiguous(shape, start, stop)]


def _iter_contiguous(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = shape[1:]
    row = prod(inner)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        for o, s in _iter_contiguous(inner, head, tail):
            yield (first, *o), (1, *s)
        return
    if head:
        for o, s in _iter_contiguous(inner, head, row):
            yield (first, *o), (1, *s)
        first += 1
    if last > first:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    for o, s in _iter_contiguous(inner, 0, tail):
        yield (last, *o), (1, *s)


def flat_range(part: Box, whole: Box) -> tuple[int, int]:
    """Return the positions of the first and past-the-last element of ``part``, which must be within
    ``whole`` and not empty, in the flattened row-major array of ``whole``."""
    first = last = 0
    for o, s, z, n in zip(part.offsets, part.sizes, whole.offsets, whole.sizes, strict=True):
        first = first * n + o - z
        last = last * n + o - z + s - 1
    return first, last + 1


def subtract(box: Box, part: Box) -> list[Box]:
    """Return disjoint boxes that cover ``box`` without ``part``, which must be within ``box``."""
    remaining = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for d, (o, s) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        remaining += [
            Box((*offsets[:d], a, *offsets[d + 1 :]), (*sizes[:d], b - a, *sizes[d + 1 :]))
            for a, b in ((offsets[d], o), (o + s, offsets[d] + sizes[d]))
            if b > a
        ]
        offsets[d], sizes[d] = o, s
    return remaining
