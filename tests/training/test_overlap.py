"""Deferred staging: a version has the state of its step, whatever the next step changes."""

import threading

import pytest
import torch

import limpet
from limpet.errors import CommitError, NoSpace
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from limpet.saving import staging
from limpet.saving.staging import DeferredStaging
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from limpet.types import BLOCK_SIZE
from tests.waiting import wait_until


def network(outputs=4000):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, outputs)
    )
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05),
        "scale": torch.ones(3),
        "progress": limpet.Progress(),
        "rng": limpet.RNG(),
    }


def forward_backward(state):
    state["scale"].mul_(1.5)
    loss = state["model"](torch.randn(8, 64)).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()


def train_step(state):
    forward_backward(state)
    state["optimizer"].step()


def saved_values(store, step):
    """Return the values of a version in comparable form."""
    loaded = limpet.load(store.at(f"version_{step}"))
    return {k: v for k, v in loaded.items() if k != "rng"} | {"rng": str(loaded["rng"])}


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.fixture
def gate(monkeypatch):
    """Return an event. While it is cleared, deferred staging waits."""
    gate, stage = threading.Event(), DeferredStaging.stage

    def wait_and_stage(self, workers):
        assert gate.wait(20)
        return stage(self, workers)

    monkeypatch.setattr(DeferredStaging, "stage", wait_and_stage)
    gate.set()
    yield gate
    gate.set()


def test_versions_are_equal_with_and_without_overlap():
    stores = [MemoryStore(), MemoryStore()]
    for store, overlaps in zip(stores, (False, True), strict=True):
        state = network()
        with Checkpointer(store, state, save=EverySteps(1), overlap=overlaps) as ckpt:
            for _ in range(6):
                train_step(state)
                ckpt.step()
    for step in range(1, 7):
        assert same(saved_values(stores[0], step), saved_values(stores[1], step))


def test_only_the_optimizer_waits_for_the_copies(gate):
    store, state = MemoryStore(), network()
    with Checkpointer(store, state, save=EverySteps(2), overlap=True) as ckpt:
        for _ in range(2):
            train_step(state)
            gate.clear()
            ckpt.step()
        before = {k: v.clone() for k, v in state["model"].state_dict().items()}
        scale = state["scale"].clone()
        forward_backward(state)  # changes the buffers of BatchNorm and the scale meanwhile
        assert not torch.equal(state["model"][1].running_mean, before["1.running_mean"])
        waiting = threading.Thread(target=state["optimizer"].step)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        assert torch.equal(state["model"][2].weight, before["2.weight"])
        gate.set()
        waiting.join(20)
        assert not torch.equal(state["model"][2].weight, before["2.weight"])
        ckpt.wait()
    saved = limpet.load(store.at("version_2"))
    assert same(saved["model"], before)
    assert torch.equal(saved["scale"], scale)


def test_a_failed_copy_does_not_block_the_optimizer_and_raises_at_the_next_step(monkeypatch):
    store, state = MemoryStore(), network()
    ckpt = Checkpointer(store, state, save=EverySteps(2), overlap=True)
    train_step(state)
    ckpt.step()

    def fail(*args):
        raise NoSpace("no memory")

    monkeypatch.setattr(staging, "stage_pieces", fail)
    train_step(state)
    ckpt.step()
    train_step(state)  # does not hang
    wait_until(lambda: not ckpt._saver.busy)
    with pytest.raises(NoSpace):
        ckpt.step()
    monkeypatch.undo()
    assert ckpt.save().step == 3
    ckpt.close()
    assert [s.step for s in Run(store).snapshots()] == [3]


WIDE = 2 * BLOCK_SIZE // 1200
"""The number of outputs with which the last weight has its own piece."""


class Wrapper(torch.optim.Optimizer):
    """An optimizer that calls another one."""

    def __init__(self, inner):
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("kind", ["outside", "replaced", "wrapped"])
def test_an_optimizer_outside_the_state_waits_too(kind, gate):
    store, state = MemoryStore(), network(WIDE)
    other = torch.optim.SGD(state["model"].parameters(), lr=1.0)
    if kind == "wrapped":
        state["optimizer"] = Wrapper(other)
    with Checkpointer(store, state, save=EverySteps(1), overlap=True) as ckpt:
        forward_backward(state)
        other.step()
        gate.clear()
        ckpt.step()
        before = {k: v.clone() for k, v in state["model"].state_dict().items()}
        if kind == "replaced":
            state["optimizer"] = other
        forward_backward(state)
        waiting = threading.Thread(target=other.step)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        gate.set()
        waiting.join(20)
    assert same(limpet.load(store.at("version_1"))["model"], before)


def add(state):
    with torch.no_grad():
        state["model"][2].weight.add_(1)


def load(state):
    state["model"].load_state_dict(state["model"].state_dict())


def change_optimizer_state(state):
    state["optimizer"].state[state["model"][2].weight]["exp_avg"].zero_()


def replace_storage(state):
    moment = state["optimizer"].state[state["model"][2].weight]["exp_avg"]
    moment.data = torch.zeros_like(moment)


@pytest.mark.parametrize("change", [add, load, change_optimizer_state, replace_storage])
def test_a_state_changed_during_the_copy_is_not_committed(change, gate):
    store, state = MemoryStore(), network(WIDE)
    ckpt = Checkpointer(store, state, save=EverySteps(1), overlap=True)
    train_step(state)
    gate.clear()
    ckpt.step()
    change(state)
    gate.set()
    with pytest.raises(
        CommitError, match=r"2.weight.* changed during the copy in the background"
    ) as e:
        ckpt.wait()
    assert all("model" in key for key in e.value.leaves)
    train_step(state)
    ckpt.step()
    ckpt.close()
    assert [s.step for s in Run(store).snapshots()] == [2]


@pytest.mark.parametrize("layer", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_an_embedding_changed_by_its_forward_pass_is_copied_first(layer, gate):
    embedding = layer(3000, 8, max_norm=1.0)
    state = {"e": embedding, "o": torch.optim.SGD(embedding.parameters(), lr=5.0)}
    store, all_rows = MemoryStore(), torch.arange(3000).reshape(1, -1)
    with Checkpointer(store, state, save=EverySteps(1), overlap=True) as ckpt:
        embedding(all_rows).sum().backward()
        state["o"].step()
        gate.clear()
        ckpt.step()
        before = embedding.weight.detach().clone()
        embedding(all_rows)
        assert not torch.equal(embedding.weight, before)
        gate.set()
    assert torch.equal(limpet.load(store.at("version_1"))["e"]["weight"], before)


@pytest.mark.parametrize("begun", [True, False])
def test_an_interrupt_while_the_thread_starts(begun, gate, monkeypatch):
    """Either the thread runs and the optimizer waits for its copies, or the thread does nothing."""
    store, state = MemoryStore(), network()
    ckpt = Checkpointer(store, state, save=EverySteps(1), at_end=False, overlap=True)
    train_step(state)
    threads: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(self):
        if self.name == "limpet-save":
            threads.append(self)
            if begun:
                gate.clear()
                start(self)
            raise KeyboardInterrupt
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.step()
    before = {k: v.clone() for k, v in state["model"].state_dict().items()}
    if not begun:
        threads[0].start()  # if the system started the thread anyway, it does nothing
    opened = threading.Timer(0.1, gate.set)
    opened.start()
    train_step(state)
    threads[0].join(20)
    opened.join()
    ckpt.close()
    found = [s.step for s in Run(store).snapshots()]
    assert found == [1] * begun
    if begun:
        assert same(limpet.load(store.at("version_1"))["model"], before)
