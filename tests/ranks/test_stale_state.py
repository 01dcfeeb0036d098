"""A stale state on several ranks: one warning, or an error on all ranks, and no false alarm."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import limpet
from limpet.errors import PlanError, StateUnchanged
from limpet.run.policy import EverySteps
from tests.ranks.trainings import TrainingJob, TrainingRank

SIZE = 3


def make_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    return model


def sharded(trainer: TrainingRank, tensor: torch.Tensor) -> Any:
    """Return the tensor as the part of one rank of a larger one."""
    return limpet.Boxed(tensor, (trainer.rank, 0), (SIZE, *tensor.shape[1:]))


def train(
    trainer: TrainingRank, stale_ranks: tuple[int, ...], is_sharded: bool, **options: Any
) -> None:
    model = make_model()
    parameters = list(model.parameters())
    if is_sharded:
        parameters = [torch.nn.Parameter(torch.ones(1, 40_000)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    is_stale = trainer.rank in stale_ranks
    state: dict[str, Any] = {"model": copy.deepcopy(model) if is_stale else model}
    if is_sharded:
        kept = copy.deepcopy(parameters) if is_stale else parameters
        state = {str(i): sharded(trainer, p) for i, p in enumerate(kept)}
    with trainer.make_checkpointer(save=EverySteps(1), state=state, **options) as ckpt:
        for _ in range(3):
            trainer.job.wait_for_step(trainer.rank)
            for p in parameters:
                p.grad = torch.ones_like(p)
            optimizer.step()
            ckpt.step()
            ckpt.wait()


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_state_that_is_stale_on_all_ranks_causes_one_warning(
    is_sharded: bool, incremental: bool
) -> None:
    torch.optim.SGD([torch.zeros(1)])
    with TrainingJob(SIZE) as job, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.run(lambda t: train(t, (0, 1, 2), is_sharded, incremental=incremental))
        assert [w.category for w in caught] == [StateUnchanged]
        leaves = "0, 1" if is_sharded else "model/0.bias, model/0.weight, model/1.bias"
        assert f"since version_1, although an optimizer has stepped: {leaves}" in str(
            caught[0].message
        )
        assert job.versions == [1, 2, 3]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_it_raises_on_all_ranks_on_request(is_sharded: bool) -> None:
    with TrainingJob(SIZE) as job:
        outcomes = job.outcomes(lambda t: train(t, (0, 1, 2), is_sharded, on_unchanged="raise"))
        assert [type(o) for o in outcomes] == [PlanError] * SIZE, outcomes
        assert len({o.what for o in outcomes}) == 1
        assert job.versions == [1]
        assert job.leftover_keys() == []


@pytest.mark.parametrize("stale_ranks", [(), (0,), (1, 2), (0, 2)])
def test_a_change_on_one_rank_is_enough(stale_ranks: tuple[int, ...]) -> None:
    with TrainingJob(SIZE) as job:
        job.run(lambda t: train(t, stale_ranks, True, on_unchanged="raise"))
        assert job.versions == [1, 2, 3]


def test_a_replicated_training_is_not_stale() -> None:
    with TrainingJob(SIZE) as job:
        job.run(lambda t: train(t, (), False, on_unchanged="raise"))
        assert job.versions == [1, 2, 3]


def test_the_ranks_must_choose_the_same() -> None:
    with TrainingJob(SIZE) as job:
        choices = ("raise", "warn", "raise")
        outcomes = job.outcomes(lambda t: train(t, (), False, on_unchanged=choices[t.rank]))
        assert all("on_unchanged='raise' on all ranks" in str(o) for o in outcomes)
