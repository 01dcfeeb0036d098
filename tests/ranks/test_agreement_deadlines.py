"""Agreements that must end by a deadline, and errors that one rank publishes to all."""

import pytest

from limpet.errors import RankFailed
from limpet.ranks.error_report import decode_raised, encode_raised
from tests.ranks.simulated_ranks import World

LEAVE = "leave"


def failed_actions(world, rank):
    return {a for actions, _ in world.ranks[rank].observed.failures for a in actions}


@pytest.mark.parametrize("seed", range(60))
def test_all_ranks_learn_the_deadline_and_act_at_one_step(seed):
    world = World((2, 3, 5)[seed % 3], seed)
    world.run(world.random.randint(0, 40))
    world.propose(world.random.choice(world.ranks), "cadence")
    world.run(world.random.randint(0, 6))
    world.propose(world.random.choice(world.ranks), LEAVE, 30.0, "SIGTERM")
    world.run_until_idle()
    first, *others = world.ranks
    assert all(rank.action_history == first.action_history for rank in others)
    assert {a for _, actions in first.action_history for a in actions} == {"cadence", LEAVE}
    for rank in world.ranks:
        (deadline,) = rank.observed.deadlines
        assert deadline == (world.now + 30, "SIGTERM")
        assert rank.observed.failures == []
    assert world.leftover_keys() == []


@pytest.mark.parametrize("stopped", range(3))
@pytest.mark.parametrize("noticed", range(3))
@pytest.mark.parametrize("left", [30.0, 8.0, 120.0])
def test_with_a_stopped_rank_the_others_go_on_within_a_third_of_the_time(stopped, noticed, left):
    """Without a deadline, they would wait for a minute, and at the gate for up to 840 s."""
    if stopped == noticed:
        return
    world = World(3, 7)
    world.interleave_probability = 0
    world.run(10)
    world.ranks[stopped].stopped = True
    began = world.now
    world.propose(world.ranks[noticed], LEAVE, left, "SIGTERM")
    alive = [rank for rank in world.ranks if rank.number != stopped]
    while not all(rank.observed.failures for rank in alive):
        world.advance_time(left / 100, left / 100)
        for rank in alive:
            while rank.step(200):
                pass
        assert world.now - began < left / 3
    assert all(failed_actions(world, rank.number) == {LEAVE} for rank in alive)
    for rank in alive:
        _, error = rank.observed.failures[0]
        assert error.rank == stopped
        assert f"Rank {stopped}" in str(error)
        assert "SIGTERM" in str(error)
        assert rank.steps == 200  # the gate holds nobody


def test_a_rank_that_acknowledged_last_and_died_does_not_stop_the_others():
    """All have acknowledged, but nobody has ended the round: rank 0 does."""
    world = World(2, 3)
    world.interleave_probability = 0
    world.propose(world.ranks[0], LEAVE, 30.0, "SIGTERM")
    world.ranks[0].poll()
    world.ranks[0].poll()
    victim = world.ranks[1]
    original = victim.kv.increment

    def die_after(key):
        count = original(key)
        victim.dead = True
        return count

    victim.kv.increment = die_after
    victim.poll()
    while not world.ranks[0].action_history:
        world.advance_time(0.5, 0.5)
        world.ranks[0].step()
        assert world.now < 1012
    assert [actions for _, actions in world.ranks[0].action_history] == [{LEAVE}]


def error_of(rank):
    try:
        raise ValueError(f"bad batch {rank}")
    except ValueError as e:
        return e


@pytest.mark.parametrize("seed", range(40))
def test_an_error_of_one_rank_reaches_all_others_once(seed):
    world = World((2, 3, 5)[seed % 3], seed)
    world.run(world.random.randint(0, 30))
    if seed % 2:
        world.propose(world.random.choice(world.ranks), LEAVE, 30.0, "SIGTERM")
        world.run(world.random.randint(0, 6))
    failed = world.random.choice(world.ranks)
    error = error_of(failed.number)
    assert failed.agreement.publish_error(error) is None
    report = encode_raised(error, failed.number)
    failed.closed = True
    world.run(200)
    world.run_to_step(max(rank.steps for rank in world.ranks) + 5)
    for rank in world.ranks:
        assert rank.observed.errors == ([] if rank is failed else [report])
        assert rank.agreement._participant.closed_error is not None
    assert world.leftover_keys() == []


class OwnError(Exception):
    """An error whose constructor takes two arguments."""

    def __init__(self, code, what):
        super().__init__(code, what)
        self.code = code


class Unlike(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("name"),
        FileNotFoundError(2, "No such file"),
        ZeroDivisionError(),
        OwnError(3, "three"),
        RuntimeError("two", 2, None, 2.5, True),
    ],
    ids=repr,
)
def test_an_error_is_raised_with_its_class_and_message(error):
    decoded = decode_raised(encode_raised(error, 3))
    assert type(decoded) is type(error)
    assert str(decoded) == str(error)
    assert decoded.args == error.args
    (note,) = decoded.__notes__
    assert note.startswith("Raised on rank 3, whose traceback is:\n")
    assert type(error).__name__ in note


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(2), Unlike(4), ValueError(object()), GeneratorExit()]
)
def test_what_cannot_be_raised_elsewhere_becomes_rank_failed(error):
    decoded = decode_raised(encode_raised(error, 1))
    assert isinstance(decoded, RankFailed)
    assert decoded.rank == 1
    assert type(error).__name__ in str(decoded)


def test_no_class_is_imported_for_a_report():
    report = encode_raised(ValueError("x"), 0).replace("builtins", "tests.not_imported")
    assert isinstance(decode_raised(report), RankFailed)
