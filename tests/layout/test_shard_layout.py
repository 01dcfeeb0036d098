"""The order and the chunks of a shard, and the arithmetic of boxes."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from limpet.layout.boxes import contiguous_boxes
from limpet.layout.shard_layout import (
    MAX_SHARED_CHUNK_BYTES,
    SMALL_BOX_BYTES,
    chunk_cuts,
)
from limpet.types import BLOCK_SIZE
from tests.layout.random_boxes import shapes

limits = [
    0, 1, SMALL_BOX_BYTES - 16, SMALL_BOX_BYTES, SMALL_BOX_BYTES + 16, MAX_SHARED_CHUNK_BYTES,
    BLOCK_SIZE - 16, BLOCK_SIZE, BLOCK_SIZE + 16, 3 * BLOCK_SIZE,
]  # fmt: skip
elements = st.one_of(
    st.sampled_from(limits), st.integers(0, 5000), st.integers(0, 2 * SMALL_BOX_BYTES)
)


@given(
    header=st.integers(1, 64).map(lambda n: n * 4096),
    boxes=st.lists(
        st.tuples(st.sampled_from([16, 8, 4, 2, 1]), elements, st.sampled_from([1, 40])),
        max_size=20,
    ),
)
def test_chunks_tile_the_file_and_follow_all_rules(header, boxes):
    boxes = sorted(((w, n // w) for w, n, times in boxes for _ in range(times)), reverse=True)
    widths = np.array([w for w, _ in boxes], np.int64)
    lengths = np.array([w * n for w, n in boxes], np.int64)
    ends = header + np.cumsum(lengths)
    starts = ends - lengths

    cuts = chunk_cuts(header, lengths)

    assert cuts.dtype == np.int64
    assert cuts[0] == header
    assert cuts[-1] == header + lengths.sum()
    sizes = np.diff(cuts)
    assert (sizes > 0).all(), "no chunk is empty"
    begin, stop = cuts[:-1], cuts[1:]
    assert ((begin - header) // BLOCK_SIZE == (stop - 1 - header) // BLOCK_SIZE).all(), (
        "each chunk is within one unit"
    )
    large = lengths >= SMALL_BOX_BYTES
    assert np.isin(starts[large], cuts).all()
    assert np.isin(ends[large], cuts).all()
    filled = lengths > 0
    if filled.any():
        box = np.searchsorted(ends[filled], begin, side="right")
        shared = ~large[filled][box]
        assert (sizes[shared] <= MAX_SHARED_CHUNK_BYTES).all(), (
            "small boxes share chunks up to a limit"
        )
        assert ((begin - starts[filled][box]) % widths[filled][box] == 0).all(), (
            "chunks contain whole elements"
        )
        inside = begin[shared & (begin != starts[filled][box])]
        assert ((inside - header) % BLOCK_SIZE == 0).all(), "only unit boundaries cut small boxes"


@given(shapes, st.data())
def test_contiguous_boxes_cover_the_range(shape, data):
    count = prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    array = np.arange(count).reshape(shape)

    parts = contiguous_boxes(shape, start, stop)

    assert len(parts) <= max(1, 2 * len(shape) - 1)
    origin = (0,) * len(shape)
    flat = [array[b.slices(origin)].ravel() for b in parts]
    assert np.concatenate([np.empty(0, int), *flat]).tolist() == list(range(start, stop))


def test_boxes_that_are_alone_have_chunks_of_their_own():
    lengths = np.array([3 * SMALL_BOX_BYTES, 10, 20, 0, 30, 40], np.int64)
    cuts = chunk_cuts(100, lengths, [False, False, True, True, False, False])
    ends = np.cumsum(lengths) + 100
    assert cuts.tolist() == [100, *ends[[0, 1, 2, 5]].tolist()]
    cuts = chunk_cuts(100, lengths, [True] * 6)
    assert cuts.tolist() == [100, *ends[[0, 1, 2, 4, 5]].tolist()]
