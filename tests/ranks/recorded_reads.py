"""A store that records its reads, and the minimum that a rank must read."""

from itertools import pairwise

import numpy as np

from limpet.types import BLOCK_SIZE, DTYPES, Box
from tests.unreliable_stores import HookedStore


class RecordingStore(HookedStore):
    """A store that records its calls.

    ``ranges``: the file, offset, and length in bytes of each read from a shard. ``calls``: the
    method and key of each call.
    """

    def __init__(self, inner):
        super().__init__(inner)
        self.ranges: list[tuple[str, int, int]] = []
        self.calls: list[tuple[str, str]] = []
        self.before = lambda method, key: self.calls.append((method, key))

    def get_range(self, key, offset, length, into):
        self.ranges.append((key, offset, length))
        super().get_range(key, offset, length, into)

    @property
    def nbytes(self):
        return sum(length for _, _, length in self.ranges)


def chunks_containing(snapshot, wanted):
    """Return the chunks (file, start, stop) that contain any of the ``wanted`` elements, and the
    headers of their shards.

    ``wanted`` maps a key to a boolean array of the tensor's shape. The function checks each element
    and uses none of the arithmetic under test.
    """
    chunks = []
    for index in snapshot.indexes():
        starts = [0, *index.cuts.tolist()][:-1]
        needed = np.zeros(index.length, bool)
        for leaf in index.leaves:
            if leaf.key not in wanted:
                continue
            for box in leaf.boxes:
                origin = (0,) * len(leaf.shape)
                elements = wanted[leaf.key][Box(box.offsets, box.sizes).slices(origin)]
                mask = np.repeat(elements.reshape(-1), DTYPES[leaf.dtype].itemsize)
                needed[box.at : box.at + len(mask)] |= mask
        needed[: index.header] = needed.any()
        for start, stop in zip(starts, index.cuts.tolist(), strict=True):
            if needed[start:stop].any():
                chunks.append((index.shard, start, stop))
    return chunks


def are_merged(reads, snapshot):
    """Return True if no byte is read twice and adjacent reads within one block are merged."""
    data_starts = {index.shard: index.header for index in snapshot.indexes()}
    for (file, offset, length), (next_file, start, _) in pairwise(sorted(reads)):
        data_start = data_starts[file]
        same_block = (offset - data_start) // BLOCK_SIZE == (start - data_start) // BLOCK_SIZE
        end = offset + length
        if file == next_file and (end > start or (end == start and same_block)):
            return False
    return True
