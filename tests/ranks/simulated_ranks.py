"""A simulation of ranks that agree, without threads and with a simulated clock.

The ranks take turns in a random order. Between any two calls of one rank's watcher to the store,
the other watchers and all trainings may act. So the random orders include delays at every call.
"""

from random import Random

from limpet.errors import RankFailed
from limpet.ranks.agreement import Agreement, RoundDeadline
from limpet.ranks.group import Group
from limpet.ranks.kv import KVClient, Timeouts
from tests.fakegroup import FakeStore

TIMEOUTS = Timeouts(silent=60, stuck=600)


class DirectKVClient(KVClient):
    """A key-value client that calls its store in the thread of the caller."""

    def _call(self, do):
        if self._error is None:
            try:
                return do()
            except Exception as e:
                self._error = e
        raise self._unresponsive_error() from self._error

    def start(self): ...

    def send_heartbeat(self):
        try:
            if self._error is None:
                self._send_heartbeat()
        except Exception as e:
            self._error = e


class ManualAgreement(Agreement):
    """An agreement whose watcher acts only when ``poll`` is called."""

    def _watch(self): ...

    def poll(self):
        rounds = self._participant
        if rounds.closed_error is not None:
            return
        try:
            self._wait_for_proposals(0)
            rounds.poll()
        except Exception as e:
            rounds.abort(e)

    def is_pending(self):
        """Return True if an action is proposed, in an open round, or agreed for a later step."""
        rounds, gate = self._participant, self._gate
        return bool(
            rounds.proposed
            or gate._granted
            or rounds._acked_attempts
            or not self._proposals.empty()
        )

    def would_block(self):
        """Return True if ``step`` would wait."""
        return not self._gate._is_resolved(self._gate.current_step + 1)


class FaultyStoreView:
    """A rank's view of the store. If the store dies, the last request or its answer may be lost."""

    def __init__(self, rank):
        self._rank = rank

    def __getattr__(self, name):
        call = getattr(self._rank.world.store, name)

        def do(*given):
            self._rank.before_call()
            made = call(*given)
            self._rank.after_call()
            self._rank.raise_if_disconnected()
            return made

        return do


class Observations:
    """Records what an agreement tells its observer."""

    def __init__(self):
        self.deadlines: list[RoundDeadline] = []
        self.failures: list[tuple[frozenset[str], RankFailed]] = []
        self.errors: list[str] = []

    def on_deadline(self, deadline):
        self.deadlines.append(deadline)

    def on_failure(self, actions, error):
        self.failures.append((actions, error))

    def on_error(self, report):
        self.errors.append(report)

    def on_raised(self): ...


class SimulatedRank:
    def __init__(self, world, number):
        self.world = world
        self.number = number
        self.store = FaultyStoreView(self)
        self.kv = DirectKVClient(self.store, number, world.size, TIMEOUTS, lambda: world.now)
        group = Group(self.kv, world.size)
        self.observed = Observations()
        self.agreement = ManualAgreement(group, "run", observer=self.observed)
        self.agreement._thread.join()
        self.action_history: list[tuple[int, frozenset[str]]] = []
        self.failed_steps: list[int] = []
        self.steps = 0
        self.calls = 0
        self.dead = False
        self.stopped = False
        self.closed = False
        self.dies_at_call = -1
        self.disconnects_at_call = -1
        self.is_polling = False

    def before_call(self):
        self.calls += 1
        if self.dies_at_call == self.calls:
            self.dead = True
        self.after_call()

    def after_call(self):
        if not self.dead and not self.world.store_dead:
            self.world.interleave()
        if self.dead or self.world.store_dead:
            raise ConnectionError("killed by a test")

    def raise_if_disconnected(self):
        """Simulate that the connection and the last answer are lost. The training continues."""
        if -1 < self.disconnects_at_call <= self.calls:
            raise ConnectionError("disconnected by a test")

    def step(self, last_step=10**9):
        """Make one training step, unless the training would wait or has ended."""
        if self.dead or self.stopped or self.closed or self.steps >= last_step:
            return False
        if self.agreement.would_block():
            return False
        self.steps += 1
        try:
            actions = self.agreement.step()
        except RankFailed:
            self.failed_steps.append(self.steps)
        else:
            if actions:
                self.action_history.append((self.steps, actions))
        return True

    def poll(self):
        if not self.dead and not self.stopped and not self.is_polling:
            self.is_polling = True
            self.agreement.poll()
            self.is_polling = False

    def close(self):
        self.closed = True
        self.agreement.close()


class World:
    """``size`` ranks and their store."""

    def __init__(self, size, seed):
        self.random = Random(seed)
        self.size = size
        self.now = 1000.0
        self.store = FakeStore()
        self.store_dead = False
        self.last_step = 10**9
        self.interleave_depth = 0
        self.ranks: list[SimulatedRank] = []
        self.ranks = [SimulatedRank(self, number) for number in range(size)]
        self.speed = [self.random.choice((1, 1, 5, 30)) for _ in range(size)]
        self.proposed: list[tuple[int, str]] = []
        self.interleave_probability = 0.4

    def alive_ranks(self):
        return [rank for rank in self.ranks if not rank.dead]

    def propose(self, rank, action, seconds=None, cause=""):
        rank.agreement.propose(action, seconds, cause)
        self.proposed.append((rank.number, action))

    def act_once(self):
        """Let a random rank act once. A fast rank makes many steps."""
        rank = self.random.choice(self.ranks)
        if self.random.random() < 0.5:
            for _ in range(self.random.randint(1, self.speed[rank.number])):
                rank.step(self.last_step)
        else:
            rank.poll()

    def interleave(self):
        """Let other ranks act while one rank waits for the store."""
        if self.interleave_depth < 3:
            self.interleave_depth += 1
            while self.random.random() < self.interleave_probability:
                self.act_once()
            self.interleave_depth -= 1

    def run(self, actions):
        for _ in range(actions):
            self.act_once()

    def advance_time(self, seconds, interval=5):
        """Advance the clock. The living ranks send heartbeats and poll the store."""
        until = self.now + seconds
        while self.now < until:
            self.now += interval
            for rank in self.alive_ranks():
                if not self.store_dead and not rank.stopped:
                    rank.kv.send_heartbeat()
                rank.poll()

    def run_until_idle(self):
        """Run all ranks to the same step, until no rank waits for anything."""
        self.interleave_probability = 0
        for _ in range(1000):
            self.run_to_step(max(rank.steps for rank in self.alive_ranks()) + 20)
            if not any(rank.agreement.is_pending() for rank in self.alive_ranks()):
                return
        raise AssertionError("the ranks never become idle")

    def run_to_step(self, last_step):
        """Run each rank to ``last_step``, or as far as it can get while the clock stands still."""
        idle = 0
        while idle < 5:
            moved = False
            for rank in self.alive_ranks():
                while rank.step(last_step):
                    moved = True
                rank.poll()
            idle = 0 if moved else idle + 1

    def leftover_keys(self):
        """Return the keys in the store, except heartbeats."""
        return [key for key in self.store.values if not key.startswith("heartbeat/")]
