"""Save in any layout and load in any other, on ranks in threads, compared with direct slicing."""

from dataclasses import replace
from math import prod
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet.buffers import shared_pool
from limpet.loading import shared_read
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import reader_of
from limpet.ranks.group import current_group
from limpet.saving import partition
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot.location import Location
from limpet.snapshot.reader import open_location
from limpet.storage.memory import MemoryStore
from limpet.types import BLOCK_SIZE, DTYPES, MIB
from tests.fakegroup import FakeGroup
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


def save_on_ranks(store, size, state_of_rank, **options):
    with FakeGroup(size) as group:
        snapshots = group.run(lambda r: limpet.save(store, state_of_rank(r), **options))
    assert len({reader_of(s).digest for s in snapshots}) == 1
    return reader_of(snapshots[0])


def save_async_on_ranks(store, size, state_of_rank):
    with FakeGroup(size) as group:
        group.run(lambda r: limpet.save_async(store, state_of_rank(r)).wait())


def assert_loaded(tensors, state, expected, chosen=None):
    """Check that the ``chosen`` tensors are as saved and that the others are unchanged."""
    for i, rows in expected.items():
        level, name = leaf_key(i).split("/")
        rows = rows if chosen is None or i in chosen else np.full_like(rows, 1)
        assert local_bytes(state[level][name]) == rows.tobytes(), (i, tensors[i])


@pytest.mark.slow
@settings(max_examples=30)
@given(states(), st.sampled_from([partition.MAX_BOX_BYTES, 64, 8]), st.booleans())
def test_a_state_in_any_layout_loads_into_any_other(drawn, max_box_bytes, asynchronous):
    """The ranks load all leaves and some leaves. A single process loads all and a part of them."""
    sizes, tensors = drawn
    store = MemoryStore()
    with patch.object(partition, "MAX_BOX_BYTES", max_box_bytes):
        save = save_async_on_ranks if asynchronous else save_on_ranks
        save(store, sizes[0], lambda r: state_of(tensors, 0, r)[0])
    snapshot = limpet.open(store)
    assert snapshot.verify().ok
    assert set(snapshot.keys()) == {leaf_key(i) for i in range(len(tensors))}
    written = sum(nbytes for _, _, nbytes in _boxes(reader_of(snapshot)))
    assert written == sum(tensor.element_bytes().nbytes for tensor in tensors)

    def load(rank):
        state, expected = state_of(tensors, 1, rank, empty=True)
        assert limpet.load(store, into=state).is_complete
        assert_loaded(tensors, state, expected)

    with FakeGroup(sizes[1]) as group:
        group.run(load)
    chosen = [i for i in range(0, len(tensors), 2) if tensors[i].seed % 4] + [1]

    def load_some(rank):
        state, expected = state_of(tensors, 2, rank, empty=True)
        limpet.load(store, into=state, keys=[leaf_key(i) for i in chosen])
        assert_loaded(tensors, state, expected, chosen)

    chosen = [i for i in chosen if i < len(tensors)]
    if chosen:
        with FakeGroup(sizes[2]) as group:
            group.run(load_some)
    whole = limpet.load(store)
    for i, tensor in enumerate(tensors):
        level, name = leaf_key(i).split("/")
        assert local_bytes(whole[level][name]) == tensor.element_bytes().tobytes(), tensor
    if tensors[1:]:
        assert limpet.load(store, keys="other/**").keys() == {"other"}


def _boxes(snapshot):
    """Return the shard number, key, and size in bytes of each box of a snapshot."""
    return [
        (number, leaf.key, prod(box.sizes) * DTYPES[leaf.dtype].itemsize)
        for number, index in enumerate(snapshot.indexes())
        for leaf in index.leaves
        for box in leaf.boxes
    ]


LARGE = [(300, 7, 40), (1, 130_000), (129, 1030), (70_000,), (3, 5, 7, 900), (400, 400), (9,), ()]


@pytest.mark.parametrize("seed", range(6))
def test_each_rank_reads_exactly_the_chunks_that_it_needs_once(seed):
    """The tensors have several chunks, so a rank with a part of one reads some of its chunks."""
    random, sizes = Random(seed), (4, 6)
    tensors = [
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
    snapshot = save_on_ranks(store, 4, lambda r: state_of(tensors, 0, r)[0])
    total = sum(nbytes for _, _, nbytes in _boxes(snapshot))

    def load(rank):
        state, expected = state_of(tensors, 1, rank, empty=True)
        recorded = RecordingStore(store)
        limpet.load(recorded, into=state)
        assert_loaded(tensors, state, expected)
        wanted = {}
        for i, tensor in enumerate(tensors):
            numbers = tensor.layouts[1].element_numbers(tensor.shape, rank)
            wanted[leaf_key(i)] = np.zeros(tensor.shape, bool)
            wanted[leaf_key(i)].reshape(-1)[[] if numbers is None else numbers] = True
        needed = chunks_containing(snapshot, wanted)
        assert recorded.nbytes == sum(stop - start for _, start, stop in needed)
        assert are_merged(recorded.ranges, snapshot)
        assert len(recorded.ranges) <= len(needed)
        metadata_files = sorted(key for method, key in recorded.calls if method == "get")
        assert len(metadata_files) == len(set(metadata_files)) == 1 + len(snapshot.indexes())
        return recorded.nbytes

    with FakeGroup(6) as group:
        read_bytes = group.run(load)
    headers = sum(index.header for index in snapshot.indexes())
    assert min(read_bytes) <= total + headers <= sum(read_bytes) + headers


def test_a_rank_reads_only_its_rows_of_a_large_tensor():
    """4 ranks save a tensor of 32 MiB, and 8 ranks load it. Each one reads exactly its 4 MiB."""
    whole = torch.arange(8 << 20, dtype=torch.int32).reshape(2048, 4096)
    store = MemoryStore()

    def part(rank, size):
        rows = slice(2048 * rank // size, 2048 * (rank + 1) // size)
        return limpet.Boxed(whole[rows].clone(), (rows.start, 0), (2048, 4096))

    save_on_ranks(store, 4, lambda r: {"w": part(r, 4)})

    def load(rank):
        recorded, live = RecordingStore(store), part(rank, 8)
        expected = live.tensor.clone()
        live.tensor.zero_()
        with patch.object(shared_read, "MIN_SHARED_BYTES", 1 << 62):
            limpet.load(recorded, into={"w": live})
        assert torch.equal(live.tensor, expected)
        assert recorded.nbytes == live.tensor.nbytes + 4096  # the header of the shard
        assert max(length for _, _, length in recorded.ranges) <= BLOCK_SIZE + 4096

    with FakeGroup(8) as group:
        group.run(load)


def _bytes_per_shard(snapshot, keys=None):
    totals = [0] * len(snapshot.indexes())
    for shard, key, nbytes in _boxes(snapshot):
        totals[shard] += nbytes if keys is None or key in keys else 0
    return totals


@settings(max_examples=30)
@given(
    st.integers(2, 6),
    st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    st.sampled_from([64, 1000, partition.MAX_BOX_BYTES]),
)
def test_replicated_tensors_are_written_once_and_evenly(size, lengths, max_box_bytes):
    state = {str(i): torch.full((n, 3), i, dtype=torch.uint8) for i, n in enumerate(lengths)}
    with patch.object(partition, "MAX_BOX_BYTES", max_box_bytes):
        snapshot = save_on_ranks(
            MemoryStore(), size, lambda r: {k: t.clone() for k, t in state.items()}
        )
    boxes = [nbytes for _, _, nbytes in _boxes(snapshot)]
    assert sum(boxes) == 3 * sum(lengths)
    totals = _bytes_per_shard(snapshot)
    assert max(totals) <= sum(totals) / size + max(boxes)
    assert max(boxes) <= max(max_box_bytes, 3)


def test_replicas_of_sharded_tensors_share_the_work_evenly():
    """2 replicas of 3 shards, as in HSDP. Replicated tensors go to the ranks with the least."""
    random, size = Random(0), 6
    mesh = Layout(tuple(range(6)), (2, 3), (None, 0), (0, 1), "dtensor")
    plain = Layout(tuple(range(6)), (6,), (None,), (0,), "plain")
    tensors = [
        LaidOutTensor(
            "uint8", (random.randint(1, 300), 10), (mesh if i % 3 else plain,), False, False, i
        )
        for i in range(60)
    ]
    snapshot = save_on_ranks(MemoryStore(), size, lambda r: state_of(tensors, 0, r)[0])
    boxes = [nbytes for _, _, nbytes in _boxes(snapshot)]
    assert sum(boxes) == sum(prod(tensor.shape) for tensor in tensors)
    sharded = {leaf_key(i) for i in range(60) if i % 3}
    totals = _bytes_per_shard(snapshot, sharded)
    for n in range(3):
        assert abs(totals[n] - totals[n + 3]) <= max(boxes)
    assert max(_bytes_per_shard(snapshot)) <= sum(boxes) / size + max(boxes)


@pytest.mark.slow
def test_a_large_replicated_tensor_is_split_across_ranks():
    whole = torch.arange(9 * MIB, dtype=torch.int32).reshape(3, 3, -1)
    snapshot = save_on_ranks(MemoryStore(), 3, lambda r: {"w": whole, "t": whole.permute(2, 1, 0)})
    totals = _bytes_per_shard(snapshot)
    assert sum(totals) == 2 * whole.nbytes
    assert max(totals) <= sum(totals) / 3 + partition.MAX_BOX_BYTES
    loaded = limpet.load(snapshot.location.store)
    assert torch.equal(loaded["w"], whole)
    assert torch.equal(loaded["t"], whole.permute(2, 1, 0))


@pytest.mark.slow
@settings(max_examples=25)
@given(states(30), st.booleans())
def test_an_incremental_version_in_another_layout_holds_its_own_values(drawn, same_layout):
    """With ``same_layout``, the version refers to the unchanged chunks of its base version."""
    sizes, tensors = drawn
    sizes = sizes[:1] * 3 if same_layout else sizes
    if same_layout:
        tensors = [replace(tensor, layouts=tensor.layouts[:1] * 3) for tensor in tensors]
    store = MemoryStore()
    save_to_location(Location(store, "version_1"), sizes[0], lambda r: state_of(tensors, 0, r)[0])
    changed = [replace(tensor, seed=tensor.seed + (tensor.seed % 3 == 0)) for tensor in tensors]
    base = open_location(Location(store, "version_1"))
    location = Location(store, "version_2")
    save_to_location(location, sizes[1], lambda r: state_of(changed, 1, r)[0], base)
    snapshot = open_location(location)
    assert snapshot.verify().ok
    # a changed tensor of few values may have some of them in common with the earlier one
    unchanged_bytes = sum(
        int(np.count_nonzero(a.element_bytes() == b.element_bytes()))
        for a, b in zip(tensors, changed, strict=True)
    )
    if same_layout:
        assert snapshot.referred_bytes <= unchanged_bytes
    if same_layout and changed == tensors:
        assert snapshot.referred_bytes == unchanged_bytes

    def load(rank):
        state, expected = state_of(changed, 2, rank, empty=True)
        load_snapshot(open_location(location), state, group=current_group())
        assert_loaded(changed, state, expected)

    with FakeGroup(sizes[2]) as group:
        group.run(load)


def save_to_location(location, size, state_of_rank, base=None):
    """Save to a location within a run, optionally with a base version, as a run does."""

    def work(rank):
        metadata = VersionMetadata(step=int(location.folder[-1]))
        state = state_of_rank(rank)
        pool, group = shared_pool(), current_group()
        return finish_save(
            begin_save(location, state, metadata, pool, stage_now=False, group=group, base=base)
        )

    with FakeGroup(size) as group:
        group.run(work)
