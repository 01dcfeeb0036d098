"""A store that notes what is read from it, and what a rank would have to read at least."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from holdfast.types import BLOCK_SIZE, DTYPES, Box
from tests.engine.unreliable_stores import HookedStore


class RecordingStore(HookedStore):
    """``ranges``: file, offset and length of each part that was read of a shard."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.ranges: list[tuple[str, int, int]] = []
        self.calls: list[tuple[str, str]] = []
        self.before = lambda method, key: self.calls.append((method, key))

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        self.ranges.append((key, offset, length))
        super().get_range(key, offset, length, into)

    @property
    def nbytes(self) -> int:
        return sum(length for _, _, length in self.ranges)


def chunks_containing(snapshot: Any, wanted: dict[str, np.ndarray]) -> list[tuple[str, int, int]]:
    """The chunks (file, start, stop) that hold any of the ``wanted`` elements: by key an array of
    the tensor's shape that says of each whether it is.

    By looking at each element, without any of the arithmetic that is tested."""
    found = []
    for index in snapshot.indexes():
        starts = [0, *index.cuts.tolist()][:-1]
        needed = np.zeros(index.length, bool)
        for leaf in index.leaves:
            if leaf.key not in wanted:
                continue
            for box in leaf.boxes:
                origin = (0,) * len(leaf.shape)
                here = wanted[leaf.key][Box(box.offsets, box.sizes).slices(origin)]
                each = np.repeat(here.reshape(-1), DTYPES[leaf.dtype].itemsize)
                needed[box.at : box.at + len(each)] |= each
        for start, stop in zip(starts, index.cuts.tolist(), strict=True):
            if needed[start:stop].any():
                found.append((index.shard, start, stop))
    return found


def are_merged(reads: Iterable[tuple[str, int, int]], snapshot: Any) -> bool:
    """Whether no byte is read twice, and reads that touch are one, up to the size of a buffer."""
    begins = {index.shard: index.header for index in snapshot.indexes()}
    several = sorted(reads)
    for (file, at, length), (other, start, _) in pairwise(several):
        one_unit = (at - begins[file]) // BLOCK_SIZE == (start - begins[file]) // BLOCK_SIZE
        if file == other and (at + length > start or (at + length == start and one_unit)):
            return False
    return True
