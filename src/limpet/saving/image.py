"""The image of a shard: its content before the file exists."""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap
from operator import attrgetter, mul
from typing import Any, NamedTuple

import numpy as np

from limpet.buffers import Buffer, BufferPool
from limpet.format.safetensors import build_header
from limpet.layout.boxes import contiguous_boxes
from limpet.layout.shard_layout import (
    LeafBox,
    chunk_cuts,
    digest_leaf_boxes,
    file_order,
    full_shard_entries,
)
from limpet.lazy_torch import torch_or_none
from limpet.ragged import Ints, sorted_unique
from limpet.state.memory_ranges import read_ranges, write_ranges
from limpet.state.source import Source
from limpet.types import BLOCK_SIZE


@dataclass(slots=True)
class Piece:
    """A part of the image, by file offsets; at most ``BLOCK_SIZE`` bytes. A piece is staged once it
    has a buffer."""

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
    """A shard to be written: its header, and its boxes in file order with the arrays, tensors, or
    ``Source`` objects that have their bytes. ``cuts``: the file offsets at which chunks end."""

    header: bytes
    leaf_boxes: list[LeafBox]
    sources: list[Any]
    box_starts: list[int]
    box_ends: list[int]
    cuts: Ints
    length: int

    def split_by_device(self, pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
        """Return the pieces with bytes from CUDA devices, and those with bytes from the host."""
        if not cuda_devices(self.sources):
            return [], list(pieces)
        is_cuda = (getattr(source, "is_cuda", False) for source in self.sources)
        counts = [0, *accumulate(map(int, is_cuda))]
        split: tuple[list[Piece], list[Piece]] = [], []
        for piece in pieces:
            first, last = self._boxes_between(piece.start, piece.stop)
            split[piece.start < len(self.header) or counts[first] == counts[last]].append(piece)
        return split

    def _boxes_between(self, start: int, stop: int) -> tuple[int, int]:
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
        """Copy the data at file offsets ``start`` to ``stop`` into the buffer at
        ``buffer_offset``."""
        self.begin_copy(start, stop, buffer, buffer_offset)
        first, last = self._boxes_between(start, stop)
        synchronize_streams(self.sources[first:last])

    def begin_copy(self, start: int, stop: int, buffer: Buffer, buffer_offset: int) -> None:
        """Copy as ``copy_range`` does. Copies from CUDA devices may end only when the current
        streams of this thread are synchronized."""
        first, last = self._boxes_between(start, stop)
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
        addresses = np.array(_contiguous_addresses(self.sources[first:last]), np.int64)
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
    leaf_boxes: Sequence[LeafBox],
    order: Sequence[int] | None = None,
    cache: dict[str, Any] | None = None,
) -> Image:
    """Return the image of a shard whose box ``i`` is all of ``sources[i]``. ``cache``: the group's;
    keeps the layout for later images of these boxes, unless an ``order`` in the file is given."""
    layouts: dict[bytes, _Layout] = {} if cache is None else cache.setdefault("layouts", {})
    digest = b"" if cache is None else digest_leaf_boxes(leaf_boxes)
    layout = layouts.get(digest)
    if layout is None:
        order = file_order(leaf_boxes) if order is None else order
        ordered = [*map(leaf_boxes.__getitem__, order)]
        lengths = np.array([*map(attrgetter("nbytes"), ordered)], dtype=np.int64)
        header = build_header(full_shard_entries(ordered))
        ends = np.cumsum(lengths) + len(header)
        cuts = chunk_cuts(len(header), lengths)
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


def copy_bytes(source: Any, start: int, stop: int, buffer: Buffer, buffer_offset: int) -> None:
    """Copy bytes ``start`` to ``stop`` of the source, in row-major order, into the buffer at
    ``buffer_offset``."""
    _begin_copy(source, start, stop, buffer, buffer_offset)
    synchronize_streams([source])


def cuda_devices(sources: Iterable[Any]) -> set[Any]:
    """Return the CUDA devices that hold sources."""
    torch = torch_or_none()
    if torch is None or not torch.cuda.is_initialized():  # no tensor can be on a device
        return set()
    return {s.device for s in sources if getattr(s, "is_cuda", False)}


def synchronize_streams(sources: Iterable[Any]) -> None:
    """Wait for the work that is queued on this thread's current CUDA streams, on every device that
    holds sources. Streams of other threads do not wait for that work."""
    for device in cuda_devices(sources):
        import torch

        torch.cuda.current_stream(device).synchronize()


def _begin_copy(source: Any, start: int, stop: int, buffer: Buffer, buffer_offset: int) -> None:
    """Copy as ``copy_bytes`` does. A copy from a CUDA device may end only when the thread's stream
    is synchronized."""
    if address := contiguous_address(source):
        ctypes.memmove(buffer.address + buffer_offset, address + start, stop - start)
    elif isinstance(source, Source):
        source.read_into(start, buffer.view[buffer_offset : buffer_offset + stop - start])
    elif isinstance(source, np.ndarray):
        _copy_strided_array(source, start, stop, buffer.view[buffer_offset:])
    else:
        _copy_strided_tensor(source, start, stop, buffer.view[buffer_offset:])


def contiguous_address(source: Any) -> int:
    """Return the address of the elements of an array or tensor, or 0 if they are not contiguous in
    host memory."""
    if isinstance(source, np.ndarray):
        return int(source.__array_interface__["data"][0]) if source.flags.c_contiguous else 0
    return int(source.data_ptr()) if source.is_cpu and source.is_contiguous() else 0


def _contiguous_addresses(sources: Sequence[Any]) -> list[int]:
    """Return ``contiguous_address`` of each source."""
    torch = torch_or_none()
    is_torch = torch is not None and {*map(type, sources)} <= {torch.Tensor, torch.nn.Parameter}
    if torch is None or not is_torch or not all(map(attrgetter("is_cpu"), sources)):
        return [*map(contiguous_address, sources)]
    addresses = map(torch.Tensor.data_ptr, sources)  # a third of the time
    return [*map(mul, addresses, map(torch.Tensor.is_contiguous, sources))]


def _copy_strided_array(
    source: np.ndarray[Any, Any], start: int, stop: int, out: memoryview
) -> None:
    size = source.itemsize
    done = 0
    for box in contiguous_boxes(source.shape, start // size, stop // size):
        target = np.ndarray(box.sizes, source.dtype, out, done)
        target[...] = source[box.slices((0,) * source.ndim)]
        done += target.nbytes


def _copy_strided_tensor(source: Any, start: int, stop: int, out: memoryview) -> None:
    """Copy as integers of the same size, which preserves every bit pattern of every dtype."""
    import torch

    if source.is_complex():
        source = torch.view_as_real(source)
    size = source.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    source = source.view(integer)
    if source.is_contiguous():
        source = source.view(-1)  # then one copy suffices
    done = 0
    for box in contiguous_boxes(tuple(source.shape), start // size, stop // size):
        target = torch.frombuffer(out, dtype=integer, count=box.numel, offset=done)
        part = source[box.slices((0,) * source.ndim)]
        target.view(box.sizes).copy_(part, non_blocking=True)
        done += target.nbytes
