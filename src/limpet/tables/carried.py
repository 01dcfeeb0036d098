"""Rows of an earlier version that a save carries over without reading them."""

from __future__ import annotations

import numpy as np

from limpet.buffers import BufferPool
from limpet.layout.read_plan import ReadRequest, make_read_plan
from limpet.snapshot.chunks import Target, execute_read_plan
from limpet.snapshot.leaf import LeafView
from limpet.state.arrays.own import Source
from limpet.threads import Workers
from limpet.types import BLOCK_SIZE, DTYPES, Box


class CarriedSource(Source):
    """Rows ``first_row`` to ``stop_row`` of a leaf of the base of a save.

    A save that refers to the base does not read it if the rows are a box of the same leaf, at the
    same place, and the base has that box, too. Otherwise, the rows are read and checked.
    """

    is_held = True

    def __init__(self, leaf: LeafView, first_row: int, stop_row: int) -> None:
        self.dtype, self.shape = leaf.dtype, (stop_row - first_row, *leaf.shape[1:])
        self._reader, self._key, self._first_row = leaf._reader, leaf._source_key, first_row
        offsets = (first_row, *[0] * (len(self.shape) - 1))
        self.carried = self._reader.digest, self._key, offsets

    def read_into(self, start: int, view: memoryview) -> None:
        """Read from the base. Raises ``FormatError`` if it is damaged, and ``StoreError``."""
        if not len(view):
            return
        row = self.nbytes // self.shape[0]
        first, stop = start // row, -(-(start + len(view)) // row)
        sizes = (stop - first, *self.shape[1:])
        rows = np.empty(sizes, f"V{DTYPES[self.dtype].itemsize}")
        box = Box((self._first_row + first, *[0] * (len(sizes) - 1)), sizes)
        target = Target(self.dtype, sizes, rows, rows.__array_interface__["data"][0])
        reader = self._reader
        with reader.not_found_if_deleted():
            indexes = reader.indexes()
            plan = make_read_plan(indexes, [ReadRequest(self._key, box)], None)
            # buffers of its own: the threads of the save may wait while they have all of theirs
            workers = Workers(BufferPool(2 * BLOCK_SIZE), 1, check_time=reader.location.check_time)
            execute_read_plan(reader.location, plan, indexes, [target], workers)
        view[:] = rows.reshape(-1).view(np.uint8)[start - first * row :][: len(view)].data
