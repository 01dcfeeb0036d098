"""Read plans, executed on bytes in memory, from any layout into any other."""

from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.errors import ManifestInvalid, MissingLeaf, PlanError
from limpet.format.index import Index, IndexBox, IndexLeaf, ShardIndex, decode_index, encode_index
from limpet.layout.global_plan import make_global_plan
from limpet.layout.local_plan import make_local_plan
from limpet.layout.read_plan import ReadRequest, make_read_plan
from limpet.layout.shard_layout import chunk_cuts, file_order, itemsize
from limpet.types import Box
from tests.layout.random_boxes import leaves, rank_boxes, tilings
from tests.snapshot.manual_shards import index_columns


def tensor(rng, dtype, shape):
    """Return random bytes as an array of opaque elements."""
    raw = rng.bytes(int(np.prod(shape)) * itemsize(dtype))
    return np.frombuffer(raw, f"V{itemsize(dtype)}").reshape(shape)


def shard(name, holdings, tensors, header=4096, cuts=None):
    """Return the bytes of a shard with the leaf boxes in the given order, and its decoded index."""
    parts = [tensors[h.key][h.box.slices((0,) * len(h.shape))].tobytes() for h in holdings]
    data = b"H" * header + b"".join(parts)
    at = header + np.cumsum([0, *map(len, parts)])
    if cuts is None:
        cuts = chunk_cuts(header, np.array([len(p) for p in parts], np.int64))
    rows = {}
    for h, offset in zip(holdings, at.tolist()):
        leaf = rows.setdefault(h.key, IndexLeaf(h.key, h.dtype, h.shape, []))
        leaf.boxes.append(IndexBox(h.box.offsets, h.box.sizes, offset))
    index = Index(
        1,
        name,
        len(data),
        header,
        list(rows.values()),
        list(map(int, cuts)),
        ["0" * 32] * len(cuts),
        [],
    )
    return data, decode_index(encode_index(index), name)


def execute_plan(plan, files, indexes, requests, widths):
    """Execute the plan, and assert that it reads no chunk twice and no chunk without need."""
    targets = [np.zeros(w.box.sizes, f"V{widths[w.key]}") for w in requests]
    filled = [np.zeros(t.nbytes, int) for t in targets]
    read = [np.zeros(len(i.cuts), int) for i in indexes]
    for item in plan.items:
        cuts = indexes[item.shard].cuts.tolist()
        assert item.start == ([0, *cuts])[item.first_chunk]
        assert item.stop == cuts[item.end_chunk - 1]
        read[item.shard][item.first_chunk : item.end_chunk] += 1
        used = np.zeros(item.stop - item.start, bool)
        piece = files[item.shard][item.start : item.stop]
        for request, source, offset, nbytes in item.linear_copies.tolist():
            a = source - item.start
            assert 0 <= a < a + nbytes <= len(piece)
            used[a : a + nbytes] = True
            raw = targets[request].reshape(-1).view(np.uint8)
            raw[offset : offset + nbytes] = np.frombuffer(piece[a : a + nbytes], np.uint8)
            filled[request][offset : offset + nbytes] += 1
        for s in item.strided_copies:
            a = s.file_offset - item.start
            count = int(np.prod(s.shape))
            assert 0 <= a < a + count * s.itemsize <= len(piece)
            used[a : a + count * s.itemsize] = True
            array = np.frombuffer(piece, f"V{s.itemsize}", count, a).reshape(s.shape)
            targets[s.request_id][s.target] = array[s.source]
            per = filled[s.request_id].reshape(*targets[s.request_id].shape, s.itemsize)
            per[s.target] += 1
        for c in range(item.first_chunk, item.end_chunk):
            begin = ([0, *cuts])[c] - item.start
            assert used[begin : cuts[c] - item.start].any(), "no chunk is read without need"
    assert all((r <= 1).all() for r in read), "no chunk is read twice"
    assert all((f == 1).all() for f in filled), "every requested byte is filled once"
    return targets


def random_cuts(data, header, holdings):
    """Draw chunk boundaries at any positions between elements."""
    ends, at = {header}, header
    for h in holdings:
        if h.nbytes:
            inside = st.integers(0, h.box.numel - 1).map(
                lambda n, h=h, at=at: at + n * itemsize(h.dtype)
            )
            ends |= data.draw(st.sets(inside, max_size=4))
        at += h.nbytes
    return sorted(ends | {at})


@settings(max_examples=100)
@given(st.data())
def test_a_state_in_any_layout_is_read_into_any_other_layout(data):
    state = data.draw(leaves())
    rng = np.random.default_rng(0)
    tensors = {key: tensor(rng, dtype, shape) for key, dtype, shape in state}
    widths = {key: itemsize(dtype) for key, dtype, _ in state}
    ranks = data.draw(rank_boxes(state, data.draw(st.integers(1, 4))))
    made = make_global_plan([make_local_plan(h) for h in ranks])
    requests = [ReadRequest(k, b) for k, _, s in state for b in data.draw(tilings(s))]
    requests += [ReadRequest(k, b) for k, _, s in state for b in data.draw(tilings(s))]
    requests = data.draw(st.permutations(requests))

    with ExitStack() as patches:  # small units, so that the state has many of them
        sizes = {
            "shard_layout.BLOCK_SIZE": 128,
            "shard_layout.SMALL_BOX_BYTES": 32,
            "shard_layout.MAX_SHARED_CHUNK_BYTES": 64,
            "read_plan.BLOCK_SIZE": 128,
        }
        for name, size in sizes.items():
            patches.enter_context(patch(f"limpet.layout.{name}", size))
        files, indexes = [], []
        for r, holdings in enumerate(ranks):
            mine = [h for h, w in zip(holdings, made.write_mask(r), strict=True) if w]
            mine = [mine[i] for i in file_order(mine)]
            own = data.draw(st.booleans())
            cuts = random_cuts(data, 64, mine) if own else None
            raw, index = shard(f"s{r}", mine, tensors, 64, cuts)
            files.append(raw)
            indexes.append(index)
        plan = make_read_plan(iter(indexes), requests)
        for item in plan.items:
            assert item.stop - item.start <= 128 or item.end_chunk == item.first_chunk + 1

    targets = execute_plan(plan, files, indexes, requests, widths)
    for request, target in zip(requests, targets, strict=True):
        expected = tensors[request.key][request.box.slices((0,) * len(request.box.sizes))]
        assert target.tobytes() == expected.tobytes()


def index_of(name, leaves, length=1 << 40, header=4096, cuts=None):
    cuts = np.array([header, length] if cuts is None else cuts, np.int64)
    return ShardIndex(name, length, header, index_columns(leaves), cuts, b"")


def test_the_error_names_a_region_that_no_shard_has():
    leaf = IndexLeaf(
        "w", "int8", (4, 4), [IndexBox((0, 0), (4, 2), 4096), IndexBox((0, 2), (3, 2), 4104)]
    )
    with pytest.raises(ManifestInvalid, match=r"w \(offsets \(3, 2\), sizes \(1, 2\)\)") as caught:
        make_read_plan(
            [index_of("s", [leaf])],
            [ReadRequest("w", Box.whole((4, 4))), ReadRequest("w", Box((3, 3), (1, 1)))],
        )
    assert caught.value.leaves == ("w", "w")
    make_read_plan([index_of("s", [leaf])], [ReadRequest("w", Box((0, 0), (3, 4)))])


def test_the_error_names_all_leaves_that_no_shard_has():
    with pytest.raises(MissingLeaf, match=r"lacks 2 .*a, b"):
        make_read_plan(
            [index_of("s", [])], [ReadRequest("b", Box((), ())), ReadRequest("a", Box((0,), (0,)))]
        )


def test_shards_that_disagree_about_a_leaf_are_refused():
    a = IndexLeaf("w", "int8", (4,), [IndexBox((0,), (2,), 4096)])
    for b in (IndexLeaf("w", "int8", (5,), []), IndexLeaf("w", "uint8", (4,), [])):
        with pytest.raises(ManifestInvalid, match="disagree about w") as caught:
            make_read_plan(
                [index_of("s", [a]), index_of("t", [b])], [ReadRequest("w", Box((0,), (2,)))]
            )
        assert caught.value.file == "t"


def test_a_request_that_exceeds_its_leaf_is_refused():
    leaf = IndexLeaf("w", "int8", (4,), [IndexBox((0,), (4,), 4096)])
    for box in (
        Box((0,), (5,)),
        Box((0, 0), (4, 1)),
        Box((), ()),
        Box((-1,), (2,)),
        Box((5,), (0,)),
    ):
        with pytest.raises(PlanError, match="w is not within the stored tensor"):
            make_read_plan([index_of("s", [leaf])], [ReadRequest("w", box)])
