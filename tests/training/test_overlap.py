"""Staging beside the training: a version is the state at its step, whatever the next one does."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.buffers import BufferPool
from holdfast.engine.saving import overlap as beside
from holdfast.engine.saving import save
from holdfast.engine.saving.overlap import DeferredStaging, pin_memory
from holdfast.errors import CommitError, HoldfastError, NoSpace
from holdfast.run.policy import EverySteps
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from holdfast.training.checkpointer import Checkpointer
from holdfast.types import BLOCK_SIZE
from holdfast.workers import Workers


def network(outputs: int = 4000) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, outputs)
    )
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05),
        "scale": torch.ones(3),
        "progress": holdfast.Progress(),
        "rng": holdfast.RNG(),
    }


def forward_backward(state: dict[str, Any]) -> None:
    state["scale"].mul_(1.5)
    loss = state["model"](torch.randn(8, 64)).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()


def train_step(state: dict[str, Any]) -> None:
    forward_backward(state)
    state["optimizer"].step()


def held(store: MemoryStore, step: int) -> dict[str, Any]:
    """The values of a version, but for what tells the time."""
    loaded = holdfast.load(store.at(f"version_{step}"))
    return {k: v for k, v in loaded.items() if k != "rng"} | {"rng": str(loaded["rng"])}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is cleared, no copy is made beside the training."""
    gate, stage = threading.Event(), DeferredStaging.stage

    def slow(self: DeferredStaging, workers: Workers) -> list[str]:
        assert gate.wait(20)
        return stage(self, workers)

    monkeypatch.setattr(DeferredStaging, "stage", slow)
    gate.set()
    yield gate
    gate.set()


def test_every_version_is_the_one_that_is_made_without_overlap() -> None:
    stores = [MemoryStore(), MemoryStore()]
    for store, overlap in zip(stores, (False, True), strict=True):
        state = network()
        with Checkpointer(store, state, save=EverySteps(1), overlap=overlap) as ckpt:
            for _ in range(6):
                train_step(state)
                ckpt.step()
    for step in range(1, 7):
        assert same(held(stores[0], step), held(stores[1], step))


def test_the_optimizer_waits_for_the_copies_and_nothing_else_does(gate: threading.Event) -> None:
    store, state = MemoryStore(), network()
    with Checkpointer(store, state, save=EverySteps(2), overlap=True) as ckpt:
        for _ in range(2):
            train_step(state)
            gate.clear()
            ckpt.step()
        before = {k: v.clone() for k, v in state["model"].state_dict().items()}
        scale = state["scale"].clone()
        forward_backward(state)  # BatchNorm's buffers and the scale go on meanwhile
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
    saved = holdfast.load(store.at("version_2"))
    assert same(saved["model"], before)
    assert torch.equal(saved["scale"], scale)


def test_a_copy_that_fails_holds_no_optimizer_up_and_raises_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, state = MemoryStore(), network()
    ckpt = Checkpointer(store, state, save=EverySteps(2), overlap=True)
    train_step(state)
    ckpt.step()

    def fail(*args: Any) -> None:
        raise NoSpace("no memory")

    monkeypatch.setattr(beside, "stage_pieces", fail)
    train_step(state)
    ckpt.step()
    train_step(state)  # does not hang
    with pytest.raises(NoSpace):
        ckpt.step()
    monkeypatch.undo()
    assert ckpt.save().step == 3
    ckpt.close()
    assert [s.step for s in Run(store).snapshots()] == [3]


def test_an_optimizer_that_comes_later_is_saved_too() -> None:
    store, state = MemoryStore(), network()
    with Checkpointer(store, state, save=EverySteps(1), overlap=True) as ckpt:
        train_step(state)
        ckpt.step()
        state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            train_step(state)
            before = state["model"][2].weight.detach().clone()
            ckpt.step()
        ckpt.wait()
    assert torch.equal(holdfast.load(store.at("version_4"))["model"]["2.weight"], before)


WIDE = 2 * BLOCK_SIZE // 1200
"""Outputs with which the last weight has a piece of its own."""


class Wrapper(torch.optim.Optimizer):
    """An optimizer that lets another one do the work."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("kind", ["outside", "replaced", "wrapped"])
def test_an_optimizer_that_is_not_in_the_state_waits_too(kind: str, gate: threading.Event) -> None:
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
    assert same(holdfast.load(store.at("version_1"))["model"], before)


def add(state: dict[str, Any]) -> None:
    with torch.no_grad():
        state["model"][2].weight.add_(1)


def load(state: dict[str, Any]) -> None:
    state["model"].load_state_dict(state["model"].state_dict())


def slot(state: dict[str, Any]) -> None:
    state["optimizer"].state[state["model"][2].weight]["exp_avg"].zero_()


def elsewhere(state: dict[str, Any]) -> None:
    moment = state["optimizer"].state[state["model"][2].weight]["exp_avg"]
    moment.data = torch.zeros_like(moment)


@pytest.mark.parametrize("change", [add, load, slot, elsewhere])
def test_what_was_changed_while_it_was_copied_is_not_committed(
    change: Callable[[Any], None], gate: threading.Event
) -> None:
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
def test_an_embedding_that_its_forward_changes_is_copied_before(
    layer: Any, gate: threading.Event
) -> None:
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
    assert torch.equal(holdfast.load(store.at("version_1"))["e"]["weight"], before)


def test_whatever_fails_before_the_copies_holds_no_optimizer_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, state = MemoryStore(), network()
    ckpt = Checkpointer(store, state, save=EverySteps(1), overlap=True)
    train_step(state)
    ckpt.step()
    ckpt.wait()
    train_step(state)

    def fail(*_: Any) -> None:
        raise HoldfastError("no copy was made")

    monkeypatch.setattr(save, "_stage_deferred", fail)
    ckpt.step()
    waiting = threading.Thread(target=train_step, args=(state,), daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()
    with pytest.raises(HoldfastError, match="no copy was made"):
        ckpt.close()


@pytest.mark.parametrize("begun", [True, False])
def test_interrupted_as_the_thread_starts(
    begun: bool, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It either goes on, and the optimizer waits for its copies, or it never begins."""
    store, state = MemoryStore(), network()
    ckpt = Checkpointer(store, state, save=EverySteps(1), overlap=True)
    train_step(state)
    threads: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        if self.name == "holdfast-save":
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
        threads[0].start()  # even if the system had made it already, it does nothing
    opened = threading.Timer(0.1, gate.set)
    opened.start()
    train_step(state)
    threads[0].join(20)
    opened.join()
    ckpt.close()
    found = [s.step for s in Run(store).snapshots()]
    assert found == [1] * begun
    if begun:
        assert same(holdfast.load(store.at("version_1"))["model"], before)


def test_buffers_for_a_device_are_locked_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: dict[int, int] = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: locked.update({address: size}) or 0,
        cudaHostUnregister=locked.pop,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pool = BufferPool(1 << 20, 1 << 16, pin_memory)
    buffers = [pool.acquire() for _ in range(3)]
    assert locked == {b.address: 1 << 16 for b in buffers}
    for buffer in buffers:
        pool.release(buffer)
    del buffer, buffers
    pool.close()
    gc.collect()
    assert locked == {}
    runtime.cudaHostRegister = lambda address, size, flags: 712  # refused: used as it is
    other = BufferPool(1 << 20, 1 << 16, pin_memory)
    other.release(other.acquire())
    other.close()
    assert locked == {}
