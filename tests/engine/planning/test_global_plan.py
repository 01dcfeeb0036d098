"""Offers and the write plan: every box once, fairly, and no lie passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.planning.global_plan import can_reuse_plan, make_global_plan
from holdfast.engine.planning.local_plan import LocalPlan, digest_leaf_boxes, make_local_plan
from holdfast.engine.planning.shard_layout import LeafBox
from holdfast.errors import DTypeMismatch, PlanError, ShapeMismatch, Unsupported
from holdfast.types import Box
from tests.engine.planning.random_boxes import leaves, rank_boxes, tilings


def plan(ranks):
    """The plan as a coordinator makes it: from what came over the wire."""
    return make_global_plan([LocalPlan.from_bytes(make_local_plan(h).to_bytes()) for h in ranks])


def row(key, start, size, total=8, dtype="float32"):
    return LeafBox(key, dtype, (total,), Box((start,), (size,)))


@given(st.data())
def test_every_box_is_written_once_by_one_that_holds_it(data):
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
    assert {h.key for h in written} == {key for key, _, _ in state}, "empty leaves are kept too"
    assert can_reuse_plan([digest_leaf_boxes(h) for h in ranks], made)


@given(st.data())
def test_loads_are_balanced_over_those_who_can_choose(data):
    ranks = data.draw(st.integers(2, 6))
    held = [[] for _ in range(ranks)]
    groups = data.draw(st.lists(st.sets(st.integers(0, ranks - 1), min_size=1), min_size=1))
    for i, group in enumerate(groups):
        for n in data.draw(st.lists(st.integers(1, 1000), max_size=10)):
            key = f"{i}/{len(held[min(group)])}"
            for r in group:
                held[r].append(LeafBox(key, "uint8", (n,), Box.whole((n,))))

    made = plan(held)

    holders = {}
    for r, holdings in enumerate(held):
        for h in holdings:
            holders.setdefault(h.key, []).append(r)
    for r, holdings in enumerate(held):
        given_to = [
            h
            for h, w in zip(holdings, made.write_mask(r), strict=True)
            if w and len(holders[h.key]) > 1
        ]
        if given_to:
            means = [made.bytes_per_rank[holders[h.key]].mean() for h in given_to]
            assert made.bytes_per_rank[r] <= max(means) + max(h.nbytes for h in given_to)


def test_replicas_go_to_those_who_have_nothing_else_to_write():
    shared = [row(f"model/{i}", 0, 8) for i in range(10)]
    alone = LeafBox("table", "uint8", (320,), Box.whole((320,)))
    made = plan([[*shared, alone], shared, shared])
    assert made.bytes_per_rank.tolist() == [320, 160, 160]


def test_one_rank_writes_everything():
    holdings = [row(f"model/{i}", 0, 8) for i in range(100)]
    made = plan([holdings])
    assert made.write_mask(0).all()
    assert made.bytes_per_rank.tolist() == [3200]
    assert plan([[]]).write_mask(0).tolist() == []
    assert plan([[], holdings, []]).bytes_per_rank.tolist() == [0, 3200, 0]


def test_a_box_that_a_rank_has_twice_is_written_once():
    made = plan([[row("a", 0, 8), row("a", 0, 8)], [row("a", 0, 8)]])
    assert made.write_flags.sum() == 1


@given(st.data())
def test_a_box_that_nobody_has_or_that_is_cut_twice_is_an_error(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    boxes = data.draw(tilings(shape))
    lies = [b for b in boxes if b.numel]
    if len(lies) < 2:
        return
    lie = data.draw(st.sampled_from(lies))
    d = data.draw(st.sampled_from([i for i, n in enumerate(lie.sizes)]))
    kind = data.draw(st.sampled_from(["gap", "moved", "twice"]))
    boxes.remove(lie)
    offsets = list(lie.offsets)
    if kind == "moved":  # the bytes still add up, but the parts do not
        offsets[d] += 1 if offsets[d] + lie.sizes[d] < shape[d] else -1
        if offsets[d] < 0:
            return
        boxes.append(Box(tuple(offsets), lie.sizes))
    elif kind == "twice":
        other = Box.whole(shape)
        boxes += [lie, other]
    holdings = [LeafBox("w", "uint8", shape, b) for b in boxes]
    with pytest.raises(PlanError, match=r"w: its boxes (overlap|leave gaps)") as caught:
        plan([holdings[::2], holdings[1::2]])
    assert caught.value.leaves == ("w",)


def test_a_gap_is_not_made_up_for_by_an_overlap():
    with pytest.raises(PlanError, match=r"overlap and leave gaps \(32 of 32 bytes\)"):
        plan([[row("a", 0, 4)], [row("a", 2, 4)]])
    square = [
        LeafBox("a", "int8", (4, 4), Box(o, (2, 2))) for o in ((0, 0), (0, 2), (2, 0), (2, 0))
    ]
    with pytest.raises(PlanError, match="leave gaps"):
        plan([square])


def test_all_disagreements_are_told_at_once_with_keys_and_ranks():
    first = [row("a", 0, 8), row("b", 0, 8), row("c", 0, 4), row("same", 0, 8)]
    second = [row("a", 0, 9, 9), row("b", 0, 8, dtype="int32"), row("same", 0, 8)]
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


def test_the_error_is_as_exact_as_the_disagreement():
    with pytest.raises(ShapeMismatch, match="ranks 0, 1"):
        plan([[row("a", 0, 8)], [row("a", 0, 8)], [row("a", 0, 9, 9)]])
    with pytest.raises(DTypeMismatch):
        plan([[row("a", 0, 8)], [row("a", 0, 8, dtype="int32")]])


def test_many_wrong_leaves_are_counted_not_all_listed():
    with pytest.raises(PlanError, match=r"in 1000 leaves.*and 980 more"):
        plan([[row(f"k/{i}", 0, 4) for i in range(1000)]])


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ([row("a", 4, 5)], PlanError, "not within the tensor"),
        ([row("a", -1, 5)], PlanError, "not within the tensor"),
        ([LeafBox("a", "int8", (4,), Box((0, 0), (4, 1)))], PlanError, "not within the tensor"),
        ([row("a", 0, 4), row("a", 4, 4, 9)], PlanError, "two different tensors"),
        ([row("a", 0, 8, dtype="quaternion")], Unsupported, "quaternion"),
    ],
)
def test_a_rank_refuses_what_it_cannot_offer(bad, error, match):
    with pytest.raises(error, match=match):
        make_local_plan(bad)


def test_a_damaged_offer_is_refused():
    raw = make_local_plan([row("a", 0, 8)]).to_bytes()
    for bad in (raw[:-1], raw + b"x", raw[:10], b""):
        with pytest.raises(PlanError, match="truncated or damaged"):
            LocalPlan.from_bytes(bad)


def test_structure_changes_with_everything_that_a_plan_depends_on():
    base = row("a", 0, 8)
    others = [
        row("b", 0, 8),
        row("a", 0, 4),
        row("a", 4, 4),
        row("a", 0, 8, 9),
        row("a", 0, 8, dtype="int32"),
    ]
    digests = {digest_leaf_boxes([h]) for h in [base, *others]}
    assert len(digests) == 6
    assert make_local_plan([base]).digest == digest_leaf_boxes([base])
    made = plan([[base]])
    assert not can_reuse_plan([digest_leaf_boxes([others[0]])], made)
    assert not can_reuse_plan([digest_leaf_boxes([base])], None)
    assert not can_reuse_plan([digest_leaf_boxes([base]), digest_leaf_boxes([])], made)


def test_transposed_boxes_and_equal_leaves_are_told_apart():
    h = [
        LeafBox(key, "int8", (4, 4), Box(o, s))
        for key in ("a", "b")
        for o, s in (((0, 0), (2, 4)), ((0, 0), (4, 2)), ((2, 0), (2, 4)), ((0, 2), (4, 2)))
    ]
    offer = make_local_plan(h)
    assert len(np.unique(offer.box_weight)) == 8
