"""A state whose size changes after ``resume``, as that of an optimizer does at its first step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import NoSpace, Unavailable
from holdfast.run.policy import EverySteps
from holdfast.tiers import host_tier, local_versions
from holdfast.tiers.local_tier import LocalTier
from holdfast.tiers.memory_check import MemoryLimit
from holdfast.tiers.memory_tier import MemoryTier
from holdfast.tiers.tiers import Tier
from holdfast.training.checkpointer import Checkpointer
from holdfast.types import MIB
from tests.ranks.trainings import TrainingJob, TrainingRank, initial_state
from tests.tiers.hosts import Host
from tests.tiers.test_memory_ranks import Cluster, cluster

__all__ = ["cluster"]


class AdamTraining:
    """A training with 1 MiB of parameters, and 2 MiB of slots from the first step on."""

    def __init__(self, host: Host, *tiers: Tier, save: int = 1000) -> None:
        self.model = torch.nn.Linear(512, 512, bias=False)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "progress": holdfast.Progress(),
        }
        self.ckpt = Checkpointer(host.run, self.state, save=EverySteps(save), tiers=tiers)
        host.ckpts.append(self.ckpt)

    def change(self) -> None:
        self.model(torch.ones(1, 512)).sum().backward()
        self.optimizer.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.change()
            self.ckpt.step()


def memory_tier(host: Host, every: int = 2) -> MemoryTier:
    return MemoryTier(every=EverySteps(every), copies=1, path=host.path)


def limit_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    def find_limits(_: Any, present: int, **__: Any) -> Iterator[MemoryLimit]:
        yield MemoryLimit("the test", nbytes, 0, "Make it larger: {docker}")

    monkeypatch.setattr("holdfast.tiers.memory_check.find_limits", find_limits)


@pytest.mark.parametrize("is_resumed", [True, False])
def test_the_memory_is_checked_for_the_slots_before_the_first_capture(
    host: Host, monkeypatch: pytest.MonkeyPatch, is_resumed: bool
) -> None:
    limit_memory(monkeypatch, 8 * MIB)  # 3 states of 1 MiB fit, and 3 of 3 MiB do not
    training = AdamTraining(host, memory_tier(host))
    if is_resumed:
        training.ckpt.resume()
    with pytest.raises(NoSpace, match="does not fit into the memory of this host"):
        training.train(1)
    assert host.captured == []


def test_the_memory_is_checked_for_the_slots_if_the_training_starts_before_the_first_step(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, 8 * MIB)
    training = AdamTraining(host, memory_tier(host))
    training.ckpt.resume()
    training.ckpt.save()
    training.train(1)
    with pytest.raises(NoSpace, match="does not fit into the memory of this host"):
        training.train(1)
    assert host.captured == []


def test_a_state_that_fits_with_its_slots_is_captured(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, 10 * MIB)
    training = AdamTraining(host, memory_tier(host))
    training.ckpt.resume()
    training.train(2)
    training.ckpt._tiers.memory.wait()
    assert host.captured == ["version_2"]


def test_a_local_disk_is_checked_for_the_slots(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        f_bavail, f_frsize = 6, MIB  # 4 versions of 1 MiB fit, and 4 of 3 MiB do not

    training = AdamTraining(host, LocalTier(host.path), save=2)
    monkeypatch.setattr(local_versions.os, "statvfs", lambda _: Small)
    training.ckpt.resume()
    with pytest.raises(NoSpace, match="does not fit on its disk"):
        training.train(1)


# -- several ranks ---------------------------------------------------------------------------------


def train_with_slots(cluster: Cluster, last_step: int) -> None:
    """Train 2 ranks on 2 hosts. Each has 400 KiB of slots from its first step on."""
    folders = [cluster.folder(host) for host in "ab"]

    def work(trainer: TrainingRank) -> None:
        tier = MemoryTier(every=EverySteps(5), path=folders[trainer.rank])
        state = {**initial_state(trainer.rank, 2), "slots": {}}
        with trainer.make_checkpointer(state=state, save=EverySteps(1000), tiers=[tier]) as ckpt:
            ckpt.resume()
            box = (50_000 * trainer.rank,), (100_000,)
            state["slots"]["moment"] = holdfast.Boxed(np.ones(50_000), *box)
            while ckpt.current_step < last_step:
                trainer.train_steps(ckpt.current_step + 1)
                ckpt._tiers.memory.wait()

    with TrainingJob(2, cluster.run) as job:
        job.run(work)


@pytest.mark.slow
def test_peers_accept_copies_with_slots_that_did_not_exist_at_the_resume(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tier, "MIB", 1024)  # 64 KiB more than the state are accepted
    train_with_slots(cluster, 12)
    assert cluster.events_of("copy_failed") == []
    for host in "ab":
        assert len(cluster.files(host, ".safetensors")) == 4  # 2 states of 2 ranks


@pytest.mark.slow
def test_copies_that_fail_are_reported_to_the_user_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        def __init__(self, *_: Any) -> None:
            raise Unavailable("Cannot connect to the peer")

    monkeypatch.setattr(host_tier, "PeerConnection", Refusing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_with_slots(cluster, 22)
    messages = [str(w.message) for w in caught if "fewer copies on other" in str(w.message)]
    assert len(cluster.events_of("copy_failed")) == 8  # 4 captures of 2 ranks
    first, second = sorted(messages)  # one warning of each rank
    assert "the copy of version_5 to rank 0 failed (Cannot connect to the peer" in first
    assert "the copy of version_5 to rank 1 failed" in second
