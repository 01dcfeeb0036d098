"""Ranks agree on a step: in all orders that can be drawn, with ranks and stores that die."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from tests.engine.distributed.simulated_ranks import World

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
    first, *others = world.alive_ranks()
    for rank in others:
        assert rank.action_history == first.action_history
        assert rank.steps == first.steps
    return first.action_history


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
    world.run_until_idle()
    history = same(world)
    done = Counter(what for _, whats in history for what in whats)
    assert done == Counter(what for _, what in world.proposed)
    assert not lost
    assert world.leftover_keys() == []
    assert not any(rank.failed_steps for rank in world.ranks)


# -- ranks that leave, die, or lose the store ----------------------------------------------------


def proposals(world: World, count: int, actions: int = 40) -> None:
    for n in range(count):
        world.run(world.random.randint(0, actions))
        alive = [rank for rank in world.alive_ranks() if not rank.closed]
        if alive:
            world.propose(world.random.choice(alive), f"p{n}")


@pytest.mark.parametrize("seed", range(100))
def test_a_training_that_ends_ends_the_rounds_and_nothing_else(seed: int, lost: list[str]) -> None:
    """All make as many steps; each closes when it has made its last."""
    world = World(SIZES[seed % 3], seed)
    world.last_step = world.random.randint(0, 60)
    proposals(world, world.random.randint(1, 6), 30)
    order = world.random.sample(world.ranks, world.size)
    for rank in order:
        while rank.steps < world.last_step:
            world.run(1)
            world.advance_time(5)
        rank.close()
        world.run(world.random.randint(0, 20))
    world.advance_time(50)
    history = same(world)
    done = Counter(what for _, whats in history for what in whats)
    assert all(count == 1 for count in done.values())
    assert set(done).union(lost) <= {what for _, what in world.proposed}
    assert all(rank.agreement._participant.closed_error is not None for rank in world.ranks)
    assert world.leftover_keys() == []
    assert not any(rank.failed_steps for rank in world.ranks)


@pytest.mark.parametrize("seed", range(60))
def test_a_rank_that_closes_early_holds_nobody_up(seed: int, lost: list[str]) -> None:
    world = World(SIZES[seed % 3], seed)
    proposals(world, 3)
    left = world.random.choice(world.ranks)
    left.close()
    after = [rank for rank in world.ranks if rank is not left]
    world.propose(after[0], "later")
    world.run(100)
    world.interleave_probability = 0
    for _ in range(8):
        world.advance_time(5)
        world.run_to_step(max(rank.steps for rank in world.ranks) + 50)
    assert len({tuple(rank.action_history) for rank in after}) == 1
    assert len({rank.steps for rank in after}) == 1
    assert [
        entry for entry in after[0].action_history if entry[0] <= left.steps
    ] == left.action_history
    done = Counter(what for _, whats in after[0].action_history for what in whats)
    assert all(count == 1 for count in done.values())
    assert set(done) | set(lost) == {what for _, what in world.proposed}
    assert "later" in lost
    assert not set(done) & set(lost)
    assert world.leftover_keys() == []


def dying(seed: int, at: int) -> bool:
    """A rank dies at its ``at``-th call to the store. Whether it has come to that."""
    world = World(3, seed)
    victim = world.ranks[seed % 3]
    victim.dies_at_call = victim.calls + at
    proposals(world, 3, 12)
    world.run(60)
    world.interleave_probability = 0
    for _ in range(100):
        world.run_to_step(max(rank.steps for rank in world.alive_ranks()) + 50)
        if not any(rank.agreement.is_pending() for rank in world.alive_ranks()):
            break
        world.advance_time(5)  # until it is missed, in each of the rounds
    else:
        raise AssertionError("they wait for it without end")
    world.run_to_step(max(rank.steps for rank in world.alive_ranks()) + 50)
    history = same(world)
    assert not any(rank.failed_steps for rank in world.alive_ranks())
    done = Counter(what for _, whats in history for what in whats)
    assert all(count == 1 for count in done.values())
    if victim.dead:
        assert [h for h in history if h[0] <= victim.steps] == victim.action_history
    else:
        assert set(done) == {what for _, what in world.proposed}
    return victim.dead


@pytest.mark.slow
def test_a_rank_that_dies_at_any_call_is_missed_and_nobody_raises(lost: list[str]) -> None:
    for seed in range(4):
        at = 1
        while dying(seed, at):
            at += 1
        assert at > 15
    assert lost


def without_store(seed: int, at: int) -> tuple[bool, bool]:
    """The store dies at a call. Whether it came to that, and whether a rank has raised."""
    world = World(3, seed)
    first = sum(rank.calls for rank in world.ranks)
    real = world.interleave

    def meanwhile() -> None:
        if sum(rank.calls for rank in world.ranks) >= first + at:
            world.store_dead = True
        real()

    world.interleave = meanwhile  # type: ignore[method-assign]
    proposals(world, 3, 12)
    world.run(60)
    world.interleave_probability = 0
    for _ in range(3):
        world.run_to_step(max(rank.steps for rank in world.alive_ranks()) + 50)
    assert not any(rank.agreement.would_block() for rank in world.ranks)
    if not world.store_dead:
        return False, False
    assert len({rank.steps for rank in world.ranks}) == 1
    for rank in world.ranks:
        assert len(rank.failed_steps) <= 1
        for other in world.ranks:  # whoever has not acted with the others has raised there
            for step, whats in other.action_history:
                assert (step, whats) in rank.action_history or rank.failed_steps == [step], (
                    seed,
                    at,
                )
    return True, any(rank.failed_steps for rank in world.ranks)


@pytest.mark.slow
def test_where_the_store_dies_a_rank_acts_with_the_others_or_raises_once(lost: list[str]) -> None:
    raised = 0
    for seed in range(4):
        at = 1
        while (outcome := without_store(seed, at))[0]:
            raised += outcome[1]
            at += 1
        assert at > 40
    assert raised > 10
    assert lost


def cut_off(seed: int, at: int) -> tuple[bool, bool]:
    """A rank loses its connection at a call. Whether it came to that, and whether it has raised."""
    world = World(3, seed)
    victim = world.ranks[seed % 3]
    victim.disconnects_at_call = victim.calls + at
    proposals(world, 3, 12)
    world.run(60)
    world.interleave_probability = 0
    for _ in range(100):
        world.run_to_step(max(rank.steps for rank in world.ranks) + 50)
        if not any(rank.agreement.is_pending() for rank in world.ranks if rank is not victim):
            break
        world.advance_time(5)
    world.run_to_step(max(rank.steps for rank in world.ranks) + 50)
    assert len({rank.steps for rank in world.ranks}) == 1
    one, two = (rank for rank in world.ranks if rank is not victim)
    assert one.action_history == two.action_history
    assert not one.failed_steps
    assert not two.failed_steps
    assert len(victim.failed_steps) <= 1
    for entry in one.action_history:
        assert entry in victim.action_history or victim.failed_steps == [entry[0]], (seed, at)
    assert all(entry in one.action_history for entry in victim.action_history)
    return victim.calls >= victim.disconnects_at_call, bool(victim.failed_steps)


@pytest.mark.slow
def test_a_rank_that_is_cut_off_acts_with_the_others_or_raises_once(lost: list[str]) -> None:
    raised = 0
    for seed in range(4):
        at = 1
        while (outcome := cut_off(seed, at))[0]:
            raised += outcome[1]
            at += 1
        assert at > 15
    assert raised > 4


@pytest.mark.parametrize("seed", range(100))
def test_who_asks_again_and_again_gets_it_after_each_asking(seed: int, lost: list[str]) -> None:
    world = World(SIZES[seed % 3], seed)
    asked: list[tuple[int, str, int]] = []
    for _ in range(world.random.randint(1, 25)):
        world.run(world.random.randint(0, 12))
        rank, what = world.random.choice(world.ranks), world.random.choice("ab")
        asked.append((rank.number, what, len(rank.action_history)))
        world.propose(rank, what)
    world.run_until_idle()
    history = same(world)
    for number, what, before in asked:
        assert any(what in whats for _, whats in history[before:]), (number, what, before)
    done = Counter(what for _, whats in history for what in whats)
    for what, count in done.items():
        assert count <= sum(a[1] == what for a in asked)
    assert not lost
    assert world.leftover_keys() == []


def test_what_is_wanted_at_the_same_time_is_done_at_the_same_step() -> None:
    world = World(3, 1)
    world.interleave_probability = 0
    for rank in world.ranks:
        world.propose(rank, f"p{rank.number}")
        rank.poll()
    world.run_until_idle()
    assert [whats for _, whats in same(world)] == [{"p0", "p1", "p2"}]


def test_what_waits_already_is_asked_for_once() -> None:
    world = World(2, 1)
    world.interleave_probability = 0
    for _ in range(100):
        world.propose(world.ranks[0], "save")
        world.propose(world.ranks[1], "save")
        world.ranks[0].agreement._wait_for_proposals(0)
    world.run_until_idle()
    assert [whats for _, whats in same(world)] == [{"save"}]
    world.propose(world.ranks[1], "save")  # after it was done it is another one
    world.run_until_idle()
    assert [whats for _, whats in same(world)] == [{"save"}, {"save"}]


def test_what_is_asked_for_while_it_is_due_is_met_by_that() -> None:
    world = World(2, 1)
    world.interleave_probability = 0
    world.propose(world.ranks[0], "save")
    for _ in range(20):
        for rank in world.ranks:
            rank.poll()
    assert all(rank.agreement._gate._granted for rank in world.ranks)
    for rank in world.ranks:
        world.propose(rank, "save")
        rank.poll()
    world.run_until_idle()
    assert [whats for _, whats in same(world)] == [{"save"}]
