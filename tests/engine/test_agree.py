"""Ranks agree on a step: in all orders that can be drawn, with ranks and stores that die."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from agreeing import World

import holdfast

SIZES = (2, 3, 5)


@pytest.fixture
def lost() -> Iterator[list[str]]:
    """What was told to have come to nothing."""
    told: list[str] = []

    def sink(name: str, fields: dict[str, Any]) -> None:
        if name == "not_agreed":
            told.extend(fields["wanted"])

    with holdfast.attach(sink):
        yield told


def same(world: World) -> list[tuple[int, frozenset[str]]]:
    """The history that all living ranks have; each has come equally far."""
    first, *others = world.living()
    for rank in others:
        assert rank.history == first.history
        assert rank.steps == first.steps
    return first.history


@pytest.mark.parametrize("seed", range(150))
def test_all_do_the_same_at_the_same_step_and_each_proposal_once(
    seed: int, lost: list[str]
) -> None:
    world = World(SIZES[seed % 3], seed)
    for n in range(world.random.randint(1, 8)):
        world.run(world.random.randint(0, 40))
        for _ in range(world.random.randint(1, 2)):
            world.propose(world.random.choice(world.ranks), f"{n}.{world.random.random()}")
    world.run(world.random.randint(0, 60))
    world.settle()
    history = same(world)
    done = Counter(what for _, whats in history for what in whats)
    assert done == Counter(what for _, what in world.proposed)
    assert not lost
    assert world.notes() == []
    assert not any(rank.raised for rank in world.ranks)
