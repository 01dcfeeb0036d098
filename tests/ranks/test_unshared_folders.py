"""Ranks whose folders have the same name but are on different disks."""

import pytest
import torch

import limpet
from limpet.errors import CommitError, LimpetError
from limpet.ranks.kv import Timeouts
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.testing.crashfs import CrashFs
from tests.fakegroup import FakeGroup


@pytest.mark.parametrize("large", [False, True])
def test_no_rank_writes_to_a_folder_that_rank_0_does_not_share(large):
    """A small state has nothing to write for the other ranks, so rank 0 would see all files."""
    stores = [MemoryStore() for _ in range(3)]
    stores[2] = stores[0]

    def save(rank):
        state = {"w": torch.ones(3_000_000 if large else 3), "n": 5}
        return limpet.save(stores[rank], state, step=1)

    with FakeGroup(3, Timeouts(2.0, 4.0)) as group:
        outcomes = group.outcomes(save)
    for outcome in outcomes:
        assert isinstance(outcome, CommitError), outcome
        assert "rank 1 cannot see the files that rank 0 writes there" in str(outcome)
        assert outcome.rank == 1
    assert list(stores[1].list("")) == []
    assert not any(stat.key.endswith("manifest.json") for stat in stores[0].list(""))


def test_a_training_raises_at_its_first_save(tmp_path):
    def train(rank):
        state = {"w": torch.ones(3), "progress": limpet.Progress()}
        folder = tmp_path / ("here" if rank == 0 else "there") / "run"
        with limpet.Checkpointer(MemoryStore() if rank else folder, state) as ckpt:
            ckpt.step()
            ckpt.save()

    with FakeGroup(2, Timeouts(2.0, 4.0)) as group:
        outcomes = group.outcomes(train)
    assert all(isinstance(e, LimpetError) for e in outcomes), outcomes


def trained(steps):
    store = MemoryStore()
    for _ in range(steps):  # each start makes a step
        with limpet.Checkpointer(store, make_state(), save=limpet.EverySteps(1)) as ckpt:
            ckpt.resume()
            ckpt.step()
    return store


def make_state():
    return {"w": torch.ones(3), "progress": limpet.Progress()}


def without_newest(store):
    copy = MemoryStore()
    for stat in store.list(""):
        if not stat.key.startswith("version_2"):
            copy.put_if_absent(stat.key, store.get(stat.key, 1 << 30))
    return copy


def lacking_newest():
    store = trained(2)
    return store, without_newest(store)


FOLDERS = {
    "only rank 0 has versions": (lambda: (trained(1), MemoryStore()), "no such file"),
    "each has its own": (lambda: (trained(1), trained(1)), "another file"),
    "rank 1 lacks the newest": (lacking_newest, "no such file"),
}


@pytest.mark.parametrize(("make", "found"), FOLDERS.values(), ids=FOLDERS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_resume_raises_what_a_save_raises(make, found, ranks):
    """The newest version is not damaged: to fall back to an older one would discard it."""
    first, second = make()
    stores, before = [first, second, first], {stat.key for stat in first.list("")}

    def resume(rank):
        with limpet.Checkpointer(stores[rank], make_state()) as ckpt:
            ckpt.resume()

    with FakeGroup(ranks, Timeouts(2.0, 4.0)) as group:
        outcomes = group.outcomes(resume)
    for outcome in outcomes:
        assert isinstance(outcome, CommitError), outcome
        assert "rank 1 cannot see the files that rank 0 writes there" in str(outcome)
        assert outcome.found == f"{found}; this is a different folder, possibly on another disk"
        assert "shared file system" in outcome.todo
    assert {stat.key for stat in first.list("")} == before


def test_a_version_that_is_deleted_meanwhile_is_no_different_folder():
    """For rank 1 and, when it looks again, for rank 0."""
    store = trained(2)

    class Deleting:
        def __getattr__(self, name):
            return getattr(store, name)

        def get(self, key, limit):
            if key.startswith("version_2"):
                store.delete(key)
            return store.get(key, limit)

    def resume(rank):
        with limpet.Checkpointer(Deleting() if rank else store, make_state()) as ckpt:
            ckpt.resume()
            return ckpt.current_step

    with FakeGroup(2, Timeouts(2.0, 4.0)) as group:
        assert group.outcomes(resume) == [1, 1]


def test_a_resume_raises_if_only_another_rank_finds_versions():
    """Otherwise, the training would begin again, and its first save would raise."""
    disks = [LocalStore("/a/run", fs=CrashFs()) for _ in range(2)]
    with limpet.Checkpointer(disks[1], make_state(), save=limpet.EverySteps(1)) as ckpt:
        ckpt.step()

    def resume(rank):
        with limpet.Checkpointer(disks[rank % 2], make_state()) as ckpt:
            ckpt.resume()

    for ranks in (2, 3):
        with FakeGroup(ranks, Timeouts(2.0, 4.0)) as group:
            outcomes = group.outcomes(resume)
        for outcome in outcomes:
            assert isinstance(outcome, CommitError), outcome
            assert "rank 1 cannot see the files that rank 0 writes there" in str(outcome)
            assert "no version, as rank 0 finds it, found a run with versions" in str(outcome)
    assert list(disks[0].list("")) == []
