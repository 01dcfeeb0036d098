"""The layout of tensors in ranks and shards: leaf boxes, their order in a shard, chunks. No I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import msgspec
import numpy as np
from xxhash import xxh3_128_digest

from limpet.errors import PlanError, Unsupported
from limpet.format.index import ShardIndex
from limpet.format.safetensors import entry_name, stored_shape
from limpet.ragged import Ints, sorted_unique
from limpet.types import BLOCK_SIZE, DTYPES, KIB, MIB, Box

HeaderEntry = tuple[str, str, tuple[int, ...], int, int]
"""An entry for ``build_header``: name, stored dtype, shape, start, stop."""

ImageSpan = tuple[int, int, int]
"""A part of an image: its start and end in the image, and its offset in the shard's data."""


def full_shard_entries(leaf_boxes: Sequence[LeafBox]) -> Iterator[HeaderEntry]:
    """Yield the entries of a shard that holds all of these boxes, one after the other."""
    used_names = {"__metadata__"}  # reserved by the format
    stop = 0
    for leaf_box in leaf_boxes:
        dtype = DTYPES[leaf_box.dtype]
        name = _unique_name(
            entry_name(leaf_box.key, leaf_box.shape, leaf_box.box.offsets, leaf_box.box.sizes),
            used_names,
        )
        start, stop = stop, stop + leaf_box.nbytes
        yield name, dtype.stored_dtype, stored_shape(dtype, leaf_box.box.sizes), start, stop


def partial_shard_entries(
    leaf_boxes: Sequence[LeafBox], image_offsets: Sequence[int], spans: Iterable[ImageSpan]
) -> Iterator[HeaderEntry]:
    """Yield the entries of a shard with some spans of its image; box i begins at
    ``image_offsets[i]``. A part of a box is flat, with its elements in the name: ``w[0:1024]``."""
    used_names = {"__metadata__"}
    for start, stop, data_offset in spans:
        for i in range(max(0, bisect_right(image_offsets, start) - 1), len(leaf_boxes)):
            leaf_box, begin = leaf_boxes[i], image_offsets[i]
            if begin >= stop:
                break
            a, b = max(start, begin), min(stop, begin + leaf_box.nbytes)
            if a >= b:
                continue
            dtype, sizes = DTYPES[leaf_box.dtype], leaf_box.box.sizes
            name = entry_name(leaf_box.key, leaf_box.shape, leaf_box.box.offsets, sizes)
            if b - a < leaf_box.nbytes:
                first, last = (a - begin) // dtype.itemsize, (b - begin) // dtype.itemsize
                name, sizes = f"{name}[{first}:{last}]", (last - first,)
            yield (
                _unique_name(name, used_names),
                dtype.stored_dtype,
                stored_shape(dtype, sizes),
                data_offset + a - start,
                data_offset + b - start,
            )


def _unique_name(name: str, used_names: set[str]) -> str:
    while name in used_names:
        name += "~"
    used_names.add(name)
    return name


def leaf_boxes_from_index(index: ShardIndex) -> tuple[list[LeafBox], list[int]]:
    """Return the boxes of an index in the order of the image, and their offsets in the image."""
    rows = [
        (box.at, LeafBox(leaf.key, leaf.dtype, leaf.shape, Box(box.offsets, box.sizes)))
        for leaf in index.leaves
        for box in leaf.boxes
    ]
    rows.sort(key=lambda row: (row[0], row[1].nbytes))
    return [leaf_box for _, leaf_box in rows], [at for at, _ in rows]


def own_spans(index: ShardIndex) -> list[ImageSpan]:
    """Return the spans of the image that an incremental shard itself holds, in shard order."""
    chunk_refs = index.chunk_refs
    if chunk_refs is None or len(index.cuts) == 1:
        return []
    own = np.flatnonzero(chunk_refs.files == 0)[1:]
    first = np.append(
        True, ~(chunk_refs.is_contiguous_with_next(index.cuts)[own[1:] - 1] & (np.diff(own) == 1))
    )
    begins = own[first[: len(own)]]
    ends = own[np.append(first[1 : len(own)], True)[: len(own)]]
    spans = zip(
        index.cuts[begins - 1].tolist(),
        index.cuts[ends].tolist(),
        (chunk_refs.offsets[begins] - index.header).tolist(),
        strict=True,
    )
    return sorted(spans, key=lambda span: span[2])


SMALL_BOX_BYTES = 64 * KIB
"""Boxes below this size in bytes share chunks. Each other box has chunks of its own."""

MAX_SHARED_CHUNK_BYTES = 1 * MIB
"""The maximum number of bytes of a chunk that several small boxes share."""


# One object per box: creating a frozen dataclass takes eight times as long.
class LeafBox(msgspec.Struct, frozen=True, gc=False):
    """One box of one leaf that this rank has. ``dtype`` is a name in ``types.DTYPES``, ``shape``
    that of the global tensor."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def nbytes(self) -> int:
        """The number of bytes of the box."""
        return prod(self.box.sizes) * itemsize(self.dtype)


def itemsize(dtype: str) -> int:
    """Return the bytes per element of a dtype. Raises ``Unsupported`` for an unknown dtype."""
    if dtype not in DTYPES:
        raise Unsupported(
            f"A tensor of dtype {dtype} cannot be saved",
            expected="one of " + ", ".join(DTYPES),
            found=dtype,
            todo="Convert the tensor to one of these dtypes",
        )
    return DTYPES[dtype].itemsize


def digest_leaf_boxes(leaf_boxes: Sequence[LeafBox]) -> bytes:
    """Return a 16-byte digest. As long as it is unchanged, the local plan is unchanged, too."""
    return xxh3_128_digest(msgspec.msgpack.encode(leaf_boxes))


def file_order(leaf_boxes: Sequence[LeafBox]) -> list[int]:
    """Return the order of boxes in a shard, as indices: larger elements first, so that all are
    aligned, then by top level, then large boxes, so that small ones share chunks."""
    sort_keys = [
        (
            -itemsize(leaf_box.dtype),
            leaf_box.key.partition("/")[0],
            -leaf_box.nbytes,
            leaf_box.key,
            leaf_box.box.offsets,
        )
        for leaf_box in leaf_boxes
    ]
    return sorted(range(len(leaf_boxes)), key=sort_keys.__getitem__)


def chunk_cuts(header_length: int, box_lengths: Ints, is_alone: Sequence[bool] = ()) -> Ints:
    """Return the ends of a shard's chunks, the last of which is the file's length. The first chunk
    is the header. ``box_lengths`` are the bytes of the boxes in file order. Chunks of the data end:

    at every multiple of ``BLOCK_SIZE``, so that one thread can write and digest a block; around
    each box of at least ``SMALL_BOX_BYTES``, or that ``is_alone``, so that it can be read alone;
    and between smaller boxes, which share chunks of at most ``MAX_SHARED_CHUNK_BYTES``. Raises
    ``PlanError`` for an empty header or a negative length.
    """
    box_lengths = np.asarray(box_lengths, dtype=np.int64)
    if header_length <= 0 or (box_lengths.size and box_lengths.min() < 0):
        raise PlanError(
            "The chunks of a shard cannot be computed",
            expected="a header of at least 1 byte and boxes of at least 0 bytes",
            found=f"a header of {header_length} bytes and a shortest box of"
            f" {box_lengths.min(initial=0)} bytes",
        )
    is_large = (box_lengths >= SMALL_BOX_BYTES) | np.array(is_alone or [False], np.bool_)
    is_large, box_lengths = is_large[box_lengths > 0], box_lengths[box_lengths > 0]
    ends = np.cumsum(box_lengths)
    starts = ends - box_lengths
    total = int(ends[-1]) if ends.size else 0
    # A small box starts in one window and ends less than SMALL_BOX_BYTES after that window, so no
    # chunk exceeds MAX_SHARED_CHUNK_BYTES. This needs no loop over the boxes.
    window = starts // (MAX_SHARED_CHUNK_BYTES - SMALL_BOX_BYTES)
    first_in_window = np.flatnonzero(window[1:] != window[:-1]) + 1
    cuts = np.concatenate(
        [
            np.zeros(1, np.int64),
            np.arange(BLOCK_SIZE, total, BLOCK_SIZE, dtype=np.int64),
            starts[is_large],
            ends[is_large],
            starts[first_in_window],
            ends[-1:],
        ]
    )
    return sorted_unique(cuts) + header_length


def split_long_chunks(cuts: Ints) -> Ints:
    """Add cuts to chunks after the header that are longer than ``BLOCK_SIZE``."""
    long_chunks = np.flatnonzero(np.diff(cuts) > BLOCK_SIZE).tolist()
    extra_cuts = [np.arange(cuts[i], cuts[i + 1], BLOCK_SIZE, dtype=np.int64) for i in long_chunks]
    return sorted_unique(np.concatenate([cuts, *extra_cuts]))
