"""The warning about a loop that makes all of its epochs again after a resume."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import limpet
from limpet.errors import InexactResume
from limpet.preemption import PreemptionGuard

State = dict[str, Any]
Loop = Callable[[limpet.Checkpointer, State], object]


def make_state(**more: Any) -> State:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "rng": limpet.RNG(), **more}


def make_sampler() -> limpet.ElasticSampler:
    return limpet.ElasticSampler(8, batch_size=2)


def make_state_with_progress(has_sampler: bool) -> State:
    more = {"sampler": make_sampler()} if has_sampler else {}
    return make_state(progress=limpet.Progress(), **more)


def train(folder: Path, state: State, loop: Loop, **options: Any) -> list[str]:
    """Train as a script does; return the warnings about the loop, which name the user's file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with limpet.Checkpointer(folder, state, save=limpet.EverySteps(1), **options) as ckpt:
            ckpt.resume()
            loop(ckpt, state)
    found = [w for w in caught if w.category is InexactResume and "its loop" in str(w.message)]
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


def epochs(ckpt: limpet.Checkpointer, state: State) -> None:
    """The loop of a script that saved nothing before."""
    for _ in range(2):
        for _ in state.get("sampler", range(4)):
            ckpt.step()


@pytest.mark.parametrize("has_sampler", [False, True])
@pytest.mark.parametrize("has_scheduler", [False, True])
def test_a_loop_that_repeats_its_epochs_is_reported_once(
    has_sampler: bool, has_scheduler: bool, tmp_path: Path
) -> None:
    def make() -> State:
        state = make_state(**({"sampler": make_sampler()} if has_sampler else {}))
        if has_scheduler:
            state["scheduler"] = torch.optim.lr_scheduler.StepLR(state["optimizer"], 10)
        return state

    assert train(tmp_path, make(), epochs) == []  # the first process
    (warning,) = train(tmp_path, make(), epochs)
    assert "at step 8" in warning
    for part in ("no Progress", "for epoch in range(10)", "ckpt.end_epoch()", 'missing="keep"'):
        assert part in warning


def test_a_loop_over_a_loader_is_reported(tmp_path: Path) -> None:
    def loop(ckpt: limpet.Checkpointer, state: State) -> None:
        loader = DataLoader(range(8), batch_sampler=state["sampler"])  # type: ignore[arg-type]
        for _ in range(2):
            for _ in loader:
                ckpt.step()

    assert train(tmp_path, make_state(sampler=make_sampler()), loop) == []
    assert len(train(tmp_path, make_state(sampler=make_sampler()), loop)) == 1


def while_step(ckpt: limpet.Checkpointer, state: State) -> None:
    while ckpt.current_step < 16:
        ckpt.step()


def for_step(ckpt: limpet.Checkpointer, state: State) -> None:
    for _ in range(ckpt.current_step, 16):
        ckpt.step()


def break_at_step(ckpt: limpet.Checkpointer, state: State) -> None:
    for _ in range(1000):
        ckpt.step()
        if ckpt.current_step >= 16:
            break


def in_a_function(ckpt: limpet.Checkpointer, state: State) -> None:
    def is_done() -> bool:
        return ckpt.current_step >= 16

    while not is_done():
        ckpt.step()


def guarded(ckpt: limpet.Checkpointer, state: State) -> None:
    guard = PreemptionGuard(ckpt)
    for _ in range(guard.total_run_calls, 8):
        guard.run(lambda: None)


@pytest.mark.parametrize("loop", [while_step, for_step, break_at_step, in_a_function, guarded])
def test_a_loop_that_reads_the_position_is_not_reported(loop: Loop, tmp_path: Path) -> None:
    for _ in range(2):
        assert train(tmp_path, make_state(), loop) == []
        with limpet.Checkpointer(tmp_path, make_state(), save=limpet.EverySteps(1)) as ckpt:
            ckpt.resume()
            ckpt.step()


def test_the_step_of_the_snapshot_is_a_position(tmp_path: Path) -> None:
    train(tmp_path, make_state(), epochs)
    with limpet.Checkpointer(tmp_path, make_state(), save=limpet.EverySteps(1)) as ckpt:
        snapshot = ckpt.resume()
        assert snapshot is not None
        for _ in range(snapshot.step or 0, 12):
            ckpt.step()


def test_the_epochs_of_a_sampler_are_a_position(tmp_path: Path) -> None:
    def loop(ckpt: limpet.Checkpointer, state: State) -> None:
        while state["sampler"].epochs < 4:
            for _ in state["sampler"]:
                ckpt.step()

    train(tmp_path, make_state(sampler=make_sampler()), epochs)
    assert train(tmp_path, make_state(sampler=make_sampler()), loop) == []


def test_one_pass_over_the_rest_of_the_data_needs_no_count(tmp_path: Path) -> None:
    def loop(ckpt: limpet.Checkpointer, state: State) -> None:
        for number, _ in enumerate(state["sampler"]):
            ckpt.step()
            if number == 1:
                break

    for _ in range(2):
        assert train(tmp_path, make_state(sampler=make_sampler()), loop) == []


def repeated_epochs(ckpt: limpet.Checkpointer, state: State) -> None:
    """An old loop, whose Progress counts."""
    for _ in range(2):
        for _ in state.get("sampler", range(4)):
            ckpt.step()
        ckpt.end_epoch()


@pytest.mark.parametrize("has_sampler", [False, True])
def test_a_loop_that_does_not_read_its_progress_is_reported_once(
    has_sampler: bool, tmp_path: Path
) -> None:
    make = partial(make_state_with_progress, has_sampler)
    assert train(tmp_path, make(), repeated_epochs) == []
    (warning,) = train(tmp_path, make(), repeated_epochs)
    for part in ("neither progress.epoch", "`while progress.epoch < 10`"):
        assert part in warning
    assert "no Progress" not in warning


def while_epoch(ckpt: limpet.Checkpointer, state: State) -> None:
    while state["progress"].epoch < 4:
        for _ in state.get("sampler", range(4)):
            ckpt.step()
        ckpt.end_epoch()


def for_epoch(ckpt: limpet.Checkpointer, state: State) -> None:
    for _ in range(state["progress"].epoch, 4):
        for _ in state.get("sampler", range(4)):
            ckpt.step()
        ckpt.end_epoch()


def at_the_end_of_an_epoch(ckpt: limpet.Checkpointer, state: State) -> None:
    while True:
        for _ in state.get("sampler", range(4)):
            ckpt.step()
        ckpt.end_epoch()
        if state["progress"].epoch >= 4:
            break


def for_step_of_progress(ckpt: limpet.Checkpointer, state: State) -> None:
    step = state["progress"].step
    while step < 16:
        for _ in state.get("sampler", range(4)):
            ckpt.step()
            step += 1


def counted_by_the_user(ckpt: limpet.Checkpointer, state: State) -> None:
    for epoch in range(state["progress"].epoch, 4):
        state["progress"].epoch = epoch
        for _ in state.get("sampler", range(4)):
            ckpt.step()


def by_samples(ckpt: limpet.Checkpointer, state: State) -> None:
    while state["progress"].samples < 32:
        for _ in state.get("sampler", range(4)):
            ckpt.step()
            state["progress"].samples += 2
        ckpt.end_epoch()


@pytest.mark.parametrize("has_sampler", [False, True])
@pytest.mark.parametrize(
    "loop",
    [
        *(while_epoch, for_epoch, at_the_end_of_an_epoch, for_step_of_progress),
        *(counted_by_the_user, by_samples),
    ],
)
def test_a_loop_that_reads_its_progress_is_not_reported(
    loop: Loop, has_sampler: bool, tmp_path: Path
) -> None:
    make = partial(make_state_with_progress, has_sampler)

    def a_part(ckpt: limpet.Checkpointer, state: State) -> None:
        for _, _ in zip(range(2), state.get("sampler", range(2)), strict=False):
            ckpt.step()

    train(tmp_path, make(), a_part)
    for _ in range(2):
        assert train(tmp_path, make(), loop) == []


def counted_with_increments(ckpt: limpet.Checkpointer, state: State) -> None:
    """An old loop, which counts itself."""
    progress = state["progress"]
    for _ in range(2):
        for _ in state.get("sampler", range(4)):
            ckpt.step()
            progress.samples += 2
        state["progress"].epoch += 1


def should_stop(ckpt: limpet.Checkpointer, state: State) -> None:
    for _ in range(2):
        for _ in state.get("sampler", range(4)):
            ckpt.step({"loss": 1.0 / (ckpt._step_counter.step + 1)})
        ckpt.end_epoch()
        if ckpt.should_stop:
            break


@pytest.mark.parametrize("has_sampler", [False, True])
@pytest.mark.parametrize("loop", [counted_with_increments, should_stop])
def test_an_increment_and_a_test_for_an_early_stop_are_no_position(
    loop: Loop, has_sampler: bool, tmp_path: Path
) -> None:
    make = partial(make_state_with_progress, has_sampler)
    assert train(tmp_path, make(), loop) == []
    assert len(train(tmp_path, make(), loop)) == 1


def test_a_loop_that_ends_by_its_stop_policy_is_not_reported(tmp_path: Path) -> None:
    stop = limpet.StopWhen("loss", patience=100, mode="min")
    for _ in range(2):
        assert train(tmp_path, make_state(progress=limpet.Progress()), should_stop, stop=stop) == []


def test_what_is_left_of_an_epoch_is_a_position(tmp_path: Path) -> None:
    def loop(ckpt: limpet.Checkpointer, state: State) -> None:
        for _ in range(2):
            batches = iter(state["sampler"])
            while state["sampler"].left:
                next(batches)
                ckpt.step()

    for _ in range(2):
        assert train(tmp_path, make_state(sampler=make_sampler()), loop) == []


def test_a_read_of_the_process_before_a_second_resume_does_not_count(tmp_path: Path) -> None:
    """A notebook: an earlier cell has read the position."""
    state = make_state(progress=limpet.Progress())
    assert train(tmp_path, state, while_epoch) == []
    assert len(train(tmp_path, state, repeated_epochs)) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"epoch": 0},
        {"counts": [1.5]},
        {"counts": {"epoch": np.zeros(1)}},
        {"epoch": torch.zeros(1)},
        {"epoch": limpet.PerRank(torch.zeros(1))},
    ],
)
def test_a_member_that_may_count_is_not_reported(more: State, tmp_path: Path) -> None:
    for _ in range(2):
        assert train(tmp_path, make_state(**more), epochs) == []
