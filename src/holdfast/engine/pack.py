"""Writing an incremental shard: what its base lacks, gathered out of the image and checked anew."""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from holdfast.engine.location import Location
from holdfast.engine.parallel import in_parallel
from holdfast.engine.refer import Packing
from holdfast.engine.stage import Image, Piece
from holdfast.errors import CommitError
from holdfast.format.digest import digest
from holdfast.storage.direct import Buffer, Pool
from holdfast.words import UNIT


def write_packed(
    place: Location,
    name: str,
    image: Image,
    packing: Packing,
    pieces: list[Piece],
    pool: Pool,
    threads: int,
) -> None:
    """Write the shard. Raises ``StoreError``, or ``CommitError`` if the state has changed since
    its digests were made; then there is no such shard."""
    gather = _Gather(place, image, packing, pieces)
    header = packing.header
    spans = [(a, min(a + pool.unit, len(header))) for a in range(0, len(header), pool.unit)]
    data = range(len(header), packing.length, pool.unit)
    spans += [(a, min(a + pool.unit, packing.length)) for a in data]

    def write(span: tuple[int, int]) -> None:
        start, stop = span
        buffer = pool.acquire()
        try:
            if start < len(header):
                buffer.view[: stop - start] = header[start:stop]
            else:
                gather.fill(start, stop, buffer)
            upload.write_at(start, buffer.view[: stop - start])
        finally:
            pool.release(buffer)

    with place.store.put(place.key(name), packing.length) as upload:
        in_parallel(spans, write, min(threads, len(spans)))
        upload.commit()


class _Gather:
    """Brings parts of the image together as they follow one another in the shard."""

    def __init__(
        self,
        place: Location,
        image: Image,
        packing: Packing,
        pieces: list[Piece],
    ) -> None:
        self.url = place.url
        self.image = image
        self.packing = packing
        self.cuts = image.cuts.tolist()
        self.pieces = pieces
        self.begins = [p.start for p in pieces]
        self.checked = bytearray(len(self.cuts))
        self.spare: list[Buffer] = []

    def fill(self, start: int, stop: int, buffer: Buffer) -> None:
        """Copy the shard's bytes from ``start`` to ``stop`` to the buffer's beginning."""
        for chunk, first, last, at in self._parts(start, stop):
            self._copy(chunk, first, last, buffer, at - start)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """What lies there: the number of a chunk, which of its bytes, and where in the shard."""
        packing, cuts = self.packing, self.cuts
        for i in range(bisect_right(packing.at, start) - 1, len(packing.at)):
            shift = packing.at[i] - packing.starts[i]
            a, b = max(start - shift, packing.starts[i]), min(stop - shift, packing.stops[i])
            if a >= b:
                break
            for c in range(bisect_right(cuts, a), bisect_left(cuts, b) + 1):
                first, last = max(a, cuts[c - 1]), min(b, cuts[c])
                yield c, first - cuts[c - 1], last - cuts[c - 1], first + shift

    def _copy(self, chunk: int, first: int, last: int, buffer: Buffer, at: int) -> None:
        """Bytes ``first`` to ``last`` of a chunk to the buffer's byte ``at``. The chunk is checked
        as a whole, wherever its other bytes go."""
        start, stop = self.cuts[chunk - 1], self.cuts[chunk]
        piece = self.pieces[bisect_right(self.begins, start) - 1]
        if piece.buffer is not None:
            begin = start - piece.start
            if not self.checked[chunk]:  # what is staged stays as it is
                self._check(chunk, piece.buffer.view[begin : begin + stop - start])
                self.checked[chunk] = 1
            source = piece.buffer.address + begin
            ctypes.memmove(buffer.address + at, source + first, last - first)
        elif last - first == stop - start:
            self.image.copy(start, stop, buffer, at)
            self._check(chunk, buffer.view[at : at + stop - start])
        else:
            try:
                whole = self.spare.pop()
            except IndexError:
                whole = Buffer(UNIT)  # no chunk of ours is longer
            self.image.copy(start, stop, whole, 0)
            self._check(chunk, whole.view[: stop - start])
            ctypes.memmove(buffer.address + at, whole.address + first, last - first)
            self.spare.append(whole)

    def _check(self, chunk: int, view: memoryview) -> None:
        found = digest(view)
        if found != self.packing.digests[chunk]:
            image = self.image
            holding = image.holdings[bisect_right(image.begins, self.cuts[chunk - 1]) - 1]
            raise CommitError(
                f"Nothing was committed to {self.url}: {holding.key} changed while it was saved",
                expected=f"digest {self.packing.digests[chunk]}",
                found=found,
                todo="Change nothing in the state until the save returns; if nothing did, suspect"
                " the machine's memory",
                leaf=holding.key,
            )
