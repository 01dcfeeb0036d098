"""What of the stored boxes fills a wanted one: runs of bytes, or rectangles.

Arithmetic only: nothing here does I/O.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from holdfast.engine.planning.boxes import flat_range, subtract
from holdfast.ragged import Ints
from holdfast.types import Box

VECTORIZE_ABOVE = 16
"""With more stored boxes in a wanted one, they are looked at together."""


class StoredBox(NamedTuple):
    """A stored box that touches a wanted one."""

    shard: int
    file_offset: int
    box: Box
    itemsize: int


class StridedOverlap(NamedTuple):
    """A part of a wanted box that one stored box gives, scattered in the file or in the target."""

    request_id: int
    requested_box: Box
    overlap: Box
    stored: StoredBox


class ShardCopies(NamedTuple):
    """What is wanted of one shard. ``linear`` is flat: four numbers for each row of an item's."""

    linear: array[int]
    strided: list[StridedOverlap]


def cover_box(
    request_id: int, requested_box: Box, overlapping: Ints, copies: dict[int, ShardCopies]
) -> Box | None:
    """Note what fills ``want`` in ``needs``; a part that nothing holds, or None."""
    if 0 in requested_box.sizes:
        return None
    if len(overlapping) > VECTORIZE_ABOVE and _try_cover_linear(
        request_id, requested_box, overlapping, copies
    ):
        return None
    dims = len(requested_box.sizes)
    found = [
        StoredBox(shard, at, Box(tuple(box[:dims]), tuple(box[dims:])), size)
        for shard, at, size, *box in overlapping.tolist()
    ]
    # In the order of their offsets, so that what is still missing stays in few pieces.
    missing = [requested_box]
    for f in sorted(found, key=lambda f: f.box.offsets):
        left: list[Box] = []
        for piece in missing:
            part = piece.intersection(f.box)
            if part is None:
                left.append(piece)
                continue
            linear = _linear_copy(request_id, part, requested_box, f)
            if linear is None:
                copies[f.shard].strided.append(StridedOverlap(request_id, requested_box, part, f))
            else:
                copies[f.shard].linear.extend(linear)
            left += subtract(piece, part)
        missing = left
        if not missing:
            return None
    return missing[0]


def _try_cover_linear(
    request_id: int, requested_box: Box, overlapping: Ints, copies: dict[int, ShardCopies]
) -> bool:
    """As ``cover`` where each box gives one run of bytes, and one run follows the other: rows of a
    leaf that many shards have. Whether it is so."""
    dims, size = len(requested_box.sizes), int(overlapping[0, 2])
    if requested_box.numel * size >= 1 << 62:  # beyond what is exact here
        return False
    offsets, sizes = overlapping[:, 3 : 3 + dims], overlapping[:, 3 + dims :]
    first = np.maximum(offsets, requested_box.offsets)
    last = np.minimum(offsets + sizes, np.add(requested_box.offsets, requested_box.sizes)) - 1
    count = (last - first + 1).prod(axis=1)
    into, end = _flat_ranges(
        first, last, np.array(requested_box.offsets), np.array([requested_box.sizes])
    )
    begin, stop = _flat_ranges(first, last, offsets, sizes)
    order = np.argsort(into)
    bounds = np.append(into[order], requested_box.numel)
    if (
        (count < 1).any()
        or (end - into != count).any()
        or (stop - begin != count).any()
        or bounds[0] != 0
        or (end[order] != bounds[1:]).any()
    ):
        return False
    rows = np.column_stack([overlapping[:, 1] + begin * size, into * size, count * size]).tolist()
    for shard, (at, into_byte, nbytes) in zip(overlapping[:, 0].tolist(), rows, strict=True):
        copies[shard].linear.extend((request_id, at, into_byte, nbytes))
    return True


def _flat_ranges(first: Ints, last: Ints, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """``span`` of many parts at once, given by their first and last elements in each dimension."""
    steps = np.ones_like(sizes)
    steps[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    begin: Ints = ((first - offsets) * steps).sum(axis=1)
    end: Ints = ((last - offsets) * steps).sum(axis=1) + 1
    return begin, end


def _linear_copy(
    request_id: int, overlap: Box, requested_box: Box, stored: StoredBox
) -> tuple[int, int, int, int] | None:
    """The copy of ``part`` as one run of bytes, if it is one both in the file and in the target."""
    count, size = overlap.numel, stored.itemsize
    first, last = flat_range(overlap, stored.box)
    if last - first != count:
        return None
    into, end = flat_range(overlap, requested_box)
    if end - into != count:
        return None
    return request_id, stored.file_offset + first * size, into * size, count * size
