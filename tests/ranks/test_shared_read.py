"""Shared reads: the ranks of a host read each byte once and pass it on to one another."""

import gc
import os
import threading
import time
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet import machine
from limpet.errors import DigestMismatch, FormatError, RankFailed
from limpet.loading import shared_read
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import reader_of
from limpet.ranks import host_exchange
from limpet.ranks.group import current_group
from limpet.ranks.host_exchange import HostPeers
from limpet.ranks.kv import Timeouts
from limpet.snapshot.location import Location
from limpet.snapshot.reader import open_location
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.types import BLOCK_SIZE, MIB
from tests.fakegroup import FakeGroup
from tests.ranks.random_layouts import leaf_key, local_bytes, state_of, states
from tests.ranks.test_layouts import save_to_location
from tests.unreliable_stores import HookedStore

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


class CountingStore(HookedStore):
    """A store that counts the bytes that are read from each file, and the calls of ``stat``."""

    def __init__(self, inner):
        super().__init__(inner)
        self.byte_counts = Counter()
        self.stats = Counter()
        self.lock = threading.Lock()
        self.before = lambda method, key: self.stats.update([key] if method == "stat" else [])

    def get(self, key, limit):
        data = super().get(key, limit)
        self.byte_counts[key] += len(data)
        return data

    def get_range(self, key, offset, length, into):
        super().get_range(key, offset, length, into)
        with self.lock:
            self.byte_counts[key] += length

    def bytes_read(self, suffix):
        return sum(n for file, n in self.byte_counts.items() if file.endswith(suffix))


def on_hosts(*hosts):
    """Make rank r appear to run on ``hosts[r]``."""
    original = machine.process_identity

    def process_identity():
        host, boot, process = original()
        _, prefix, rank = threading.current_thread().name.partition("rank-")
        return (hosts[int(rank)] if prefix else host), boot, process

    return patch.object(machine, "process_identity", process_identity)


def without_sharing():
    return patch.object(shared_read, "MIN_SHARED_BYTES", 1 << 62)


def load_outcomes(hosts, store, states, **options):
    """Load into the states of all ranks. Return the outcome of each rank and its store."""
    stores = [CountingStore(store) for _ in hosts]
    with FakeGroup(len(hosts)) as group, on_hosts(*hosts):
        outcomes = group.outcomes(lambda r: limpet.load(stores[r], into=states[r], **options))
    return outcomes, stores


def load_on_hosts(hosts, store, states, **options):
    """Load like ``load_outcomes``. Return the stores, or raise the error of a rank."""
    outcomes, stores = load_outcomes(hosts, store, states, **options)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return stores


def save(*states, store=None):
    store = MemoryStore() if store is None else store
    with FakeGroup(len(states)) as group:
        group.run(lambda rank: limpet.save(store, states[rank]))
    return store


def shared_segments():
    """Return the descriptors, and the number of mappings, of shared memory in this process."""
    gc.collect()
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    maps = Path("/proc/self/maps").read_text()
    return [fd for fd in fds if "memfd:limpet" in fd], maps.count("memfd:limpet")


@pytest.fixture(autouse=True)
def no_leftover_memory():
    before = shared_memory_names()
    with patch.object(shared_read, "MIN_SHARED_BYTES", 0):
        yield
    assert shared_segments() == ([], 0)
    assert shared_memory_names() - before == set()


def shared_memory_names():
    """Return the names in /dev/shm, except those of other tests, and of their data loaders."""
    others = ("sem.mp-", "limpet-", "pytest-", "torch_")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}


def replicated(rank=0, seed=0):
    """Return a state of 20 MiB that is the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(3, 1_000_000, generator=generator),
        "u": torch.randn(2_000_003, generator=generator).to(torch.bfloat16),
        "a": np.arange(500_000),
        "small": {str(i): torch.randn(i + 1, generator=generator) for i in range(50)},
        "step": 7,
    }


def sharded(rank, ranks, seed=0):
    """Return one rank's rows of a tensor that does not depend on the number of ranks."""
    whole = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(seed))
    first, last = 4096 * rank // ranks, 4096 * (rank + 1) // ranks
    return {"w": limpet.Boxed(whole[first:last].clone(), (first, 0), (4096, 1024))}


def zeroed(state):
    """Return a state of the same structure with zeros."""
    if isinstance(state, dict):
        return {k: zeroed(v) for k, v in state.items()}
    if isinstance(state, limpet.Boxed):
        return limpet.Boxed(torch.zeros_like(state.tensor), state.offsets, state.shape)
    if isinstance(state, torch.Tensor | np.ndarray):
        return state * 0
    return 0


def assert_same_state(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for k in a:
            assert_same_state(a[k], b[k])
    elif isinstance(a, int):
        assert a == b
    else:
        assert local_bytes(a) == local_bytes(b)


def stored_bytes(store):
    """Return the bytes of a snapshot's shards and of its indexes."""
    snapshot = limpet.open(store)
    index_bytes = sum(shard.index.length for shard in reader_of(snapshot).manifest.shards)
    return sum(i.length for i in reader_of(snapshot).indexes()), index_bytes


TWO_BY_TWO = ("a", "b", "a", "b")


def test_replicated_leaves_are_read_once_per_host():
    store = save(*[replicated() for _ in range(4)])
    live_states = [zeroed(replicated()) for _ in range(4)]
    stores = load_on_hosts(TWO_BY_TWO, store, live_states)
    for live in live_states:
        assert_same_state(live, replicated())
    data, indexes = stored_bytes(store)
    for host in ((0, 2), (1, 3)):
        assert sum(stores[r].bytes_read(".safetensors") for r in host) == data
        assert sum(stores[r].bytes_read(".index.json") for r in host) == indexes
        assert max(stores[r].bytes_read(".safetensors") for r in host) <= data / 2 + BLOCK_SIZE
        stats = Counter()
        for r in host:
            stats += stores[r].stats
        assert max(stats.values()) == 1


def test_each_rank_reads_its_own_shards_itself():
    store = save(*[sharded(r, 4) for r in range(4)])
    alone, shared = ([zeroed(sharded(r, 4)) for r in range(4)] for _ in range(2))
    with without_sharing():
        stores_alone = load_on_hosts(TWO_BY_TWO, store, alone)
    stores = load_on_hosts(TWO_BY_TWO, store, shared)
    for rank in range(4):
        assert_same_state(shared[rank], sharded(rank, 4))
        assert stores[rank].bytes_read(".safetensors") == stores_alone[rank].bytes_read(
            ".safetensors"
        )
    for host in ((0, 2), (1, 3)):
        assert sum(stores[r].bytes_read(".index.json") for r in host) == stored_bytes(store)[1]


def test_an_incremental_version_is_shared_like_a_full_one():
    store = MemoryStore()
    old, new = replicated(), {**replicated(), "a": np.arange(500_000) * 3}
    base = Location(store, "version_1")
    save_to_location(base, 2, lambda r: old)
    save_to_location(Location(store, "version_2"), 2, lambda r: new, open_location(base))
    live_states, stores = [zeroed(new) for _ in range(2)], [CountingStore(store) for _ in range(2)]

    def load(rank):
        snapshot = open_location(Location(stores[rank], "version_2"))
        load_snapshot(snapshot, live_states[rank], group=current_group())

    with FakeGroup(2) as group:
        group.run(load)
    for live in live_states:
        assert_same_state(live, new)
    bytes_read = sum(s.bytes_read(".safetensors") for s in stores)
    indexes = indexes_of(store, "version_2")
    own_headers = sum(i.header for i in indexes if i.length > i.header)
    assert bytes_read == sum(i.cuts[-1] - i.header for i in indexes) + own_headers


def indexes_of(store, folder):
    return open_location(Location(store, folder)).indexes()


@pytest.mark.slow
@settings(max_examples=25)
@given(states(), st.sampled_from([1, 4096, 20_000, 256 * MIB]), st.randoms(use_true_random=False))
def test_any_layout_loads_on_any_hosts(drawn, budget, random):
    sizes, tensors = drawn
    store = MemoryStore()
    with ExitStack() as small:
        planned = ("layout.shard_layout", "saving.image", "layout.read_plan")
        for module in (*planned, "loading.shared_read"):
            small.enter_context(patch(f"limpet.{module}.BLOCK_SIZE", 512))
        with FakeGroup(sizes[0]) as group:
            group.run(lambda r: limpet.save(store, state_of(tensors, 0, r)[0]))
        small.enter_context(patch.object(host_exchange, "WINDOW_BUDGET", budget))
        _load_and_check(tensors, 1, store, [random.choice("abc") for _ in range(sizes[1])])
        hosts = [random.choice("ab") for _ in range(sizes[2])]
        shared, alone = (
            _load_and_check(tensors, 2, store, hosts, share) for share in (True, False)
        )
    for suffix in (".safetensors", ".index.json"):
        for host in set(hosts):
            ranks = [r for r, name in enumerate(hosts) if name == host]
            shared_bytes = sum(shared[r].bytes_read(suffix) for r in ranks)
            assert shared_bytes <= sum(alone[r].bytes_read(suffix) for r in ranks)


def _load_and_check(tensors, world, store, hosts, share=True):
    """Load and compare all tensors on all ranks. Return the stores."""
    states = [state_of(tensors, world, rank, empty=True) for rank in range(len(hosts))]
    with nullcontext() if share else without_sharing():
        stores = load_on_hosts(hosts, store, [state for state, _ in states])
    for state, expected in states:
        for i, rows in expected.items():
            level, name = leaf_key(i).split("/")
            assert local_bytes(state[level][name]) == rows.tobytes(), (i, tensors[i])
    return stores


def test_a_leaf_that_is_larger_than_all_windows_is_read_once():
    whole = torch.arange(10 * MIB, dtype=torch.int32).reshape(1024, -1)
    store = save({"w": whole}, {"w": whole})
    live_states = [{"w": torch.zeros_like(whole)} for _ in range(3)]
    with patch.object(host_exchange, "WINDOW_BUDGET", 12 * MIB + 3 * 4096):
        stores = load_on_hosts("aaa", store, live_states)
    assert all(torch.equal(live["w"], whole) for live in live_states)
    assert sum(s.bytes_read(".safetensors") for s in stores) == stored_bytes(store)[0]


def test_a_chunk_that_does_not_fit_into_a_window_is_read_by_each_rank():
    store = save(*[replicated() for _ in range(2)])
    live_states = [zeroed(replicated()) for _ in range(2)]
    with patch.object(host_exchange, "WINDOW_BUDGET", 4 * MIB):  # 2 MiB for each of 2 ranks
        stores = load_on_hosts("aa", store, live_states)
    for live in live_states:
        assert_same_state(live, replicated())
    data, bytes_read = stored_bytes(store)[0], sum(s.bytes_read(".safetensors") for s in stores)
    assert data + 4 * BLOCK_SIZE < bytes_read < 2 * data


def damage(store, suffix, offset=None):
    """Flip a bit of the last file with this suffix, by default in its middle. Return its name."""
    file = sorted(k for k in store._objects if k.endswith(suffix))[-1]
    data, modified = store._objects[file]
    offset = len(data) // 2 if offset is None else offset
    changed = data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]
    store._objects[file] = changed, modified
    return file.rpartition("/")[2]


def test_a_damaged_chunk_raises_on_all_ranks_of_all_hosts():
    store = save(*[replicated() for _ in range(4)])
    file = damage(store, ".safetensors")
    live_states = [zeroed(replicated()) for _ in range(4)]
    counters = [live["w"]._version for live in live_states]
    errors, _ = load_outcomes(TWO_BY_TWO, store, live_states)
    assert {type(e) for e in errors} == {DigestMismatch}
    assert all(live["w"]._version > n for live, n in zip(live_states, counters, strict=True))
    for error in errors:
        assert file in str(error)
        assert error.leaf is not None
        assert error.leaf in str(error)
        assert error.fields["live_state"] == "not valid"


def test_a_damaged_index_raises_before_anything_is_changed():
    store = save(*[replicated() for _ in range(4)])
    file = damage(store, ".index.json")
    live_states = [zeroed(replicated()) for _ in range(4)]
    errors, _ = load_outcomes(TWO_BY_TWO, store, live_states)
    assert {type(e) for e in errors} == {DigestMismatch}
    for error, live in zip(errors, live_states, strict=True):
        assert file in str(error)
        assert "live_state" not in error.fields
        assert_same_state(live, zeroed(replicated()))


@pytest.mark.parametrize("suffix", [".index.json", ".safetensors"])
def test_a_short_or_missing_file_raises_on_all_ranks(suffix):
    for missing in (True, False):
        store = save(*[replicated() for _ in range(4)])
        file = sorted(k for k in store._objects if k.endswith(suffix))[-1]
        data, modified = store._objects.pop(file)
        if not missing:
            store._objects[file] = data[:-1], modified
        errors, _ = load_outcomes(TWO_BY_TWO, store, [zeroed(replicated()) for _ in range(4)])
        assert {type(e) for e in errors} == {FormatError}
        assert all(file.rpartition("/")[2] in str(e) for e in errors)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["indexes", "wanted", "read", "publish", "consume"])
def test_all_ranks_raise_within_the_timeouts_when_one_dies(phase):
    """Only the shared memory of the dead rank remains, with words that never change."""
    store = save(*[replicated() for _ in range(3)])
    live_states = [zeroed(replicated()) for _ in range(3)]
    exchanges = Counter()
    with FakeGroup(3, Timeouts(silent=1.0, stuck=10.0)) as group:

        def dying(original, is_due):
            def call(self, *args):
                peers = getattr(self, "_peers", self)
                if is_due(peers, *args) and peers.peer_index == 1:
                    group.views[1].disconnect()
                    raise KeyboardInterrupt
                return original(self, *args)

            return call

        def is_exchange(peers, sizes, *_):
            exchanges[peers.peer_index] += 1
            return exchanges[peers.peer_index] == {"indexes": 1, "wanted": 2}.get(phase)

        name = f"_run_{phase}" if hasattr(host_exchange._Exchange, f"_run_{phase}") else ""
        step = getattr(host_exchange._Exchange, name or "_run_read")
        with (
            patch.object(HostPeers, "exchange", dying(HostPeers.exchange, is_exchange)),
            patch.object(
                host_exchange._Exchange,
                name or "_run_read",
                dying(step, lambda peers, *_: name and exchanges[peers.peer_index] == 3),
            ),
        ):
            began = time.monotonic()
            errors = group.outcomes(lambda r: limpet.load(store, into=live_states[r]))
    assert isinstance(errors[1], KeyboardInterrupt)
    for error in (errors[0], errors[2]):
        assert isinstance(error, RankFailed)
        assert error.rank == 1
        assert error.fields["lost"]
    assert time.monotonic() - began < 8
    if phase in ("indexes", "wanted"):
        assert_same_state(live_states[0], zeroed(replicated()))
    del errors, error, dying, is_exchange, step


def test_the_other_ranks_raise_at_once_when_one_fails_in_the_middle():
    store = save(*[replicated() for _ in range(3)])

    class BrokenStore(CountingStore):
        def get_range(self, key, offset, length, into):
            if key.endswith(".safetensors"):
                raise limpet.errors.StoreError("the disk is gone", key=key)
            super().get_range(key, offset, length, into)

    began = time.monotonic()
    with FakeGroup(3) as group:
        errors = group.outcomes(
            lambda r: limpet.load(
                BrokenStore(store) if r == 1 else store, into=zeroed(replicated())
            )
        )
    assert time.monotonic() - began < 4
    assert type(errors[1]) is limpet.errors.StoreError
    for error in (errors[0], errors[2]):
        assert isinstance(error, RankFailed)
        assert error.rank == 1
        assert "the disk is gone" in str(error)


def test_ranks_that_cannot_map_each_others_memory_read_alone():
    store = save(*[replicated() for _ in range(4)])
    live_states = [zeroed(replicated()) for _ in range(4)]
    original, events = host_exchange.SharedSegment.open_peer.__func__, []

    def open_peer(cls, peer):
        if threading.current_thread().name == "rank-2":
            raise PermissionError(13, "Permission denied")
        return original(cls, peer)

    def sink(name, fields):
        if name == "read_alone":
            events.append(fields)

    with (
        patch.object(host_exchange.SharedSegment, "open_peer", classmethod(open_peer)),
        limpet.attach(sink),
    ):
        stores = load_on_hosts("abab", store, live_states)
    for live in live_states:
        assert_same_state(live, replicated())
    data = stored_bytes(store)[0]
    bytes_read = [s.bytes_read(".safetensors") for s in stores]
    assert bytes_read[0] == bytes_read[2] == data
    assert bytes_read[1] + bytes_read[3] == data
    assert len(events) == 2
    assert all("rank 2" in s["reason"] and "Permission denied" in s["reason"] for s in events)


@pytest.mark.parametrize("allocation", [1, 2, 3])
def test_all_ranks_read_alone_when_there_is_no_memory_for_windows(allocation):
    """It may be missing for the indexes, for the lists of chunks, or for the data."""
    store = save(*[replicated() for _ in range(2)])
    live_states, events, calls = [zeroed(replicated()) for _ in range(2)], [], Counter()
    original = host_exchange.SharedSegment.resize

    def fail(segment, size):
        rank = threading.current_thread().name
        calls[rank] += 1
        if rank == "rank-1" and calls[rank] == allocation:
            raise OSError(28, "No space left on device")
        original(segment, size)

    with (
        patch.object(host_exchange.SharedSegment, "resize", fail),
        limpet.attach(lambda n, f: events.append(f["reason"]) if n == "read_alone" else None),
    ):
        stores = load_on_hosts("aa", store, live_states)
    assert [s.bytes_read(".safetensors") for s in stores] == [stored_bytes(store)[0]] * 2
    for live in live_states:
        assert_same_state(live, replicated())
    assert len(events) == 2
    assert all("rank 1 cannot allocate" in reason for reason in events)
    assert any("No space left" in reason for reason in events)


def test_a_segment_of_another_process_is_refused():
    own, other = host_exchange.SharedSegment.create(), host_exchange.SharedSegment.create()
    try:
        peer = host_exchange.Peer(0, ("a", "b"), os.getpid(), own.fd, own.control_words[0])
        host_exchange.SharedSegment.open_peer(peer).close()
        with pytest.raises(OSError, match="belongs to another process"):
            host_exchange.SharedSegment.open_peer(
                host_exchange.Peer(0, ("a", "b"), os.getpid(), other.fd, own.control_words[0])
            )
        for fd in (-1, 0, 10_000):
            with pytest.raises(OSError):
                host_exchange.SharedSegment.open_peer(
                    host_exchange.Peer(0, ("a", "b"), os.getpid(), fd, -1)
                )
    finally:
        own.close()
        other.close()


def resume_on_hosts(hosts, run, **options):
    """Resume on all ranks. Return the step of each rank and the bytes of shards read per host."""
    live_states = [zeroed(replicated()) | {"progress": limpet.Progress()} for _ in hosts]
    stores = [CountingStore(LocalStore(run)) for _ in hosts]

    def work(rank):
        with limpet.Checkpointer(
            stores[rank], live_states[rank], save=limpet.EverySteps(1)
        ) as ckpt:
            snapshot = ckpt.resume(**options)
        assert_same_state(
            {k: v for k, v in live_states[rank].items() if k != "progress"}, replicated()
        )
        return None if snapshot is None else snapshot.step

    with FakeGroup(len(hosts)) as group, on_hosts(*hosts):
        steps = group.run(work)
    bytes_read = Counter()
    for host, store in zip(hosts, stores, strict=True):
        bytes_read[host] += store.bytes_read(".safetensors")
    return steps, bytes_read


@pytest.mark.filterwarnings("ignore::limpet.errors.SkippedVersion")
def test_a_shared_resume_skips_a_damaged_version(tmp_path):
    run = tmp_path / "run"

    def train(rank):
        state = replicated() | {"progress": limpet.Progress()}
        with limpet.Checkpointer(run, state, save=limpet.EverySteps(1)) as ckpt:
            ckpt.step()
            ckpt.step()

    with FakeGroup(2) as group:
        group.run(train)
    data = stored_bytes(str(run / "version_2"))[0]
    steps, read = resume_on_hosts("aab", run)
    assert steps == [2, 2, 2]
    assert set(read.values()) == {data}
    with (next((run / "version_2").glob("*.safetensors"))).open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([file.read(1)[0] ^ 1]))
    steps, _ = resume_on_hosts("aab", run)
    assert steps == [1, 1, 1]
    new_run = tmp_path / "new_run"
    new_run.mkdir()
    steps, read = resume_on_hosts("aab", new_run, start=f"{run}@1")
    assert steps == [1, 1, 1]
