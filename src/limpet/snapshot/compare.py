"""Compares leaves of two snapshots: whether their bytes are equal, and how much elements differ.

Equal digests of equal chunks prove equality without a read. The other leaves are read in batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limpet.layout.boxes import contiguous_boxes
from limpet.layout.read_plan import ReadRequest
from limpet.snapshot.chunks import Target
from limpet.snapshot.reader import SnapshotReader
from limpet.types import DTYPES, MIB, Box

BATCH_BYTES = 32 * MIB
"""Bytes of each snapshot that one batch compares."""

Bytes = NDArray[np.uint8]
LeafPair = tuple[str, str]
"""The key of a leaf in the first snapshot, and the key of its counterpart in the second."""


@dataclass(slots=True)
class LeafDifference:
    """How two leaves of one dtype and shape differ. ``largest``: the largest absolute difference,
    or NaN; None if none differs, or NumPy cannot compute with the dtype."""

    elements: int
    differing: int = 0
    largest: float | None = None

    def add(self, differing: int, largest: float | None) -> None:
        self.differing += differing
        if largest is not None:
            previous = largest if self.largest is None else self.largest
            self.largest = float(np.maximum(previous, largest))


def find_equal_by_digest(
    a: SnapshotReader, b: SnapshotReader, pairs: Iterable[LeafPair]
) -> set[LeafPair]:
    """Return the pairs of leaves whose digests prove that their bytes are equal."""
    chunks_a, chunks_b = _chunks_by_leaf(a), _chunks_by_leaf(b)
    return {
        (key_a, key_b)
        for key_a, key_b in pairs
        if key_a in chunks_a and chunks_a[key_a] == chunks_b.get(key_b)
    }


def _chunks_by_leaf(snapshot: SnapshotReader) -> dict[str, list[tuple[Any, ...]]]:
    """Return, for each leaf, its boxes with their chunks at offsets relative to the box."""
    boxes_by_leaf: dict[str, list[tuple[Any, ...]]] = {}
    for index in snapshot.indexes():
        cuts = [0, *index.cuts.tolist()]
        for leaf in index.leaves:
            size = DTYPES[leaf.dtype].itemsize
            boxes = [b for b in leaf.boxes if prod(b.sizes)]
            starts = np.array([b.at for b in boxes], np.int64)
            ends = np.array([b.at + prod(b.sizes) * size for b in boxes], np.int64)
            first = np.searchsorted(index.cuts, starts, "right").tolist()
            last = np.searchsorted(index.cuts, ends, "left").tolist()
            for box, i, j in zip(boxes, first, last, strict=True):
                chunks = tuple(
                    (cuts[c] - box.at, cuts[c + 1] - box.at, index.chunk_digest(c))
                    for c in range(i, j + 1)
                )
                boxes_by_leaf.setdefault(leaf.key, []).append((box.offsets, box.sizes, chunks))
    return {key: sorted(boxes) for key, boxes in boxes_by_leaf.items()}


def compare_bytes(
    a: SnapshotReader,
    b: SnapshotReader,
    pairs: Sequence[LeafPair],
    progress: Callable[[int], None] | None = None,
) -> dict[LeafPair, LeafDifference]:
    """Read and compare pairs of leaves of equal dtype and shape, with 64 MiB and the reads' memory.
    ``progress(nbytes)`` counts one snapshot. Raises ``FormatError`` and ``StoreError``."""
    differences = {pair: LeafDifference(prod(a.leaves[pair[0]][1])) for pair in pairs}
    for batch in _batches(a, pairs):
        parts = zip(
            batch,
            read_parts(a, [(key_a, box) for key_a, _, box in batch]),
            read_parts(b, [(key_b, box) for _, key_b, box in batch]),
            strict=True,
        )
        for (key_a, key_b, box), x, y in parts:
            dtype = a.leaves[key_a][0]
            differences[key_a, key_b].add(*_compare_elements(x, y, dtype))
            if progress is not None:
                progress(box.numel * DTYPES[dtype].itemsize)
    return differences


def _batches(
    snapshot: SnapshotReader, pairs: Sequence[LeafPair]
) -> Iterator[list[tuple[str, str, Box]]]:
    """Yield batches of boxes to read: many small leaves, or a part of a large one."""
    batch: list[tuple[str, str, Box]] = []
    remaining = BATCH_BYTES
    for key_a, key_b in pairs:
        dtype, shape = snapshot.leaves[key_a]
        size = DTYPES[dtype].itemsize
        done, total = 0, prod(shape)
        while done < total:
            step = min(total - done, max(1, remaining // size))
            batch += [(key_a, key_b, box) for box in contiguous_boxes(shape, done, done + step)]
            done += step
            remaining -= step * size
            if remaining < size:
                yield batch
                batch, remaining = [], BATCH_BYTES
    if batch:
        yield batch


def read_parts(snapshot: SnapshotReader, parts: Sequence[tuple[str, Box]]) -> list[Bytes]:
    """Read boxes of leaves as bytes, one row for each element."""
    requests, targets, parts_as_rows = [], [], []
    for key, box in parts:
        dtype = snapshot.leaves[key][0]
        into = np.empty(box.sizes, f"V{DTYPES[dtype].itemsize}")
        requests.append(ReadRequest(key, box))
        # opaque bytes for every dtype, because NumPy does not know all of them
        targets.append(Target(dtype, box.sizes, into, into.__array_interface__["data"][0]))
        parts_as_rows.append(into.reshape(-1).view(np.uint8).reshape(box.numel, -1))
    snapshot.read(requests, targets)
    return parts_as_rows


def _compare_elements(a: Bytes, b: Bytes, dtype: str) -> tuple[int, float | None]:
    """Return the number of elements that differ, and the largest difference."""
    if np.array_equal(a, b):
        return 0, None
    rows = (a != b).any(axis=1)
    return int(rows.sum()), _largest_difference(a[rows], b[rows], dtype)


def _largest_difference(a: Bytes, b: Bytes, dtype: str) -> float | None:
    x, y = (as_numbers(v, dtype) for v in (a, b))
    if x is None or y is None or x.dtype.kind == "b":
        return None
    if x.dtype.kind in "iu":
        # exact: the difference of two signed integers fits an unsigned integer of the same width
        unsigned = f"u{x.dtype.itemsize}"
        return float((np.maximum(x, y).view(unsigned) - np.minimum(x, y).view(unsigned)).max())
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.abs(x.astype(wide) - y.astype(wide)).max())


def as_numbers(elements: Bytes, dtype: str) -> NDArray[Any] | None:
    """Return elements, given as rows of bytes, as a flat array; None: NumPy lacks the dtype."""
    flat = np.ascontiguousarray(elements).reshape(-1)
    if dtype == "bfloat16":  # the upper half of a float32
        return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return flat.view(dtype) if dtype == "bool" or hasattr(np, dtype) else None
