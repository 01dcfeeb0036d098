"""Versions of trainings with tables: what they contain, what a save writes, and what it reads."""

import itertools
import random
import threading
from contextlib import suppress

import numpy as np
import pytest
import torch

import limpet
from limpet import tables
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.tables.contents import differing, live, saved
from tests.tables.runs import Killed, contents, make_state, train, train_step
from tests.tables.trainings import WORDS
from tests.unreliable_stores import HookedStore


def undisturbed(steps, **words):
    state = make_state(**words)
    found = {}
    for step in range(1, steps + 1):
        train_step(state, step)
        found[step] = contents(state)[0]
    return state, found


# -- exact resumes -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("incremental", [False, 1, 3, True])
def test_a_killed_training_continues_exactly(incremental):
    """B 3, 4, 28. Versions between, and rows, slots, counts, last steps, candidates, and rates."""
    expected, found = undisturbed(16)
    kills, store = random.Random(int(incremental)), MemoryStore()
    for last in (5, 8, 12):
        every = limpet.EverySteps(kills.randint(1, 2))
        with suppress(Killed):
            train(store, 16, kill=last, incremental=incremental, save=every)
    state = train(store, 16, incremental=incremental)
    assert not differing(live(state["tables"]), live(expected["tables"]))
    assert contents(state)[1:] == contents(expected)[1:]
    for version in Run(store).snapshots():
        assert not differing(saved(version), found[version.step])
    chains = [version.chain for version in Run(store).snapshots()]
    most = {"False": [0], "1": [0], "3": [2], "True": range(4, 20)}[str(incremental)]
    assert max(chains) in most


@pytest.mark.slow
def test_versions_of_any_number_of_servers_are_restored_on_any_other():
    """B 6, 7, and 3 to 2. All pairs of 1 to 5 servers, with an incremental version after each."""
    found = undisturbed(28)[1]
    store, step = MemoryStore(), 2
    train(store, step)
    # each pair once: 1, 1 2, 1 3, 1 4, 1 5, 2, 2 3, ... (a de Bruijn sequence)
    pairs = ((a, *(n for b in range(a + 1, 6) for n in (a, b))) for a in range(1, 6))
    counts = [*itertools.chain(*pairs), 1]
    assert len({*itertools.pairwise(counts)}) == 25
    for count in counts:
        step += 1
        state = train(store, step, count=count, incremental=True)
        assert len(state["tables"].servers) == count
    assert not differing(live(state["tables"]), found[step])
    versions = Run(store).snapshots()
    assert [version.step for version in versions] == [*range(1, step + 1)]
    for version in versions:
        assert not differing(saved(version), found[version.step])
    # as many servers as the version before refer to it, others do not
    same = [False, False, *(a == b for a, b in itertools.pairwise([1, *counts]))]
    assert [version.chain > 0 for version in versions] == same


def test_unused_rows_are_evicted_on_servers_without_gradients():
    """Otherwise, what a table contains would depend on the number of servers."""
    found = []
    for count in (1, 8):
        evict = tables.Evict(unused_steps=2, every=2)
        table = tables.Table("words", 2, optimizer=tables.SGD(1.0), evict=evict)
        servers = tables.Servers([table], count)
        for ids in ([*range(100)], [1], [1], [1], []):
            ids = torch.tensor(ids, dtype=torch.int64)
            tables.Embedding(servers, "words")(ids).sum().backward()
            servers.step()
        found.append(live(servers)["words"][0].keys())
    assert found == [{1}, {1}]


# -- what a save writes and reads ----------------------------------------------------------------


class CountingStore(HookedStore):
    """Counts the bytes of shards that are read and written. ``open_``: while it is clear, writes of
    shards wait."""

    def __init__(self, inner):
        super().__init__(inner)
        self.read, self.open_ = 0, threading.Event()
        self.open_.set()
        self.before = self.wait

    def wait(self, method, key):
        if method == "write_at":
            assert self.open_.wait(10)

    def get_range(self, key, offset, length, into):
        self.read += length if key.endswith(".safetensors") else 0
        super().get_range(key, offset, length, into)

    def size(self, folder):
        return sum(stat.length for stat in self.list(folder))


def large(count=1, dim=64, rows=200_000, **options):
    """Servers with a table of many rows, the ids of these, and the bytes of a row."""
    options = {"optimizer": tables.Adagrad(0.1), **options}
    servers = tables.Servers([tables.Table("words", dim, **options)], count)
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, rows)
    servers.fill("words", ids, torch.ones(rows, dim))
    return servers, ids, 8 + 2 * 4 * dim + 4 + 8


def push(servers, ids, name="words"):
    tables.Embedding(servers, name)(torch.as_tensor(ids)).sum().backward()
    servers.step()


def segments_of(snapshot, name="words"):
    """The number of rows and of deleted ids of each segment, oldest first."""
    segments = snapshot.load(keys=f"tables/{name}/segments/**")["tables"][name]["segments"]
    return [(len(segment["ids"]), len(segment["deleted"])) for segment in segments.values()]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_an_incremental_save_writes_the_touched_rows_and_reads_nothing(count):
    store = CountingStore(MemoryStore())
    servers, ids, row = large(count)
    with limpet.Checkpointer(
        store, {"tables": servers}, save=limpet.EverySteps(1), incremental=True
    ) as ckpt:
        ckpt.resume()
        ckpt.step()
        for n in range(2, 8):
            push(servers, ids[2000 * n : 2000 * n + 2000])
            ckpt.step()
            ckpt.wait()
            assert store.size(f"version_{n}") <= 1.1 * 2000 * row
    assert store.read == 0
    last = Run(store).latest()
    assert segments_of(last) == [(200_000, 0)] + [(2000, 0)] * 6
    assert last.verify().ok


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 3), (2, 2)])
def test_each_server_reads_its_part_only(before, after):
    """Two servers share the chunks, of at most 4 MiB, at the border of their parts."""
    store = CountingStore(MemoryStore())
    servers, ids, row = large(before, 16, 100_000)
    limpet.save(store, {"tables": servers})
    restored = tables.Servers([*servers.specs.values()], after)
    limpet.load(store, into={"tables": restored})
    chunks = [min(4 << 20, len(ids) * width) for width in (64, 64, 8, 8, 4)]
    shared = (after - 1) * sum(chunks) if before != after else 0
    assert store.read <= 1.05 * (row * len(ids) + shared)
    assert not differing(live(restored), live(servers))


def run_of(servers, store=None, **options):
    """A Checkpointer that saves each step, and begins with a full version."""
    store = MemoryStore() if store is None else store
    options = {"save": limpet.EverySteps(1), "incremental": True, **options}
    ckpt = limpet.Checkpointer(store, {"tables": servers}, **options)
    ckpt.resume()
    ckpt.step()
    return ckpt, store


def segments_after(pushes, ids_of_each, **options):
    """Return the segments of each version: the first, and one after each push of other ids."""
    servers, ids, _ = large(2, 8, 1000)
    ckpt, store = run_of(servers, **options)
    with ckpt:
        for n in range(pushes):
            push(servers, ids[ids_of_each * n :][:ids_of_each])
            ckpt.step()
    return [segments_of(version) for version in Run(store).snapshots()]


def test_a_version_is_full_when_increments_exceed_half_of_the_table():
    full, more = (1000, 0), (200, 0)
    expected = [[full], [full, more], [full, more, more], [full], [full, more]]
    assert segments_after(4, 200) == expected


def test_the_first_of_every_full_every_versions_is_full():
    full, ten = (1000, 0), (10, 0)
    expected = [[full], [full, ten], [full, ten, ten]] * 2 + [[full]]
    assert segments_after(6, 10, incremental=3) == expected


def test_an_unchanged_table_has_no_new_segment():
    servers, ids, _ = large(2, 8, 1000)
    ckpt, store = run_of(servers)
    with ckpt:
        ckpt.step()
        push(servers, ids[:5])
        ckpt.step()
        ckpt.step()
    found = [segments_of(version) for version in Run(store).snapshots()]
    assert found == [[(1000, 0)], [(1000, 0)], [(1000, 0), (5, 0)], [(1000, 0), (5, 0)]]


def test_a_save_of_the_tables_elsewhere_makes_the_next_version_full():
    """What has changed since that save is not all that has changed since the version."""
    servers, ids, _ = large(2, 8, 1000)
    ckpt, store = run_of(servers)
    with ckpt:
        push(servers, ids[:5])
        ckpt.wait()
        limpet.save(MemoryStore(), {"tables": servers})
        push(servers, ids[5:9])
        ckpt.step()
        ckpt.wait()
        assert not differing(saved(Run(store).latest()), live(servers))
        push(servers, ids[9:12])
        ckpt.step()
    found = [segments_of(version) for version in Run(store).snapshots()]
    assert found == [[(1000, 0)], [(1000, 0)], [(1000, 0), (3, 0)]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_versions_are_exact_while_rows_vanish_return_and_grow_during_saves(seed):
    """Rows are evicted and created again between and during saves, whose writes are blocked. More
    rows than ever are created meanwhile."""
    random = np.random.default_rng(seed)
    options = {"evict": tables.Evict(max_rows=1900), "admit_after": 1 + seed % 2}
    table = tables.Table("words", 4, optimizer=tables.Adam(0.1), **options)
    servers = tables.Servers([table], 1 + seed)
    for _ in range(2):
        push(servers, range(1900))
    store, found = CountingStore(MemoryStore()), {}
    state = {"tables": servers}
    with limpet.Checkpointer(store, state, save=limpet.EverySteps(4), incremental=5) as ckpt:
        ckpt.resume()
        for step in range(1, 41):
            push(servers, random.integers(0, 3500, 10 if step % 4 else 60))
            if step % 4 == 0:
                store.open_.set()
                ckpt.wait()
                found[step] = live(servers)
                store.open_.clear()
            ckpt.step()
        store.open_.set()
    versions = Run(store).snapshots()
    assert [version.step for version in versions] == [*found]
    for version in versions:
        assert not differing(saved(version), found[version.step])
        restored = tables.Servers([table], 2)
        version.load({"tables": restored})
        assert not differing(live(restored), found[version.step])
    assert sum(deleted for version in versions for _, deleted in segments_of(version)) > 0


@pytest.mark.parametrize("part", [0.25, 0.5])
def test_a_push_waits_while_a_save_has_as_many_old_rows_as_it_may_have(part):
    more = {} if part == 0.25 else {"old_rows": part}
    servers, ids, _ = large(1, 8, 250_000, **more)
    most = int(part * len(ids))
    store = CountingStore(MemoryStore())
    shard = servers.servers[0].shards["words"]
    before = servers.lookup("words", ids)
    store.open_.clear()
    ckpt = run_of(servers, store)[0]
    with ckpt:
        push(servers, ids[: most - 1000])
        assert not shard.rows.must_wait
        push(servers, ids[most - 1000 : most + 1000])
        assert shard.rows.must_wait
        pushing = threading.Thread(target=push, args=(servers, ids[most + 1000 : most + 1100]))
        pushing.start()
        pushing.join(0.1)
        assert pushing.is_alive()
        with torch.no_grad():  # a look-up does not wait
            tables.Embedding(servers, "words")(torch.as_tensor(ids))
        store.open_.set()
        pushing.join(20)
        assert not pushing.is_alive()
        after = servers.lookup("words", ids)
        ckpt.step()
    first, second = Run(store).snapshots()
    for version, expected in ((first, before), (second, after)):
        restored = tables.Servers([*servers.specs.values()])
        version.load({"tables": restored})
        assert torch.equal(restored.lookup("words", ids), expected)


def test_a_push_does_not_wait_for_a_save_of_a_small_table():
    """The old rows of a table, or of candidates, may always have 4 MiB."""
    servers, ids, _ = large(1, 8, 1000, admit_after=2)
    push(servers, [1, 2, 3])
    store = CountingStore(MemoryStore())
    ckpt = run_of(servers, store)[0]
    with ckpt:
        ckpt.wait()
        store.open_.clear()
        ckpt.step()
        for _ in range(3):
            push(servers, ids)
            push(servers, [2, 3, 4])
        store.open_.set()


def test_filled_rows_are_evicted_when_they_would_be_without_a_resume():
    """They have no gradient, and came after the eviction of their step."""
    evict = tables.Evict(min_count=2, every=4)
    table = tables.Table("words", 4, optimizer=tables.SGD(1.0), evict=evict)
    servers = tables.Servers([table], 2)
    for _ in range(4):
        push(servers, range(20))
    servers.fill("words", range(100, 110), torch.ones(10, 4))
    other = tables.Servers([table], 3)
    store = MemoryStore()
    limpet.save(store, {"tables": servers})
    limpet.load(store, into={"tables": other})
    for rows in (30, 30, 30, 20):
        for each in (servers, other):
            push(each, range(20))
        assert not differing(live(servers), live(other))
        assert len(live(other)["words"][0]) == rows


@pytest.mark.parametrize("step", ["_count", "_plan", "_table"])
@pytest.mark.parametrize("incremental", [False, True])
def test_rows_that_another_thread_fills_while_a_cut_begins_are_in_all_of_it_or_in_none(
    monkeypatch, step, incremental
):
    servers, store, threads = tables.Servers([WORDS], 2), MemoryStore(), []
    servers.fill("words", range(100), torch.ones(100, 4))
    real = getattr(servers, step)

    def fill_and_go_on(*arguments):
        if not threads:
            fill = threading.Thread(
                target=servers.fill, args=("words", range(95, 110), torch.zeros(15, 4))
            )
            threads.append(fill)
            fill.start()
            fill.join(0.1)
        return real(*arguments)

    with Run(store).writer(incremental=incremental) as writer:
        writer.save({"tables": servers}, step=1)
        servers.fill("words", [0], torch.zeros(1, 4))
        monkeypatch.setattr(servers, step, fill_and_go_on)
        writer.save({"tables": servers}, step=2)
    threads[0].join(10)
    assert not threads[0].is_alive()
    view = tables.open(limpet.Run(store).latest())
    assert len(view["words"]) in (100, 110)
    filled = view["words"].lookup(range(95, 100)).eq(0).all()
    assert filled == (len(view["words"]) == 110)
    assert view["words"].lookup(range(1, 95)).eq(1).all()
    assert servers.statistics()["words"]["rows"] == 110
