"""What of the stored boxes fills a wanted one: runs of bytes, or rectangles.

Arithmetic only: nothing here does I/O.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from holdfast.engine.planning.boxes import span, subtract
from holdfast.ragged import Ints
from holdfast.types import Box

MANY = 16
"""With more stored boxes in a wanted one, they are looked at together."""


class Found(NamedTuple):
    """A stored box that touches a wanted one."""

    shard: int
    at: int
    box: Box
    itemsize: int


class Hit(NamedTuple):
    """A part of a wanted box that one stored box gives, scattered in the file or in the target."""

    want: int
    target: Box
    part: Box
    found: Found


class Needs(NamedTuple):
    """What is wanted of one shard. ``linear`` is flat: four numbers for each row of an item's."""

    linear: array[int]
    scattered: list[Hit]


def cover(number: int, want: Box, touching: Ints, needs: dict[int, Needs]) -> Box | None:
    """Note what fills ``want`` in ``needs``; a part that nothing holds, or None."""
    if 0 in want.sizes:
        return None
    if len(touching) > MANY and _tiled(number, want, touching, needs):
        return None
    dims = len(want.sizes)
    found = [
        Found(shard, at, Box(tuple(box[:dims]), tuple(box[dims:])), size)
        for shard, at, size, *box in touching.tolist()
    ]
    # In the order of their offsets, so that what is still missing stays in few pieces.
    missing = [want]
    for f in sorted(found, key=lambda f: f.box.offsets):
        left: list[Box] = []
        for piece in missing:
            part = piece.intersection(f.box)
            if part is None:
                left.append(piece)
                continue
            linear = _linear(number, part, want, f)
            if linear is None:
                needs[f.shard].scattered.append(Hit(number, want, part, f))
            else:
                needs[f.shard].linear.extend(linear)
            left += subtract(piece, part)
        missing = left
        if not missing:
            return None
    return missing[0]


def _tiled(number: int, want: Box, touching: Ints, needs: dict[int, Needs]) -> bool:
    """As ``cover`` where each box gives one run of bytes, and one run follows the other: rows of a
    leaf that many shards have. Whether it is so."""
    dims, size = len(want.sizes), int(touching[0, 2])
    if want.elements * size >= 1 << 62:  # beyond what is exact here
        return False
    offsets, sizes = touching[:, 3 : 3 + dims], touching[:, 3 + dims :]
    first = np.maximum(offsets, want.offsets)
    last = np.minimum(offsets + sizes, np.add(want.offsets, want.sizes)) - 1
    count = (last - first + 1).prod(axis=1)
    into, end = _spans(first, last, np.array(want.offsets), np.array([want.sizes]))
    begin, stop = _spans(first, last, offsets, sizes)
    order = np.argsort(into)
    bounds = np.append(into[order], want.elements)
    if (
        (count < 1).any()
        or (end - into != count).any()
        or (stop - begin != count).any()
        or bounds[0] != 0
        or (end[order] != bounds[1:]).any()
    ):
        return False
    rows = np.column_stack([touching[:, 1] + begin * size, into * size, count * size]).tolist()
    for shard, (at, into_byte, nbytes) in zip(touching[:, 0].tolist(), rows, strict=True):
        needs[shard].linear.extend((number, at, into_byte, nbytes))
    return True


def _spans(first: Ints, last: Ints, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """``span`` of many parts at once, given by their first and last elements in each dimension."""
    steps = np.ones_like(sizes)
    steps[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    begin: Ints = ((first - offsets) * steps).sum(axis=1)
    end: Ints = ((last - offsets) * steps).sum(axis=1) + 1
    return begin, end


def _linear(number: int, part: Box, want: Box, found: Found) -> tuple[int, int, int, int] | None:
    """The copy of ``part`` as one run of bytes, if it is one both in the file and in the target."""
    count, size = part.elements, found.itemsize
    first, last = span(part, found.box)
    if last - first != count:
        return None
    into, end = span(part, want)
    if end - into != count:
        return None
    return number, found.at + first * size, into * size, count * size
