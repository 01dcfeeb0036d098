"""A loop with an ``RNG`` draws one sequence, and no call of a Checkpointer draws from it."""

import random

import numpy as np
import pytest
import torch

import limpet
from limpet.generators import capture_states, restore_states, seed_generators
from limpet.storage.memory import MemoryStore
from limpet.training import step_counter


@pytest.fixture(autouse=True)
def _generators():
    before = capture_states()
    yield
    restore_states(before)


def draw():
    """Draw from every generator, also the numbers that it caches."""
    return [random.random(), random.gauss(0, 1), float(np.random.normal()), torch.randn(1).item()]


def upcoming():
    """The numbers that the training would draw next."""
    states = capture_states()
    try:
        return draw()
    finally:
        restore_states(states)


@pytest.mark.parametrize(
    "options",
    [
        {"save": limpet.EverySteps(2)},
        {"save": limpet.EverySteps(2), "overlap": True},
        {"save": limpet.EverySteps(2), "incremental": True},
        {"save": limpet.EverySteps(2) | limpet.OnException()},
    ],
    ids=["plain", "overlap", "incremental", "on exception"],
)
def test_no_call_of_a_checkpointer_draws(options):
    store, state = MemoryStore(), {"x": torch.ones(2), "rng": limpet.RNG()}
    expected = upcoming()
    with limpet.Checkpointer(store, state, **options) as ckpt:
        assert ckpt.resume() is None
        for _ in range(5):
            ckpt.step()
            assert upcoming() == expected
        ckpt.end_epoch({"val": 1.0})
        ckpt.save()
        assert upcoming() == expected
    seed_generators(2)
    with limpet.Checkpointer(store, state, **options) as ckpt:
        ckpt.resume()
        assert upcoming() == expected
        ckpt.step()
        ckpt.resume(at=4)
        assert upcoming() == expected


def run(store, loop, seed, stop=-1):
    """Return the numbers of each step."""
    seed_generators(seed)
    found = {}
    state = {"x": torch.zeros(1), "rng": limpet.RNG()}
    with limpet.Checkpointer(store, state, save=limpet.EverySteps(1)) as ckpt:
        for _ in ckpt.steps(6) if loop == "steps" else ckpt.epochs(6):
            found[ckpt.current_step] = draw()
            ckpt.step()
            if ckpt.current_step == stop and loop == "steps":
                return found
            draw() if loop == "epochs" else None
            if ckpt.current_step == stop:
                ckpt.end_epoch()
                ckpt.save()
                return found
    return found


@pytest.mark.parametrize("loop", ["steps", "epochs"])
def test_an_rng_continues_one_sequence(loop):
    """``steps`` and ``epochs`` seed nothing then: other loops may depend on the sequence."""
    seed_generators(1)
    sequence = [draw() for _ in range(12 if loop == "epochs" else 6)]
    whole = run(MemoryStore(), loop, 1)
    assert [*whole.values()] == sequence[:: 2 if loop == "epochs" else 1]
    if loop == "steps":
        for stop in range(1, 6):
            store = MemoryStore()
            assert run(store, loop, 1, stop) | run(store, loop, 99) == whole


@pytest.mark.parametrize("loop", ["steps", "epochs"])
def test_without_an_rng_a_start_decides_the_numbers(loop):
    found = []
    for disturbance in (0, 7):
        numbers = []
        torch.manual_seed(3)
        with limpet.Checkpointer(MemoryStore(), {"x": torch.zeros(1)}) as ckpt:
            for _ in ckpt.steps(3) if loop == "steps" else ckpt.epochs(3):
                numbers.append(draw())
                [draw() for _ in range(disturbance)]
                ckpt.step()
        found.append(numbers)
    assert found[0] == found[1]
    assert len(set(map(repr, found[0]))) == 3


def test_ranks_at_one_place_draw_the_same_numbers(monkeypatch):
    """As ranks of a tensor-parallel group must; by default, each rank is a place of its own."""
    with limpet.Checkpointer(MemoryStore(), {"x": torch.ones(2)}) as ckpt:
        drawn = {}
        for rank in range(2):
            monkeypatch.setattr(step_counter, "rank_and_world_size", lambda rank=rank: (rank, 2))
            for place in (None, 0, 2**64 - 1):
                ckpt._step_counter.seed_step(place)
                drawn[rank, place] = draw()
        assert drawn[0, None] == drawn[0, 0] == drawn[1, 0]
        assert drawn[0, 2**64 - 1] == drawn[1, 2**64 - 1] != drawn[1, None] != drawn[0, None]
        ckpt.step()
        ckpt._step_counter.seed_step(0)
        assert draw() != drawn[0, 0]
