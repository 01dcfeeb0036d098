"""Staging beside the training: a version is the state at its step, whatever the next one does."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Run
from holdfast.engine import beside
from holdfast.engine.beside import Rest, pin_memory
from holdfast.errors import NoSpace
from holdfast.policy import EverySteps
from holdfast.storage.direct import Pool
from holdfast.storage.memory import MemoryStore


def network(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 4000)
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
    assert not state["optimizer"]._optimizer_step_pre_hooks  # closed: no hook is left


def test_the_optimizer_waits_for_the_copies_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, stage = threading.Event(), Rest.stage

    def slow(self: Rest, pool: Pool, threads: int) -> None:
        assert gate.wait(20)
        stage(self, pool, threads)

    monkeypatch.setattr(Rest, "stage", slow)
    store, state = MemoryStore(), network()
    with Checkpointer(store, state, save=EverySteps(2), overlap=True) as ckpt:
        for _ in range(2):
            train_step(state)
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

    monkeypatch.setattr(beside, "stage_ahead", fail)
    train_step(state)
    ckpt.step()
    train_step(state)  # does not hang
    with pytest.raises(NoSpace):
        ckpt.step()
    monkeypatch.undo()
    assert ckpt.save().step == 3
    ckpt.close()
    assert [s.step for s in Run(store).snapshots()] == [3]


def test_an_optimizer_that_comes_later_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    store, state = MemoryStore(), network()
    with Checkpointer(store, state, save=EverySteps(1), overlap=True) as ckpt:
        train_step(state)
        ckpt.step()
        old = state["optimizer"]
        state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            train_step(state)
            before = state["model"][2].weight.detach().clone()
            ckpt.step()
        ckpt.wait()
        assert not old._optimizer_step_pre_hooks
        assert len(state["optimizer"]._optimizer_step_pre_hooks) == 1
    assert torch.equal(holdfast.load(store.at("version_4"))["model"]["2.weight"], before)


def test_buffers_for_a_device_are_locked_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: dict[int, int] = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: locked.update({address: size}) or 0,
        cudaHostUnregister=locked.pop,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pool = Pool(1 << 20, 1 << 16, pin_memory)
    buffers = [pool.acquire() for _ in range(3)]
    assert locked == {b.address: 1 << 16 for b in buffers}
    for buffer in buffers:
        pool.release(buffer)
    del buffer, buffers
    pool.close()
    gc.collect()
    assert locked == {}
    runtime.cudaHostRegister = lambda address, size, flags: 712  # refused: used as it is
    other = Pool(1 << 20, 1 << 16, pin_memory)
    other.release(other.acquire())
    other.close()
    assert locked == {}
