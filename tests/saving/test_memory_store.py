"""Saves into a store in memory: they stage into the file itself."""

from pathlib import Path

import numpy as np
import pytest
import torch

import limpet
from limpet.buffers import BufferPool
from limpet.errors import AlreadyExists, NoSpace, RankFailed
from limpet.saving import save as saving
from limpet.saving.commit import VersionMetadata
from limpet.snapshot.location import Location
from limpet.storage.local.tmpfs import TmpfsStore
from tests.fakegroup import FakeGroup


@pytest.fixture
def folder(memory):
    return Path(memory)


def make_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(3 << 20, generator=generator),
        "strided": torch.randn(300, 200, generator=generator).t(),
        "small": {f"p{i}": torch.randn(3, generator=generator) for i in range(30)},
        "array": np.arange(7, dtype=np.int16),
        "n": seed,
    }


class CountingPool(BufferPool):
    """Fails the test if a save takes a buffer for its state."""

    def acquire(self, *args, **kwargs):
        raise AssertionError("a save into memory took a buffer")


def begin(store, version, state, **options):
    options = {"pool": CountingPool(1 << 30), "stage_now": True, **options}
    location = Location(store, f"version_{version}")
    return saving.begin_save(location, state, VersionMetadata(step=version), **options)


def assert_equal(state, loaded):
    for key in ("large", "strided"):
        assert torch.equal(loaded[key], state[key])
    assert all(torch.equal(loaded["small"][k], v) for k, v in state["small"].items())
    assert np.array_equal(loaded["array"], state["array"])
    assert loaded["n"] == state["n"]


def test_the_state_is_staged_into_the_file(folder):
    store, state = TmpfsStore(folder), make_state()
    job = begin(store, 1, state)
    expected = make_state()
    state["large"].zero_()  # training continues
    (partial,) = list(store.partials(""))
    assert partial.length == job.image.length
    snapshot = saving.finish_save(job)
    assert list(store.partials("")) == []
    assert snapshot.verify().ok
    assert_equal(expected, limpet.load(f"{folder}/version_1"))


def test_the_bytes_and_digests_are_those_of_every_store(folder, tmp_path):
    state = make_state()
    saving.finish_save(begin(TmpfsStore(folder), 1, state))
    limpet.save(tmp_path / "version_1", state, step=1)
    names = [sorted(p.name.partition(".")[0] for p in (f / "version_1").iterdir())
             for f in (folder, tmp_path)]  # fmt: skip
    assert names[0] == names[1]
    in_memory, on_disk = (
        next((f / "version_1").glob("shard-*.safetensors")).read_bytes() for f in (folder, tmp_path)
    )
    assert in_memory == on_disk


def test_generations_take_turns_and_each_is_whole(folder):
    store, inodes = TmpfsStore(folder), set()
    for version in range(1, 8):
        saving.finish_save(begin(store, version, make_state(version)))
        (shard,) = (folder / f"version_{version}").glob("shard-*.safetensors")
        inodes.add(shard.stat().st_ino)
        if version > 2:
            old = f"version_{version - 2}"
            stats = list(store.list(old))
            store.delete(f"{old}/manifest.json")
            for stat in stats:
                store.delete(stat.key)
        for live in range(max(1, version - 1), version + 1):
            assert limpet.open(folder / f"version_{live}").verify().ok
            assert_equal(make_state(live), limpet.load(folder / f"version_{live}"))
    assert len(inodes) == 3
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["version_6", "version_7"]


def test_a_failed_save_leaves_nothing(folder):
    store = TmpfsStore(folder)
    saving.finish_save(begin(store, 1, make_state()))
    with pytest.raises(AlreadyExists):
        begin(store, 1, make_state())
    job = begin(store, 2, make_state())
    with pytest.raises(RuntimeError, match="no"), job:
        raise RuntimeError("no")
    assert list(store.partials("")) == []

    def fail(*_):
        raise NoSpace("No room")

    with pytest.raises(NoSpace, match="No room"):
        saving.finish_save(begin(store, 3, make_state()), fail)
    assert list(store.partials("")) == []


def test_a_leaf_that_cannot_be_copied_leaves_nothing(folder, monkeypatch):
    store = TmpfsStore(folder)

    def fail(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("limpet.saving.image._begin_copy", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        begin(store, 1, make_state())
    assert list(folder.iterdir()) == []


def test_deferred_pieces_are_staged_into_the_file(folder):
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store = TmpfsStore(folder)
    job = begin(store, 1, {"model": model, "optimizer": optimizer}, overlap=True)
    assert not job.deferred.done.is_set()
    assert saving.finish_save(job).verify().ok
    loaded = limpet.load(f"{folder}/version_1")
    assert torch.equal(loaded["model"]["weight"], model.weight)


def test_ranks_stage_into_their_own_files(folder):
    stores = [TmpfsStore(folder) for _ in range(3)]
    with FakeGroup(3) as ranks:

        def work(rank, version):
            state = {"mine": limpet.PerRank(torch.full((1000,), rank)), "n": 1}
            job = begin(stores[rank], version, state, group=ranks.groups[rank])
            return saving.finish_save(job)

        ranks.run(lambda rank: work(rank, 1))
        stores[1].put_mapped = refuse
        outcomes = ranks.outcomes(lambda rank: work(rank, 2))
    assert len(list(folder.glob("version_1/shard-*.safetensors"))) == 3
    assert limpet.open(folder / "version_1").verify().ok
    assert [type(outcome) for outcome in outcomes] == [RankFailed, NoSpace, RankFailed]
    assert "No room" in str(outcomes[0].__cause__ or outcomes[0])
    assert not (folder / "version_2/manifest.json").exists()  # shards without it are orphans


def refuse(*_):
    raise NoSpace("No room")
