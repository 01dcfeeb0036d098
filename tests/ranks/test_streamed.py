"""Members that are streamed, on several ranks: each has some rows of each segment."""

from contextlib import closing
from threading import Thread

import numpy as np
import pytest
import torch

import limpet
from limpet.buffers import BufferPool
from limpet.errors import LimpetError, MemberFailed, RankFailed, SkippedVersion, StoreError
from limpet.loading.snapshot import Snapshot, reader_of
from limpet.run.run import Run
from limpet.saving import partition
from limpet.saving import save as recipe
from limpet.saving.commit import VersionMetadata
from limpet.snapshot.location import Location
from limpet.state.arrays import LocalBoxes
from limpet.storage.memory import MemoryStore
from limpet.types import Box
from tests.fakegroup import FakeGroup
from tests.ranks.test_member import HERE, JOINING
from tests.states import unused_url
from tests.streamed_members import CountedReads, HeldRows, Table, make_table
from tests.trainings import delete_version, flip_bit

SIZES = [1, 2, 3]


def make_tables(size, *counts):
    return [make_table(*counts, rank=rank, size=size) for rank in range(size)]


def whole(tables):
    """Return the rows of all ranks, by segment."""
    names = tables[0].segments
    return {n: np.concatenate([t.segments[n][0] for t in tables]).tobytes() for n in names}


def loaded(snapshot):
    segments = snapshot.load()["tables"]["words"]["segments"]
    return {name: np.asarray(segment["values"]).tobytes() for name, segment in segments.items()}


def state_of(table):
    return {"tables": table, "w": torch.ones(5)}


@pytest.fixture(params=[None, 160 << 10], ids=["", "split"])
def split(request, monkeypatch):
    """Large boxes are split into parts."""
    if request.param:
        monkeypatch.setattr(partition, "MAX_BOX_BYTES", request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("split")
def test_each_rank_writes_its_boxes(size):
    url, tables = unused_url(), make_tables(size, 20_000, 1, 7)
    with FakeGroup(size) as group:
        group.run(lambda rank: limpet.save(url, state_of(tables[rank])))
    snapshot = limpet.open(url)
    assert loaded(snapshot) == whole(tables)
    assert snapshot.verify().ok
    assert snapshot.metadata["tables"] == ["tables/words"]
    digest = reader_of(snapshot).digest
    assert [table.calls for table in tables] == [["begin", (digest, None)]] * size
    # each source is read once, by the rank that has it: nothing compares the elements
    assert [t.bytes_read for t in tables] == [
        sum(rows.nbytes for rows, _, _ in t.segments.values()) for t in tables
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("others", SIZES)
def test_another_number_of_ranks_restores_them(size, others):
    url, tables = unused_url(), make_tables(size, 100, 7)
    with FakeGroup(size) as group:
        group.run(lambda rank: limpet.save(url, state_of(tables[rank])))
    restored = make_tables(others)
    with FakeGroup(others) as group:
        group.run(lambda rank: limpet.load(url, into=state_of(restored[rank])))
    assert whole(restored) == whole(tables)


def test_a_rank_may_have_several_boxes():
    url, tables = unused_url(), make_tables(2, 9)
    rows = np.arange(36, dtype=np.float32).reshape(9, 4)
    spans = [[(0, 2), (5, 9)], [(2, 5)]]

    def tree_of(rank):
        parts = [
            (Box((a, 0), (b - a, 4)), HeldRows(rows[a:b], tables[rank])) for a, b in spans[rank]
        ]
        return {"values": LocalBoxes((9, 4), parts, "float32")}

    for rank, table in enumerate(tables):
        table.state_dict = lambda rank=rank: tree_of(rank)
    with FakeGroup(2) as group:
        group.run(lambda rank: limpet.save(url, state_of(tables[rank])))
    assert np.asarray(limpet.load(url)["tables"]["values"]).tobytes() == rows.tobytes()


@pytest.mark.parametrize("size", [1, 2])
def test_a_source_that_is_not_in_boxes_is_compared_by_no_rank(size):
    """All ranks declare to have the same rows, and one of them reads these."""
    url, tables = unused_url(), make_tables(size, 1)
    rows = np.arange(60_000, dtype=np.float32).reshape(-1, 4)
    for table in tables:
        table.state_dict = lambda table=table: {"values": HeldRows(rows, table)}
    with FakeGroup(size) as group:
        group.run(lambda rank: limpet.save(url, state_of(tables[rank])))
    assert sum(table.bytes_read for table in tables) == rows.nbytes
    assert np.asarray(limpet.load(url)["tables"]["values"]).tobytes() == rows.tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_parts_of_held_sources_are_not_staged(size, monkeypatch):
    monkeypatch.setattr(partition, "MAX_BOX_BYTES", 5 << 20)
    store, tables = MemoryStore(), make_tables(size, 1_000_000 * size)

    def save(rank):
        job = recipe.begin_save(
            Location(store, "version_1"),
            state_of(tables[rank]),
            VersionMetadata(step=1),
            BufferPool(1 << 40),
            group=group.groups[rank],
            stage_now=True,
        )
        read = tables[rank].bytes_read
        recipe.finish_save(job)
        return read

    with FakeGroup(size) as group:
        assert max(group.run(save)) <= 2 * (4 << 20)
    assert all(table.bytes_read >= 16_000_000 for table in tables)
    assert loaded(Run(store).snapshots()[0]) == whole(tables)


def test_boxes_of_another_number_of_ranks_are_read():
    """The first half of each segment is a box of the base. In its shard, the first half of the next
    segment follows, and not the second half of the same one."""
    rows = (8 << 20) // 16
    store, tables = CountedReads(), make_tables(2, rows, rows)
    save_versions(store, tables, 1)
    first = reader_of(Run(store).snapshots()[0])
    table = make_table(rows, rows)
    job = recipe.begin_save(
        Location(store, "version_2"),
        state_of(table),
        VersionMetadata(step=2),
        BufferPool(1 << 40),
        stage_now=False,
        base=first,
    )
    second = Snapshot(recipe.finish_save(job))
    assert store.count > 0
    assert second.verify().ok
    assert loaded(second) == whole(tables)


def save_versions(store, tables, steps, *, act=lambda step: None, **options):
    size = len(tables)
    found = []

    def write(rank):
        with Run(store).writer(incremental=True, group=group.groups[rank], **options) as writer:
            for step in range(1, steps + 1):
                if rank == 0:
                    act(step)
                if step > 1:
                    tables[rank].append(6000 * size, float(step))
                snapshot = writer.save(state_of(tables[rank]), step=step)
                found.append((rank, snapshot))

    with FakeGroup(size) as group:
        group.run(write)
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("split")
def test_carried_rows_are_not_read_by_any_rank(size):
    store, tables = CountedReads(), make_tables(size, 60_000)
    save_versions(store, tables, 3)
    assert store.count == 0
    versions = Run(store).snapshots()
    assert [version.chain for version in versions] == [0, 1, 2]
    assert versions[2].bases == {versions[0].version, versions[1].version}
    assert all(version.verify().ok for version in versions)
    assert loaded(versions[2]) == whole(tables)
    assert versions[2].nbytes < 6000 * size * 16 + 20_000


def test_all_ranks_get_the_base_of_rank_0():
    store, tables = MemoryStore(), make_tables(3, 60_000)
    bases = []
    for table in tables:
        begin = table.begin_save

        def begin_save(key, base, group, begin=begin):
            bases.append((group.rank, None if base is None else base.digest))
            begin(key, base, group)

        table.begin_save = begin_save
    save_versions(store, tables, 2)
    first = reader_of(Run(store).snapshots()[0])
    assert sorted(bases, key=str) == sorted(
        [(rank, digest) for rank in range(3) for digest in (None, first.digest)], key=str
    )


def test_a_lost_base_fails_the_save_on_all_ranks():
    store, tables = MemoryStore(), make_tables(2, 60_000)

    def act(step):
        if step == 2:
            delete_version(store, 1)

    with pytest.raises(LimpetError):
        save_versions(store, tables, 2, act=act)
    for table in tables:
        assert [type(call) is tuple and call[0] is None for call in table.calls[2:]] == [
            False,
            True,
        ]


@pytest.mark.parametrize("where", ["begin", "read", "flatten"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_rank_ends_the_save_on_all(where, failing):
    url, tables = unused_url(), make_tables(2, 60_000)
    states = [state_of(table) for table in tables]
    if where == "begin":
        tables[failing].fail["begin"] = ValueError("no memory")
    elif where == "read":
        tables[failing].before_read = lambda: (_ for _ in ()).throw(StoreError("gone"))
    else:
        states[failing]["f"] = lambda: 1
    with FakeGroup(2) as group:
        errors = group.outcomes(lambda rank: limpet.save(url, states[rank]))
    assert all(isinstance(error, LimpetError) for error in errors)
    for table in tables:
        ends = [call for call in table.calls if type(call) is tuple]
        assert [digest for digest, _ in ends] == [None] * table.calls.count("begin")
        assert len(ends) == 1
    if where == "read":
        assert isinstance(errors[1 - failing], RankFailed)


def test_a_rank_without_the_member_is_named_at_once():
    url, tables = unused_url(), make_tables(2, 10)
    with FakeGroup(2) as group:
        errors = group.outcomes(
            lambda rank: limpet.save(url, {"w": torch.ones(2)} if rank else state_of(tables[0]))
        )
    assert all(isinstance(error, RankFailed) for error in errors)
    assert any("with tables" in str(error) for error in errors)
    assert tables[0].calls in ([], ["begin", (None, RankFailed)])


def test_the_restore_of_one_rank_makes_all_fall_back():
    store, tables = MemoryStore(), make_tables(2, 60_000)
    save_versions(store, tables, 2)
    (shard,) = [
        s.key for s in store.list("version_2") if "shard-00001" in s.key and "safet" in s.key
    ]
    flip_bit(store, shard)
    restored = make_tables(2)

    def resume(rank):
        with limpet.Checkpointer(
            store, state_of(restored[rank]), save=limpet.Never(), group=group.groups[rank]
        ) as ckpt:
            return ckpt.resume().step

    with FakeGroup(2) as group, pytest.warns(SkippedVersion):
        assert group.run(resume) == [1, 1]
    expected = {"s0": whole(tables)["s0"]}
    assert whole(restored) == expected


def test_a_failed_restore_of_one_rank_is_an_error_of_all():
    url, tables = unused_url(), make_tables(2, 10)
    with FakeGroup(2) as group:
        group.run(lambda rank: limpet.save(url, state_of(tables[rank])))
    restored = make_tables(2)
    restored[1].fail["restore"] = ValueError("a mistake")
    with FakeGroup(2) as group:
        errors = group.outcomes(lambda rank: limpet.load(url, into=state_of(restored[rank])))
    assert isinstance(errors[0], RankFailed)
    assert isinstance(errors[1], MemberFailed)
    assert all(error.is_state_invalid for error in errors)


def test_differences_of_one_rank_are_those_of_all():
    url, tables = unused_url(), make_tables(2, 10)
    with FakeGroup(2) as group:
        group.run(lambda rank: limpet.save(url, state_of(tables[rank])))
        restored = [Table(rank, 2, dim=8 if rank else 4) for rank in range(2)]
        errors = group.outcomes(lambda rank: limpet.load(url, into=state_of(restored[rank])))
    assert all("tables/words/dim 4, live 8" in str(error) for error in errors)
    assert not any("restore" in table.calls for table in restored)


# -- members that make no steps --------------------------------------------------------------------


def run_with_members(run, tables, train, name, *, incremental=True):
    """Train as rank 0, whose table has no rows, beside a ``Member`` for each other table."""
    found = [None] * len(tables)
    with limpet.Group.join(HERE, 0, len(tables), members=len(tables) - 1, name=name) as group:

        def serve(rank):
            try:
                with JOINING:
                    joined = limpet.Group.join(
                        group.address, rank, len(tables), members=len(tables) - 1, name=name
                    )
                with joined:
                    limpet.Member(run, {"tables": tables[rank]}, group=joined).run()
            except BaseException as e:
                found[rank] = e

        threads = [Thread(target=serve, args=(n,), daemon=True) for n in range(1, len(tables))]
        for thread in threads:
            thread.start()
        with limpet.Checkpointer(
            run,
            state_of(tables[0]),
            save=limpet.EverySteps(1),
            group=group,
            incremental=incremental,
        ) as ckpt:
            train(ckpt)
    for thread in threads:
        thread.join(30)
    assert found == [None] * len(tables)


def server_tables(count, *counts):
    """Return the table of a driver, which has no rows, and those of servers."""
    driver = Table()
    tables = make_tables(count, *counts)
    driver.append = lambda rows, value: driver.segments.update(
        {f"s{len(driver.segments)}": (np.zeros((0, 4), np.float32), 0, rows)}
    )
    for rows in counts:
        driver.append(rows, 0.0)
    return [driver, *tables]


def test_a_member_of_the_group_has_a_streamed_member(tmp_path):
    tables = server_tables(2, 40_000)

    def train(ckpt):
        for step in range(1, 4):
            ckpt.wait()
            for table in tables:
                table.append(12_000, float(step))
            ckpt.step()

    run_with_members(tmp_path, tables, train, "train")
    versions = Run(tmp_path).snapshots()
    assert [version.step for version in versions] == [1, 2, 3]
    assert [version.chain for version in versions] == [0, 1, 2]
    assert loaded(versions[-1]) == whole(tables[1:])
    assert all(version.verify().ok for version in versions)
    assert [version.metadata["tables"] for version in versions] == [["tables/words"]] * 3
    digests = [(reader_of(version).digest, None) for version in versions]
    assert all([c for c in t.calls if type(c) is tuple] == digests for t in tables)
    restored = server_tables(3)
    restored[0].restore = lambda snapshot, key: None
    run_with_members(tmp_path, restored, lambda ckpt: ckpt.resume(check=True), "resume")
    assert whole(restored[1:]) == whole(tables[1:])


def test_without_a_base_of_rank_0_no_member_has_one(tmp_path):
    """A ``Member`` does not know whether the training saves incrementally."""
    tables = server_tables(2, 40_000)

    def train(ckpt):
        for _ in range(3):
            ckpt.wait()
            ckpt.step()

    run_with_members(tmp_path, tables, train, "full", incremental=False)
    assert [table.base for table in tables] == [None] * 3
    assert [version.chain for version in Run(tmp_path).snapshots()] == [0, 0, 0]


def test_a_member_that_fails_ends_the_save_of_all(tmp_path):
    tables = server_tables(2, 40_000)
    reads = []

    def before_read():
        if len(reads) == 0:
            reads.append(1)
            raise StoreError("the memory is gone")

    tables[2].before_read = before_read

    def train(ckpt):
        ckpt.step()
        with pytest.raises(LimpetError, match="the memory is gone"):
            ckpt.wait()
        ckpt.step()

    run_with_members(tmp_path, tables, train, "failing")
    (version,) = Run(tmp_path).snapshots()
    assert version.step == 2
    assert loaded(version) == whole(tables[1:])
    for table in tables:
        ends = [digest for digest, _ in (c for c in table.calls if type(c) is tuple)]
        assert ends == [None, reader_of(version).digest]


def gather_in(table, found):
    """Let a table gather its number of rows when a save begins, as servers do."""
    begin = table.begin_save

    def begin_save(key, base, group):
        with closing(group.collective("the sizes of the tables")) as collective, collective:
            begin(key, base, group)  # here, so that the other ranks hear of an error
            own = sum(len(rows) for rows, _, _ in table.segments.values())
            sizes = collective.gather(own, int)
            found.append(collective.broadcast(None if sizes is None else sum(sizes), int))

    table.begin_save = begin_save


def test_a_member_may_use_collectives_when_a_save_begins(tmp_path):
    tables, found = server_tables(2, 40_000), []
    for table in tables:
        gather_in(table, found)

    def train(ckpt):
        for _ in range(2):
            ckpt.wait()
            ckpt.step()

    run_with_members(tmp_path, tables, train, "collectives")
    assert found == [40_000] * 6
    assert [version.step for version in Run(tmp_path).snapshots()] == [1, 2]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_before_a_collective_of_the_members(failing):
    url, tables, found = unused_url(), make_tables(2, 10), []
    for table in tables:
        gather_in(table, found)
    tables[failing].fail["begin"] = ValueError("no memory")
    with FakeGroup(2) as group:
        errors = group.outcomes(lambda rank: limpet.save(url, state_of(tables[rank])))
    assert [type(error) for error in errors] == [
        MemberFailed if rank == failing else RankFailed for rank in range(2)
    ]
    assert all("no memory" in str(error) for error in errors)
    assert [table.calls[0] for table in tables] == ["begin", "begin"]
    assert [table.calls[1][0] for table in tables] == [None, None]
