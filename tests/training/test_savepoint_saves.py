"""After a notice, a thread saves the state after the last step if the training does not."""

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import limpet
from limpet import Preemption
from limpet.deadline import Deadline
from limpet.errors import Preempted
from limpet.loading.snapshot import reader_of
from limpet.notices.notice import Notice
from limpet.preemption import PreemptionGuard
from limpet.run.catalog import read_training_metadata
from limpet.run.policy import EverySteps, Never
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.training import response, step_savepoint
from limpet.training.checkpointer import Checkpointer
from tests.unreliable_stores import HookedStore
from tests.waiting import wait_until

Ends = list[tuple[int, str]]


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    """Record the ends of the process instead of ending pytest."""
    ends: Ends = []
    monkeypatch.setattr(step_savepoint, "SHARE", 1e9)  # the steps of these tests are short
    monkeypatch.setattr(response, "end_process", lambda code, why: ends.append((code, why)))
    return ends


class TorchTraining:
    """A training of a small model with BatchNorm, and an average of its weights."""

    def __init__(self, store, save=None, **settings):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "progress": limpet.Progress(),
            "rng": limpet.RNG(),
        }
        save = EverySteps(10**9) if save is None else save
        tiers = settings.pop("tiers", ())
        preemption = Preemption(**{"notices": [], **settings})
        self.ckpt = Checkpointer(store, self.state, save=save, preemption=preemption, tiers=tiers)

    def forward_and_backward(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).square().sum().backward()

    def step(self):
        self.forward_and_backward()
        self.optimizer.step()
        self.ckpt.step()

    def notice(self, seconds):
        self.ckpt._preemption.on_notice(Notice("a test", seconds))

    def copy(self):
        return {k: v.clone() for k, v in self.model.state_dict().items()}

    def saved_step(self):
        return self.ckpt._preemption._savepoint_saver.saved_step

    def await_save(self, seconds=10.0):
        wait_until(lambda: self.saved_step() is not None, seconds, lambda: "nothing was saved")
        return self.saved_step()


def assert_holds(store, step, expected):
    """The run has one version, with the parameters and buffers of ``expected``, bit for bit."""
    (snapshot,) = Run(store).snapshots()
    assert (snapshot.step, snapshot.metadata["reason"]) == (step, "preemption")
    for key, value in expected.items():
        assert torch.equal(snapshot[f"model/{key}"].read(), value), key


def test_a_training_that_never_comes_back_is_ended_with_75(ends):
    store = MemoryStore()
    training = TorchTraining(store)
    with training.ckpt:
        training.step()
        expected = training.copy()
        training.notice(5.0)
        wait_until(lambda: ends, 8)
    assert ends[0][0] == 75
    assert_holds(store, 1, expected)


def test_swapped_weights_are_not_saved_until_the_next_step():
    """An evaluation with an average of the weights changes the parameters outside of a step."""
    store = MemoryStore()
    training = TorchTraining(store)
    with pytest.raises(Preempted) as left, training.ckpt:
        for _ in range(3):
            training.step()
        weight = training.model[0].weight
        with torch.no_grad():
            weight.copy_(torch.zeros(8, 8))
        training.notice(6.0)
        time.sleep(4.0)
        assert training.saved_step() is None
        training.optimizer.step()
        expected = training.copy()
        training.ckpt.step()
    assert (left.value.code, left.value.saved_step) == (75, 4)
    assert_holds(store, 4, expected)


POINTS = ["begin", "staging", "put", "put_if_absent manifest"]


@pytest.mark.parametrize("point", POINTS)
def test_an_optimizer_that_begins_its_step_during_the_save_never_tears_it(monkeypatch, point):
    """It waits until the state is copied, and not for longer."""
    reached, stepped = threading.Event(), threading.Event()

    def at(name):
        if name == point:
            reached.set()
            is_copied = name not in ("begin", "staging")
            assert stepped.wait(2 if is_copied else 0.2) == is_copied

    def before(method, key):
        at(f"{method} manifest" if "manifest" in key else method)

    store = HookedStore(MemoryStore())
    store.before = before
    training = TorchTraining(store)
    saver, savepoint = training.ckpt._saver, training.ckpt._savepoint
    save, flatten = saver.save_savepoint, savepoint.flatten_captured
    monkeypatch.setattr(saver, "save_savepoint", lambda *a: (at("staging"), save(*a)))
    monkeypatch.setattr(savepoint, "flatten_captured", lambda rank: (at("begin"), flatten(rank))[1])
    with pytest.raises(Preempted) as left, training.ckpt:
        for _ in range(3):
            training.step()
        expected = training.copy()
        training.forward_and_backward()
        training.notice(5.0)
        assert reached.wait(5)
        training.optimizer.step()
        stepped.set()
        assert training.await_save() == 3
        training.ckpt.step()
    assert (left.value.code, left.value.step, left.value.saved_step) == (75, 4, 3)
    assert_holds(store.inner, 3, expected)


def test_a_change_of_parameters_during_the_copy_commits_nothing(monkeypatch):
    store = MemoryStore()
    training = TorchTraining(store)
    savepoint = training.ckpt._savepoint
    flatten = savepoint.flatten_captured

    def flatten_and_swap(rank):
        flat = flatten(rank)
        with torch.no_grad():
            training.model[0].weight.add_(1)
        return flat

    monkeypatch.setattr(savepoint, "flatten_captured", flatten_and_swap)
    with pytest.raises(Preempted) as left, training.ckpt:
        training.step()
        training.notice(5.0)
        time.sleep(3.0)
        assert training.saved_step() is None
        assert Run(store).snapshots() == []
        training.step()
    assert (left.value.code, left.value.saved_step) == (75, 2)


def test_a_part_of_a_call_of_a_guard_is_not_saved():
    """A version counts complete calls. A restart would repeat the steps of the part."""
    store = MemoryStore()
    training = TorchTraining(store)
    guard = PreemptionGuard(training.ckpt)

    def make_two_steps():
        training.step()
        for _ in range(100):
            training.ckpt._goodput.step_durations.add(60.0)  # so the thread waits for none
        training.notice(30.0)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert training.saved_step() is None
            time.sleep(0.01)
        training.step()

    with pytest.raises(Preempted) as left, training.ckpt:
        guard.run(training.forward_and_backward)
        guard.run(make_two_steps)
    assert (left.value.code, left.value.saved_step) == (75, 3)
    (snapshot,) = Run(store).snapshots()
    assert read_training_metadata(reader_of(snapshot))["run_calls"] == 2


def test_a_step_that_is_known_to_be_too_long_is_not_awaited():
    store = MemoryStore()
    training = TorchTraining(store)
    with training.ckpt:
        training.step()
        for _ in range(100):
            training.ckpt._goodput.step_durations.add(60.0)
        began = time.monotonic()
        training.notice(30.0)
        training.await_save(2.0)
        assert time.monotonic() - began < 2
        assert [s.step for s in Run(store).snapshots()] == [1]


def test_the_savepoint_of_a_step_that_is_saved_is_not_saved_again(ends):
    store = MemoryStore()
    training = TorchTraining(store, EverySteps(3))
    with training.ckpt:
        for _ in range(3):
            training.step()
        training.ckpt._saver.pending.wait()
        training.notice(5.0)
        assert training.await_save() == 3
    assert [s.metadata["reason"] for s in Run(store).snapshots()] == ["cadence"]


@pytest.mark.parametrize("save", [Never(), None])
def test_nothing_is_captured_if_nothing_would_be_saved(save):
    settings = {} if save is not None else {"save_fn": lambda: None}
    training = TorchTraining(MemoryStore(), save, **settings)
    with pytest.raises(Preempted), training.ckpt:
        training.step()
        assert training.ckpt._savepoint.label is None
        training.notice(5.0)
        training.step()
        assert training.ckpt._savepoint.label is None


def test_a_state_that_cannot_be_captured_does_not_end_the_training():
    class Failing:
        def state_dict(self):
            if armed:
                raise OSError("no state")
            return {}

        def load_state_dict(self, state): ...

    armed: list[int] = []
    events: list[str] = []
    training = TorchTraining(MemoryStore())
    training.state["failing"] = Failing()
    with limpet.attach(lambda name, fields: events.append(name)), training.ckpt:
        training.step()
        armed.append(1)
        for _ in range(3):
            training.step()
        armed.clear()
    assert events.count("savepoint_failed") == 1


def test_a_capture_that_needs_much_memory_is_made_only_after_a_notice():
    training = TorchTraining(MemoryStore())
    training.state["average"] = torch.zeros(step_savepoint.MAX_BYTES // 4 + 1)
    with training.ckpt:
        for _ in range(3):
            training.step()
        assert training.ckpt._savepoint.invalid_reason is not None
        assert training.ckpt._savepoint._copies._reused_bytes == 0
        training.ckpt._preemption._set_deadline(_far_deadline(), "a test")
        training.step()
        assert training.ckpt._savepoint.invalid_reason is None


def _far_deadline():
    return Deadline.after(1000, "a test")


def test_without_a_savepoint_the_newest_captured_state_is_saved_and_the_step_may_still_end(
    tmp_path, memory, monkeypatch, ends
):
    monkeypatch.setattr(step_savepoint, "SHARE", 0.0)
    monkeypatch.setattr(step_savepoint, "_MEASURED_SHARE", 1e-9)
    tier = limpet.MemoryTier(every=EverySteps(3), copies=1, path=memory)
    training = TorchTraining(tmp_path / "run", tiers=[tier])
    with pytest.raises(Preempted) as left, training.ckpt:
        for _ in range(4):
            training.step()
        timer = training.ckpt._preemption._timer
        training.notice(8.0)
        ends_at = timer._calls["exit"][0]
        wait_until(Run(tmp_path / "run").snapshots, 7.5)  # the step takes longer than that
        training.ckpt._preemption._savepoint_saver._ended.wait(5)
        assert timer._calls["exit"][0] == ends_at
        while True:
            training.step()
    assert not ends
    assert left.value.code == 75
    assert [s.step for s in Run(tmp_path / "run").snapshots()] == [3, left.value.saved_step]


@pytest.mark.parametrize("share", [0.0, 1e9], ids=["without captures", "with captures"])
def test_after_a_step_the_parameters_are_sharded_whether_they_are_captured_or_not(
    share, monkeypatch
):
    """Otherwise, the next forward pass after an evaluation would gather them on some ranks only."""
    monkeypatch.setattr(step_savepoint, "SHARE", share)
    monkeypatch.setattr(step_savepoint, "_MEASURED_SHARE", share or 1e-9)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        fully_shard(model[0])
        root = torch.nn.Sequential(model)  # is not in the state
        fully_shard(root)
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer, "rng": limpet.RNG()}
        with Checkpointer(MemoryStore(), state, save=EverySteps(100), group="alone") as ckpt:
            for epoch in range(6):
                root(torch.randn(4, 4)).square().sum().backward()
                optimizer.step()
                with torch.no_grad():  # an evaluation, before or after the step
                    if epoch % 2:
                        ckpt.step()
                    root(torch.randn(4, 4))
                    assert not any(isinstance(p, DTensor) for p in model[1].parameters())
                    ckpt.end_epoch() if epoch % 2 else ckpt.step()
                assert all(isinstance(p, DTensor) for p in model.parameters())
            assert (ckpt._savepoint.label is not None) == (share > 0)
    finally:
        dist.destroy_process_group()
