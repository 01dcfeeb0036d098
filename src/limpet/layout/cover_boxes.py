"""Cover a requested box with stored boxes, as linear or strided copies.

A linear copy is one contiguous run of bytes both in the file and in the target. All other copies
are strided. Arithmetic only: this module does no I/O.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from limpet.layout.boxes import flat_range, subtract
from limpet.ragged import Ints
from limpet.types import Box

VECTORIZE_ABOVE = 16
"""If more stored boxes than this overlap a requested box, NumPy operations process them at once."""


class StoredBox(NamedTuple):
    """A stored box that overlaps a requested box."""

    shard: int
    file_offset: int
    box: Box
    itemsize: int


class StridedOverlap(NamedTuple):
    """A part of a requested box, in one stored box, that is strided in the file or the target."""

    request_id: int
    requested_box: Box
    overlap: Box
    stored: StoredBox


class ShardCopies(NamedTuple):
    """The copies to make from one shard.

    ``linear`` is a flat array with four numbers per copy: request ID, file offset, byte offset in
    the requested box, number of bytes.
    """

    linear: array[int]
    strided: list[StridedOverlap]


def cover_box(
    request_id: int, requested_box: Box, overlapping: Ints, copies: dict[int, ShardCopies]
) -> Box | None:
    """Add the copies that fill ``requested_box`` to ``copies``.

    Returns a part of the box that no stored box covers, or None if the box is covered. Each row of
    ``overlapping`` is a stored box: shard, file offset, itemsize, offsets, sizes.
    """
    if 0 in requested_box.sizes:
        return None
    if len(overlapping) > VECTORIZE_ABOVE and _try_cover_linear(
        request_id, requested_box, overlapping, copies
    ):
        return None
    dims = len(requested_box.sizes)
    stored_boxes = [
        StoredBox(shard, at, Box(tuple(box[:dims]), tuple(box[dims:])), size)
        for shard, at, size, *box in overlapping.tolist()
    ]
    # Sorting by offset keeps the number of missing pieces small.
    missing = [requested_box]
    for stored in sorted(stored_boxes, key=lambda stored: stored.box.offsets):
        uncovered: list[Box] = []
        for piece in missing:
            part = piece.intersection(stored.box)
            if part is None:
                uncovered.append(piece)
                continue
            linear = _linear_copy(request_id, part, requested_box, stored)
            if linear is None:
                copies[stored.shard].strided.append(
                    StridedOverlap(request_id, requested_box, part, stored)
                )
            else:
                copies[stored.shard].linear.extend(linear)
            uncovered += subtract(piece, part)
        missing = uncovered
        if not missing:
            return None
    return missing[0]


def _try_cover_linear(
    request_id: int, requested_box: Box, overlapping: Ints, copies: dict[int, ShardCopies]
) -> bool:
    """Cover the box with linear copies only, and return True if that is possible.

    It is possible if each stored box provides one run of bytes and the runs tile the requested
    box, as for the rows of a leaf that many shards hold.
    """
    dims, itemsize = len(requested_box.sizes), int(overlapping[0, 2])
    if requested_box.numel * itemsize >= 1 << 62:  # not exact in int64
        return False
    offsets, sizes = overlapping[:, 3 : 3 + dims], overlapping[:, 3 + dims :]
    first = np.maximum(offsets, requested_box.offsets)
    last = np.minimum(offsets + sizes, np.add(requested_box.offsets, requested_box.sizes)) - 1
    numels = (last - first + 1).prod(axis=1)
    target_begin, target_end = _flat_ranges(
        first, last, np.array(requested_box.offsets), np.array([requested_box.sizes])
    )
    source_begin, source_end = _flat_ranges(first, last, offsets, sizes)
    order = np.argsort(target_begin)
    bounds = np.append(target_begin[order], requested_box.numel)
    if (
        (numels < 1).any()
        or (target_end - target_begin != numels).any()
        or (source_end - source_begin != numels).any()
        or bounds[0] != 0
        or (target_end[order] != bounds[1:]).any()
    ):
        return False
    rows = np.column_stack(
        [overlapping[:, 1] + source_begin * itemsize, target_begin * itemsize, numels * itemsize]
    ).tolist()
    for shard, (at, into_byte, nbytes) in zip(overlapping[:, 0].tolist(), rows, strict=True):
        copies[shard].linear.extend((request_id, at, into_byte, nbytes))
    return True


def _flat_ranges(first: Ints, last: Ints, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Compute ``flat_range`` of many parts, given their first and last elements per dimension."""
    steps = np.ones_like(sizes)
    steps[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    begin: Ints = ((first - offsets) * steps).sum(axis=1)
    end: Ints = ((last - offsets) * steps).sum(axis=1) + 1
    return begin, end


def _linear_copy(
    request_id: int, overlap: Box, requested_box: Box, stored: StoredBox
) -> tuple[int, int, int, int] | None:
    """Return ``overlap`` as one linear copy, or None if it is strided in the file or the target."""
    numel, itemsize = overlap.numel, stored.itemsize
    source_begin, source_end = flat_range(overlap, stored.box)
    if source_end - source_begin != numel:
        return None
    target_begin, target_end = flat_range(overlap, requested_box)
    if target_end - target_begin != numel:
        return None
    return (
        request_id,
        stored.file_offset + source_begin * itemsize,
        target_begin * itemsize,
        numel * itemsize,
    )
