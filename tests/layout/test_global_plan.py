"""Local plans and the global plan: every box is written once, loads are balanced, and wrong local
plans are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.errors import DTypeMismatch, PlanError, ShapeMismatch, Unsupported
from limpet.layout.global_plan import can_reuse_plan, make_global_plan
from limpet.layout.local_plan import LocalPlan, make_local_plan
from limpet.layout.shard_layout import LeafBox, digest_leaf_boxes
from limpet.types import Box
from tests.layout.random_boxes import leaves, rank_boxes, tilings


def plan(ranks):
    """Make the global plan as the coordinator does, from encoded local plans."""
    return make_global_plan([LocalPlan.from_bytes(make_local_plan(h).to_bytes()) for h in ranks])


def interval(key, start, size, total=8, dtype="float32"):
    return LeafBox(key, dtype, (total,), Box((start,), (size,)))


@given(st.data())
def test_every_box_is_written_once_by_a_rank_that_has_it(data):
    state = data.draw(leaves())
    ranks = data.draw(rank_boxes(state, data.draw(st.integers(1, 5))))

    made = plan(ranks)

    written = []
    for r, holdings in enumerate(ranks):
        mask = made.write_mask(r)
        assert len(mask) == len(holdings)
        mine = [h for h, w in zip(holdings, mask, strict=True) if w]
        assert made.bytes_per_rank[r] == sum(h.nbytes for h in mine)
        written += mine
    filled = [(h.key, h.box) for h in written if h.nbytes]
    assert len(set(filled)) == len(filled)
    assert set(filled) == {(h.key, h.box) for hs in ranks for h in hs if h.nbytes}
    assert {h.key for h in written} == {key for key, _, _ in state}, "the plan keeps empty leaves"
    assert can_reuse_plan([digest_leaf_boxes(h) for h in ranks], made)


@given(st.data())
def test_replicated_boxes_are_balanced_across_the_ranks_that_have_them(data):
    ranks = data.draw(st.integers(2, 6))
    boxes_by_rank = [[] for _ in range(ranks)]
    groups = data.draw(st.lists(st.sets(st.integers(0, ranks - 1), min_size=1), min_size=1))
    for i, group in enumerate(groups):
        for n in data.draw(st.lists(st.integers(1, 1000), max_size=10)):
            key = f"{i}/{len(boxes_by_rank[min(group)])}"
            for r in group:
                boxes_by_rank[r].append(LeafBox(key, "uint8", (n,), Box.whole((n,))))

    made = plan(boxes_by_rank)

    holders = {}
    for r, holdings in enumerate(boxes_by_rank):
        for h in holdings:
            holders.setdefault(h.key, []).append(r)
    for r, holdings in enumerate(boxes_by_rank):
        assigned = [
            h
            for h, w in zip(holdings, made.write_mask(r), strict=True)
            if w and len(holders[h.key]) > 1
        ]
        if assigned:
            means = [made.bytes_per_rank[holders[h.key]].mean() for h in assigned]
            assert made.bytes_per_rank[r] <= max(means) + max(h.nbytes for h in assigned)


def test_a_box_that_a_rank_has_twice_is_written_once():
    made = plan([[interval("a", 0, 8), interval("a", 0, 8)], [interval("a", 0, 8)]])
    assert made.write_flags.sum() == 1


@given(st.data())
def test_gaps_and_overlaps_between_boxes_raise_an_error(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    boxes = data.draw(tilings(shape))
    filled = [b for b in boxes if b.numel]
    if len(filled) < 2:
        return
    wrong = data.draw(st.sampled_from(filled))
    d = data.draw(st.sampled_from([i for i, n in enumerate(wrong.sizes)]))
    kind = data.draw(st.sampled_from(["gap", "moved", "twice"]))
    boxes.remove(wrong)
    offsets = list(wrong.offsets)
    if kind == "moved":  # the total of the bytes is right, but the boxes do not tile the tensor
        offsets[d] += 1 if offsets[d] + wrong.sizes[d] < shape[d] else -1
        if offsets[d] < 0:
            return
        boxes.append(Box(tuple(offsets), wrong.sizes))
    elif kind == "twice":
        other = Box.whole(shape)
        boxes += [wrong, other]
    holdings = [LeafBox("w", "uint8", shape, b) for b in boxes]
    with pytest.raises(PlanError, match=r"w: its boxes (overlap|leave gaps)") as caught:
        plan([holdings[::2], holdings[1::2]])
    assert caught.value.leaves == ("w",)


def test_a_gap_is_found_even_if_an_overlap_has_the_same_size():
    with pytest.raises(PlanError, match=r"overlap and leave gaps \(32 of 32 bytes\)"):
        plan([[interval("a", 0, 4)], [interval("a", 2, 4)]])
    square = [
        LeafBox("a", "int8", (4, 4), Box(o, (2, 2))) for o in ((0, 0), (0, 2), (2, 0), (2, 0))
    ]
    with pytest.raises(PlanError, match="leave gaps"):
        plan([square])


def test_one_error_names_all_disagreements_with_keys_and_ranks():
    first = [interval("a", 0, 8), interval("b", 0, 8), interval("c", 0, 4), interval("same", 0, 8)]
    second = [interval("a", 0, 9, 9), interval("b", 0, 8, dtype="int32"), interval("same", 0, 8)]
    with pytest.raises(PlanError) as caught:
        plan([first, second])
    message = str(caught.value)
    assert type(caught.value) is PlanError
    assert "in 3 leaves" in message
    assert "a: float32 [8] on rank 0, float32 [9] on rank 1" in message
    assert "b: float32 [8] on rank 0, int32 [8] on rank 1" in message
    assert "c: its boxes leave gaps (16 of 32 bytes)" in message
    assert "same: " not in message
    assert set(caught.value.leaves) == {"a", "b", "c"}


def test_the_error_class_matches_the_disagreement():
    with pytest.raises(ShapeMismatch, match="ranks 0, 1"):
        plan([[interval("a", 0, 8)], [interval("a", 0, 8)], [interval("a", 0, 9, 9)]])
    with pytest.raises(DTypeMismatch):
        plan([[interval("a", 0, 8)], [interval("a", 0, 8, dtype="int32")]])


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ([interval("a", 4, 5)], PlanError, "not within the tensor"),
        ([interval("a", -1, 5)], PlanError, "not within the tensor"),
        ([LeafBox("a", "int8", (4,), Box((0, 0), (4, 1)))], PlanError, "not within the tensor"),
        ([interval("a", 0, 4), interval("a", 4, 4, 9)], PlanError, "two different tensors"),
        ([interval("a", 0, 8, dtype="quaternion")], Unsupported, "quaternion"),
    ],
)
def test_make_local_plan_refuses_invalid_boxes(bad, error, match):
    with pytest.raises(error, match=match):
        make_local_plan(bad)


def test_a_damaged_local_plan_is_refused():
    raw = make_local_plan([interval("a", 0, 8)]).to_bytes()
    for bad in (raw[:-1], raw + b"x", raw[:10], b""):
        with pytest.raises(PlanError, match="truncated or damaged"):
            LocalPlan.from_bytes(bad)
