"""Views of versions, against a dict of rows."""

import gc
import pickle
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import limpet
from limpet import tables
from limpet.convert.copy import copy_snapshot
from limpet.errors import (
    DigestMismatch,
    LimpetError,
    ManifestInvalid,
    MissingLeaf,
    NotFound,
)
from limpet.loading.snapshot import reader_of
from limpet.storage.memory import MemoryStore
from limpet.tables import ray_engine
from limpet.tables.client import ServersLost
from limpet.tables.ids import bucket_of
from limpet.tables.segments import StoredSegment, restore_rows
from limpet.tables.shard import TableShard
from limpet.tables.view import stored_tables
from limpet.tasks import ray_cluster
from tests.forging import files_of, forge, store_of
from tests.tables.trainings import URLS, WORDS, Training
from tests.unreliable_stores import HookedStore

ADAM = replace(WORDS, optimizer=tables.Adam(lr=1.0))


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def open_latest(training):
    return tables.open(training.run.latest())


def flip(store, key, at):
    """Flip a bit of a file."""
    data = bytearray(store._objects[key][0])
    data[at] ^= 1
    store._objects[key] = (bytes(data), store._objects[key][1])


def shards_of(store, folder):
    return [k for k in store._objects if k.startswith(f"{folder}/") and k.endswith(".safetensors")]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_view_has_the_rows_of_its_version_and_follows_the_next_ones(count):
    training = Training(MemoryStore(), WORDS, URLS, count=count, seed=count)
    with training.saving(incremental=True):
        training.change()
        view = tables.open(training.save())
        training.assert_equal(view, 1)
        for step in range(2, 10):
            training.change()
            training.save()
            if step % 3:  # it may miss a version
                assert view.follow() is True
                training.assert_equal(view, step)
                assert view.follow() is False
                training.assert_equal(view, step)
    for step in range(1, 10):
        version = training.run.open(training.run.find(step))
        training.assert_equal(tables.open(version), step)
    lists = view.snapshot.tree["tables"]["words"]["segments"]
    assert len(lists) > 1, "there were no increments"


def test_a_view_is_of_an_address_and_shows_its_version(tmp_path):
    training = Training(str(tmp_path), WORDS)
    with training.saving():
        training.update("words", [1, 2])
        training.save()
        training.update("words", [3])
        training.save()
    view = tables.open(f"{tmp_path}@1")
    training.assert_equal(view, 1)
    assert view.snapshot.url.endswith("version_1")
    assert view.follow() is True
    training.assert_equal(view, 2)
    assert view.snapshot.url.endswith("version_2")
    training.assert_equal(tables.open(f"{tmp_path}@latest"), 2)


def test_a_look_up_is_a_copy_of_one_row_for_each_id():
    training = Training(MemoryStore(), WORDS)
    with training.saving():
        training.update("words", [5])
        words = tables.open(training.save())["words"]
    row = training.rows["words"][5]
    for ids in ([5, 5], torch.tensor([5, 5]), np.full(2, 5, np.uint64)):
        assert torch.equal(words.lookup(ids), row.expand(2, 4))
    assert words.lookup([]).shape == (0, 4)
    vectors = words.lookup([5])
    vectors.zero_()
    assert torch.equal(words.lookup([5])[0], row)
    assert words.table == WORDS


def test_a_table_may_be_empty():
    training = Training(MemoryStore(), WORDS)
    with training.saving(incremental=True):
        view = tables.open(training.save())
        training.assert_equal(view, 1)
        training.update("words", [1, 2])
        training.save()
        assert view.follow()
        training.assert_equal(view, 2)
        training.evict("words", [1, 2])
        training.save()
        assert view.follow()
        training.assert_equal(view, 3)


class CountingStore(HookedStore):
    """Counts the bytes of files that are read."""

    nbytes = 0

    def get_range(self, key, offset, length, into):
        self.nbytes += length
        super().get_range(key, offset, length, into)


def test_slots_and_candidates_are_not_read():
    store = CountingStore(MemoryStore())
    training = Training(store, replace(ADAM, dim=64, admit_after=2))
    ids = np.arange(10_000)
    with training.saving(incremental=True):
        training.servers.fill("words", ids, torch.ones(len(ids), 64))
        training.update("words", (10**6 + ids).tolist())  # not admitted
        training.save()
        store.nbytes = 0
        view = open_latest(training)
        payload = len(ids) * (8 + 4 * 64)
        small = 100_000
        assert payload <= store.nbytes < payload + small < training.run.latest().nbytes / 2
        assert view["words"].ids().tolist() == ids.tolist()
        columns = {*view._shards["words"].rows.columns}
        assert columns == {"ids", "values", "counts", "last_steps"}
        store.nbytes = 0
        training.update("words", (10**6 + ids[:50]).tolist())
        training.save()
        assert view.follow()
        assert view["words"].ids()[-50:].tolist() == (10**6 + ids[:50]).tolist()
        assert store.nbytes < small


def test_modules_use_a_view_and_collect_no_gradients():
    training = Training(MemoryStore(), WORDS)
    with training.saving():
        training.update("words", [1, 2, 3], 2.0)
        view = tables.open(training.save())
    ids = torch.tensor([[1, 2, 2], [3, 4, 7]])
    for make in (
        lambda t: tables.EmbeddingBag(t, "words", mode="sum", padding_idx=7),
        lambda t: tables.Embedding(t, "words"),
    ):
        found = make(view)(ids)
        assert torch.equal(found, make(training.servers)(ids))
        assert not found.requires_grad
    linear = torch.nn.Linear(4, 1)
    linear(tables.EmbeddingBag(view, "words")(ids)).sum().backward()
    assert linear.weight.grad is not None
    assert view.client.take() == {}


def test_a_branch_and_a_full_version_are_read_completely():
    training = Training(MemoryStore(), WORDS, URLS)
    with training.saving(incremental=True):
        training.change()
        training.save()
        for _ in range(3):
            training.change()
            training.save()
        view = open_latest(training)
    shard = view._shards["words"]
    training.branch(2)
    assert view.follow() is False, "the branch has no version yet"
    training.assert_equal(view, 4)
    other = Training(training.run.store, WORDS, URLS, seed=9)
    other.step = 2
    with other.saving(incremental=True):
        other.change()
        other.save()
        assert view.follow() is True, "step 3 of branch 1 is newer than step 4 of branch 0"
        other.assert_equal(view, 3)
        assert view._shards["words"] is not shard
        shard = view._shards["words"]
        other.change()
        other.save()
    assert view.follow() is True
    other.assert_equal(view, 4)
    with other.saving(incremental=False):
        other.change()
        other.save()
    assert view.follow() is True
    other.assert_equal(view, 5)
    assert view._shards["words"] is not shard


def test_a_branch_from_the_same_base_does_not_mix_segments():
    store = MemoryStore()
    training = Training(store, WORDS)
    with training.saving(incremental=True):
        training.update("words", [1, 2, 3, 4, 5, 6, 7, 8])
        base = training.save()
        training.update("words", [9])
        training.save()
    view = open_latest(training)
    training.branch(1)
    other = Training(store, WORDS)
    base.load({"tables": other.servers})
    other.rows = {"words": dict(training.versions[1]["words"])}
    other.waiting = {"words": dict.fromkeys(other.rows["words"], 1)}
    other.step = 1
    with other.saving(incremental=True):
        other.update("words", [10])
        other.save()
    assert view.follow() is True
    other.assert_equal(view, 2)
    assert 9 not in view["words"].ids()


@pytest.mark.parametrize("is_full", [False, True])
def test_damage_leaves_the_view_as_it_was(is_full):
    store = MemoryStore()
    training = Training(store, WORDS, URLS, count=2)
    with training.saving(incremental=not is_full):
        for _ in range(2):
            training.change()
            training.save()
        view = open_latest(training)
        training.change()
        training.save()
    good = dict(store._objects)
    raised = 0
    for key in shards_of(store, "version_3"):
        for at in range(100, len(good[key][0]), 1993):
            store._objects.clear()
            store._objects.update(good)
            flip(store, key, at)
            try:
                view.follow()
            except DigestMismatch:
                raised += 1
                training.assert_equal(view, 2)
            else:  # a byte that a view does not need, such as one of a count
                training.assert_equal(view, 3)
                view = tables.open(training.run.open(training.run.find(2)))
    assert raised > 3
    store._objects.update(good)
    assert view.follow() is True
    training.assert_equal(view, 3)


class Twice:
    """A leaf of ids that has its first id again and again."""

    def __init__(self, leaf):
        self.leaf = leaf

    def __getitem__(self, part):
        ids = self.leaf[part]
        ids[:] = ids[:1]
        return ids


@pytest.mark.parametrize("of", ["ids", "deleted"])
def test_an_id_twice_in_a_segment_is_damage_that_is_found_before_anything_changes(monkeypatch, of):
    training = Training(MemoryStore(), WORDS, URLS)
    with training.saving(incremental=True):
        training.change()
        view = tables.open(training.save())
        training.change()
        training.save()

        read = StoredSegment.read

        def read_twice(segment, names, first, stop, into):
            read(segment, names, first, stop, into)
            into["ids"][:] = into["ids"][0]

        def deleted_twice(segment, buckets):
            segment._deleted = Twice(segment._deleted)
            return deleted(segment, buckets)

        deleted = StoredSegment.deleted
        if of == "ids":
            monkeypatch.setattr(StoredSegment, "read", read_twice)
        else:
            monkeypatch.setattr(StoredSegment, "deleted", deleted_twice)
        with pytest.raises(ManifestInvalid, match="occurs twice"):
            view.follow()
        monkeypatch.undo()
        training.assert_equal(view, 1)
        assert view.follow()
        training.assert_equal(view, 2)


def test_retention_has_deleted_the_version_of_the_view():
    training = Training(MemoryStore(), WORDS, URLS)
    with training.saving(keep=limpet.KeepLast(1)):
        training.change()
        view = tables.open(training.save())
        for _ in range(2):
            training.change()
            training.save()
    assert [v.step for v in training.run.line()] == [3]
    training.assert_equal(view, 1)
    assert view.follow() is True
    training.assert_equal(view, 3)


def test_a_version_that_is_deleted_while_it_is_read_is_replaced_by_the_newest():
    store = HookedStore(MemoryStore())
    training = Training(store, WORDS, URLS)
    with training.saving(keep=limpet.KeepLast(1)):
        training.change()
        view = tables.open(training.save())
        training.change()
        training.save()
        started = []

        def before(method, key):
            if method == "get_range" and key.startswith("version_2/") and not started:
                started.append(key)
                training.change()
                training.save()
                assert [v.step for v in training.run.line()] == [3]

        store.before = before
        assert view.follow() is True
    assert started
    training.assert_equal(view, 3)


def test_a_run_that_is_gone_is_no_change():
    store = MemoryStore()
    training = Training(store, WORDS)
    with training.saving():
        training.update("words", [1])
        view = tables.open(training.save())
    store._objects.clear()
    assert view.follow() is False
    training.assert_equal(view, 1)


def test_look_ups_in_another_thread_never_mix_versions():
    a = replace(WORDS, initializer=tables.Constant(0.0))
    training = Training(MemoryStore(), a, replace(a, name="urls"))
    ids = np.arange(500)
    changed, stop, failed, seen = threading.Condition(), threading.Event(), [], set()

    def look_up(view):
        last = 0.0
        while not stop.is_set():
            first, second = view["words"].lookup(ids), view["urls"].lookup(ids[::-1].copy())
            again = view["words"].lookup(ids[:1])
            values = [{*each.reshape(-1).tolist()} for each in (first, second, again)]
            steps = [-values[n].pop() for n in range(3)]
            if any(values) or not last <= steps[0] <= steps[1] <= steps[2]:
                failed.append((steps, values))
                stop.set()
            with changed:
                seen.add(steps[0])
                changed.notify_all()
            last = steps[2]

    def save():
        for name in ("words", "urls"):
            training.update(name, ids.tolist())
        training.save()

    with training.saving(incremental=True):
        for name in ("words", "urls"):  # other rows, so that versions have increments
            training.servers.fill(name, np.arange(1000, 4000), torch.zeros(3000, 4))
        save()
        view = open_latest(training)
        threads = [threading.Thread(target=look_up, args=(view,), daemon=True) for _ in "ab"]
        for thread in threads:
            thread.start()
        shards = []
        for n in range(9):
            save()
            assert view.follow() is True
            shards.append(view._shards["words"])
            with changed:
                assert changed.wait_for(lambda n=n: failed or n + 2 in seen, 10)
            assert not failed, failed[0]
    assert 1 < len({*shards}) < 5, "some versions are full, and most are not"
    stop.set()
    for thread in threads:
        thread.join(10)
    assert not failed, failed[0]


def test_a_copy_with_another_name_is_opened_but_not_followed(tmp_path):
    training = Training(MemoryStore(), WORDS, URLS, count=2)
    with training.saving(incremental=True):
        for _ in range(3):
            training.change()
            training.save()
    from limpet.snapshot.location import locate

    copy_snapshot(reader_of(training.run.latest()), locate(str(tmp_path / "best")))
    view = tables.open(tmp_path / "best")
    training.assert_equal(view, 3)
    with pytest.raises(ManifestInvalid, match="a folder with the name version_STEP"):
        view.follow()


def test_some_buckets_of_two_segments_are_read():
    training = Training(MemoryStore(), WORDS, count=3)
    with training.saving(incremental=True):
        for _ in range(2):
            training.change()
            training.save()
    (stored,) = stored_tables(reader_of(training.run.latest())).values()
    ranges = [range(1000), range(1000, 1001), range(1001, 4096)]
    shards = [TableShard(stored.table) for _ in ranges]
    for shard, buckets in zip(shards, ranges):
        restore_rows(shard.rows, stored.segments(), buckets, ("ids", "values"))
    parts = [shard.ids() for shard in shards]
    assert sorted(np.concatenate(parts).tolist()) == sorted(training.rows["words"])
    for part, buckets in zip(parts, ranges):
        assert {*bucket_of(part).tolist()} <= {*buckets}


def test_bad_arguments():
    training = Training(MemoryStore(), WORDS, URLS)
    with training.saving():
        view = tables.open(training.save())
    with pytest.raises(
        LimpetError, match=r"^There is no table 'word'; the tables are 'words', 'urls'."
    ):
        view["word"]
    with pytest.raises(LimpetError, match=r"^There is no table 'word'"):
        tables.EmbeddingBag(view, "word")
    for ids in ([0.5], torch.ones(2), np.array([True])):
        with pytest.raises(LimpetError, match=r"^ids must be an array of integers"):
            view["words"].lookup(ids)
    store = MemoryStore()
    limpet.save(store, {"n": 1})
    with pytest.raises(MissingLeaf, match="no tables"):
        tables.open(store)
    with pytest.raises(NotFound):
        tables.open(store.at("x"))


def forged(training, change):
    """The newest version, with a changed tree of the table ``words``."""
    files = files_of(training.run.store)

    def manifest(content):
        change(content["tree"]["dict"]["tables"]["dict"]["words"]["dict"])

    return store_of(forge(files, manifest, folder=f"version_{training.step}"))


def test_a_newer_kind_of_optimizer_does_not_matter():
    training = Training(MemoryStore(), ADAM)
    with training.saving():
        training.servers.fill("words", [1, 2], torch.ones(2, 4))
        training.save()

    def change(words):
        words["optimizer"]["dict"] = {"kind": "Muon", "beta": 3}

    view = tables.open(limpet.Run(forged(training, change)).latest())
    assert torch.equal(view["words"].lookup([2, 1]), torch.ones(2, 4))
    assert view["words"].table == replace(WORDS, optimizer=tables.SGD(0.0))


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("dtype", "float8", "float8"),
        ("initializer", {"dict": {"kind": "Sobol"}}, "Sobol"),
        ("rows", 3, "2"),
        ("dim", 5, "4"),
    ],
)
def test_what_this_release_does_not_know_is_refused(name, value, found):
    training = Training(MemoryStore(), WORDS)
    with training.saving():
        training.update("words", [1, 2])
        training.save()
    store = forged(training, lambda words: words.update({name: value}))
    with pytest.raises(ManifestInvalid, match=found):
        tables.open(limpet.Run(store).latest())


# -- on servers ------------------------------------------------------------------------------------


class Actor:
    def __init__(self, name, server):
        self.name, self.server, self.__ray_ready__ = name, server, SimpleNamespace(remote=int)


class Cluster:
    """A cluster of Ray in this process. ``alive``: its actors by name. As those of Ray, they end
    when the handle is garbage that started them, whoever has found them by name."""

    def __init__(self):
        self.alive, self.started, self.before_call = weakref.WeakValueDictionary(), 0, lambda: None

    def remote(self, **options):
        assert options["max_restarts"] == options["max_task_retries"] == 0
        return lambda kind: SimpleNamespace(options=partial(self.named, kind))

    def named(self, kind, *, name, namespace, get_if_exists):
        assert (namespace, get_if_exists) == ("limpet", True)
        return SimpleNamespace(remote=partial(self.find_or_start, kind, name))

    def find_or_start(self, kind, name, *arguments):
        found = self.alive.get(name)
        if found is None:
            self.started += 1
            found = self.alive[name] = Actor(name, kind(*arguments))
            return found
        return weakref.proxy(found)

    def wait(self, calls, *, num_returns, timeout):
        return calls, []

    def crash(self, *numbers):
        """Ray keeps the names of actors that crash. Return how many did."""
        found = [ref() for ref in self.alive.valuerefs()]
        found = [actor for actor in found if actor is not None and actor.server is not None]
        for actor in (chosen := found[slice(*numbers)]):
            actor.server = None
        return len(chosen)

    def kill(self, actor):
        with suppress(ReferenceError):
            actor.server = None
            if self.alive.get(actor.name) == actor:
                del self.alive[actor.name]

    def call(self, ray, actors, method, arguments):
        self.before_call()
        found, lost = {}, []
        for n, each in arguments.items():
            try:
                answer = actors[n].server.call(method, each)
                found[n] = pickle.loads(pickle.dumps(answer, 5))
            except (ReferenceError, AttributeError):
                lost.append(n)
        if lost:
            raise ServersLost(f"lost: {lost}", servers=tuple(lost))
        return found


@pytest.fixture
def cluster(monkeypatch):
    found = Cluster()
    monkeypatch.setattr(ray_cluster, "connect", lambda user: found)
    monkeypatch.setattr(ray_engine, "call_servers", found.call)
    return found


@pytest.mark.parametrize("servers", [1, 3])
def test_a_view_on_servers_equals_one_in_this_process(tmp_path, cluster, servers):
    training = Training(str(tmp_path), WORDS, URLS, count=2, seed=servers)
    with training.saving(incremental=True):
        for _ in range(2):
            training.change()
            training.save()
        view = tables.open(training.run.latest(), servers=servers)
        training.assert_equal(view, 2)
        bag, ids = tables.EmbeddingBag(view, "words"), torch.arange(12).view(3, 4) * 2**50
        for step in (3, 4):
            training.change()
            training.save()
            assert view.follow() is True
            training.assert_equal(view, step)
            assert torch.equal(bag(ids), tables.EmbeddingBag(training.servers, "words")(ids))
            assert view.follow() is False
    assert cluster.started == 3 * servers
    assert len(cluster.alive) == servers, "those of the older versions are released"


@pytest.fixture
def without_gc():
    gc.disable()
    yield
    gc.enable()


def test_views_of_a_version_share_servers_which_end_with_the_first_view(
    tmp_path, cluster, without_gc
):
    training = Training(str(tmp_path), WORDS)
    with training.saving():
        training.change()
        version = training.save()
        first, second = (tables.open(u, servers=2) for u in (version, f"{tmp_path}@latest"))
        assert cluster.started == 2
        other = tables.open(version, servers=3)
        training.change()
        training.save()
    newer = tables.open(training.run.latest(), servers=2)
    assert cluster.started == 7
    training.assert_equal(newer, 2)
    for view in (first, second, other):
        training.assert_equal(view, 1)
    bag = tables.EmbeddingBag(first, "words")
    del first, view, other, newer
    training.assert_equal(second, 1)
    assert cluster.started == 7
    assert len(cluster.alive) == 2, "the module still needs them"
    del bag
    assert not cluster.alive
    training.assert_equal(second, 1)
    assert cluster.started == 9
    del second
    assert not cluster.alive


def test_the_rows_in_this_process_are_released_with_the_view(without_gc):
    training = Training(MemoryStore(), WORDS)
    with training.saving():
        training.change()
        view = tables.open(training.save())
    shard = weakref.ref(view._shards["words"])
    del view
    assert shard() is None


def test_servers_that_end_are_started_again_once_whatever_number_of_threads(tmp_path, cluster):
    training, failed, checks = Training(str(tmp_path), WORDS), [], []
    with training.saving():
        training.change()
        view = tables.open(training.save(), servers=3)

    def check():
        try:
            for _ in range(15):
                training.assert_equal(view, 1)
                checks.append(1)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=check, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    crashed = 0
    while any(thread.is_alive() for thread in threads):
        if len(checks) >= 4 * crashed:  # on a busy machine, no look-up would end otherwise
            crashed += cluster.crash(crashed % 3, crashed % 3 + 1)
        threads[crashed % 4].join(0.02)
    assert not failed, failed[0]
    view["words"].lookup(range(100))
    assert crashed > 2
    assert cluster.started == 3 + crashed


def test_servers_that_always_end_are_an_error(tmp_path, cluster):
    training = Training(str(tmp_path), WORDS)
    with training.saving():
        training.change()
        view = tables.open(training.save(), servers=2)
    cluster.before_call = lambda: cluster.crash(None)
    with pytest.raises(ServersLost, match=r"lost: \[0, 1\]\. See `ray logs`.*memory"):
        view["words"].lookup(range(100))
    assert cluster.started == 2 * 5
    cluster.before_call = lambda: None
    training.assert_equal(view, 1)


def test_what_servers_cannot_read_is_raised_by_open_and_follow(tmp_path, cluster):
    training = Training(str(tmp_path), WORDS)
    with training.saving():
        training.change()
        view = tables.open(training.save(), servers=2)
        training.change()
        training.save()
    (shard,) = (tmp_path / "version_2").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    for change in (view.follow, lambda: tables.open(f"{tmp_path}@2", servers=2)):
        with pytest.raises(DigestMismatch, match="version_2"):
            change()
        training.assert_equal(view, 1)
        assert len(cluster.alive) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"servers": 0}, "^servers= must be a number of servers, 1 to 4096, not 0"),
        ({"servers": 4097}, "^servers= must be a number of servers"),
        ({"servers": 2.0}, "^servers= must be a number of servers"),
        ({"ray": {}}, "^ray= must be None without servers="),
        ({"servers": 1, "ray": {"lifetime": "detached"}}, r"^ray= must be some of .*'lifetime'"),
        ({"servers": 1}, "^url must be the URL of a store that other processes can open"),
    ],
)
def test_bad_arguments_of_servers(monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "ray", None)
    training = Training(MemoryStore(), WORDS)
    with training.saving(), pytest.raises(LimpetError, match=message):
        tables.open(training.save(), **arguments)


def test_servers_need_ray(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    training = Training(str(tmp_path), WORDS)
    with (
        training.saving(),
        pytest.raises(LimpetError, match=r"servers= needs the package ray\. Install"),
    ):
        tables.open(training.save(), servers=2)
