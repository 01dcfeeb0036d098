"""The metadata of a version do not depend on what has caused its save."""

import time
from typing import Any

import pytest
import torch

import limpet
from limpet import AtEnd, EverySteps, Never, OnException, Preemption
from limpet.preemption import PreemptionGuard
from tests.notices.announced import Announced

MANY = 10**9


def make_state(decay=0.0, length=10, warmup=2, milestones=(3, 6)):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=decay)
    schedulers = torch.optim.lr_scheduler
    parts = [
        schedulers.LinearLR(optimizer, total_iters=warmup),
        schedulers.CosineAnnealingLR(optimizer, length),
    ]
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": schedulers.SequentialLR(optimizer, parts, [warmup]),
        "steps": schedulers.MultiStepLR(optimizer, milestones),
        "progress": limpet.Progress(),
    }


def train(state, ckpt, steps=2):
    for _ in range(steps):
        state["model"](torch.ones(1, 2)).sum().backward()
        state["optimizer"].step()
        state["scheduler"].step()
        ckpt.step({"loss": 1.0})


def by_step(run, **more):
    state = make_state()
    with limpet.Checkpointer(run, state, save=EverySteps(1), **more) as ckpt:
        yield state, ckpt
        train(state, ckpt)


def by_request(run, **more):
    state = make_state()
    with limpet.Checkpointer(run, state, save=EverySteps(MANY), **more) as ckpt:
        yield state, ckpt
        train(state, ckpt)
        ckpt.save()


def by_end(run, **more):
    state = make_state()
    with limpet.Checkpointer(run, state, save=AtEnd(), **more) as ckpt:
        yield state, ckpt
        train(state, ckpt)


def by_epoch(run, **more):
    state = make_state()
    with limpet.Checkpointer(run, state, save=limpet.EveryEpoch(), **more) as ckpt:
        yield state, ckpt
        train(state, ckpt)
        ckpt.end_epoch({"loss": 1.0})


def by_guard(run, **more):
    state = make_state()
    with limpet.Checkpointer(run, state, save=EverySteps(1), **more) as ckpt:
        yield state, ckpt
        PreemptionGuard(ckpt).run(train, state, ckpt)


def by_exception(run, **more):
    state = make_state()
    with (
        pytest.raises(ZeroDivisionError),
        limpet.Checkpointer(run, state, save=OnException(), **more) as ckpt,
    ):
        yield state, ckpt
        train(state, ckpt)
        raise ZeroDivisionError


def by_notice(run, **more):
    state, source = make_state(), Announced()
    more["preemption"] = Preemption(notices=[source])
    with (
        pytest.raises(SystemExit),
        limpet.Checkpointer(run, state, save=EverySteps(MANY), **more) as ckpt,
    ):
        yield state, ckpt
        train(state, ckpt)
        source.announce()
        while True:
            time.sleep(0.01)
            train(state, ckpt, 1)


def by_local_tier(run, **more):
    more["tiers"] = [limpet.LocalTier(run.parent / "local")]
    yield from by_step(run, **more)


WAYS: dict[str, Any] = {n[3:]: v for n, v in globals().copy().items() if n.startswith("by_")}
MEASURED = {"save_seconds", "step_seconds", "run_calls"}
"""What only versions have whose training has measured it."""


def start(way, run, is_resumed):
    """Train until a version is saved in that way. Return the names of what it records."""
    ways = way(run, quiet=True, config={"lr": 0.1})
    _, ckpt = next(ways)
    if is_resumed:
        assert ckpt.resume() is None
    list(ways)
    newest = limpet.Run(run).latest()
    metadata = dict(newest.metadata)
    training = metadata.pop("training")
    assert metadata["config"] == {"lr": 0.1}
    return {*metadata}, {*training} - MEASURED, {*training["options"]}


@pytest.mark.parametrize("is_resumed", [False, True])
def test_all_saves_record_the_same(tmp_path, is_resumed):
    expected = start(by_step, tmp_path / "expected", is_resumed)
    assert expected[1] >= {"began", "options", "sessions", "trained_seconds"}
    for name, way in WAYS.items():
        assert start(way, tmp_path / name / "run", is_resumed) == expected, name


def test_changed_options_and_schedules_are_named(tmp_path):
    run, replaced = tmp_path / "run", list[str]()
    start(by_step, run, is_resumed=False)

    def sink(name, fields):
        if name == "options_replaced":
            replaced.extend(fields["options"])

    changed = make_state(decay=0.5, length=20, warmup=4, milestones=(5, 8))
    for state in (make_state(), changed):
        assert replaced == []
        with limpet.attach(sink), limpet.Checkpointer(run, state, save=Never()) as ckpt:
            ckpt.resume()
    assert [text.partition("; ")[0] for text in replaced] == [
        "optimizer/weight_decay: the script has 0.5, had 0.0",
        "steps/milestones: the script has [5, 8], had [3, 6]",
        "scheduler/milestones: the script has [4], had [2]",
        "scheduler/1/T_max: the script has 20, had 10",
        "scheduler/0/total_iters: the script has 4, had 2",
    ]


def test_an_optimizer_that_joins_the_state_later_is_recorded(tmp_path):
    """Before the first step, or before the resume."""
    for rate, resumes in ((0.1, False), (0.2, True)):
        state, late = make_state(), make_state()["model"]
        replaced = list[str]()
        with limpet.Checkpointer(tmp_path, state, save=EverySteps(1), quiet=True) as ckpt:
            state |= {"late": torch.optim.SGD(late.parameters(), lr=rate), "second": late}
            with limpet.attach(lambda name, f: replaced.extend(f.get("options", ()))):  # noqa: B023
                if resumes:
                    ckpt.resume()
            train(state, ckpt)
    assert replaced == ["late/lr: the script has 0.2, had 0.1; the version's 0.1 is in use"]
