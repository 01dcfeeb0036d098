"""Whether leaves of two snapshots hold the same bytes, and how far apart their numbers are.

Digests decide first: where both snapshots cut a leaf alike, equal digests of all its chunks need no
reading. What is left is read in pieces, so that memory stays bounded whatever a leaf's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.planning.boxes import contiguous_boxes
from holdfast.engine.planning.read_plan import ReadRequest
from holdfast.engine.snapshot.read import Target
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.types import DTYPES, MIB, Box

BATCH_BYTES = 32 * MIB
"""Bytes of each snapshot that are compared at a time."""

Bytes = NDArray[np.uint8]
Chunks = tuple[tuple[int, int, str], ...]
LeafPair = tuple[str, str]
"""The key of a leaf in the one snapshot, and of the one to compare it with in the other."""


@dataclass(slots=True)
class LeafDifference:
    """How two leaves of one dtype and shape differ. ``largest``: the largest absolute difference
    of two elements, NaN if one of them is; None for a dtype that NumPy cannot count with."""

    elements: int
    differing: int = 0
    largest: float | None = None

    def add(self, differing: int, largest: float | None) -> None:
        self.differing += differing
        if largest is not None:
            known = largest if self.largest is None else self.largest
            self.largest = float(np.maximum(known, largest))


def find_equal_by_digest(a: Snapshot, b: Snapshot, pairs: Iterable[LeafPair]) -> set[LeafPair]:
    """Those pairs of leaves whose digests tell that their bytes are the same. Reads the indexes.
    The others may be the same nevertheless."""
    ours, theirs = _chunks_by_leaf(a), _chunks_by_leaf(b)
    return {(k, other) for k, other in pairs if k in ours and ours[k] == theirs.get(other)}


def _chunks_by_leaf(snapshot: Snapshot) -> dict[str, list[tuple[Any, ...]]]:
    """For each leaf its boxes, each with the chunks that hold it, placed relative to it."""
    found: dict[str, list[tuple[Any, ...]]] = {}
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
                chunks: Chunks = tuple(
                    (cuts[c] - box.at, cuts[c + 1] - box.at, index.chunk_digest(c))
                    for c in range(i, j + 1)
                )
                found.setdefault(leaf.key, []).append((box.offsets, box.sizes, chunks))
    return {key: sorted(boxes) for key, boxes in found.items()}


def compare_bytes(
    a: Snapshot,
    b: Snapshot,
    pairs: Sequence[LeafPair],
    progress: Callable[[int], None] | None = None,
) -> dict[LeafPair, LeafDifference]:
    """Read pairs of leaves of equal dtype and shape, and compare them.

    Uses 64 MiB and what reading needs. ``progress(nbytes)`` counts the bytes of one side.
    Raises ``FormatError`` for bytes that are damaged, ``StoreError``.
    """
    found = {pair: LeafDifference(prod(a.leaves[pair[0]][1])) for pair in pairs}
    for batch in _batches(a, pairs):
        ours = _read_parts(a, [(key, box) for key, _, box in batch])
        theirs = _read_parts(b, [(other, box) for _, other, box in batch])
        for (key, other, box), x, y in zip(batch, ours, theirs, strict=True):
            dtype = a.leaves[key][0]
            found[key, other].add(*_compare_elements(x, y, dtype))
            if progress is not None:
                progress(box.numel * DTYPES[dtype].itemsize)
    return found


def _batches(snapshot: Snapshot, pairs: Sequence[LeafPair]) -> Iterator[list[tuple[str, str, Box]]]:
    """What to read at a time: many small leaves, or a part of a large one."""
    batch: list[tuple[str, str, Box]] = []
    room = BATCH_BYTES
    for key, other in pairs:
        dtype, shape = snapshot.leaves[key]
        size = DTYPES[dtype].itemsize
        done, total = 0, prod(shape)
        while done < total:
            step = min(total - done, max(1, room // size))
            batch += [(key, other, box) for box in contiguous_boxes(shape, done, done + step)]
            done += step
            room -= step * size
            if room < size:
                yield batch
                batch, room = [], BATCH_BYTES
    if batch:
        yield batch


def _read_parts(snapshot: Snapshot, parts: list[tuple[str, Box]]) -> list[Bytes]:
    """Parts of leaves as bytes, one row for each element."""
    wants, targets, made = [], [], []
    for key, box in parts:
        dtype = snapshot.leaves[key][0]
        into = np.empty(box.sizes, f"V{DTYPES[dtype].itemsize}")
        wants.append(ReadRequest(key, box))
        # raw bytes whatever the dtype, so NumPy need not know it
        targets.append(Target(dtype, box.sizes, into, into.__array_interface__["data"][0]))
        made.append(into.reshape(-1).view(np.uint8).reshape(box.numel, -1))
    snapshot.read(wants, targets)
    return made


def _compare_elements(a: Bytes, b: Bytes, dtype: str) -> tuple[int, float | None]:
    """How many elements differ, and the largest difference."""
    if np.array_equal(a, b):
        return 0, None
    rows = (a != b).any(axis=1)
    return int(rows.sum()), _largest_difference(a[rows], b[rows], dtype)


def _largest_difference(a: Bytes, b: Bytes, dtype: str) -> float | None:
    if dtype == "bfloat16":  # the upper half of a float32
        x, y = (_bfloat16_to_float32(v) for v in (a, b))
    elif dtype in ("bool", "complex32") or not hasattr(np, dtype):
        return None
    else:
        x, y = (np.ascontiguousarray(v).reshape(-1).view(dtype) for v in (a, b))
    if x.dtype.kind in "iu":
        # exact: a difference of signed integers fits the unsigned ones of the same width
        unsigned = f"u{x.dtype.itemsize}"
        return float((np.maximum(x, y).view(unsigned) - np.minimum(x, y).view(unsigned)).max())
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.abs(x.astype(wide) - y.astype(wide)).max())


def _bfloat16_to_float32(halves: Bytes) -> NDArray[np.float32]:
    raw = np.ascontiguousarray(halves).reshape(-1).view(np.uint16)
    return (raw.astype(np.uint32) << 16).view(np.float32)
