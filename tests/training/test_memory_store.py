"""A training whose run is in memory: its files take turns, and every version is intact."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import limpet
from limpet.storage.local.tmpfs import TmpfsStore


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp(prefix="limpet-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def test_a_training_in_memory_uses_three_files(folder):
    state, inodes = {"w": torch.zeros(1 << 20)}, set()
    options = {"save": limpet.EverySteps(1), "keep": limpet.KeepLast(2)}
    store = TmpfsStore(folder, spare_files=3)
    with limpet.Checkpointer(store, {"model": state}, **options) as checkpointer:
        for _ in range(8):
            state["w"] += 1
            checkpointer.step()
            state["w"] += 0  # training continues
            checkpointer.wait()
            inodes |= {p.stat().st_ino for p in folder.rglob("shard-*.safetensors")}
    assert len(inodes) == 3
    snapshots = limpet.Run(folder).snapshots()
    assert [snapshot.step for snapshot in snapshots] == [7, 8]
    assert all(snapshot.verify().ok for snapshot in snapshots)
    restored = {"w": torch.zeros(1 << 20)}
    with limpet.Checkpointer(folder, {"model": restored}, **options) as checkpointer:
        assert checkpointer.resume().step == 8
    assert torch.equal(restored["w"], torch.full((1 << 20,), 8.0))
