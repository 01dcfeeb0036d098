"""The vote of the live ranks on the step whose savepoints they save."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from limpet.errors import RankFailed
from limpet.ranks.collective import LocalCollective
from limpet.ranks.group import LocalGroup, StoreGroup
from limpet.ranks.kv import CLOSED_HEARTBEAT
from limpet.training.live_ranks import Decision, SavepointVote, Voter, VoteTimes
from tests.fakegroup import FakeGroup

NAME = "1/savepoint"


class Training:
    """A rank whose training makes steps unless its savepoint is held.

    ``is_valid`` is False while there is no valid savepoint, as during an EMA swap.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_held = False
        self.is_valid = True
        self.is_saving = self.has_ended = False
        self._lock = threading.Lock()

    def hold(self) -> int | None:
        with self._lock:
            if not self.is_valid:
                return None
            self.is_held = True
            return self.step

    def release(self) -> None:
        with self._lock:
            self.is_held = False

    def try_step(self) -> bool:
        with self._lock:
            if not self.is_held:
                self.step += 1
            return not self.is_held

    @property
    def voter(self) -> Voter:
        return Voter(self.hold, self.release, lambda: self.is_saving, lambda: self.has_ended)


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with FakeGroup(4) as group:
        yield group


def times(respond: float = 0.6, vote: float = 1.5, end: float = 4.0) -> VoteTimes:
    now = time.monotonic()
    return VoteTimes(now + respond, now + end, now + vote, now + end)


def vote(
    group: FakeGroup, trainings: dict[int, Training], limits: VoteTimes | None = None
) -> dict[int, Decision | None]:
    """Let the ranks of ``trainings`` vote."""
    limits = times() if limits is None else limits

    def run(rank: int) -> Decision | None:
        if rank not in trainings:
            return None
        member = SavepointVote(group.groups[rank], NAME)
        return member.run(trainings[rank].voter, limits, lambda: False)

    found = group.run(run)
    return {rank: found[rank] for rank in trainings}


def test_all_ranks_at_one_step_decide_at_once(group: FakeGroup) -> None:
    trainings = {rank: Training(5) for rank in range(4)}
    began = time.monotonic()
    found = vote(group, trainings)
    assert set(found.values()) == {Decision(0, 5, (0, 1, 2, 3))}
    assert time.monotonic() - began < 0.6
    assert all(t.is_held for t in trainings.values())


@pytest.mark.parametrize("dead", [(0,), (2,), (0, 3), (0, 1, 2)])
def test_ranks_that_do_not_respond_are_left_out(group: FakeGroup, dead: tuple[int, ...]) -> None:
    live = tuple(r for r in range(4) if r not in dead)
    found = vote(group, {rank: Training(5) for rank in live})
    assert set(found.values()) == {Decision(0, 5, live)}


@pytest.mark.parametrize("last", [CLOSED_HEARTBEAT, b"-1 0 host"])
def test_ranks_whose_process_has_ended_are_left_out_at_once(group: FakeGroup, last: bytes) -> None:
    for rank in (1, 2):
        group.store.set(f"heartbeat/{rank}", last)
        group.groups[rank].kv.close = lambda: None  # type: ignore[method-assign]
    began = time.monotonic()
    found = vote(group, {0: Training(5), 3: Training(5)}, times(respond=10, vote=20, end=30))
    assert set(found.values()) == {Decision(0, 5, (0, 3))}
    assert time.monotonic() - began < 5


def test_a_rank_that_has_ended_without_a_savepoint_holds_up_nobody(group: FakeGroup) -> None:
    trainings = {rank: Training(5) for rank in range(4)}
    trainings[2].is_valid, trainings[2].has_ended = False, True
    began = time.monotonic()
    found = vote(group, trainings, times(respond=0.6, vote=20, end=30))
    assert found.pop(2) is None
    assert set(found.values()) == {Decision(0, 5, (0, 1, 3))}
    assert time.monotonic() - began < 5


def test_ranks_that_are_behind_reach_the_step_of_the_others(group: FakeGroup) -> None:
    trainings = {rank: Training(6 if rank == 2 else 5) for rank in range(4)}
    is_over = threading.Event()

    def train() -> None:
        while not is_over.wait(0.01):
            for training in trainings.values():
                if training.step < 6:
                    training.try_step()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        found = vote(group, trainings)
    finally:
        is_over.set()
        thread.join()
    (decision,) = set(found.values())
    assert decision is not None
    assert (decision.step, decision.ranks) == (6, (0, 1, 2, 3))
    assert all(t.step == 6 and t.is_held for t in trainings.values())


def test_of_many_ranks_only_a_few_read_all_votes() -> None:
    with FakeGroup(24) as group:
        reads = [0] * 24

        def count(rank: int, name: str, key: str) -> None:
            reads[rank] += name == "compare_set" and "/0/" in key

        for rank, view in enumerate(group.views):
            view.before = partial(count, rank)
        found = vote(group, {rank: Training(5) for rank in range(24)}, times(8.0, 9.0, 10.0))
        assert set(found.values()) == {Decision(0, 5, tuple(range(24)))}
        assert reads[4:] == [0] * 20


def test_a_rank_that_is_alive_is_awaited_until_it_has_a_savepoint(group: FakeGroup) -> None:
    trainings = {rank: Training(5) for rank in range(4)}
    trainings[1].is_valid = False
    timer = threading.Timer(1.0, setattr, [trainings[1], "is_valid", True])
    timer.start()
    found = vote(group, trainings, times(0.3, 3.0, 4.0))
    assert set(found.values()) == {Decision(0, 5, (0, 1, 2, 3))}


def test_a_rank_that_stays_without_a_savepoint_is_left_out_at_last(group: FakeGroup) -> None:
    trainings = {rank: Training(5) for rank in range(4)}
    trainings[1].is_valid = False
    found = vote(group, trainings, times(0.3, 1.0, 4.0))
    assert set(found.values()) == {Decision(0, 5, (0, 2, 3))}


def test_a_rank_that_comes_late_is_not_part_of_the_decision(group: FakeGroup) -> None:
    vote(group, {rank: Training(5) for rank in (0, 2, 3)})
    late = vote(group, {1: Training(5)})
    assert late == {1: Decision(0, 5, (0, 2, 3))}


def test_nobody_decides_while_all_ranks_are_in_a_save_of_all(group: FakeGroup) -> None:
    trainings = {rank: Training(5) for rank in range(4)}
    for training in trainings.values():
        training.is_saving = True
    assert set(vote(group, trainings, times(0.1, 0.3, 0.8)).values()) == {None}


def test_ranks_in_a_save_decide_if_one_is_dead(group: FakeGroup) -> None:
    trainings = {rank: Training(5) for rank in (0, 1, 3)}
    for training in trainings.values():
        training.is_saving = True
    assert set(vote(group, trainings).values()) == {Decision(0, 5, (0, 1, 3))}


@pytest.mark.parametrize("seed", range(8))
def test_there_is_one_decision_and_its_ranks_hold_its_step(group: FakeGroup, seed: int) -> None:
    """The trainings go on at random speeds, and each rank votes from a random moment on."""
    rng = random.Random(seed)
    trainings = {rank: Training(rng.randint(3, 5)) for rank in range(4)}
    dead = rng.choice([None, 0, 2])
    is_over = threading.Event()

    def train(training: Training, pauses: list[float]) -> None:
        for pause in pauses:
            if is_over.wait(pause):
                return
            if training.step <= min(t.step for t in trainings.values()):  # as in an all-reduce
                training.try_step()

    def delay(name: str, key: str) -> None:
        time.sleep(rng.random() * 0.002)

    for view in group.views:
        view.before = delay
    threads = [
        threading.Thread(target=train, args=(t, [rng.random() * 0.03 for _ in range(400)]))
        for t in trainings.values()
    ]
    for thread in threads:
        thread.start()
    try:
        found = vote(group, {r: t for r, t in trainings.items() if r != dead}, times(1.0, 2.0, 6.0))
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    (decision,) = set(found.values())
    if dead is None:
        assert decision is not None
    if decision is not None:
        for rank in decision.ranks:
            assert trainings[rank].is_held
            assert trainings[rank].step == decision.step


def test_a_store_that_is_gone_ends_the_vote(group: FakeGroup) -> None:
    for view in group.views:
        view.disconnect()
    with pytest.raises(RankFailed):
        vote(group, {0: Training(5)})


# -- the group of the live ranks -------------------------------------------------------------------


def run_subset(group: FakeGroup, ranks: tuple[int, ...], work: Callable[[Any], Any]) -> list[Any]:
    def run(rank: int) -> Any:
        if rank not in ranks:
            return None
        member = SavepointVote(group.groups[rank], NAME)
        return work(member.subgroup(Decision(0, 5, ranks)))

    return group.run(run)


def test_the_live_ranks_exchange_values_under_their_own_keys(group: FakeGroup) -> None:
    def work(subset: StoreGroup) -> list[int]:
        collective = subset.collective("a test")
        values = collective.gather(subset.ranks[subset.rank], int)
        result = collective.broadcast(values, list[int])
        collective.close()
        return result

    assert run_subset(group, (1, 3), work) == [None, [1, 3], None, [1, 3]]
    left = [k for k in group.store.values if not k.startswith("heartbeat/")]
    assert left == []


def test_one_live_rank_saves_alone_under_its_own_rank(group: FakeGroup) -> None:
    found = run_subset(group, (2,), lambda g: (type(g), g.ranks, type(g.collective("x"))))
    assert found[2] == (LocalGroup, (2,), LocalCollective)
