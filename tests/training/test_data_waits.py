"""A notice while the training thread waits for a batch: BEHAVIOURS.md, C1."""

from collections.abc import Callable

import numpy as np
import pytest
from torch.utils.data import Dataset

import limpet
from limpet.errors import Preempted
from limpet.notices.notice import Notice
from limpet.preemption import Preemption
from limpet.run.policy import AtEnd, EverySteps
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.training import response, step_savepoint
from tests.waiting import wait_until

ITEMS = 40
WAITS_AT = 3
"""The number of the step whose batch comes late."""


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    """Record the ends of the process instead of ending pytest."""
    ends: list[int] = []
    monkeypatch.setattr(step_savepoint, "SHARE", 1e9)  # the steps of these tests are short
    monkeypatch.setattr(response, "end_process", lambda code, why: ends.append(code))
    return ends


class Items(Dataset[int]):
    """The numbers from 0. ``wait`` is called before each of them."""

    def __init__(self):
        self.wait: Callable[[], object] = lambda: None

    def __len__(self):
        return ITEMS

    def __getitem__(self, number):
        self.wait()
        return number


class Training:
    """A training that adds up the items of each batch."""

    def __init__(self, store, save):
        self.items = Items()
        self.loader = limpet.DataLoader(self.items, batch_size=4, shuffle=True, seed=1)
        self.sums = np.zeros(ITEMS // 4)
        state = {"sums": self.sums, "progress": limpet.Progress(), "loader": self.loader}
        self.ckpt = limpet.Checkpointer(store, state, save=save, preemption=Preemption(notices=[]))

    def train(self):
        with self.ckpt:
            self.ckpt.resume()
            for batch in self.loader:
                self.sums[self.ckpt.current_step] += batch.sum().item()
                self.ckpt.step()

    def wait_until_saved(self):
        """In the loader: get a notice, and return no item before a thread has saved the state."""
        if self.ckpt.current_step == WAITS_AT:
            preemption = self.ckpt._preemption
            for _ in range(100):
                self.ckpt._goodput.step_durations.add(60.0)  # so no step is awaited
            preemption.on_notice(Notice("a test", 30.0))
            wait_until(lambda: preemption._savepoint_saver.saved_step is not None)


def test_a_data_loader_that_blocks_does_not_keep_the_training(ends):
    """No gate can stop a thread that waits for a batch. The restart trains on that batch, once."""
    store = MemoryStore()
    training = Training(store, EverySteps(10**9))
    training.items.wait = training.wait_until_saved
    with pytest.raises(Preempted) as left:
        training.train()
    assert (left.value.code, left.value.step, left.value.saved_step) == (75, 4, WAITS_AT)
    (snapshot,) = Run(store).snapshots()
    assert (snapshot.step, snapshot.metadata["reason"]) == (WAITS_AT, "preemption")
    restarted, undisturbed = Training(store, AtEnd()), Training(MemoryStore(), AtEnd())
    restarted.train()
    undisturbed.train()
    assert restarted.sums.tolist() == undisturbed.sums.tolist()
    assert ends == []
