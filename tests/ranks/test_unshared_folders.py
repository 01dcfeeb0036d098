"""Ranks whose folders have the same name but are on different disks."""

import pytest
import torch

import limpet
from limpet.errors import CommitError, LimpetError
from limpet.ranks.kv import Timeouts
from limpet.storage.memory import MemoryStore
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
