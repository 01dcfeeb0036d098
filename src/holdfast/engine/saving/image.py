"""The bytes of a shard before it is a file."""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from holdfast.buffers import Buffer
from holdfast.engine.planning.boxes import contiguous_boxes
from holdfast.engine.planning.shard_layout import (
    LeafBox,
    chunk_cuts,
    file_order,
    full_shard_entries,
)
from holdfast.engine.state.flatten import LocalLeaf
from holdfast.format.safetensors import build_header
from holdfast.ragged import Ints
from holdfast.types import BLOCK_SIZE


@dataclass(slots=True)
class Piece:
    """A part of the image: file offsets, at most ``UNIT`` bytes; staged once it has a buffer."""

    start: int
    stop: int
    buffer: Buffer | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """A shard that is to be written: what its bytes are and where they come from.

    ``holdings``, ``sources``, ``begins`` and ``ends`` (file offsets) are in file order; ``cuts``
    are the ends of its chunks.
    """

    header: bytes
    leaf_boxes: list[LeafBox]
    sources: list[Any]
    box_starts: list[int]
    box_ends: list[int]
    cuts: Ints

    @property
    def length(self) -> int:
        return int(self.cuts[-1])

    def pieces(self) -> list[Piece]:
        """The file in pieces that begin at multiples of ``UNIT``, counted from the data's
        beginning; the header comes first, in pieces of its own."""
        split = len(self.header)
        spans = [(a, min(a + BLOCK_SIZE, split)) for a in range(0, split, BLOCK_SIZE)]
        spans += [
            (a, min(a + BLOCK_SIZE, self.length)) for a in range(split, self.length, BLOCK_SIZE)
        ]
        return [Piece(a, b) for a, b in spans]

    def copy_piece(self, piece: Piece, buffer: Buffer) -> None:
        """Copy the piece's bytes to the beginning of the buffer."""
        start, stop = piece.start, piece.stop
        if start < len(self.header):
            buffer.view[: stop - start] = self.header[start:stop]
        else:
            self.copy_range(start, stop, buffer, 0)

    def copy_range(self, start: int, stop: int, buffer: Buffer, buffer_offset: int) -> None:
        """Copy data from ``start`` to ``stop`` to the buffer's byte ``at``."""
        some = slice(bisect_right(self.box_starts, start) - 1, bisect_left(self.box_starts, stop))
        shift = buffer_offset - start
        for source, begin, end in zip(
            self.sources[some], self.box_starts[some], self.box_ends[some], strict=True
        ):
            a, b = max(start, begin), min(stop, end)
            if b > a:
                copy_bytes(source, a - begin, b - begin, buffer, a + shift)


def make_image(leaves: Sequence[LocalLeaf], leaf_boxes: Sequence[LeafBox]) -> Image:
    """The image of the shard that holds these boxes; each is the whole of its leaf's source."""
    order = file_order(leaf_boxes)
    ordered = [leaf_boxes[i] for i in order]
    lengths = np.array([h.nbytes for h in ordered], dtype=np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    header = build_header(full_shard_entries(ordered))
    return Image(
        header,
        ordered,
        [leaves[i].source for i in order],
        (starts + len(header)).tolist(),
        (ends + len(header)).tolist(),
        chunk_cuts(len(header), lengths),
    )


def copy_bytes(source: Any, start: int, stop: int, buffer: Buffer, buffer_offset: int) -> None:
    """Bytes ``start`` to ``stop`` of the row-major source to the buffer's byte ``at``."""
    if isinstance(source, np.ndarray):
        if source.flags.c_contiguous:
            address = source.__array_interface__["data"][0]
            ctypes.memmove(buffer.address + buffer_offset, address + start, stop - start)
        else:
            _copy_strided_array(source, start, stop, buffer.view[buffer_offset:])
    elif source.is_cpu and source.is_contiguous():
        ctypes.memmove(buffer.address + buffer_offset, source.data_ptr() + start, stop - start)
    else:
        _copy_strided_tensor(source, start, stop, buffer.view[buffer_offset:])


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
    """As integers of the same size, so that every bit pattern of every dtype passes unchanged."""
    import torch

    if source.is_complex():
        source = torch.view_as_real(source)
    size = source.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    source = source.view(integer)
    shape = tuple(source.shape)
    done = 0
    for box in contiguous_boxes(shape, start // size, stop // size):
        count = prod(box.sizes)
        target = torch.frombuffer(out, dtype=integer, count=count, offset=done)
        target.view(box.sizes).copy_(source[box.slices((0,) * len(shape))])
        done += count * size
