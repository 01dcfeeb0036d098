"""Random states in random layouts, for the tests of planning."""

from hypothesis import strategies as st

from limpet.layout.shard_layout import LeafBox
from limpet.types import Box

DTYPES = ("uint8", "bfloat16", "float32", "complex128")

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def tilings(draw, shape, depth=4):
    """Draw boxes that tile a tensor. The tensor is split in two repeatedly, at any position."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, depth)) if shape else 0):
        i = draw(st.integers(0, len(boxes) - 1))
        d = draw(st.integers(0, len(shape) - 1))
        box = boxes.pop(i)
        at = draw(st.integers(0, box.sizes[d]))
        for begin, size in ((0, at), (at, box.sizes[d] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[d] += begin
            sizes[d] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return sorted(set(boxes), key=lambda b: (b.offsets, b.sizes))


@st.composite
def leaves(draw, max_count=4):
    """Draw leaves as tuples of key, dtype, and shape."""
    count = draw(st.integers(0, max_count))
    tops = st.sampled_from(["model", "optimizer"])
    return [
        (f"{draw(tops)}/{i}.weight", draw(st.sampled_from(DTYPES)), draw(shapes))
        for i in range(count)
    ]


@st.composite
def rank_boxes(draw, state, ranks):
    """Draw the leaf boxes of each rank. Every leaf is tiled, and at least one rank has each box."""
    boxes_by_rank = [[] for _ in range(ranks)]
    for key, dtype, shape in state:
        for box in draw(tilings(shape)):
            for r in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                boxes_by_rank[r].append(LeafBox(key, dtype, shape, box))
    return [draw(st.permutations(h)) for h in boxes_by_rank]
