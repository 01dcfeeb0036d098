"""What a shard's safetensors header says of its boxes, or of the parts of them that it holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from holdfast.engine.layout import Holding
from holdfast.format.index import ShardIndex
from holdfast.format.tensorfile import entry_name, stored_shape
from holdfast.words import DTYPES, Box

Row = tuple[str, str, tuple[int, ...], int, int]
"""An entry as ``build_header`` takes it: name, stored dtype, shape, start, stop."""

Span = tuple[int, int, int]
"""A part of an image: where it begins and ends there, and where in the shard's data it lies."""


def whole_entries(holdings: Sequence[Holding]) -> Iterator[Row]:
    """The entries of a shard that holds all of these boxes, one after the other."""
    taken = {"__metadata__"}  # the format's own name
    start = 0
    for h in holdings:
        dtype = DTYPES[h.dtype]
        name = _free(entry_name(h.key, h.shape, h.box.offsets, h.box.sizes), taken)
        stop = start + h.nbytes
        yield name, dtype.stored, stored_shape(dtype, h.box.sizes), start, stop
        start = stop


def part_entries(
    holdings: Sequence[Holding], begins: Sequence[int], spans: Iterable[Span]
) -> Iterator[Row]:
    """The entries of a shard that holds only some spans of its image.

    ``holdings`` lie in the image in this order, each from its number in ``begins`` on. A box
    that is there whole has its usual name; a part of one is flat, and its name says which of the
    box's elements it holds: ``model/weight[0:1024]``. Boxes without bytes are left out.
    """
    taken = {"__metadata__"}
    for start, stop, at in spans:
        for i in range(max(0, bisect_right(begins, start) - 1), len(holdings)):
            h, begin = holdings[i], begins[i]
            if begin >= stop:
                break
            a, b = max(start, begin), min(stop, begin + h.nbytes)
            if a >= b:
                continue
            dtype, sizes = DTYPES[h.dtype], h.box.sizes
            name = entry_name(h.key, h.shape, h.box.offsets, sizes)
            if b - a < h.nbytes:
                first, last = (a - begin) // dtype.itemsize, (b - begin) // dtype.itemsize
                name, sizes = f"{name}[{first}:{last}]", (last - first,)
            shape = stored_shape(dtype, sizes)
            yield _free(name, taken), dtype.stored, shape, at + a - start, at + b - start


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "~"
    taken.add(name)
    return name


def holdings_of(index: ShardIndex) -> tuple[list[Holding], list[int]]:
    """The boxes of an index in the order in which they lie in the image, and where they begin."""
    rows = [
        (box.at, holding.nbytes, n, holding)
        for n, (leaf, box) in enumerate((leaf, b) for leaf in index.leaves for b in leaf.boxes)
        for holding in [Holding(leaf.key, leaf.dtype, leaf.shape, Box(box.offsets, box.sizes))]
    ]
    rows.sort(key=lambda row: row[:3])
    return [row[3] for row in rows], [row[0] for row in rows]


def own_spans(index: ShardIndex) -> list[Span]:
    """The spans of the image that an incremental shard itself holds, in the shard's order."""
    places = index.places
    if places is None or len(index.cuts) == 1:
        return []
    own = np.flatnonzero(places.file == 0)[1:]
    first = np.append(True, ~(places.joined(index.cuts)[own[1:] - 1] & (np.diff(own) == 1)))
    begins = own[first[: len(own)]]
    ends = own[np.append(first[1 : len(own)], True)[: len(own)]]
    spans = zip(
        index.cuts[begins - 1].tolist(),
        index.cuts[ends].tolist(),
        (places.at[begins] - index.header).tolist(),
        strict=True,
    )
    return sorted(spans, key=lambda span: span[2])
