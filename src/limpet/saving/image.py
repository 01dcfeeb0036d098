"""The image of a shard: its content before the file exists."""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from limpet.buffers import Buffer, BufferPool
from limpet.format.safetensors import build_header
from limpet.layout import shard_layout
from limpet.ragged import Ints, sorted_unique
from limpet.state.arrays import part_library
from limpet.state.arrays.own import Source
from limpet.state.memory_ranges import read_ranges, write_ranges
from limpet.types import BLOCK_SIZE


@dataclass(slots=True)
class Piece:
    """At most ``BLOCK_SIZE`` bytes of the image, by file offsets; staged once it has a buffer."""

    start: int
    stop: int
    buffer: Buffer | None = None


def split_into_pieces(header_length: int, length: int) -> list[Piece]:
    """Return the whole of a shard of ``length`` bytes as pieces. The header comes first, in its own
    pieces; data pieces start at multiples of ``BLOCK_SIZE`` from the start of the data."""
    header_starts = range(0, header_length, BLOCK_SIZE)
    data_starts = range(header_length, length, BLOCK_SIZE)
    return list(starmap(Piece, pairwise([*header_starts, *data_starts, length])))


def release_buffers(pieces: Iterable[Piece], pool: BufferPool) -> None:
    """Return the buffers of all staged pieces to the pool."""
    for piece in pieces:
        buffer, piece.buffer = piece.buffer, None  # first, so that none is released twice
        if buffer is not None:
            pool.release(buffer)


@dataclass(frozen=True, slots=True)
class Image:
    """A shard to be written: its header, and its boxes in file order with the parts of arrays that
    have their bytes. ``cuts``: the file offsets at which chunks end."""

    header: bytes
    leaf_boxes: list[shard_layout.LeafBox]
    sources: list[Any]
    box_starts: list[int]
    box_ends: list[int]
    cuts: Ints
    length: int

    def split_by_device(self, pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
        """Return the pieces with bytes from accelerators, and those with bytes from the host."""
        accelerators = set[Any]()
        for library in {*map(part_library, {*map(type, self.sources)})}:
            accelerators |= library.accelerators(self.sources)
        if not accelerators:
            return [], list(pieces)
        on_device = (getattr(source, "device", None) in accelerators for source in self.sources)
        counts = [0, *accumulate(map(int, on_device))]
        split: tuple[list[Piece], list[Piece]] = [], []
        for piece in pieces:
            first, last = self.boxes_between(piece.start, piece.stop)
            split[piece.start < len(self.header) or counts[first] == counts[last]].append(piece)
        return split

    def boxes_between(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first box with bytes between two file offsets, and the one after the last."""
        return bisect_right(self.box_starts, start) - 1, bisect_left(self.box_starts, stop)

    def copy_piece(self, piece: Piece, buffer: Buffer) -> None:
        """Copy the piece's bytes to the start of the buffer."""
        start, stop = piece.start, piece.stop
        if start < len(self.header):
            buffer.view[: stop - start] = self.header[start:stop]
        else:
            self.copy_range(start, stop, buffer, 0)

    def copy_range(self, start: int, stop: int, buffer: Buffer, buffer_offset: int) -> None:
        """Copy the data at these file offsets to ``buffer_offset`` of the buffer."""
        self.begin_copy(start, stop, buffer, buffer_offset)
        first, last = self.boxes_between(start, stop)
        synchronize(self.sources[first:last])

    def begin_copy(self, start: int, stop: int, buffer: Buffer, buffer_offset: int) -> None:
        """Copy as ``copy_range``; copies from accelerators may end only with ``synchronize``."""
        first, last = self.boxes_between(start, stop)
        shift = buffer_offset - start
        boxes: Iterable[int] = range(first, last)
        if last - first >= _MANY_BOXES:  # all but the first and the last one are copied completely
            boxes = (first, *self._copy_small_boxes(first + 1, last - 1, buffer, shift), last - 1)
        for i in boxes:
            box_start = self.box_starts[i]
            a, b = max(start, box_start), min(stop, self.box_ends[i])
            if b > a:
                _begin_copy(self.sources[i], a - box_start, b - box_start, buffer, a + shift)

    def _copy_small_boxes(self, first: int, last: int, buffer: Buffer, shift: int) -> list[int]:
        """Copy the small boxes among ``first`` to before ``last``, and return the others.
        ``shift``: from a file offset to one in the buffer."""
        sources = self.sources[first:last]
        libraries = {*map(part_library, {*map(type, sources)})}
        if len(libraries) == 1:
            addresses = np.array(libraries.pop().addresses(sources), np.int64)
        else:
            addresses = np.array([part_library(type(s)).address(s) for s in sources], np.int64)
        starts = np.array(self.box_starts[first:last], np.int64)
        sizes = np.array(self.box_ends[first:last], np.int64) - starts
        is_small = (addresses != 0) & (sizes > 0) & (sizes <= _SMALL_BOX_BYTES)
        for size in sorted_unique(sizes[is_small]).tolist():
            same_size = is_small & (sizes == size)
            (ranges,) = read_ranges([(size, addresses[same_size])])
            write_ranges(buffer.view, starts[same_size] + shift, ranges)
        others: list[int] = (first + np.flatnonzero(~is_small)).tolist()
        return others


_MANY_BOXES = 8
_SMALL_BOX_BYTES = 512
"""If a copy consists of many boxes, those up to this size are copied all at once."""


class _Layout(NamedTuple):
    """What in an image follows from its boxes, which a training's saves have in common. Nothing may
    change a layout: several images have its lists."""

    order: Sequence[int]
    header: bytes
    box_starts: list[int]
    box_ends: list[int]
    cuts: Ints


_MAX_CACHED_LAYOUTS = 2
_MAX_CACHED_BOXES = 200_000
"""The layout of more boxes than this is not kept. A box takes about 200 bytes."""


def make_image(
    sources: Sequence[Any],
    leaf_boxes: Sequence[shard_layout.LeafBox],
    order: Sequence[int] | None = None,
    cache: dict[str, Any] | None = None,
) -> Image:
    """Return the image of a shard whose box ``i`` is all of ``sources[i]``. ``cache``: the group's;
    keeps the layout for later images of these boxes, unless an ``order`` in the file is given."""
    layouts: dict[bytes, _Layout] = {} if cache is None else cache.setdefault("layouts", {})
    digest = b"" if cache is None else shard_layout.digest_leaf_boxes(leaf_boxes)
    layout = layouts.get(digest)
    if layout is None:
        order = shard_layout.file_order(leaf_boxes) if order is None else order
        ordered = [*map(leaf_boxes.__getitem__, order)]
        lengths = np.array([*map(attrgetter("nbytes"), ordered)], dtype=np.int64)
        header = build_header(shard_layout.full_shard_entries(ordered))
        ends = np.cumsum(lengths) + len(header)
        is_held: list[bool] = []
        if has_sources(sources):
            is_held = [getattr(sources[i], "is_held", False) for i in order]
        cuts = shard_layout.chunk_cuts(len(header), lengths, is_held)
        cuts.setflags(write=False)
        layout = _Layout(order, header, (ends - lengths).tolist(), ends.tolist(), cuts)
        if len(order) <= _MAX_CACHED_BOXES:
            layouts[digest] = layout
            while len(layouts) > _MAX_CACHED_LAYOUTS:
                del layouts[next(iter(layouts))]
    return Image(
        layout.header,
        [*map(leaf_boxes.__getitem__, layout.order)],
        [*map(sources.__getitem__, layout.order)],
        layout.box_starts,
        layout.box_ends,
        layout.cuts,
        int(layout.cuts[-1]),
    )


def has_sources(parts: Sequence[Any]) -> bool:
    """Return True if some parts are sources, which a save may read later, or need not read. Nearly
    all states have none, and to ask each of a million tensors would take long."""
    return any(issubclass(cls, Source) for cls in {*map(type, parts)})


def copy_bytes(source: Any, start: int, stop: int, buffer: Buffer) -> None:
    """Copy bytes ``start`` to ``stop`` of the source, in row-major order, into the buffer."""
    _begin_copy(source, start, stop, buffer, 0)
    synchronize([source])


def synchronize(sources: Sequence[Any]) -> None:
    """Wait for the work that this thread has queued on the accelerators that hold sources. Work of
    other threads does not wait for it."""
    for library in {*map(part_library, {*map(type, sources)})}:
        library.synchronize(sources)


def _begin_copy(source: Any, start: int, stop: int, buffer: Buffer, buffer_offset: int) -> None:
    """Copy as ``copy_bytes`` does. A copy from an accelerator may end only with ``synchronize``."""
    library = part_library(type(source))
    if address := library.address(source):
        ctypes.memmove(buffer.address + buffer_offset, address + start, stop - start)
    else:
        out = buffer.view[buffer_offset : buffer_offset + stop - start]
        library.copy_range(source, start, stop, out)
