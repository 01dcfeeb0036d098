"""The contents of a snapshot: its tree, with statistics of the tensors, and of how they changed.

A limited number of bytes is read, in whole chunks that are checked: of large tensors, some blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, nan, prod
from typing import Any

import numpy as np

from limpet.errors import FormatError, LimpetError, StoreError
from limpet.layout.boxes import contiguous_boxes
from limpet.layout.read_plan import ReadRequest, make_read_plan
from limpet.snapshot.compare import BATCH_BYTES, as_numbers, find_equal_by_digest, read_parts
from limpet.snapshot.reader import SnapshotReader
from limpet.snapshot.tree_rows import TreeRow, describe_rows, iter_tree_rows
from limpet.text import format_value
from limpet.types import BLOCK_SIZE, DTYPES, Box

_BINS, _PART = 24, 1 << 20  # elements that become numbers of 8 or 16 bytes at once

Parts = list[tuple[str, Box]]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of the ``elements`` of a tensor that were read; of complex numbers, of their absolute values.
    ``histogram``: counts in intervals of one width from ``low`` to ``high``. ``change``: the norm
    of the difference from the earlier snapshot, divided by the norm there (inf if that is 0), and
    exactly 0.0 only if the bytes of the whole tensor are equal; None: not compared."""

    elements: int
    nans: int
    infinite: int
    change: float | None = None
    mean: float = nan
    deviation: float = nan
    low: float = nan
    high: float = nan
    histogram: Sequence[int] = ()

    def describe(self, count: int) -> tuple[str, ...]:
        """Return as text: the mean, the deviation, the range, how many elements are not finite, how
        many of ``count`` were read, and the change."""
        low, high = format_value(self.low), format_value(self.high)
        change = "" if self.change is None else "none" if not self.change else f"{self.change:.2%}"
        return (
            format_value(self.mean),
            format_value(self.deviation),
            low if low == high else f"{low} to {high}",
            f"{self.nans + self.infinite:,}",
            "all" if self.elements == count else f"{self.elements / count:.2%}",
            "from 0" if self.change == inf else change,
        )


@dataclass(slots=True)
class Contents:
    """The first rows of the tree, of ``row_count``, with a description and a number of bytes, and
    the statistics of those of its tensors that could be read. ``problem``: why not all could."""

    snapshot: SnapshotReader
    earlier: SnapshotReader | None
    rows: Sequence[tuple[TreeRow, str, int | None]]
    row_count: int
    statistics: dict[str, Statistics] = field(default_factory=dict)
    problem: LimpetError | None = None


def read_contents(
    snapshot: SnapshotReader, earlier: SnapshotReader | None, most: int, limit: int
) -> Contents:
    """Return at most ``most`` rows, with statistics for which ``limit`` bytes are read."""
    rows = [*describe_rows([*iter_tree_rows(snapshot, by_table=True)])]
    contents = Contents(snapshot, earlier, rows[:most], len(rows))
    keys = [row.key for row, *_ in contents.rows if row.has_numbers and limit]
    try:
        for key, found in _read_statistics(snapshot, earlier, keys, limit) if keys else ():
            contents.statistics[key] = found
    except (FormatError, StoreError) as e:
        contents.problem = e
    return contents


def _read_statistics(
    snapshot: SnapshotReader, earlier: SnapshotReader | None, keys: Sequence[str], limit: int
) -> Iterator[tuple[str, Statistics]]:
    """Yield the statistics of those leaves for which ``limit`` bytes suffice, of both snapshots.
    They need memory for as many bytes. Raises ``FormatError`` or ``StoreError``."""
    equal, compared = set[str](), set[str]()
    if earlier is not None:
        pairs = [(k, k) for k in keys if earlier.leaves.get(k) == snapshot.leaves[k]]
        equal = {key for key, _ in find_equal_by_digest(snapshot, earlier, pairs)}
        compared = {key for key, _ in pairs} - equal
    cost, share = limit + 1, limit if earlier is None else limit // 2
    while cost > limit:  # chunks are read whole, and several tensors may share one
        batches = [*_choose_batches(snapshot, keys, share)]
        old = [[part for part in batch if part[0] in compared] for batch in batches]
        cost = sum(_bytes_to_read(snapshot, batch) for batch in batches)
        cost += 0 if earlier is None else sum(_bytes_to_read(earlier, batch) for batch in old)
        share = share * 3 // 4
    for batch, old_batch in zip(batches, old, strict=True):
        new_rows = _read_batch(snapshot, batch)
        old_rows = {} if earlier is None else _read_batch(earlier, old_batch)
        for key, rows in new_rows.items():
            (dtype, shape), before = snapshot.leaves[key], old_rows.get(key)
            if before is not None and len(rows) == prod(shape) and np.array_equal(rows, before):
                equal.add(key)
            x, y = (r if r is None else as_numbers(r, dtype) for r in (rows, before))
            if x is not None:
                yield key, _compute(x, y, change=0.0 if key in equal else None)


def _choose_batches(snapshot: SnapshotReader, keys: Sequence[str], limit: int) -> Iterator[Parts]:
    """Yield what to read at once: whole leaves, the smallest first, and blocks at even distances of
    each that has more than its share of ``limit``, in bytes."""
    itemsizes = {key: DTYPES[snapshot.leaves[key][0]].itemsize for key in keys}
    counts = {key: prod(snapshot.leaves[key][1]) for key in keys}
    batch, batch_bytes = Parts(), 0
    for i, key in enumerate(sorted(keys, key=lambda key: counts[key] * itemsizes[key])):
        size, share = counts[key] * itemsizes[key], limit // (len(keys) - i)
        step = BLOCK_SIZE // itemsizes[key]
        blocks = ceil(counts[key] / step)
        used = blocks if size <= share else min(blocks, max(1, share // BLOCK_SIZE))
        if (nbytes := min(size, used * BLOCK_SIZE)) > limit:
            break
        for start in (n * blocks // used * step for n in range(used)):
            stop = min(start + step, counts[key])
            batch += [(key, b) for b in contiguous_boxes(snapshot.leaves[key][1], start, stop)]
        limit, batch_bytes = limit - nbytes, batch_bytes + nbytes
        if batch_bytes > BATCH_BYTES:
            yield batch
            batch, batch_bytes = Parts(), 0
    yield batch


def _bytes_to_read(snapshot: SnapshotReader, parts: Parts) -> int:
    plan = make_read_plan(snapshot.indexes(), [ReadRequest(key, box) for key, box in parts])
    return sum(item.stop - item.start for item in plan.items)


def _read_batch(snapshot: SnapshotReader, parts: Parts) -> dict[str, Any]:
    """Return the elements of each leaf that were chosen, as rows of bytes."""
    found: dict[str, list[Any]] = {}
    for (key, _), rows in zip(parts, read_parts(snapshot, parts), strict=True):
        found.setdefault(key, []).append(rows)
    return {key: np.concatenate(rows) for key, rows in found.items()}


def _compute(x: Any, y: Any, *, change: float | None) -> Statistics:
    is_complex = x.dtype.kind == "c"
    parts = [slice(i, i + _PART) for i in range(0, x.size, _PART)]

    def widen(part: Any) -> Any:
        return part.astype(np.complex128 if is_complex else np.float64)

    def finite_parts() -> Iterator[Any]:
        for part in parts:
            values = np.abs(widen(x[part])) if is_complex else widen(x[part])
            yield values[np.isfinite(values)]

    with np.errstate(all="ignore"):
        if y is not None and change is None:
            gap = norm = np.float64(0)
            for part in parts:
                new, old = widen(x[part]), widen(y[part])
                both = np.isfinite(new) & np.isfinite(old)
                gap = np.hypot(gap, np.linalg.norm((new - old)[both]))
                norm = np.hypot(norm, np.linalg.norm(old[both]))
            change = max(float(gap / norm) if gap else 0.0, 5e-324)  # what differs was not seen
        nans = sum(int(np.isnan(x[part]).sum()) for part in parts)
        found = [(v.size, float(v.min()), float(v.max())) for v in finite_parts() if v.size]
        count = sum(size for size, *_ in found)
        if not count:
            return Statistics(x.size, nans, x.size - nans, change)
        low, high = min(low for _, low, _ in found), max(high for *_, high in found)
        scale = max(-low, high) or 1.0  # the squares of large numbers would overflow
        width = high / scale - low / scale
        total, squares, histogram = 0.0, 0.0, np.zeros(_BINS, int)
        for values in finite_parts():
            share = (values / scale - low / scale) / (width or 1.0)
            total, squares = total + float(share.sum()), squares + float((share * share).sum())
            bins = np.minimum(share * _BINS, _BINS - 1) if width else np.full(share.size, _BINS / 2)
            histogram += np.bincount(bins.astype(int), minlength=_BINS)
        mean = (low / scale + total / count * width) * scale
        deviation = max(squares / count - (total / count) ** 2, 0.0) ** 0.5 * width * scale
    infinite = x.size - nans - count
    return Statistics(x.size, nans, infinite, change, mean, deviation, low, high, [*histogram])
