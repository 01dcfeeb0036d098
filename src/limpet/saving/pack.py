"""The bytes of an incremental shard: the chunks of the image that the base lacks, whose digests are
checked again."""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter

import numpy as np

from limpet.buffers import Buffer
from limpet.errors import CommitError
from limpet.format.digest import digest, digest_parts
from limpet.saving.image import Image, Piece
from limpet.saving.incremental import IncrementalLayout
from limpet.threads import Workers
from limpet.types import BLOCK_SIZE


class ImageChunks:
    """The chunks of an image. A chunk is either in staged pieces (it may touch two of them), or
    still in the live state."""

    def __init__(self, image: Image, pieces: Sequence[Piece]) -> None:
        self.image = image
        self.cuts = image.cuts.tolist()
        self._pieces = pieces
        self._piece_starts = [p.start for p in pieces]

    def staged_spans(self, chunk: int, first: int, last: int) -> list[tuple[Buffer, int, int]]:
        """Return the buffers that hold bytes ``first`` to ``last`` of a chunk, in order, each with
        the start and stop offsets in it. The list is empty if the chunk is not staged."""
        start, stop = self.cuts[chunk - 1] + first, self.cuts[chunk - 1] + last
        spans = []
        for i in range(bisect_right(self._piece_starts, start) - 1, len(self._pieces)):
            piece = self._pieces[i]
            if start >= stop or piece.buffer is None:
                break
            end = min(stop, piece.stop)
            spans.append((piece.buffer, start - piece.start, end - piece.start))
            start = end
        return spans

    def length(self, chunk: int) -> int:
        """Return the length of a chunk, in bytes."""
        return int(self.cuts[chunk] - self.cuts[chunk - 1])

    def copy_live(self, chunk: int, buffer: Buffer, buffer_offset: int) -> memoryview:
        """Copy a chunk from the live state into the buffer at ``buffer_offset``, and return the
        chunk's bytes there."""
        self.image.copy_range(self.cuts[chunk - 1], self.cuts[chunk], buffer, buffer_offset)
        return buffer.view[buffer_offset : buffer_offset + self.length(chunk)]


def digest_chunks(
    image: Image,
    pieces: Sequence[Piece],
    workers: Workers,
) -> list[str]:
    """Return the digest of every chunk. A chunk that is not staged is copied into a temporary
    buffer."""
    chunks = ImageChunks(image, pieces)
    digests = [digest(image.header)] + [""] * (len(chunks.cuts) - 1)

    def digest_chunk(chunk: int) -> None:
        staged = chunks.staged_spans(chunk, 0, chunks.length(chunk))
        if staged:
            digests[chunk] = digest_parts(b.view[first:last] for b, first, last in staged)
        else:
            with workers.buffer() as buffer:
                digests[chunk] = digest(chunks.copy_live(chunk, buffer, 0))

    workers.each(range(1, len(digests)), digest_chunk, image.length)
    return digests


class PackedImage:
    """An incremental shard to be written: chunks of the complete image, in the order in which the
    shard holds them. Their digests are known, so the end of the header is the only cut.

    ``pieces``: the pieces of the complete image, staged or not; ``url``: the save, for errors.
    """

    def __init__(self, url: str, layout: IncrementalLayout, pieces: Sequence[Piece]) -> None:
        self._url = url
        self._layout = layout
        self.header = layout.header
        self.cuts = np.array([len(layout.header)])
        self._chunks = ImageChunks(layout.image, pieces)
        self._verified = bytearray(len(layout.digests))
        self._spare_buffers: list[Buffer] = []

    def copy_piece(self, piece: Piece, buffer: Buffer) -> None:
        """Copy the bytes of a piece of the shard to the start of the buffer.

        Raises ``CommitError`` if the state changed after its digests were computed.
        """
        start, stop = piece.start, piece.stop
        if start < len(self.header):
            buffer.view[: stop - start] = self.header[start:stop]
        else:
            for chunk, first, last, at in self._chunk_spans(start, stop):
                self._copy_chunk(chunk, first, last, buffer, at - start)

    def _chunk_spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the parts of chunks in bytes ``start`` to ``stop`` of the shard: the number of the
        chunk, the first byte and the end in the chunk, and the offset in the shard."""
        spans, cuts = self._layout.spans, self._chunks.cuts
        first_span = bisect_right(spans, start - len(self.header), key=itemgetter(2)) - 1
        for i in range(first_span, len(spans)):
            span_start, span_stop, data_offset = spans[i]
            shift = len(self.header) + data_offset - span_start
            a, b = max(start - shift, span_start), min(stop - shift, span_stop)
            if a >= b:
                break
            for c in range(bisect_right(cuts, a), bisect_left(cuts, b) + 1):
                first, last = max(a, cuts[c - 1]), min(b, cuts[c])
                yield c, first - cuts[c - 1], last - cuts[c - 1], first + shift

    def _copy_chunk(
        self, chunk: int, first: int, last: int, buffer: Buffer, buffer_offset: int
    ) -> None:
        """Copy bytes ``first`` to ``last`` of a chunk into the buffer at ``buffer_offset``. Check
        the digest of the whole chunk, even if its other bytes belong elsewhere."""
        chunks, length = self._chunks, self._chunks.length(chunk)
        staged = chunks.staged_spans(chunk, first, last)
        if staged:
            if not self._verified[chunk]:  # staged bytes do not change, so one check is enough
                spans = chunks.staged_spans(chunk, 0, length)
                self._check_digest(chunk, digest_parts(b.view[i:j] for b, i, j in spans))
                self._verified[chunk] = 1
            for source, i, j in staged:
                ctypes.memmove(buffer.address + buffer_offset, source.address + i, j - i)
                buffer_offset += j - i
        elif last - first == length:
            self._check_digest(chunk, digest(chunks.copy_live(chunk, buffer, buffer_offset)))
        else:
            try:
                spare = self._spare_buffers.pop()
            except IndexError:
                spare = Buffer(BLOCK_SIZE)  # no chunk of an image is longer
            self._check_digest(chunk, digest(chunks.copy_live(chunk, spare, 0)))
            ctypes.memmove(buffer.address + buffer_offset, spare.address + first, last - first)
            self._spare_buffers.append(spare)

    def _check_digest(self, chunk: int, found: str) -> None:
        expected = self._layout.digests[chunk]
        if found != expected:
            image = self._layout.image
            start = self._chunks.cuts[chunk - 1]
            key = image.leaf_boxes[bisect_right(image.box_starts, start) - 1].key
            raise CommitError(
                f"Nothing was committed to {self._url}: {key} changed while it was saved",
                expected=f"digest {expected}",
                found=found,
                todo="Do not change the state until the save returns. If nothing changed it, test"
                " the machine's memory",
                leaf=key,
            )
