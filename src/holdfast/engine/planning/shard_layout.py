"""How tensors lie in ranks and in files: boxes, their order in a shard, chunks, rectangles.

Arithmetic only: nothing here does I/O or knows torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import msgspec
import numpy as np

from holdfast.errors import PlanError, Unsupported
from holdfast.format.index import ShardIndex
from holdfast.format.safetensors import entry_name, stored_shape
from holdfast.ragged import Ints
from holdfast.types import BLOCK_SIZE, DTYPES, KIB, MIB, Box

HeaderEntry = tuple[str, str, tuple[int, ...], int, int]
"""An entry as ``build_header`` takes it: name, stored dtype, shape, start, stop."""

ImageSpan = tuple[int, int, int]
"""A part of an image: where it begins and ends there, and where in the shard's data it lies."""


def full_shard_entries(leaf_boxes: Sequence[LeafBox]) -> Iterator[HeaderEntry]:
    """The entries of a shard that holds all of these boxes, one after the other."""
    taken = {"__metadata__"}  # the format's own name
    start = 0
    for h in leaf_boxes:
        dtype = DTYPES[h.dtype]
        name = _unique_name(entry_name(h.key, h.shape, h.box.offsets, h.box.sizes), taken)
        stop = start + h.nbytes
        yield name, dtype.stored_dtype, stored_shape(dtype, h.box.sizes), start, stop
        start = stop


def partial_shard_entries(
    leaf_boxes: Sequence[LeafBox], image_offsets: Sequence[int], spans: Iterable[ImageSpan]
) -> Iterator[HeaderEntry]:
    """The entries of a shard that holds only some spans of its image.

    ``holdings`` lie in the image in this order, each from its number in ``begins`` on. A box
    that is there whole has its usual name; a part of one is flat, and its name says which of the
    box's elements it holds: ``model/weight[0:1024]``. Boxes without bytes are left out.
    """
    taken = {"__metadata__"}
    for start, stop, at in spans:
        for i in range(max(0, bisect_right(image_offsets, start) - 1), len(leaf_boxes)):
            h, begin = leaf_boxes[i], image_offsets[i]
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
            yield (
                _unique_name(name, taken),
                dtype.stored_dtype,
                shape,
                at + a - start,
                at + b - start,
            )


def _unique_name(name: str, used_names: set[str]) -> str:
    while name in used_names:
        name += "~"
    used_names.add(name)
    return name


def leaf_boxes_from_index(index: ShardIndex) -> tuple[list[LeafBox], list[int]]:
    """The boxes of an index in the order in which they lie in the image, and where they begin."""
    rows = [
        (box.at, holding.nbytes, n, holding)
        for n, (leaf, box) in enumerate((leaf, b) for leaf in index.leaves for b in leaf.boxes)
        for holding in [LeafBox(leaf.key, leaf.dtype, leaf.shape, Box(box.offsets, box.sizes))]
    ]
    rows.sort(key=lambda row: row[:3])
    return [row[3] for row in rows], [row[0] for row in rows]


def own_spans(index: ShardIndex) -> list[ImageSpan]:
    """The spans of the image that an incremental shard itself holds, in the shard's order."""
    places = index.chunk_refs
    if places is None or len(index.cuts) == 1:
        return []
    own = np.flatnonzero(places.files == 0)[1:]
    first = np.append(
        True, ~(places.is_contiguous_with_next(index.cuts)[own[1:] - 1] & (np.diff(own) == 1))
    )
    begins = own[first[: len(own)]]
    ends = own[np.append(first[1 : len(own)], True)[: len(own)]]
    spans = zip(
        index.cuts[begins - 1].tolist(),
        index.cuts[ends].tolist(),
        (places.offsets[begins] - index.header).tolist(),
        strict=True,
    )
    return sorted(spans, key=lambda span: span[2])


SMALL_BOX_BYTES = 64 * KIB
"""Boxes below this many bytes share chunks; a larger one has chunks of its own."""

MAX_SHARED_CHUNK_BYTES = 1 * MIB
"""Most bytes of a chunk that several small boxes share."""


# Made for every box: a frozen dataclass takes eight times as long to make.
class LeafBox(msgspec.Struct, frozen=True, gc=False):
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
        return self.box.numel * itemsize(self.dtype)


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


def file_order(leaf_boxes: Sequence[LeafBox]) -> list[int]:
    """The order of boxes in a shard, as indices into ``holdings``.

    Larger elements come first: all lengths before a box are then multiples of its element size,
    so that every box starts aligned although the file is packed without holes. Then the groups at
    the top of the state lie together, and within one large boxes come before small ones, so
    that the small ones share chunks.
    """

    def place(i: int) -> tuple[int, str, int, str, tuple[int, ...]]:
        h = leaf_boxes[i]
        size = itemsize(h.dtype)
        top = h.key.partition("/")[0]
        return (-size, top, -size * prod(h.box.sizes), h.key, h.box.offsets)

    return sorted(range(len(leaf_boxes)), key=place)


def chunk_cuts(header_length: int, box_lengths: Ints) -> Ints:
    """Where the chunks of a shard end: increasing file offsets, the last is the file's length.

    ``lengths`` are the bytes of the boxes in file order. The first chunk is the header. The data
    is cut at every multiple of ``UNIT`` counted from the header's end, so that one thread can
    write and digest one piece without its neighbours; around every box of ``SMALL`` bytes or
    more, so that it can be read without reading others; and smaller boxes share chunks
    of at most ``GROUP`` bytes.

    Raises ``PlanError`` for a negative length.
    """
    box_lengths = np.asarray(box_lengths, dtype=np.int64)
    if header_length <= 0 or (box_lengths.size and box_lengths.min() < 0):
        raise PlanError(
            "The chunks of a shard cannot be laid out",
            expected="a header and boxes of no negative length",
            found=f"a header of {header_length} bytes, a shortest box of"
            f" {box_lengths.min(initial=0)}",
        )
    box_lengths = box_lengths[box_lengths > 0]
    ends = np.cumsum(box_lengths)
    starts = ends - box_lengths
    total = int(ends[-1]) if ends.size else 0
    large = box_lengths >= SMALL_BOX_BYTES
    # A small box begins in one window and ends less than SMALL after it: GROUP is kept without
    # going from box to box.
    window = starts // (MAX_SHARED_CHUNK_BYTES - SMALL_BOX_BYTES)
    first_in_window = np.flatnonzero(window[1:] != window[:-1]) + 1
    cuts = np.concatenate(
        [
            np.zeros(1, np.int64),
            np.arange(BLOCK_SIZE, total, BLOCK_SIZE, dtype=np.int64),
            starts[large],
            ends[large],
            starts[first_in_window],
            ends[-1:],
        ]
    )
    return np.unique(cuts) + header_length


def split_long_chunks(cuts: Ints) -> Ints:
    """The cuts, and more where a chunk behind the first one is longer than ``UNIT``."""
    long = np.flatnonzero(np.diff(cuts) > BLOCK_SIZE).tolist()
    more = [np.arange(cuts[i], cuts[i + 1], BLOCK_SIZE, dtype=np.int64) for i in long]
    return np.unique(np.concatenate([cuts, *more]))
