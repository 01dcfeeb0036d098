"""A Snapshot is enough where a snapshot is read, and never stands for one that replaced it."""

import inspect
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

import limpet
from limpet.errors import DigestMismatch, LimpetError, NotFound
from limpet.integrations.dcp import StorageReader
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup


def state_of(value):
    return {"w": torch.full((3,), float(value)), "n": value}


def resume_from(snapshot, run, into):
    with limpet.Checkpointer(run, into) as ckpt:
        ckpt.resume(start=snapshot)


READS = {
    "load": lambda snapshot, path, into: limpet.load(snapshot, into=into),
    "load_fresh": lambda snapshot, path, into: into.update(limpet.load(snapshot)),
    "method": lambda snapshot, path, into: snapshot.load(into=into),
    "method_fresh": lambda snapshot, path, into: into.update(snapshot.load()),
    "open": lambda snapshot, path, into: into.update(limpet.load(limpet.open(snapshot))),
    "resume": lambda snapshot, path, into: resume_from(snapshot, path / "new", into),
    "export": lambda snapshot, path, into: into.update(
        {**torch.load(limpet.export(snapshot, path / "out", to="torch").files[0][0]), "n": 1}
    ),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_snapshot_is_read_where_it_is_and_no_other_one(tmp_path, read):
    snapshot = limpet.save(tmp_path / "version_1", state_of(1))
    live = state_of(0)
    read(snapshot, tmp_path / "a", live)
    assert (live["w"].tolist(), live["n"]) == ([1.0] * 3, 1)

    shutil.rmtree(tmp_path / "version_1")
    live = state_of(0)
    with pytest.raises(NotFound, match="no snapshot at"):
        read(snapshot, tmp_path / "b", live)

    limpet.save(tmp_path / "version_1", state_of(2))
    with pytest.raises(DigestMismatch, match="not the one that was committed or opened"):
        read(snapshot, tmp_path / "c", live)
    assert (live["w"].tolist(), live["n"]) == ([0.0] * 3, 0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_a_snapshot(tmp_path):
    store = MemoryStore()
    snapshot = limpet.save(store, {"w": torch.ones(3)})
    dcp.load(live := {"w": torch.zeros(3)}, storage_reader=StorageReader(snapshot))
    assert live["w"].tolist() == [1.0] * 3
    store.delete("manifest.json")
    with pytest.raises(NotFound):
        StorageReader(snapshot).read_metadata()


def test_a_snapshot_keeps_the_store_that_it_was_opened_with():
    store = MemoryStore()  # no URL opens it
    limpet.save(store, state_of(1), step=1)
    assert limpet.load(limpet.open(store))["n"] == 1
    assert limpet.open(store).load(keys="n") == {"n": 1}
    run = MemoryStore()
    with limpet.Checkpointer(run, live := state_of(0)) as ckpt:
        ckpt.resume(start=limpet.open(store))
        ckpt.step()
    assert live["n"] == limpet.Run(run).latest().load()["n"] == 1


def test_plain_values_are_not_taken_from_memory(tmp_path):
    """The manifest has them, so that nothing else would have to be read."""
    snapshot = limpet.save(tmp_path / "version_1", {"n": 1})
    shutil.rmtree(tmp_path / "version_1")
    with pytest.raises(NotFound):
        snapshot.load()


def test_the_method_takes_the_arguments_of_the_function():
    function = inspect.signature(limpet.load).parameters
    method = inspect.signature(limpet.Snapshot.load).parameters
    assert [*map(str, method.values())][1:] == [*map(str, function.values())][1:]


def test_an_argument_is_checked_first(tmp_path):
    snapshot = limpet.save(tmp_path / "version_1", state_of(1))
    with pytest.raises(LimpetError, match="missing="):
        snapshot.load(into=state_of(0), missing="warn")
    for write in (limpet.Run, lambda url: limpet.save(url, {})):
        with pytest.raises(LimpetError, match=r"not a store.*Pass its url"):
            write(snapshot)
    with pytest.raises(LimpetError, match=r"not a store.*Pass the Snapshot itself"):
        limpet.load(limpet.Run(tmp_path).latest().version)
    with pytest.raises(LimpetError, match=r"patterns of keys \(dtypes: cast=True\), not 'cast'"):
        snapshot.load(into=state_of(0), mismatched="cast")
    with pytest.raises(LimpetError, match="or a Snapshot, not"):
        resume_from(limpet.Run(tmp_path), tmp_path / "new", state_of(0))


def test_all_ranks_load_the_snapshot_of_rank_0(tmp_path):
    first, second = (limpet.save(tmp_path / f"version_{n}", state_of(n)) for n in (1, 2))
    live = [state_of(0), state_of(0)]
    with FakeGroup(2) as group:
        group.run(lambda rank: first.load(into=live[rank]))
    assert [state["n"] for state in live] == [1, 1]

    live = [state_of(0), state_of(0)]
    with FakeGroup(2) as group:  # such as from a run whose newest version has changed meanwhile
        errors = group.outcomes(lambda rank: (first, second)[rank].load(into=live[rank]))
    assert all(isinstance(error, LimpetError) for error in errors)
    assert [state["n"] for state in live] == [0, 0]

    shutil.rmtree(tmp_path / "version_1")
    limpet.save(tmp_path / "version_1", state_of(3))
    with FakeGroup(2) as group:
        errors = group.outcomes(lambda rank: limpet.load(first, into=live[rank]))
    assert all("not the one that was" in str(error) for error in errors)
    assert [state["n"] for state in live] == [0, 0]
