"""How tensors lie in ranks and in files: boxes, their order in a shard, chunks, rectangles.

Arithmetic only: nothing here does I/O or knows torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import msgspec
import numpy as np

from holdfast.arrays import Ints
from holdfast.errors import PlanError, Unsupported
from holdfast.words import DTYPES, KIB, MIB, UNIT, Box

SMALL = 64 * KIB
"""Boxes below this many bytes share chunks; a larger one has chunks of its own."""

GROUP = 1 * MIB
"""Most bytes of a chunk that several small boxes share."""


# Made for every box: a frozen dataclass takes eight times as long to make.
class Holding(msgspec.Struct, frozen=True, gc=False):
    """One box of one leaf that this rank has.

    ``key`` is the leaf's path in the state, ``dtype`` a name in ``words.DTYPES``, ``shape`` the
    shape of the whole (global) tensor, ``box`` the part of it that this rank has.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.box.elements * itemsize(self.dtype)


def itemsize(dtype: str) -> int:
    """Bytes of one element. Raises ``Unsupported`` for an unknown dtype."""
    known = DTYPES.get(dtype)
    if known is None:
        raise Unsupported(
            f"A tensor of dtype {dtype} cannot be kept",
            expected="one of " + ", ".join(DTYPES),
            found=dtype,
            todo="Convert it to one of these dtypes",
        )
    return known.itemsize


def file_order(holdings: Sequence[Holding]) -> list[int]:
    """The order of boxes in a shard, as indices into ``holdings``.

    Larger elements come first: all lengths before a box are then multiples of its element size,
    so that every box starts aligned although the file is packed without holes. Then the groups at
    the top of the state lie together, and within one large boxes come before small ones, so
    that the small ones share chunks.
    """

    def place(i: int) -> tuple[int, str, int, str, tuple[int, ...]]:
        h = holdings[i]
        size = itemsize(h.dtype)
        top = h.key.partition("/")[0]
        return (-size, top, -size * prod(h.box.sizes), h.key, h.box.offsets)

    return sorted(range(len(holdings)), key=place)


def chunk_cuts(header_length: int, lengths: Ints) -> Ints:
    """Where the chunks of a shard end: increasing file offsets, the last is the file's length.

    ``lengths`` are the bytes of the boxes in file order. The first chunk is the header. The data
    is cut at every multiple of ``UNIT`` counted from the header's end, so that one thread can
    write and digest one piece without its neighbours; around every box of ``SMALL`` bytes or
    more, so that it can be read without reading others; and smaller boxes share chunks
    of at most ``GROUP`` bytes.

    Raises ``PlanError`` for a negative length.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if header_length <= 0 or (lengths.size and lengths.min() < 0):
        raise PlanError(
            "The chunks of a shard cannot be laid out",
            expected="a header and boxes of no negative length",
            found=f"a header of {header_length} bytes, a shortest box of {lengths.min(initial=0)}",
        )
    lengths = lengths[lengths > 0]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    total = int(ends[-1]) if ends.size else 0
    large = lengths >= SMALL
    # A small box begins in one window and ends less than SMALL after it: GROUP is kept without
    # going from box to box.
    window = starts // (GROUP - SMALL)
    first_in_window = np.flatnonzero(window[1:] != window[:-1]) + 1
    cuts = np.concatenate(
        [
            np.zeros(1, np.int64),
            np.arange(UNIT, total, UNIT, dtype=np.int64),
            starts[large],
            ends[large],
            starts[first_in_window],
            ends[-1:],
        ]
    )
    return np.unique(cuts) + header_length


def split_long(cuts: Ints) -> Ints:
    """The cuts, and more where a chunk behind the first one is longer than ``UNIT``."""
    long = np.flatnonzero(np.diff(cuts) > UNIT).tolist()
    more = [np.arange(cuts[i], cuts[i + 1], UNIT, dtype=np.int64) for i in long]
    return np.unique(np.concatenate([cuts, *more]))


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The elements ``start`` to ``stop`` of a row-major array of ``shape``, as rectangles.

    At most ``2 * len(shape) - 1`` (one for a scalar), in the order in which they lie in memory,
    each contiguous in memory. Raises ``PlanError`` if the range leaves the array.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise PlanError(
            "A range of elements leaves its array",
            expected=f"a part of 0 to {prod(shape)}",
            found=f"{start} to {stop}",
        )
    return [Box(o, s) for o, s in _rectangles(shape, start, stop)]


_Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[_Rectangle]:
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = shape[1:]
    row = prod(inner)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        for o, s in _rectangles(inner, head, tail):
            yield (first, *o), (1, *s)
        return
    if head:
        for o, s in _rectangles(inner, head, row):
            yield (first, *o), (1, *s)
        first += 1
    if last > first:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    for o, s in _rectangles(inner, 0, tail):
        yield (last, *o), (1, *s)


def span(part: Box, whole: Box) -> tuple[int, int]:
    """First and past-the-last element of ``part`` in the row-major array that holds ``whole``.

    ``part`` lies within ``whole`` and is not empty; both in coordinates of the global tensor.
    """
    first = last = 0
    for o, s, z, n in zip(part.offsets, part.sizes, whole.offsets, whole.sizes, strict=True):
        first = first * n + o - z
        last = last * n + o - z + s - 1
    return first, last + 1


def subtract(box: Box, part: Box) -> list[Box]:
    """What is left of ``box`` without ``part``, which lies within it: disjoint boxes."""
    left = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for d, (o, s) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        stop = offsets[d] + sizes[d]
        for a, b in ((offsets[d], o), (o + s, stop)):
            if b > a:
                left.append(
                    Box(
                        (*offsets[:d], a, *offsets[d + 1 :]),
                        (*sizes[:d], b - a, *sizes[d + 1 :]),
                    )
                )
        offsets[d], sizes[d] = o, s
    return left
