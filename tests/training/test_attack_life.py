"""Attack a running training: exceptions, Ctrl-C at any line, random store errors, and forks.

A save after an exception is compared with a save at that moment.
"""

import os
import random
import signal
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import limpet
from limpet import events
from limpet.errors import LimpetError, SaveFailed, StoreError
from limpet.run.policy import EverySteps, KeepLast, OnException
from limpet.run.run import Run
from limpet.saving.staging import DeferredStaging
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from tests.trainings import initial_state, state_after, train_step

Case = tuple[dict[str, Any], Callable[[], object], Callable[[], object]]
"""A state, a step, and what happens before the exception."""


def in_order(*calls):
    """Return a function that makes these calls in order."""
    return lambda: [call() for call in calls]


def trained(model, optimizer=torch.optim.AdamW, **options):
    built = optimizer(model.parameters(), lr=0.1, **options)
    state = {"model": model, "optimizer": built, "rng": limpet.RNG()}

    def forward_backward():
        built.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()

    def step():
        forward_backward()
        built.step()

    return state, step, forward_backward


def scheduled(kind, *args, **options):
    state, step, forward_backward = trained(nn.Linear(6, 6), torch.optim.SGD, momentum=0.9)
    state["schedule"] = schedule = kind(state["optimizer"], *args, **options)
    arguments = (1.0,) if kind is torch.optim.lr_scheduler.ReduceLROnPlateau else ()
    return (
        state,
        in_order(step, lambda: schedule.step(*arguments)),
        in_order(forward_backward, *2 * [lambda: schedule.step(*arguments)]),
    )


class ExtraStateModule(nn.Module):
    """A module whose forward pass changes its extra state in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seen: list[Any] = [1, {"sum": np.zeros(2)}]

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def forward(self, x):
        self.seen[1]["sum"] += 1
        self.seen.append(2)
        return self.linear(x)


class LiveReferences:
    """An object whose state dict contains live references to its attributes."""

    def __init__(self):
        self.array = np.zeros(3)
        self.lists: list[Any] = [[1], {"x": torch.zeros(2)}]
        self.raw = bytearray(b"abc" * 2000)
        self.deep: dict[str, list[Any]] = {"deep": [{"q": {1, 2}}]}

    def state_dict(self):
        return self.__dict__

    def load_state_dict(self, state):
        self.__dict__.update(state)

    def change_state(self):
        self.array += 1
        self.lists[0].append(3)
        self.lists[1]["x"] += 1
        self.raw[0] = 7
        self.deep["deep"][0]["q"].add(9)
        self.deep["deep"].append({})


def live_references():
    state, step, forward_backward = trained(nn.Linear(6, 6))
    live = LiveReferences()
    values: dict[str, Any] = {
        "live": live,
        "nested": [{"a": np.zeros(4), "l": [1, [2]]}],
        "pair": (torch.zeros(2), [np.arange(3)]),
        "count": Counter("aab"),
        "ordered": OrderedDict(a=[1]),
    }
    state.update(values)

    def change_state():
        forward_backward()
        live.change_state()
        state["nested"][0]["a"] += 1
        state["nested"][0]["l"][1].append(5)
        state["nested"].append(3)
        state["pair"][0].add_(1)
        state["pair"][1][0][:] = 9
        state["count"]["z"] += 1
        state["ordered"]["a"].append(2)
        state["late"] = 4
        state["rng"] = 5
        np.random.rand(3)

    return state, step, change_state


def averaged():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    state, step, forward_backward = trained(model)
    state["ema"] = ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    return (
        state,
        in_order(step, lambda: ema.update_parameters(model)),
        in_order(forward_backward, lambda: ema.update_parameters(model)),
    )


def partly_owned():
    """The optimizer of the second layer is not in the state. It steps before the exception."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    first, second = (torch.optim.Adam(model[i].parameters()) for i in (0, 2))

    def forward_backward():
        model(torch.randn(3, 6)).sum().backward()

    def step():
        forward_backward()
        first.step()
        second.step()

    state = {"model": model, "optimizer": first}
    return state, step, in_order(forward_backward, second.step)


def scaled_to_infinity():
    """A scaler that finds infinities skips the step of the optimizer and changes its own scale."""
    state, _, _ = trained(nn.Linear(6, 6))
    state["scaler"] = scaler = torch.amp.GradScaler("cpu")

    def step(factor=1.0):
        state["optimizer"].zero_grad()
        scaler.scale(state["model"](torch.randn(2, 6)).sum() * factor).backward()
        scaler.step(state["optimizer"])
        scaler.update()

    return state, step, lambda: step(float("inf"))


def arrays():
    a = np.arange(24.0).reshape(4, 6)
    state: dict[str, Any] = {
        "a": a,
        "transposed": a.T,
        "strided": a[::2],
        "part": a[:2, :2],
        "empty": np.zeros((0, 3)),
        "fields": np.zeros(3, [("x", "<f4"), ("y", "<i2")]),
        "swapped": np.arange(3, dtype=">i4"),
        "text": np.array(["ab", "c"]),
        "point": np.array(3.0),
        "scalar": np.float32(3),
    }

    def change_state():
        np.multiply(a, 2, out=a)
        state["fields"]["x"] += 1
        state["swapped"] += 1
        state["text"][0] = "zz"
        state["point"] += 1

    return state, lambda: np.add(a, 1, out=a), change_state


def options_in_place():
    model = nn.Linear(6, 6)
    state, step, forward_backward = trained(model, lr_decay=0.1, optimizer=torch.optim.Adagrad)
    group = state["optimizer"].param_groups[0]
    group["custom"] = [1, {"a": np.zeros(2)}]

    def change_state():
        forward_backward()
        group["custom"][1]["a"] += 1
        group["lr"] = 9.0

    return state, step, change_state


SCHEDULES = torch.optim.lr_scheduler
CASES: dict[str, Callable[[], Case]] = {
    "batch norm": lambda: trained(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout())),
    "weight norm": lambda: trained(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))),
    "spectral norm": lambda: trained(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))),
    "old spectral norm": lambda: trained(nn.utils.spectral_norm(nn.Linear(6, 6))),
    "lazy": lambda: trained(nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d())),
    "fused": lambda: trained(nn.Linear(6, 6), fused=True),
    "extra state": lambda: trained(ExtraStateModule()),
    "data parallel": lambda: trained(nn.DataParallel(nn.BatchNorm1d(6))),
    "one cycle": lambda: scheduled(SCHEDULES.OneCycleLR, max_lr=0.1, total_steps=50),
    "plateau": lambda: scheduled(SCHEDULES.ReduceLROnPlateau, patience=1),
    "cyclic": lambda: scheduled(SCHEDULES.CyclicLR, base_lr=0.1, max_lr=0.2),
    "live references": live_references,
    "averaged": averaged,
    "partly owned": partly_owned,
    "scaled to infinity": scaled_to_infinity,
    "arrays": arrays,
    "options in place": options_in_place,
}


def bits(snapshot):
    values = {key: snapshot[key] for key in snapshot}
    return {
        key: np.asarray(v[...]).tobytes() if hasattr(v, "shape") else v for key, v in values.items()
    }


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_save_after_an_exception_equals_a_save_at_the_last_step(name):
    torch.manual_seed(0)
    state, step, change_state = CASES[name]()
    store, expected = MemoryStore(), {}
    with pytest.raises(ZeroDivisionError), Checkpointer(store, state, save=OnException()) as ckpt:
        for _ in range(3):
            step()
            ckpt.step()
        expected = bits(limpet.save(MemoryStore().at("version_0"), state))
        change_state()
        raise ZeroDivisionError
    [snapshot] = Run(store).snapshots()
    assert bits(snapshot) == expected
    assert snapshot.step == 3


def wide():
    """Return a model with a parameter of several pieces, staged in the background, and a buffer."""
    model = nn.BatchNorm1d(6)
    model.register_parameter("wide", nn.Parameter(torch.zeros(2_500_000)))
    state, _, step = trained(model, torch.optim.SGD)

    def full_step():
        step()
        model.wide.grad = model.weight[:1].detach().expand(2_500_000)
        state["optimizer"].step()

    return state, full_step, step


class RandomlyFailingStore(MemoryStore):
    """A store whose calls fail at random while ``is_failing``."""

    def __init__(self, seed):
        super().__init__()
        self.rng = random.Random(seed)
        self.is_failing = False

    def _fail(self, probability):
        if self.is_failing and self.rng.random() < probability:
            raise StoreError("not this time")

    def put(self, key, length):
        self._fail(0.3)
        return super().put(key, length)

    def put_if_absent(self, key, data):
        self._fail(0.1)
        return super().put_if_absent(key, data)

    def delete(self, key):
        self._fail(0.1)
        super().delete(key)


@pytest.mark.parametrize("seed", range(12))
def test_counters_are_consistent_and_every_version_is_correct(seed):
    store, state, emitted = RandomlyFailingStore(seed), initial_state(), Counter[str]()
    ckpt = Checkpointer(
        store,
        state,
        save=EverySteps(1),
        keep=KeepLast(2),
        at_end=False,  # else, a failed save of the last step is tried again
        on_error="warn",
        incremental=seed % 3 == 0,
    )
    with warnings.catch_warnings(), events.attach(lambda name, _: emitted.update([name])):
        warnings.simplefilter("ignore", SaveFailed)
        for _ in range(31):
            train_step(state)
            ckpt.step()
            store.is_failing = True
        ckpt.close()
    counts = ckpt.statistics()
    assert counts["failures"] > 0
    assert counts["saves"] + counts["failures"] == 31
    assert (counts["saves"], counts["failures"]) == (
        emitted["saved"],
        emitted["save_failed"],
    )
    for version in Run(store).line():
        loaded = limpet.load(store.at(str(version)))
        assert (loaded["weights"] == state_after(version.step)["weights"]).all()


def test_a_fork_during_a_save_affects_neither_process(tmp_path, monkeypatch):
    gate, stage = threading.Event(), DeferredStaging.stage
    torch.manual_seed(0)
    state, step, _ = wide()
    ckpt = Checkpointer(tmp_path / "a", state, save=EverySteps(1) | OnException(), overlap=True)
    ckpt.__enter__()
    step()
    ckpt.step()
    ckpt.wait()

    def wait_and_stage(self, workers):
        assert gate.wait(20)
        stage(self, workers)

    monkeypatch.setattr(DeferredStaging, "stage", wait_and_stage)
    step()
    expected = state["model"].wide.detach().clone()
    ckpt.step()
    assert not ckpt._saver.pending._staged.is_set()
    child = os.fork()
    if child == 0:
        raised = 0
        signal.alarm(20)  # ends a child that waits for the other process
        try:
            state["optimizer"].zero_grad()
            state["optimizer"].step()  # does not wait for the copies of the other process
            for call in (ckpt.step, ckpt.save, ckpt.wait, ckpt.resume):
                try:
                    call()
                except LimpetError:
                    raised += 1
            try:
                with ckpt:
                    raise ZeroDivisionError
            except ZeroDivisionError:
                raised += 1
        finally:
            os._exit(0 if raised == 5 else 1)
    assert os.waitpid(child, 0)[1] == 0
    gate.set()
    ckpt.close()
    assert [s.step for s in Run(tmp_path / "a").snapshots()] == [1, 2]
    loaded = limpet.load(tmp_path / "a" / "version_2")
    assert torch.equal(loaded["model"]["wide"], expected)
