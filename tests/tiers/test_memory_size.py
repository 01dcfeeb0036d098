"""A state whose size changes after ``resume``, as that of an optimizer does at its first step."""

import os
import threading
from contextlib import suppress

import numpy as np
import pytest
import torch

import limpet
from limpet.errors import NoSpace
from limpet.run.policy import EverySteps
from limpet.tiers import host_tier, local_snapshots
from limpet.tiers.memory_check import MemoryLimit
from limpet.tiers.settings import LocalTier, MemoryTier
from limpet.training.checkpointer import Checkpointer
from limpet.types import MIB
from tests.ranks.trainings import TrainingJob, initial_state
from tests.tiers.test_memory_ranks import cluster, refuse_connections

__all__ = ["cluster"]


class AdamTraining:
    """A training with 1 MiB of parameters, and 2 MiB of slots from the first step on."""

    def __init__(self, host, *tiers, save=1000):
        self.model = torch.nn.Linear(512, 512, bias=False)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "progress": limpet.Progress(),
        }
        self.ckpt = Checkpointer(host.run, self.state, save=EverySteps(save), tiers=tiers)
        host.ckpts.append(self.ckpt)

    def change(self):
        self.model(torch.ones(1, 512)).sum().backward()
        self.optimizer.step()

    def train(self, steps):
        for _ in range(steps):
            self.change()
            self.ckpt.step()


def memory_tier(host, every=2):
    return MemoryTier(every=EverySteps(every), copies=1, path=host.path)


def limit_memory(monkeypatch, nbytes):
    def find_limits(_, present, **__):
        yield MemoryLimit("the test", nbytes, 0, "Make it larger: {docker}")

    monkeypatch.setattr("limpet.tiers.memory_check.find_limits", find_limits)


@pytest.mark.parametrize("is_resumed", [True, False])
def test_the_memory_is_checked_for_the_slots_before_the_first_capture(
    host, monkeypatch, is_resumed
):
    limit_memory(monkeypatch, 8 * MIB)  # 3 states of 1 MiB fit, and 3 of 3 MiB do not
    training = AdamTraining(host, memory_tier(host))
    if is_resumed:
        training.ckpt.resume()
    with pytest.raises(NoSpace, match="does not fit into the memory of this host"):
        training.train(1)
    assert host.captured == []


def test_the_memory_is_checked_for_the_slots_if_the_training_starts_before_the_first_step(
    host, monkeypatch
):
    limit_memory(monkeypatch, 8 * MIB)
    training = AdamTraining(host, memory_tier(host))
    training.ckpt.resume()
    training.ckpt.save()
    training.train(1)
    with pytest.raises(NoSpace, match="does not fit into the memory of this host"):
        training.train(1)
    assert host.captured == []


def test_what_a_rank_really_writes_is_checked_too(host, monkeypatch):
    limit_memory(monkeypatch, 8 * MIB)
    monkeypatch.setattr(host_tier, "shard_bytes", lambda *_: 1000)
    training = AdamTraining(host, memory_tier(host))
    training.train(1)
    for _ in range(2):  # also the next capture is refused
        with pytest.raises(NoSpace, match="does not fit into the memory of this host"):
            training.train(2)
        assert used_bytes(host.path) == 0


def test_a_state_that_fits_with_its_slots_is_captured(host, monkeypatch):
    limit_memory(monkeypatch, 10 * MIB)
    training = AdamTraining(host, memory_tier(host))
    training.ckpt.resume()
    training.train(2)
    training.ckpt._tiers.memory.wait()
    assert host.captured == ["version_2"]


def test_a_local_disk_is_checked_for_the_slots(host, monkeypatch):
    class Small:
        f_bavail, f_frsize = 6, MIB  # 4 versions of 1 MiB fit, and 4 of 3 MiB do not

    training = AdamTraining(host, LocalTier(host.path), save=2)
    monkeypatch.setattr(local_snapshots.os, "statvfs", lambda _: Small)
    training.ckpt.resume()
    with pytest.raises(NoSpace, match="does not fit on its disk"):
        training.train(1)


def used_bytes(*folders):
    """Return the allocated bytes of all files, also of spare and of unfinished ones."""
    nbytes = 0
    for path, _, names in (entry for folder in folders for entry in os.walk(folder)):
        for name in names:
            with suppress(FileNotFoundError):  # another rank has deleted it
                nbytes += os.stat(os.path.join(path, name)).st_blocks * 512
    return nbytes


def wait_until_allocated():
    for thread in threading.enumerate():
        if thread.name == "limpet-buffers":
            thread.join()


STATE_BYTES = 3 * MIB
MOST_BYTES = 3 * STATE_BYTES + MIB // 2
"""The need of the tier, and what indexes and manifests need."""


def test_after_a_resume_three_states_are_in_memory_at_most(host):
    training = AdamTraining(host, memory_tier(host, every=3))
    training.ckpt.resume()
    for _ in range(9):
        training.train(1)
        training.ckpt._tiers.memory.wait()
    training.ckpt._saver.writer_lock.release()
    training.ckpt._tiers.close(is_complete=False)
    assert host.captured == ["version_6", "version_9"]
    assert used_bytes(host.path) < 2 * STATE_BYTES + MIB

    training = AdamTraining(host, memory_tier(host, every=3))
    memory = training.ckpt._tiers.memory
    training.ckpt.resume()
    used, spares = [], []
    for _ in range(12):
        training.train(1)
        memory.wait()
        used.append(used_bytes(host.path))
        wait_until_allocated()
        spares.append(round(memory.store.spare_bytes / STATE_BYTES))
        used.append(used_bytes(host.path))
    assert max(used) < MOST_BYTES
    # a spare file for each capture, and none at a capture that replaces an older training's state
    assert spares == [1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1]


def train_with_slots(cluster, last_step, slots=50_000):
    """Resume and train 2 ranks on 2 hosts. Each has ``slots`` numbers from its first step on.

    Returns the bytes in memory after each step.
    """
    folders = [cluster.folder(host) for host in "ab"]
    used = []

    def work(trainer):
        tier = MemoryTier(every=EverySteps(5), path=folders[trainer.rank])
        state = {**initial_state(trainer.rank, 2), "slots": {}}
        with trainer.make_checkpointer(state=state, save=EverySteps(1000), tiers=[tier]) as ckpt:
            ckpt.resume()
            box = (slots * trainer.rank,), (2 * slots,)
            state["slots"]["moment"] = limpet.Boxed(np.ones(slots), *box)
            while ckpt.current_step < last_step:
                trainer.train_steps(ckpt.current_step + 1)
                ckpt._tiers.memory.wait()
                used.append(used_bytes(*folders))

    with TrainingJob(2, cluster.run) as job:
        job.run(work)
    return used


@pytest.mark.slow
def test_with_copies_three_states_are_in_memory_at_most(cluster):
    used = train_with_slots(cluster, 33, slots=200_000)
    assert max(used) < 3 * 4 * 1_600_000 + MIB  # 2 states of 2 ranks, each on 2 hosts, and one more
    assert max(used) > 3 * 4 * 1_600_000


@pytest.mark.slow
def test_peers_accept_copies_with_slots_that_did_not_exist_at_the_resume(cluster, monkeypatch):
    monkeypatch.setattr(host_tier, "MIB", 1024)  # 64 KiB more than the state are accepted
    train_with_slots(cluster, 12)
    assert cluster.events_of("copy_failed") == []
    for host in "ab":
        assert len(cluster.files(host, ".safetensors")) == 4  # 2 states of 2 ranks


@pytest.mark.slow
def test_peers_accept_copies_of_values_that_exist_on_one_rank_only(cluster, monkeypatch):
    """As with pipeline parallelism. Values that all ranks have are divided among them."""
    monkeypatch.setattr(host_tier, "MIB", 1024)
    folders = [cluster.folder(host) for host in "ab"]

    def work(trainer):
        tier = MemoryTier(every=EverySteps(5), path=folders[trainer.rank])
        stages = {f"stage{trainer.rank}": np.ones(50_000)}
        state = {**initial_state(trainer.rank, 2), "stages": stages}
        with trainer.make_checkpointer(state=state, save=EverySteps(1000), tiers=[tier]) as ckpt:
            while ckpt.current_step < 7:
                trainer.train_steps(ckpt.current_step + 1)
                ckpt._tiers.memory.wait()

    with TrainingJob(2, cluster.run) as job:
        job.run(work)
    assert cluster.events_of("copy_failed") == []
    assert len(cluster.files("a", ".safetensors")) == 2


@pytest.mark.slow
def test_copies_that_fail_are_reported_to_the_user_once(cluster, monkeypatch):
    refuse_connections(monkeypatch)
    train_with_slots(cluster, 22)
    assert len(cluster.events_of("copy_failed")) == 8  # 4 captures of 2 ranks
    first, second = sorted(fields["error"] for fields in cluster.events_of("uncopied"))
    assert "the copy of version_5 to rank 0 failed (Cannot connect to the peer" in first
    assert "the copy of version_5 to rank 1 failed" in second
