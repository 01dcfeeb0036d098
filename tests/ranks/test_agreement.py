"""Agreement on a step, in random orders of events, with ranks and stores that fail."""

from collections import Counter

import pytest

import limpet
from tests.ranks.simulated_ranks import World

SIZES = (2, 3, 5)


@pytest.fixture
def failed_proposals():
    """Collect the actions of failed proposals, from the event ``not_agreed``."""
    reported: list[str] = []

    def sink(name, fields):
        if name == "not_agreed":
            reported.extend(fields["wanted"])

    with limpet.attach(sink):
        yield reported


def assert_same_history(world):
    """Assert that all living ranks have the same history and number of steps, and return the
    history."""
    first, *others = world.alive_ranks()
    for rank in others:
        assert rank.action_history == first.action_history
        assert rank.steps == first.steps
    return first.action_history


@pytest.mark.parametrize("seed", range(150))
def test_all_ranks_perform_each_action_once_and_at_the_same_step(seed, failed_proposals):
    world = World(SIZES[seed % 3], seed)
    for n in range(world.random.randint(1, 8)):
        world.run(world.random.randint(0, 40))
        for _ in range(world.random.randint(1, 2)):
            world.propose(world.random.choice(world.ranks), f"{n}.{world.random.random()}")
    world.run(world.random.randint(0, 60))
    world.run_until_idle()
    history = assert_same_history(world)
    done = Counter(action for _, actions in history for action in actions)
    assert done == Counter(action for _, action in world.proposed)
    assert not failed_proposals
    assert world.leftover_keys() == []
    assert not any(rank.failed_steps for rank in world.ranks)


def propose_randomly(world, count, max_actions=40):
    for n in range(count):
        world.run(world.random.randint(0, max_actions))
        alive = [rank for rank in world.alive_ranks() if not rank.closed]
        if alive:
            world.propose(world.random.choice(alive), f"p{n}")


@pytest.mark.parametrize("seed", range(100))
def test_the_end_of_a_training_ends_all_rounds_without_errors(seed, failed_proposals):
    """All ranks make the same number of steps. Each closes its agreement after its last step."""
    world = World(SIZES[seed % 3], seed)
    world.last_step = world.random.randint(0, 60)
    propose_randomly(world, world.random.randint(1, 6), 30)
    order = world.random.sample(world.ranks, world.size)
    for rank in order:
        while rank.steps < world.last_step:
            world.run(1)
            world.advance_time(5)
        rank.close()
        world.run(world.random.randint(0, 20))
    world.advance_time(50)
    history = assert_same_history(world)
    done = Counter(action for _, actions in history for action in actions)
    assert all(count == 1 for count in done.values())
    assert set(done).union(failed_proposals) <= {action for _, action in world.proposed}
    assert all(rank.agreement._participant.closed_error is not None for rank in world.ranks)
    assert world.leftover_keys() == []
    assert not any(rank.failed_steps for rank in world.ranks)


def world_of_three(seed):
    world = World(3, seed)
    return world, world.ranks[seed % 3]


def run_and_settle(world, waiting=None):
    """Propose, and run until no living rank of ``waiting`` waits for anything."""
    propose_randomly(world, 3, 12)
    world.run(60)
    world.interleave_probability = 0
    for _ in range(100):
        world.run_to_step(max(rank.steps for rank in world.alive_ranks()) + 50)
        if not any(rank.agreement.is_pending() for rank in waiting or world.alive_ranks()):
            break
        world.advance_time(5)  # until the ranks detect the failure, in each of the rounds
    else:
        raise AssertionError("the ranks wait forever")
    world.run_to_step(max(rank.steps for rank in world.alive_ranks()) + 50)


def rank_dies(seed, at):
    """Let a rank die at its ``at``-th call to the store. No other rank raises."""
    world, victim = world_of_three(seed)
    victim.dies_at_call = victim.calls + at
    run_and_settle(world)
    history = assert_same_history(world)
    assert not any(rank.failed_steps for rank in world.alive_ranks())
    done = Counter(action for _, actions in history for action in actions)
    assert all(count == 1 for count in done.values())
    if victim.dead:
        assert [h for h in history if h[0] <= victim.steps] == victim.action_history
    else:
        assert set(done) == {action for _, action in world.proposed}
    return victim.dead, False


def store_dies(seed, at):
    """Let the store die at the ``at``-th call."""
    world, _ = world_of_three(seed)
    first = sum(rank.calls for rank in world.ranks)
    original = world.interleave

    def interleave():
        if sum(rank.calls for rank in world.ranks) >= first + at:
            world.store_dead = True
        original()

    world.interleave = interleave
    propose_randomly(world, 3, 12)
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
        for other in world.ranks:  # a rank that did not act with another raised at that step
            for entry in other.action_history:
                assert entry in rank.action_history or rank.failed_steps == [entry[0]], (seed, at)
    return True, any(rank.failed_steps for rank in world.ranks)


def rank_disconnects(seed, at):
    """Let a rank lose its connection at its ``at``-th call."""
    world, victim = world_of_three(seed)
    victim.disconnects_at_call = victim.calls + at
    one, two = (rank for rank in world.ranks if rank is not victim)
    run_and_settle(world, [one, two])
    assert len({rank.steps for rank in world.ranks}) == 1
    assert one.action_history == two.action_history
    assert one.failed_steps == two.failed_steps == []
    assert len(victim.failed_steps) <= 1
    for entry in one.action_history:
        assert entry in victim.action_history or victim.failed_steps == [entry[0]], (seed, at)
    assert all(entry in one.action_history for entry in victim.action_history)
    return victim.calls >= victim.disconnects_at_call, bool(victim.failed_steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fail", "calls", "raised"),
    [(rank_dies, 15, 0), (store_dies, 40, 11), (rank_disconnects, 15, 5)],
)
def test_each_rank_acts_with_the_others_or_raises_once(failed_proposals, fail, calls, raised):
    """``fail`` returns whether there were so many calls, and whether a rank raised an error."""
    found = 0
    for seed in range(4):
        at = 1
        while (outcome := fail(seed, at))[0]:
            found += outcome[1]
            at += 1
        assert at > calls
    assert found >= raised
    assert failed_proposals or fail is rank_disconnects
