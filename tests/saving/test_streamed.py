"""Members of a state whose arrays are read while a save runs."""

import errno
from contextlib import suppress

import numpy as np
import pytest
import torch

import limpet
from limpet.buffers import BufferPool
from limpet.convert.copy import copy_snapshot
from limpet.errors import (
    AlreadyExists,
    CommitError,
    DigestMismatch,
    LimpetError,
    MemberFailed,
    NotFound,
    StoreError,
    Unavailable,
    Unsupported,
)
from limpet.format.names import MANIFEST
from limpet.loading.snapshot import Snapshot, reader_of
from limpet.run.run import Run
from limpet.saving import save as recipe
from limpet.saving.commit import VersionMetadata
from limpet.snapshot.location import Location, locate
from limpet.storage.local.store import LocalStore
from limpet.storage.local.tmpfs import TmpfsStore
from limpet.storage.memory import MemoryStore
from limpet.testing.faults import Fault, FaultFs
from tests.pools import allocated_bytes, free_bytes
from tests.states import Stateful, unused_url
from tests.streamed_members import WIDTH, CountedReads, Table, make_table
from tests.trainings import delete_version, flip_bit, shard_of
from tests.unreliable_stores import HookedStore

LARGE = (9 << 20) // (4 * WIDTH)
"""The rows of a segment with several pieces."""


def loaded(snapshot):
    segments = snapshot.load()["tables"]["words"]["segments"]
    return {name: np.asarray(segment["values"]).tobytes() for name, segment in segments.items()}


def assert_saved(snapshot, values):
    assert loaded(snapshot) == values
    report = snapshot.verify()
    assert report.ok, report.problems


def begin(store, step, state, **options):
    options = {"pool": BufferPool(1 << 40), "stage_now": True, **options}
    location = Location(store, f"version_{step}")
    return recipe.begin_save(location, state, VersionMetadata(step=step), **options)


def save(store, step, state, *, finish=(), **options):
    return Snapshot(recipe.finish_save(begin(store, step, state, **options), *finish))


# -- a save ----------------------------------------------------------------------------------------


def test_a_save_begins_and_ends_the_save_of_a_member():
    table = make_table(10, 5)
    snapshot = limpet.save(unused_url(), {"tables": table, "w": np.ones(3)})
    assert table.calls == ["begin", (reader_of(snapshot).digest, None)]
    assert table.base is None
    assert_saved(snapshot, table.values())
    assert snapshot.metadata["tables"] == ["tables/words"]


def test_a_save_without_tables_does_not_list_any():
    assert "tables" not in limpet.save(unused_url(), {"w": np.ones(3)}).metadata


def test_names_of_tables_are_escaped_as_in_keys():
    table = make_table(2)
    table.tables = ("a/b",)
    assert limpet.save(unused_url(), {"x/y": table}).metadata["tables"] == ["x~1y/a~1b"]


def test_a_copy_of_a_version_lists_its_tables():
    url, copy = unused_url(), unused_url()
    limpet.save(url, {"tables": make_table(2)})
    copy_snapshot(reader_of(limpet.open(url)), locate(copy))
    assert limpet.open(copy).metadata["tables"] == ["tables/words"]


@pytest.mark.parametrize("kind", [MemoryStore, LocalStore, TmpfsStore])
def test_held_sources_are_read_in_the_background(kind, tmp_path):
    """The thread that begins the save reads only bytes that share a piece with others."""
    store = kind() if kind is MemoryStore else kind(str(tmp_path))
    table, w = make_table(LARGE, LARGE, 5), np.ones(3)
    pool, expected = BufferPool(1 << 40), table.values()
    job = begin(store, 1, {"tables": table, "w": w}, pool=pool)
    assert table.bytes_read <= 2 * pool.buffer_size
    assert allocated_bytes(pool) <= 4 * pool.buffer_size
    assert job.deferred.done.is_set()
    w[:] = 7
    table.append(20, 1.0)
    table.segments["s0"] = np.zeros(1), 0, 1
    snapshot = Snapshot(recipe.finish_save(job))
    assert table.bytes_read >= 2 * LARGE * 4 * WIDTH
    assert_saved(snapshot, expected)
    assert snapshot.load()["w"].tolist() == [1, 1, 1]
    assert allocated_bytes(pool) == free_bytes(pool)


def test_overlap_leaves_held_sources_alone():
    table, model = make_table(LARGE), torch.nn.Linear(1500, 1500)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "tables": table}
    expected, weight = table.values(), model.weight.detach().clone()
    job = begin(MemoryStore(), 1, state, overlap=True)
    assert not job.deferred.done.is_set()
    assert table.bytes_read <= 8 << 20
    snapshot = Snapshot(recipe.finish_save(job))
    assert_saved(snapshot, expected)
    assert torch.equal(snapshot["model/weight"].read(), weight)


def test_the_devices_of_other_members_are_recorded():
    snapshot = limpet.save(unused_url(), {"w": torch.ones(3), "tables": make_table(3)})
    assert snapshot.metadata["devices"] == "cpu"


def test_other_members_are_checked_as_without_tables():
    """A state that no load could restore is refused at its first save."""

    class Forgetful:
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            raise AssertionError("not called")

        def check_state_dict(self, state):
            raise ValueError("it never fits")

    with pytest.raises(LimpetError, match="it never fits"):
        limpet.save(unused_url(), {"tables": make_table(3), "other": Forgetful()})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda table: {"nested": table},
        lambda table: [table],
        limpet.PerRank,
        limpet.Replicated,
        lambda table: Stateful(inner=table),
    ],
)
def test_a_member_below_the_top_level_is_refused(wrap):
    table = make_table(3)
    with pytest.raises(Unsupported, match="it is streamed"):
        limpet.save(unused_url(), {"x": wrap(table)})
    assert table.calls == []


def test_a_member_gets_no_call_when_other_code_looks_at_the_state():
    table = make_table(3)
    table.state_dict()
    limpet.save(unused_url(), {"w": np.ones(2)})
    assert table.calls == []


# -- the end of a save -----------------------------------------------------------------------------


def ends_of(table):
    return [call for call in table.calls if type(call) is tuple]


def test_a_snapshot_that_exists_is_an_end():
    url, table = unused_url(), make_table(3)
    limpet.save(url, {"w": 1})
    with pytest.raises(AlreadyExists):
        limpet.save(url, {"tables": table})
    assert table.calls == ["begin", (None, AlreadyExists)]


def test_a_state_that_cannot_be_saved_is_an_end():
    table = make_table(3)
    with pytest.raises(Unsupported):
        limpet.save(unused_url(), {"tables": table, "f": lambda: 1})
    assert table.calls == ["begin", (None, Unsupported)]


def test_a_member_that_cannot_begin_is_ended_too():
    table, other = make_table(3), make_table(3)
    table.fail["begin"] = ValueError("no memory for the cut")
    with pytest.raises(MemberFailed, match="no memory for the cut") as caught:
        limpet.save(unused_url(), {"tables": table, "a": other, "z": (later := make_table(1))})
    assert "begin_save" in str(caught.value)
    assert "Nothing was saved" in str(caught.value)
    assert table.calls == other.calls == ["begin", (None, MemberFailed)]
    assert later.calls == []


@pytest.mark.parametrize("where", ["begin", "read"])
def test_an_interrupt_is_an_end(where):
    table, store = make_table(LARGE), MemoryStore()
    if where == "begin":
        table.fail["begin"] = KeyboardInterrupt()
    else:
        table.before_read = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        save(store, 1, {"tables": table}, stage_now=False)
    assert table.calls == ["begin", (None, KeyboardInterrupt)]
    table.fail, table.before_read = {}, lambda: None
    assert_saved(save(store, 1, {"tables": table}), table.values())


def test_a_thread_that_cannot_start_is_an_end(monkeypatch):
    table = make_table(3)
    monkeypatch.setattr("limpet.saving.pending.start_thread", lambda thread: False)
    with pytest.raises(CommitError, match="no thread"):
        limpet.save_async(unused_url(), {"tables": table})
    assert table.calls == ["begin", (None, CommitError)]


def test_a_fence_that_refuses_the_commit_is_an_end():
    table = make_table(3)

    def refuse():
        raise LimpetError("taken over")

    with pytest.raises(LimpetError, match="taken over"):
        save(MemoryStore(), 1, {"tables": table}, finish=[refuse])
    assert ends_of(table) == [(None, LimpetError)]


def test_an_error_of_a_member_does_not_hide_that_of_the_save():
    table = make_table(3)
    table.before_read = lambda: (_ for _ in ()).throw(StoreError("the server is gone"))
    table.fail["end"] = ValueError("cannot forget the cut")
    with pytest.raises(StoreError, match="the server is gone") as caught:
        limpet.save(unused_url(), {"tables": table, "a": (other := make_table(1))})
    assert "cannot forget the cut" in str(caught.value.__notes__)
    assert ends_of(other) == [(None, StoreError)]


def test_an_error_of_a_member_after_the_commit_says_that_the_version_is_saved():
    table, url = make_table(3), unused_url()
    table.fail["end"] = ValueError("cannot forget the cut")
    with pytest.raises(MemberFailed, match="cannot forget the cut") as caught:
        limpet.save(url, {"tables": table, "a": (other := make_table(1))})
    assert caught.value.fields["committed"] == reader_of(limpet.open(url)).digest
    assert [digest is not None for digest, _ in (*ends_of(table), *ends_of(other))] == [True, True]
    assert_saved(limpet.open(url), table.values())


def test_an_unknown_outcome_is_no_commit():
    store, table = HookedStore(MemoryStore()), make_table(3)

    def lose(method, key):
        if method == "put_if_absent" and key.endswith(MANIFEST):
            raise Unavailable("no answer")

    store.after = lose
    with pytest.raises(Unavailable) as caught:
        save(store, 1, {"tables": table})
    assert caught.value.fields["outcome"] == "unknown"
    assert ends_of(table) == [(None, Unavailable)]


@pytest.mark.parametrize("is_incremental", [False, True])
def test_every_call_of_a_store_that_fails_ends_the_save_once(is_incremental):
    for at in range(1, 200):
        table, store = make_table(60, 70), HookedStore(MemoryStore())
        state = {"tables": table, "w": np.ones(3)}
        base = reader_of(save(store, 1, state)) if is_incremental else None
        table.append(3, 1.0)
        calls, ended = [], len(ends_of(table))

        def fail(method, key, calls=calls, at=at):
            calls.append(method)
            if len(calls) == at:
                raise StoreError("a fault")

        store.before = fail
        snapshot = error = None
        try:
            snapshot = save(store, 2, state, base=base)
        except LimpetError as e:
            error = e
        store.before = lambda method, key: None
        (end,) = ends_of(table)[ended:]
        assert (snapshot is None) == (error is not None)
        if snapshot is None:
            assert end == (None, type(error))
            with suppress(AlreadyExists):  # if only what follows the commit has failed
                snapshot = save(store, 2, state, base=base)
        else:
            assert end == (reader_of(snapshot).digest, None)
        assert_saved(snapshot or Run(store).open(2), table.values())
        if len(calls) < at:
            return
    raise AssertionError("the save did not end")


@pytest.mark.slow
def test_every_call_of_a_file_system_that_fails_ends_the_save_once(tmp_path):
    for at in range(1, 300):
        fs = FaultFs(None, Fault(at=at, error=errno.ENOSPC))
        table, store = make_table(60), LocalStore(str(tmp_path / f"{at}"), fs=fs)
        found = None
        with suppress(LimpetError):
            found = save(store, 1, {"tables": table})
        ((digest, _),) = ends_of(table)
        assert (digest is not None) == (found is not None)
        if not fs.fired:
            return
    raise AssertionError("the save did not end")


# -- rows that are carried over --------------------------------------------------------------------


@pytest.mark.parametrize("stage_now", [False, True])
def test_carried_rows_are_not_read(stage_now):
    store, table = CountedReads(), make_table(LARGE)
    options = {"stage_now": stage_now}
    first = save(store, 1, {"tables": table, "w": np.ones(30_000, np.int64)}, **options)
    table.append(3, 1.0)
    table.append(6000, 2.0)
    table.bytes_read = 0
    state = {"tables": table, "w": np.ones(30_000, np.int64)}
    second = save(store, 2, state, base=reader_of(first), **options)
    # what shares a piece with others is staged
    assert store.count <= (2 * (4 << 20) if stage_now else 0)
    assert table.bytes_read <= 2 * 6003 * 4 * WIDTH
    assert second.nbytes < 110_000
    assert second.bases == {first.version}
    assert second.chain == 1
    assert_saved(second, table.values())
    table.append(5, 3.0)
    third = save(store, 3, state, base=reader_of(second), **options)
    assert third.bases == {first.version, second.version}
    assert third.chain == 2
    assert_saved(third, table.values())
    assert third.nbytes < 10_000


def test_rows_in_another_place_are_read_and_written():
    """Rows of the base that are not the same rows of the same leaf have no digest in its index."""
    store, table = CountedReads(), make_table(LARGE)
    first = save(store, 1, {"tables": table})
    renamed = Table()
    rows = table.segments["s0"][0]
    renamed.segments = {"s0": (rows[10:], 0, LARGE - 10), "s9": (rows, 0, LARGE)}
    renamed.find = lambda name: ("s0", 10 if name == "s0" else 0)
    second = save(store, 2, {"tables": renamed}, base=reader_of(first))
    assert store.count >= rows.nbytes
    assert_saved(second, renamed.values())


def test_rows_of_another_version_than_the_base_are_read():
    store, table = CountedReads(), make_table(LARGE)
    first = save(store, 1, {"tables": table})
    table.segments["s0"][0][:] += 1
    second = save(store, 2, {"tables": table})
    table.carries_from = reader_of(first)
    third = save(store, 3, {"tables": table}, base=reader_of(second))
    assert store.count >= LARGE * 4 * WIDTH
    assert loaded(third) == loaded(first) != loaded(second)


@pytest.mark.parametrize("damage", ["deleted", "flipped"])
def test_a_base_that_is_lost_meanwhile_fails_the_save(damage):
    """If the version must be full, it needs the bytes of the base."""
    store, table = MemoryStore(), make_table(LARGE)
    first = save(store, 1, {"tables": table})
    job = begin(store, 2, {"tables": table}, base=reader_of(first))
    if damage == "deleted":
        delete_version(store, 1)
    else:
        flip_bit(store, shard_of(store, "version_1"))
    error = NotFound if damage == "deleted" else DigestMismatch
    with pytest.raises(error):
        recipe.finish_save(job, is_sound=lambda base: damage == "deleted")
    assert ends_of(table)[-1] == (None, error)
    assert [str(version) for version in Run(store).listing().versions] == [
        *["version_1"] * (damage == "flipped")
    ]
    assert_saved(save(store, 2, {"tables": table}), table.values())


def test_a_version_that_refers_to_a_damaged_base_is_not_intact():
    store, table = MemoryStore(), make_table(LARGE)
    first = save(store, 1, {"tables": table})
    flip_bit(store, shard_of(store, "version_1"))
    second = save(store, 2, {"tables": table}, base=reader_of(first))
    assert not second.verify().ok
    with pytest.raises(DigestMismatch):
        second.load()


def test_without_a_sound_base_the_version_is_full():
    store, table = CountedReads(), make_table(LARGE)
    first = save(store, 1, {"tables": table})
    table.append(3, 1.0)
    finish = [lambda: None, lambda base: False]
    second = save(store, 2, {"tables": table}, base=reader_of(first), finish=finish)
    assert store.count >= LARGE * 4 * WIDTH
    assert second.bases == frozenset()
    assert second.chain == 0
    delete_version(store, 1)
    assert_saved(second, table.values())


def test_the_base_is_that_of_the_writer():
    store, table = MemoryStore(), make_table(20_000)
    bases = []
    with Run(store).writer(incremental=3) as writer:
        for step in range(1, 8):
            table.append(200, float(step))
            newest = writer.latest
            snapshot = writer.save({"tables": table}, step=step)
            bases.append(table.base is not None)
            assert table.base is None or table.base is reader_of(newest)
            assert table.newest == reader_of(snapshot).digest
    assert bases == [False, True, True, False, True, True, False]


def test_after_an_unknown_outcome_the_writer_finds_its_version():
    store, table = HookedStore(MemoryStore()), make_table(200)

    def lose(method, key):
        if method == "put_if_absent" and key.endswith(f"version_2/{MANIFEST}"):
            raise Unavailable("no answer")

    with Run(store).writer(incremental=True) as writer:
        writer.save({"tables": table}, step=1)
        first = table.newest
        table.append(3, 1.0)
        store.after = lose
        with pytest.raises(Unavailable):
            writer.save({"tables": table}, step=2)
        store.after = lambda method, key: None
        found = writer.save({"tables": table}, step=2)
        assert ends_of(table)[-2:] == [(None, Unavailable), (None, AlreadyExists)]
        assert table.newest == first
        assert_saved(found, table.values())
        table.append(3, 2.0)
        assert_saved(writer.save({"tables": table}, step=3), table.values())
        assert table.base.digest == reader_of(found).digest
