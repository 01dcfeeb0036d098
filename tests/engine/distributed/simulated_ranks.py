"""Ranks that agree, one action after the other in an order drawn by chance: no threads, no time.

Between any two calls of one rank's watcher to the store, the other watchers and all trainings may
do anything, so what is drawn includes delays at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from holdfast.engine.distributed.agreement import Agreement
from holdfast.engine.distributed.group import Ranks
from holdfast.engine.distributed.kv import Board, Patience
from holdfast.errors import RankFailed
from holdfast.testing.fakegroup import FakeStore

PATIENCE = Patience(silent=60, stuck=600)


class Direct(Board):
    """A board whose store is asked by who asks, in no other thread."""

    def _ask(self, do: Callable[[], Any]) -> Any:
        if self._broken is None:
            try:
                return do()
            except Exception as e:
                self._broken = e
        raise self._unanswered() from self._broken

    def start(self) -> None: ...

    def beat(self) -> None:
        try:
            if self._broken is None:
                self._beat()
        except Exception as e:
            self._broken = e


class Driven(Agreement):
    """An agreement whose watcher acts when it is told to."""

    def _watch(self) -> None: ...

    def turn(self) -> None:
        rounds = self._rounds
        if rounds.over is not None:
            return
        try:
            self._hear(0)
            rounds.turn()
        except Exception as e:
            rounds.break_off(e)

    def waits(self) -> bool:
        """Whether something is wanted, on its way, or agreed for a later step."""
        rounds, gate = self._rounds, self._gate
        return bool(rounds.wanted or gate._due or rounds._acked or not self._asked.empty())

    def held(self) -> bool:
        """Whether ``step`` would wait."""
        return not self._gate._settled(self._gate.at + 1)


class Wire:
    """The store as a rank sees it. Where the store dies, the last answer may be lost, or the
    question."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._rank.world.store, name)

        def do(*given: Any) -> Any:
            self._rank.before()
            made = call(*given)
            self._rank.after()
            self._rank.cut_off()
            return made

        return do


class Rank:
    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.view = Wire(self)
        self.board = Direct(self.view, number, world.size, PATIENCE, lambda: world.now)
        self.agreement = Driven(Ranks(self.board, world.size), "run")
        self.agreement._thread.join()
        self.history: list[tuple[int, frozenset[str]]] = []
        self.raised: list[int] = []
        self.steps = 0
        self.calls = 0
        self.dead = False
        self.closed = False
        self.dies_at = -1
        self.cut_off_at = -1
        self.turning = False

    def before(self) -> None:
        self.calls += 1
        if self.dies_at == self.calls:
            self.dead = True
        self.after()

    def after(self) -> None:
        if not self.dead and not self.world.store_dead:
            self.world.meanwhile()
        if self.dead or self.world.store_dead:
            raise ConnectionError("killed by a test")

    def cut_off(self) -> None:
        """Its connection is lost, and the last answer with it; its training goes on."""
        if -1 < self.cut_off_at <= self.calls:
            raise ConnectionError("cut off by a test")

    def step(self, last: int = 10**9) -> bool:
        """One step of the training, if it is not held up, and not at its end."""
        if self.dead or self.closed or self.steps >= last or self.agreement.held():
            return False
        self.steps += 1
        try:
            whats = self.agreement.step()
        except RankFailed:
            self.raised.append(self.steps)
        else:
            if whats:
                self.history.append((self.steps, whats))
        return True

    def turn(self) -> None:
        if not self.dead and not self.turning:
            self.turning = True
            self.agreement.turn()
            self.turning = False

    def close(self) -> None:
        self.closed = True
        self.agreement.close()


class World:
    """``size`` ranks and their store."""

    def __init__(self, size: int, seed: int) -> None:
        self.random = Random(seed)
        self.size = size
        self.now = 1000.0
        self.store = FakeStore()
        self.store_dead = False
        self.last = 10**9
        self.depth = 0
        self.ranks: list[Rank] = []
        self.ranks = [Rank(self, number) for number in range(size)]
        self.speed = [self.random.choice((1, 1, 5, 30)) for _ in range(size)]
        self.proposed: list[tuple[int, str]] = []
        self.chance = 0.4

    def living(self) -> list[Rank]:
        return [rank for rank in self.ranks if not rank.dead]

    def propose(self, rank: Rank, what: str) -> None:
        rank.agreement.propose(what)
        self.proposed.append((rank.number, what))

    def act(self) -> None:
        """One action of one rank, whichever; a fast one makes many steps."""
        rank = self.random.choice(self.ranks)
        if self.random.random() < 0.5:
            for _ in range(self.random.randint(1, self.speed[rank.number])):
                rank.step(self.last)
        else:
            rank.turn()

    def meanwhile(self) -> None:
        """What others do while one waits for the store."""
        if self.depth < 3:
            self.depth += 1
            while self.random.random() < self.chance:
                self.act()
            self.depth -= 1

    def run(self, actions: int) -> None:
        for _ in range(actions):
            self.act()

    def wait(self, seconds: float) -> None:
        """Let time pass, in which those who live leave pulses and look at the store."""
        until = self.now + seconds
        while self.now < until:
            self.now += 5
            for rank in self.living():
                if not self.store_dead:
                    rank.board.beat()
                rank.turn()

    def settle(self) -> None:
        """Everyone goes on until nothing is waited for any more, to the same step."""
        self.chance = 0
        for _ in range(1000):
            self.finish(max(rank.steps for rank in self.living()) + 20)
            if not any(rank.agreement.waits() for rank in self.living()):
                return
        raise AssertionError("they never come to an end")

    def finish(self, last: int) -> None:
        """Everyone comes to step ``last``, or as far as it can without time going on."""
        idle = 0
        while idle < 5:
            moved = False
            for rank in self.living():
                while rank.step(last):
                    moved = True
                rank.turn()
            idle = 0 if moved else idle + 1

    def notes(self) -> list[str]:
        """What is left in the store, besides pulses."""
        return [key for key in self.store.values if not key.startswith("pulse/")]
