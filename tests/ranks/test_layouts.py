"""Any layout into any other, on ranks that are threads: against direct slicing."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.buffers import shared_pool
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.saving import partition
from holdfast.engine.saving.job import VersionMetadata
from holdfast.engine.saving.save import begin_save, finish_save
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import open_location
from holdfast.storage.memory import MemoryStore
from holdfast.testing.fakegroup import FakeGroup
from holdfast.types import BLOCK_SIZE, DTYPES, MIB
from tests.ranks.random_layouts import (
    LaidOutTensor,
    Layout,
    draw_layout,
    leaf_key,
    local_bytes,
    state_of,
    states,
)
from tests.ranks.recorded_reads import RecordingStore, are_merged, chunks_containing

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def saved(store, size, state_of_rank, **options):
    with FakeGroup(size) as group:
        snaps = group.run(lambda r: holdfast.save(store, state_of_rank(r), **options))
    assert len({s.digest for s in snaps}) == 1
    return snaps[0]


def saved_later(store, size, state_of_rank):
    with FakeGroup(size) as group:
        group.run(lambda r: holdfast.save_async(store, state_of_rank(r)).wait())


def check(laid, state, held, chosen=None):
    """All tensors that were ``chosen`` are the saved ones, the others as they were."""
    for i, rows in held.items():
        level, name = leaf_key(i).split("/")
        rows = rows if chosen is None or i in chosen else np.full_like(rows, 1)
        assert local_bytes(state[level][name]) == rows.tobytes(), (i, laid[i])


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(states(), st.sampled_from([partition.MAX_BOX_BYTES, 64, 8]), st.booleans())
def test_any_layout_into_any_other(drawn, split, later):
    """Also some leaves only, and one process alone, of a part or the whole."""
    sizes, laid = drawn
    store = MemoryStore()
    with patch.object(partition, "MAX_BOX_BYTES", split):
        (saved_later if later else saved)(store, sizes[0], lambda r: state_of(laid, 0, r)[0])
    snapshot = holdfast.open(store)
    assert snapshot.verify().ok
    assert set(snapshot.keys()) == {leaf_key(i) for i in range(len(laid))}
    written = sum(nbytes for _, _, nbytes in _boxes(snapshot))
    assert written == sum(one.element_bytes().nbytes for one in laid)

    def load(rank):
        state, held = state_of(laid, 1, rank, empty=True)
        assert holdfast.load(store, into=state) is state
        check(laid, state, held)

    with FakeGroup(sizes[1]) as group:
        group.run(load)
    chosen = [i for i in range(0, len(laid), 2) if laid[i].seed % 4] + [1]

    def load_some(rank):
        state, held = state_of(laid, 2, rank, empty=True)
        holdfast.load(store, into=state, keys=[leaf_key(i) for i in chosen])
        check(laid, state, held, chosen)

    chosen = [i for i in chosen if i < len(laid)]
    if chosen:
        with FakeGroup(sizes[2]) as group:
            group.run(load_some)
    alone = holdfast.load(store)
    for i, one in enumerate(laid):
        level, name = leaf_key(i).split("/")
        assert local_bytes(alone[level][name]) == one.element_bytes().tobytes(), one
    if laid[1:]:
        assert holdfast.load(store, keys="other/**").keys() == {"other"}


def _boxes(snapshot):
    """Shard, key and bytes of all boxes of a snapshot."""
    return [
        (number, leaf.key, prod(box.sizes) * DTYPES[leaf.dtype].itemsize)
        for number, index in enumerate(snapshot.indexes())
        for leaf in index.leaves
        for box in leaf.boxes
    ]


# -- what is read --------------------------------------------------------------------------------

LARGE = [(300, 7, 40), (1, 130_000), (129, 1030), (70_000,), (3, 5, 7, 900), (400, 400), (9,), ()]


@pytest.mark.parametrize("seed", range(6))
def test_each_rank_reads_the_chunks_that_it_needs_once(seed):
    """Chunks of 64 KiB and more: a rank that has a part of a tensor reads a part of its chunks."""
    random, sizes = Random(seed), (4, 6)
    laid = [
        LaidOutTensor(
            random.choice(["float32", "uint8", "bfloat16"]),
            shape,
            tuple(draw_layout(random, size, shape, False) for size in sizes),
            False,
            False,
            seed + n,
        )
        for n, shape in enumerate(LARGE)
    ]
    store = MemoryStore()
    snapshot = saved(store, 4, lambda r: state_of(laid, 0, r)[0])
    everything = sum(length for _, _, length in _boxes(snapshot))

    def load(rank):
        state, held = state_of(laid, 1, rank, empty=True)
        noted = RecordingStore(store)
        holdfast.load(noted, into=state)
        check(laid, state, held)
        wanted = {}
        for i, one in enumerate(laid):
            numbers = one.layouts[1].element_numbers(one.shape, rank)
            wanted[leaf_key(i)] = np.zeros(one.shape, bool)
            wanted[leaf_key(i)].reshape(-1)[[] if numbers is None else numbers] = True
        needed = chunks_containing(snapshot, wanted)
        assert noted.nbytes == sum(stop - start for _, start, stop in needed)
        assert are_merged(noted.ranges, snapshot)
        assert len(noted.ranges) <= len(needed)
        small = sorted(key for method, key in noted.calls if method == "get")
        assert len(small) == len(set(small)) == 1 + len(snapshot.indexes())
        return noted.nbytes

    with FakeGroup(6) as group:
        read = group.run(load)
    assert min(read) <= everything <= sum(read)


def test_a_tensor_of_several_units_is_read_by_the_rows_that_a_rank_has():
    """32 MiB over 4 ranks, then over 8: each reads its 4 MiB and no more than a chunk besides."""
    whole = torch.arange(8 << 20, dtype=torch.int32).reshape(2048, 4096)
    store = MemoryStore()

    def part(rank, size):
        rows = slice(2048 * rank // size, 2048 * (rank + 1) // size)
        return holdfast.Boxed(whole[rows].clone(), (rows.start, 0), (2048, 4096))

    saved(store, 4, lambda r: {"w": part(r, 4)})

    def load(rank):
        noted, into = RecordingStore(store), part(rank, 8)
        expected = into.tensor.clone()
        into.tensor.zero_()
        holdfast.load(noted, into={"w": into})
        assert torch.equal(into.tensor, expected)
        assert noted.nbytes == into.tensor.nbytes
        assert max(length for _, _, length in noted.ranges) <= BLOCK_SIZE

    with FakeGroup(8) as group:
        group.run(load)


# -- what is written -----------------------------------------------------------------------------


def _loads(snapshot, keys=None):
    loads = [0] * len(snapshot.indexes())
    for shard, k, nbytes in _boxes(snapshot):
        loads[shard] += nbytes if keys is None or k in keys else 0
    return loads


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 6),
    st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    st.sampled_from([64, 1000, partition.MAX_BOX_BYTES]),
)
def test_what_all_ranks_have_is_written_once_and_the_work_is_shared(size, lengths, split):
    state = {str(i): torch.full((n, 3), i, dtype=torch.uint8) for i, n in enumerate(lengths)}
    with patch.object(partition, "MAX_BOX_BYTES", split):
        snapshot = saved(MemoryStore(), size, lambda r: {k: t.clone() for k, t in state.items()})
    boxes = [nbytes for _, _, nbytes in _boxes(snapshot)]
    assert sum(boxes) == 3 * sum(lengths)
    loads = _loads(snapshot)
    assert max(loads) <= sum(loads) / size + max(boxes)
    assert max(boxes) <= max(split, 3)


def test_what_replicas_have_in_common_is_shared_among_them():
    """As HSDP has it: 2 replicas of 3 parts; what all have besides goes to whoever has least."""
    random, size = Random(0), 6
    mesh = Layout(tuple(range(6)), (2, 3), (None, 0), (0, 1), "dtensor")
    plain = Layout(tuple(range(6)), (6,), (None,), (0,), "plain")
    laid = [
        LaidOutTensor(
            "uint8", (random.randint(1, 300), 10), (mesh if i % 3 else plain,), False, False, i
        )
        for i in range(60)
    ]
    snapshot = saved(MemoryStore(), size, lambda r: state_of(laid, 0, r)[0])
    boxes = [nbytes for _, _, nbytes in _boxes(snapshot)]
    assert sum(boxes) == sum(prod(one.shape) for one in laid)
    spread = {leaf_key(i) for i in range(60) if i % 3}
    parts = _loads(snapshot, spread)
    for n in range(3):
        assert abs(parts[n] - parts[n + 3]) <= max(boxes)
    assert max(_loads(snapshot)) <= sum(boxes) / size + max(boxes)


@pytest.mark.slow
def test_a_large_tensor_that_all_have_is_cut_and_shared():
    whole = torch.arange(9 * MIB, dtype=torch.int32).reshape(3, 3, -1)
    snapshot = saved(MemoryStore(), 3, lambda r: {"w": whole, "t": whole.permute(2, 1, 0)})
    loads = _loads(snapshot)
    assert sum(loads) == 2 * whole.nbytes
    assert max(loads) <= sum(loads) / 3 + partition.MAX_BOX_BYTES
    back = holdfast.load(snapshot.location.store)
    assert torch.equal(back["w"], whole)
    assert torch.equal(back["t"], whole.permute(2, 1, 0))


# -- incremental ---------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(states(30), st.booleans())
def test_an_incremental_version_of_another_layout_has_its_own_values(drawn, alike):
    """``alike``: the same layout again, of which all that has not changed is referred to."""
    sizes, laid = drawn
    sizes = sizes[:1] * 3 if alike else sizes
    laid = [replace(one, layouts=one.layouts[:1] * 3) if alike else one for one in laid]
    store = MemoryStore()
    saved_at(Location(store, "version_1"), sizes[0], lambda r: state_of(laid, 0, r)[0])
    changed = [replace(one, seed=one.seed + (one.seed % 3 == 0)) for one in laid]
    base = open_location(Location(store, "version_1"))
    place = Location(store, "version_2")
    saved_at(place, sizes[1], lambda r: state_of(changed, 1, r)[0], base)
    snapshot = open_location(place)
    assert snapshot.verify().ok
    kept = sum(
        a.element_bytes().nbytes for a, b in zip(laid, changed, strict=True) if a.seed == b.seed
    )
    if alike:
        assert snapshot.referred_bytes <= kept
    if alike and changed == laid:
        assert snapshot.referred_bytes == kept

    def load(rank):
        state, held = state_of(changed, 2, rank, empty=True)
        load_snapshot(open_location(place), state)
        check(changed, state, held)

    with FakeGroup(sizes[2]) as group:
        group.run(load)


def saved_at(place, size, state_of_rank, base=None):
    """As a run saves: at a place within it, with a base."""

    def work(rank):
        label = VersionMetadata(step=int(place.folder[-1]))
        state = state_of_rank(rank)
        return finish_save(
            begin_save(place, state, label, shared_pool(), stage_now=False, base=base)
        )

    with FakeGroup(size) as group:
        group.run(work)
