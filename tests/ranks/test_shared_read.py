"""One rank of each host reads, and passes on: as if each had read itself, but once a host."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import machine
from holdfast.engine.distributed import host_memory
from holdfast.engine.distributed.kv import Timeouts
from holdfast.engine.loading import shared_read
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.planning.read_plan import ReadItem
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import open_location
from holdfast.errors import DigestMismatch, FormatError, HoldfastError, PlanError, RankFailed
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Traits
from holdfast.testing.fakegroup import FakeGroup
from holdfast.types import BLOCK_SIZE, MIB
from tests.engine.unreliable_stores import HookedStore
from tests.ranks.random_layouts import leaf_key, local_bytes, state_of, states
from tests.ranks.test_layouts import saved_at
from tests.ranks.world import run_scenarios

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


class Counted(HookedStore):
    """A store that counts the bytes that are read of each file."""

    def __init__(self, inner):
        super().__init__(inner)
        self.bytes = Counter()
        self.stats = Counter()
        self.before = lambda method, key: self.stats.update([key] if method == "stat" else [])

    def get(self, key, limit):
        data = super().get(key, limit)
        self.bytes[key] += len(data)
        return data

    def get_range(self, key, offset, length, into):
        super().get_range(key, offset, length, into)
        self.bytes[key] += length

    def of(self, ending):
        return sum(n for file, n in self.bytes.items() if file.endswith(ending))


def on_hosts(*hosts):
    """Rank r is on ``hosts[r]``."""
    real = machine.process_identity

    def identity():
        host, boot, process = real()
        _, mark, rank = threading.current_thread().name.partition("rank-")
        return (hosts[int(rank)] if mark else host), boot, process

    return patch.object(machine, "process_identity", identity)


def load_on(hosts, store, states, patience=None, **options):
    """The ranks load into their states, sharing; what each has come to, and its store."""
    stores = [Counted(store) for _ in hosts]
    made = FakeGroup(len(hosts)) if patience is None else FakeGroup(len(hosts), patience)
    with made as group, on_hosts(*hosts):
        told = group.outcomes(
            lambda r: holdfast.load(stores[r], into=states[r], **{"share": True, **options})
        )
    return told, stores


def loaded_on(hosts, store, states, **options):
    """As ``load_on``, where all succeed: the stores."""
    told, stores = load_on(hosts, store, states, **options)
    for outcome in told:
        if isinstance(outcome, BaseException):
            raise outcome
    return stores


def save(*states, store=None):
    store = MemoryStore() if store is None else store
    with FakeGroup(len(states)) as group:
        group.run(lambda rank: holdfast.save(store, states[rank]))
    return store


def memory():
    """Descriptors and mappings of shared memory in this process."""
    gc.collect()
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    maps = Path("/proc/self/maps").read_text()
    return [fd for fd in fds if "memfd:holdfast" in fd], maps.count("memfd:holdfast")


@pytest.fixture(autouse=True)
def nothing_left():
    shm = shared_memory()
    yield
    assert memory() == ([], 0)
    assert shared_memory() - shm == set()


def shared_memory():
    """Names in the shared memory of the machine, but for semaphores of other tests' processes."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def replicated(rank=0, seed=0):
    """The same on all ranks: 20 MiB."""
    made = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(3, 1_000_000, generator=made),
        "u": torch.randn(2_000_003, generator=made).to(torch.bfloat16),
        "a": np.arange(500_000),
        "small": {str(i): torch.randn(i + 1, generator=made) for i in range(50)},
        "step": 7,
    }


def cut(rank, ranks, seed=0):
    """The rows of a rank: of the whole, which is the same whatever the number of ranks."""
    whole = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(seed))
    first, last = 4096 * rank // ranks, 4096 * (rank + 1) // ranks
    return {"w": holdfast.Boxed(whole[first:last].clone(), (first, 0), (4096, 1024))}


def emptied(state):
    """Like a state, with other bytes in it."""
    if isinstance(state, dict):
        return {k: emptied(v) for k, v in state.items()}
    if isinstance(state, holdfast.Boxed):
        return holdfast.Boxed(torch.zeros_like(state.tensor), state.offsets, state.shape)
    if isinstance(state, torch.Tensor | np.ndarray):
        return state * 0
    return 0


def same(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for k in one:
            same(one[k], other[k])
    elif isinstance(one, int):
        assert one == other
    else:
        assert local_bytes(one) == local_bytes(other)


def lengths(store):
    """Bytes of the boxes of a snapshot, and of its indexes."""
    snapshot = holdfast.open(store)
    indexes = sum(shard.index.length for shard in snapshot.manifest.shards)
    return sum(i.length - i.header for i in snapshot.indexes()), indexes


# -- how much is read ------------------------------------------------------------------------------

TWO_BY_TWO = ("a", "b", "a", "b")


def test_what_all_ranks_have_is_read_once_on_each_host():
    store = save(*[replicated() for _ in range(4)])
    lives = [emptied(replicated()) for _ in range(4)]
    stores = loaded_on(TWO_BY_TWO, store, lives)
    for live in lives:
        same(live, replicated())
    data, indexes = lengths(store)
    for host in ((0, 2), (1, 3)):
        assert sum(stores[r].of(".safetensors") for r in host) == data
        assert sum(stores[r].of(".index.json") for r in host) == indexes
        assert max(stores[r].of(".safetensors") for r in host) <= data / 2 + BLOCK_SIZE
        looked = Counter()
        for r in host:
            looked += stores[r].stats
        assert max(looked.values()) == 1


def test_without_it_each_rank_reads_for_itself():
    store = save(*[replicated() for _ in range(2)])
    lives = [emptied(replicated()) for _ in range(2)]
    stores = loaded_on("aa", store, lives, share=False)
    assert [s.of(".safetensors") for s in stores] == [lengths(store)[0]] * 2
    assert [s.of(".index.json") for s in stores] == [lengths(store)[1]] * 2


def test_what_each_rank_has_of_its_own_is_read_by_itself():
    store = save(*[cut(r, 4) for r in range(4)])
    alone, shared = ([emptied(cut(r, 4)) for r in range(4)] for _ in range(2))
    before = loaded_on(TWO_BY_TWO, store, alone, share=False)
    stores = loaded_on(TWO_BY_TWO, store, shared)
    for rank in range(4):
        same(shared[rank], cut(rank, 4))
        assert stores[rank].of(".safetensors") == before[rank].of(".safetensors")
    for host in ((0, 2), (1, 3)):
        assert sum(stores[r].of(".index.json") for r in host) == lengths(store)[1]


def test_a_chunk_of_which_ranks_want_different_parts_is_read_once():
    store = save(*[cut(r, 3) for r in range(3)])
    lives = [emptied(cut(r, 8)) for r in range(8)]
    stores = loaded_on("aaaaaaaa", store, lives)
    for rank in range(8):
        same(lives[rank], cut(rank, 8))
    assert sum(s.of(".safetensors") for s in stores) == lengths(store)[0]


def test_some_leaves_of_all_and_some_of_one():
    whole = [{**cut(r, 4), "all": replicated(), f"own{r}": torch.full((9, 9), r)} for r in range(4)]
    store = save(*whole)
    lives = [emptied(state) for state in whole]
    stores = loaded_on("aabb", store, lives)
    for rank in range(4):
        same(lives[rank], whole[rank])
    data, _ = lengths(store)
    both = [stores[r].of(".safetensors") + stores[r + 1].of(".safetensors") for r in (0, 2)]
    common = sum(t.nbytes for t in (replicated()["w"], replicated()["u"], replicated()["a"]))
    assert abs(sum(both) - data - common) < 20_000
    stores = loaded_on("aabb", store, [emptied(state) for state in whole], keys="all/u")
    assert sum(s.of(".safetensors") for s in stores) < 2 * 5 * MIB


def test_an_incremental_version_is_shared_like_a_full_one():
    store = MemoryStore()
    old, new = replicated(), {**replicated(), "a": np.arange(500_000) * 3}
    base = Location(store, "version_1")
    saved_at(base, 2, lambda r: old)
    saved_at(Location(store, "version_2"), 2, lambda r: new, open_location(base))
    lives, stores = [emptied(new) for _ in range(2)], [Counted(store) for _ in range(2)]

    def load(rank):
        snapshot = open_location(Location(stores[rank], "version_2"))
        load_snapshot(snapshot, lives[rank], share=True)

    with FakeGroup(2) as group:
        group.run(load)
    for live in lives:
        same(live, new)
    read = sum(s.of(".safetensors") for s in stores)
    assert read == sum(i.cuts[-1] - i.header for i in indexes_of(store, "version_2"))


def indexes_of(store, folder):
    return open_location(Location(store, folder)).indexes()


def test_more_ranks_on_a_host_than_share():
    store = save(*[replicated() for _ in range(5)])
    lives = [emptied(replicated()) for _ in range(5)]
    with patch.object(host_memory, "MAX_PEERS", 2):
        stores = loaded_on("aaaaa", store, lives)
    for live in lives:
        same(live, replicated())
    data = lengths(store)[0]
    read = [s.of(".safetensors") for s in stores]
    assert [read[0] + read[1], read[2] + read[3], read[4]] == [data] * 3


def test_an_index_of_several_parts():
    """Of more bytes than a part has."""
    states = [{"w": {str(i): torch.full((3,), i) for i in range(300)}} for _ in range(2)]
    store = save(*states)
    lives = [emptied(state) for state in states]

    def backwards(items, work, threads, advance=bool):  # so the parts come in another order
        for item in reversed(list(items)):
            work(item)

    with (
        patch("holdfast.engine.loading.shared_read.BLOCK_SIZE", 4096),
        patch.object(host_memory, "in_parallel", backwards),
    ):
        stores = loaded_on("aa", store, lives)
    same(lives[0], states[0])
    same(lives[1], states[1])
    assert sum(s.of(".index.json") for s in stores) == lengths(store)[1] > 5 * 4096
    assert all(s.of(".index.json") > 4096 for s in stores)


def test_what_is_read_for_all_begins_where_the_store_reads_fastest():
    state = {name: torch.full((1_500_001,), ord(name), dtype=torch.uint8) for name in "abcd"}
    store, offsets = save(state, state), []
    begins = [box.at for i in holdfast.open(store).indexes() for f in i.leaves for box in f.boxes]
    assert len({begin % 4096 for begin in begins}) > 1

    class Paged(Counted):
        traits = Traits("paged", 4096, False)

        def get_range(self, key, offset, length, into):
            offsets.append(offset)
            super().get_range(key, offset, length, into)

    for name in "abcd":
        lives = [emptied(state) for _ in range(2)]
        with FakeGroup(2) as group:
            group.run(
                lambda r: holdfast.load(Paged(store), into=lives[r], share=True, keys=name)  # noqa: B023
            )
        same(lives[1], emptied(state) | {name: state[name]})
    assert {offset % 4096 for offset in offsets} == {0}


@given(st.data())
def test_copies_of_parts_are_the_copies_of_the_whole(data):
    """Also where another writer has cut one box into several chunks of one read."""
    cuts = [*sorted(data.draw(st.sets(st.integers(1, 59), max_size=6))), 60]
    chunks = [*zip([0, *cuts[:-1]], cuts, strict=True)]
    rows, at = [], 0
    for _ in range(data.draw(st.integers(0, 5))):
        begin, end = sorted(data.draw(st.tuples(st.integers(0, 60), st.integers(0, 60))))
        rows.append((0, 100 + begin, at, end - begin))
        at += end - begin
    linear = np.array(rows, np.int64).reshape(-1, 4)
    item = ReadItem(0, 5, 5 + len(chunks), 100, 160, linear, ())
    file = np.random.default_rng(0).integers(0, 256, 60, np.uint8)

    def copied(parts):
        made = np.zeros(at, np.uint8)
        for part in parts:
            for _, offset, to, size in part.linear_copies.tolist():
                assert part.start <= offset < offset + size <= part.stop
                made[to : to + size] = file[offset - 100 : offset - 100 + size]
        return made.tobytes()

    parts = [
        shared_read._narrow(item, ReadItem(0, 5 + i, 6 + i, 100 + a, 100 + b, linear[:0], ()))
        for i, (a, b) in enumerate(chunks)
    ]
    whole = replace(item, linear_copies=linear[linear[:, 3] > 0])
    assert copied(parts) == copied([whole])
    assert sum(part.linear_copies[:, 3].sum() for part in parts) == at


# -- any layout ------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(states(), st.sampled_from([1, 4096, 20_000, 256 * MIB]), st.randoms(use_true_random=False))
def test_any_layout_on_any_hosts(drawn, budget, random):
    sizes, laid = drawn
    store = MemoryStore()
    with ExitStack() as small:
        planned = ("planning.shard_layout", "saving.image", "planning.read_plan")
        for module in (*planned, "loading.shared_read"):
            small.enter_context(patch(f"holdfast.engine.{module}.BLOCK_SIZE", 512))
        with FakeGroup(sizes[0]) as group:
            group.run(lambda r: holdfast.save(store, state_of(laid, 0, r)[0]))
        small.enter_context(patch.object(host_memory, "WINDOW_BUDGET", budget))
        _load_laid(laid, 1, store, [random.choice("abc") for _ in range(sizes[1])])
        hosts = [random.choice("ab") for _ in range(sizes[2])]
        read, alone = (_load_laid(laid, 2, store, hosts, share)[1] for share in (True, False))
    for ending in (".safetensors", ".index.json"):
        for host in set(hosts):
            ranks = [r for r, name in enumerate(hosts) if name == host]
            assert sum(read[r].of(ending) for r in ranks) <= sum(alone[r].of(ending) for r in ranks)


def _load_laid(laid, world, store, hosts, share=True):
    states = [state_of(laid, world, rank, empty=True) for rank in range(len(hosts))]
    stores = loaded_on(hosts, store, [state for state, _ in states], share=share)
    for state, held in states:
        for i, rows in held.items():
            level, name = leaf_key(i).split("/")
            assert local_bytes(state[level][name]) == rows.tobytes(), (i, laid[i])
    return states, stores


# -- windows ---------------------------------------------------------------------------------------


class Held:
    """The bytes of all windows, while a test runs."""

    def __init__(self):
        self.sizes = {}
        self.most = 0
        self.rounds = 0
        self.lock = threading.Lock()

    def __enter__(self):
        real, pass_on, held = host_memory.SharedSegment.resize, host_memory.HostPeers.exchange, self

        def resize(shelf, size):
            with held.lock:
                held.sizes[id(shelf)] = size
                held.most = max(held.most, sum(held.sizes.values()))
            real(shelf, size)
            assert os.fstat(shelf.fd).st_size == host_memory.PAGE_SIZE + size

        def passed(near, rounds, fill, take):
            held.rounds = max(held.rounds, len(rounds))
            pass_on(near, rounds, fill, take)

        self.patches = [
            patch.object(host_memory.SharedSegment, "resize", resize),
            patch.object(host_memory.HostPeers, "exchange", passed),
        ]
        for each in self.patches:
            each.start()
        return self

    def __exit__(self, *error):
        for each in self.patches:
            each.stop()


@pytest.mark.parametrize("budget", [20 * MIB, 64 * MIB])
def test_a_leaf_that_is_larger_than_all_windows(budget):
    whole = torch.arange(10 * MIB, dtype=torch.int32).reshape(1024, -1)
    store = save({"w": whole}, {"w": whole})
    lives = [{"w": torch.zeros_like(whole)} for _ in range(3)]
    with patch.object(host_memory, "WINDOW_BUDGET", budget), Held() as held:
        stores = loaded_on("aaa", store, lives)
    for live in lives:
        assert torch.equal(live["w"], whole)
    assert sum(s.of(".safetensors") for s in stores) == lengths(store)[0]
    assert held.most <= budget
    assert held.rounds >= 2 * whole.nbytes // budget


def test_a_small_load_takes_little_memory():
    store = save(*[cut(r, 2) for r in range(2)])
    with Held() as held:
        loaded_on("aa", store, [emptied(cut(r, 2)) for r in range(2)])
    assert held.most <= 64 * 1024


@given(
    st.lists(st.integers(0, 16 * MIB + 4096), max_size=300),
    st.integers(1, 64),
    st.sampled_from([64 * MIB, 256 * MIB]),
)
def test_pieces_are_dealt_within_the_budget(sizes, ranks, budget):
    with patch.object(host_memory, "WINDOW_BUDGET", budget):
        rounds = host_memory.assign_reads(sizes, ranks)
    pieces = [piece for pieces in rounds for piece in pieces]
    assert [p.item_number for p in pieces] == list(range(len(sizes)))
    room = max((p.window_offset + p.size for p in pieces), default=0)
    readers = {p.reader for p in pieces}
    assert len(readers) <= ranks
    assert 2 * room * len(readers) <= budget
    for several in rounds:
        used = {}
        for p in several:
            assert p.size >= sizes[p.item_number]
            assert p.window_offset % 4096 == 0
            assert p.window_offset == used.get(p.reader, 0)  # one behind the other
            used[p.reader] = p.window_offset + p.size
    for several in rounds[:-1]:  # no round ends early
        total = sum(p.size for p in several)
        assert total + (16 * MIB + 8192) * ranks > budget // 4 or len(readers) < ranks


def test_long_rows_of_pieces_are_dealt_evenly():
    random = Random(0)
    sizes = [random.randint(1, BLOCK_SIZE) for _ in range(1000)]
    load = Counter()
    for pieces in host_memory.assign_reads(sizes, 8):
        for p in pieces:
            load[p.reader] += p.size
    assert len(load) == 8
    assert max(load.values()) < 1.15 * min(load.values())


# -- what goes wrong -------------------------------------------------------------------------------


def damage(store, ending, at=None):
    """Change a byte in the middle of a file (the last one with that ending)."""
    file = sorted(k for k in store._shared.objects if k.endswith(ending))[-1]
    data, modified = store._shared.objects[file]
    at = len(data) // 2 if at is None else at
    changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    store._shared.objects[file] = changed, modified
    return file.rpartition("/")[2]


def test_a_damaged_chunk_is_raised_on_all_ranks_of_all_hosts():
    store = save(*[replicated() for _ in range(4)])
    file = damage(store, ".safetensors")
    lives = [emptied(replicated()) for _ in range(4)]
    changes = [live["w"]._version for live in lives]
    told, _ = load_on(TWO_BY_TWO, store, lives)
    assert {type(e) for e in told} == {DigestMismatch}
    assert all(live["w"]._version > n for live, n in zip(lives, changes, strict=True))
    for error in told:
        assert file in str(error)
        assert error.leaf is not None
        assert error.leaf in str(error)
        assert error.fields["live_state"] == "not valid"


def test_a_damaged_chunk_that_one_rank_alone_wants():
    store = save(*[cut(r, 4) for r in range(4)])
    damage(store, ".safetensors")
    told, _ = load_on("aaaa", store, [emptied(cut(r, 4)) for r in range(4)])
    assert {type(e) for e in told} == {DigestMismatch}
    assert {e.leaf for e in told} == {"w"}


def test_a_damaged_index_is_raised_before_anything_is_changed():
    store = save(*[replicated() for _ in range(4)])
    file = damage(store, ".index.json")
    lives = [emptied(replicated()) for _ in range(4)]
    told, _ = load_on(TWO_BY_TWO, store, lives)
    assert {type(e) for e in told} == {DigestMismatch}
    for error, live in zip(told, lives, strict=True):
        assert file in str(error)
        assert "live_state" not in error.fields
        same(live, emptied(replicated()))


@pytest.mark.parametrize("ending", [".index.json", ".safetensors"])
def test_a_file_that_is_short_or_missing_is_damage_on_all(ending):
    for missing in (True, False):
        store = save(*[replicated() for _ in range(4)])
        file = sorted(k for k in store._shared.objects if k.endswith(ending))[-1]
        data, modified = store._shared.objects.pop(file)
        if not missing:
            store._shared.objects[file] = data[:-1], modified
        told, _ = load_on(TWO_BY_TWO, store, [emptied(replicated()) for _ in range(4)])
        assert {type(e) for e in told} == {FormatError}
        assert all(file.rpartition("/")[2] in str(e) for e in told)


def test_differences_are_those_of_any_load():
    store = save(*[replicated() for _ in range(2)])
    lives = [emptied(replicated()) for _ in range(2)]
    lives[1]["w"] = torch.zeros(3)
    told, _ = load_on("aa", store, lives)
    assert all(isinstance(e, PlanError) and "w" in str(e) for e in told)
    same(lives[0], emptied(replicated()))


def test_a_rank_that_does_not_share_is_told():
    store = save(*[replicated() for _ in range(2)])
    with FakeGroup(2) as group:
        told = group.outcomes(
            lambda r: holdfast.load(store, into=emptied(replicated()), share=r == 0)
        )
    assert {type(e) for e in told} == {RankFailed}
    assert any("shared load" in str(e) and "different operations" in str(e) for e in told)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["indexes", "wanted", "first", "later"])
def test_a_rank_that_dies_is_missed_within_the_bounds(when):
    """Of the rank's process nothing is left but its shared memory, with a step that never ends."""
    store = save(*[replicated() for _ in range(3)])
    lives = [emptied(replicated()) for _ in range(3)]
    after = {"indexes": 2, "wanted": 4, "first": 5, "later": 6}[when]
    real = host_memory.HostPeers._barrier
    with FakeGroup(3, Timeouts(silent=1.0, stuck=10.0)) as group:

        def keep_step(near):
            if near.peer_index == 1 and near._phase + 1 == after:
                group.views[1].disconnect()
                raise KeyboardInterrupt
            real(near)

        with (
            patch.object(host_memory.HostPeers, "_barrier", keep_step),
            patch.object(host_memory, "WINDOW_BUDGET", 40 * MIB),
        ):
            began = time.monotonic()
            told = group.outcomes(lambda r: holdfast.load(store, into=lives[r], share=True))
    assert isinstance(told[1], KeyboardInterrupt)
    for error in (told[0], told[2]):
        assert isinstance(error, RankFailed)
        assert error.rank == 1
        assert error.fields["lost"]
    assert time.monotonic() - began < 8
    if when in ("indexes", "wanted"):
        same(lives[0], emptied(replicated()))
    del told, error, keep_step


def test_a_rank_that_fails_in_the_middle_is_heard_at_once():
    store = save(*[replicated() for _ in range(3)])

    class Broken(Counted):
        def get_range(self, key, offset, length, into):
            if key.endswith(".safetensors"):
                raise holdfast.errors.StoreError("the disk is gone", key=key)
            super().get_range(key, offset, length, into)

    began = time.monotonic()
    with FakeGroup(3) as group:
        told = group.outcomes(
            lambda r: holdfast.load(
                Broken(store) if r == 1 else store, into=emptied(replicated()), share=True
            )
        )
    assert time.monotonic() - began < 4
    assert type(told[1]) is holdfast.errors.StoreError
    for error in (told[0], told[2]):
        assert isinstance(error, RankFailed)
        assert error.rank == 1
        assert "the disk is gone" in str(error)


def test_ranks_that_cannot_map_each_others_memory_read_alone():
    store = save(*[replicated() for _ in range(4)])
    lives = [emptied(replicated()) for _ in range(4)]
    real, seen = host_memory.SharedSegment.open_peer.__func__, []

    def of(cls, seat):
        if threading.current_thread().name == "rank-2":
            raise PermissionError(13, "Permission denied")
        return real(cls, seat)

    def sink(name, fields):
        if name == "read_alone":
            seen.append(fields)

    with (
        patch.object(host_memory.SharedSegment, "open_peer", classmethod(of)),
        holdfast.attach(sink),
    ):
        stores = loaded_on("abab", store, lives)
    for live in lives:
        same(live, replicated())
    data = lengths(store)[0]
    read = [s.of(".safetensors") for s in stores]
    assert read[0] == read[2] == data
    assert read[1] + read[3] == data
    assert len(seen) == 2
    assert all("rank 2" in s["reason"] and "Permission denied" in s["reason"] for s in seen)


@pytest.mark.parametrize("failing", ["memfd_create", "posix_fallocate"])
def test_a_rank_without_shared_memory_reads_alone(failing):
    store = save(*[replicated() for _ in range(2)])
    lives, real, seen = [emptied(replicated()) for _ in range(2)], getattr(os, failing), []

    def fail(*given):
        if threading.current_thread().name == "rank-1":
            raise OSError(28, "No space left on device")
        return real(*given)

    with patch.object(os, failing, fail), holdfast.attach(lambda n, f: seen.append(n)):
        stores = loaded_on("aa", store, lives)
    assert [s.of(".safetensors") for s in stores] == [lengths(store)[0]] * 2
    same(lives[1], replicated())
    assert seen.count("read_alone") == 2


def test_windows_for_which_there_is_no_memory_are_an_error():
    store = save(*[replicated() for _ in range(2)])
    real = os.posix_fallocate

    def fail(fd, at, length):
        if length > MIB and threading.current_thread().name == "rank-1":
            raise OSError(28, "No space left on device")
        real(fd, at, length)

    with patch.object(os, "posix_fallocate", fail):
        told, _ = load_on("aa", store, [emptied(replicated()) for _ in range(2)])
    assert type(told[1]) is HoldfastError
    assert "share=True" in str(told[1])
    assert isinstance(told[0], RankFailed)
    assert "share=True" in str(told[0])


def test_memory_of_another_is_not_taken_for_a_ranks():
    own, other = host_memory.SharedSegment.create(), host_memory.SharedSegment.create()
    try:
        seat = host_memory.Peer(0, ("a", "b"), os.getpid(), own.fd, own.control_words[0])
        host_memory.SharedSegment.open_peer(seat).close()
        with pytest.raises(OSError, match="belongs to another process"):
            host_memory.SharedSegment.open_peer(
                host_memory.Peer(0, ("a", "b"), os.getpid(), other.fd, own.control_words[0])
            )
        for fd in (-1, 0, 10_000):
            with pytest.raises(OSError):
                host_memory.SharedSegment.open_peer(
                    host_memory.Peer(0, ("a", "b"), os.getpid(), fd, -1)
                )
    finally:
        own.close()
        other.close()


# -- nobody to share with --------------------------------------------------------------------------


def test_one_process_and_ranks_alone_on_their_hosts_just_load():
    store = save(*[replicated() for _ in range(2)])
    live = emptied(replicated())
    assert holdfast.load(store, into=live, share=True) is live
    same(live, replicated())
    same(holdfast.load(store, share=True), replicated())
    lives = [emptied(replicated()) for _ in range(2)]
    stores = loaded_on("ab", store, lives)
    assert [s.of(".safetensors") for s in stores] == [lengths(store)[0]] * 2
    same(lives[1], replicated())


# -- resuming --------------------------------------------------------------------------------------


def resumed(hosts, run, **options):
    """What the ranks go on from, and the bytes of shards that each host has read."""
    lives = [emptied(replicated()) | {"progress": holdfast.Progress()} for _ in hosts]
    stores = [Counted(LocalStore(run)) for _ in hosts]

    def work(rank):
        with holdfast.Checkpointer(stores[rank], lives[rank], save=holdfast.EverySteps(1)) as ckpt:
            snapshot = ckpt.resume(**{"share": True, **options})
        same({k: v for k, v in lives[rank].items() if k != "progress"}, replicated())
        return None if snapshot is None else snapshot.step

    with FakeGroup(len(hosts)) as group, on_hosts(*hosts):
        steps = group.run(work)
    read = Counter()
    for host, store in zip(hosts, stores, strict=True):
        read[host] += store.of(".safetensors")
    return steps, read


@pytest.mark.filterwarnings("ignore::holdfast.errors.SkippedVersion")
def test_a_training_goes_on_by_sharing_and_goes_back_where_a_version_is_damaged(tmp_path):
    run = tmp_path / "run"

    def train(rank):
        state = replicated() | {"progress": holdfast.Progress()}
        with holdfast.Checkpointer(run, state, save=holdfast.EverySteps(1)) as ckpt:
            ckpt.step()
            ckpt.step()

    with FakeGroup(2) as group:
        group.run(train)
    data = lengths(str(run / "version_2"))[0]
    steps, read = resumed("aab", run)
    assert steps == [2, 2, 2]
    assert set(read.values()) == {data}
    with (next((run / "version_2").glob("*.safetensors"))).open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([file.read(1)[0] ^ 1]))
    steps, _ = resumed("aab", run)
    assert steps == [1, 1, 1]
    new = tmp_path / "new"
    new.mkdir()
    steps, read = resumed("aab", new, start=f"{run}@1")
    assert steps == [1, 1, 1]


# -- real processes --------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_processes_share_and_one_that_is_killed_leaves_nothing(tmp_path):
    told = run_scenarios(
        "shared_reads", tmp_path, [0, -signal.SIGKILL, 0], silent_seconds=3, timeout=120
    )
    data, indexes = lengths(str(tmp_path / "version_1"))
    own = 10 * MIB
    each = data - 2 * own
    for one in told:  # all but a box of another rank; what they have in common, a third each
        assert abs(one["bytes False"] - each) < 100_000
        assert abs(one["bytes True"] - own - (each - own) / 3) < 2 * BLOCK_SIZE
    assert sum(one["indexes False"] for one in told) == 3 * indexes
    assert sum(one["indexes True"] for one in told) == indexes
    assert abs(sum(one["bytes True"] for one in told) - data) < 100_000
    assert [one["left"] for one in told] == [[[], 0]] * 3
    for rank in (0, 2):
        failed, seconds, live = told[rank]["killed"]
        assert (failed, live) == (1, "not valid")
        assert seconds < 10
        assert told[rank]["left after"] == [[], 0]
    print({key: [one[key] for one in told] for key in ("seconds False", "seconds True")})
