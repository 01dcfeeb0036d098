"""The protocol of pushes, commits, and marks, in random orders with losses, duplicates, and delays.

Messages between two parties arrive in any order, but a worker sends the next one after the answer.
"""

import itertools
import random
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from limpet import tables
from limpet.tables.coordinator import Coordinator, Synchronous
from limpet.tables.ids import bucket_of
from limpet.tables.messages import Batch, Commit, Entry, NextBatch, Push, Rates, Sender
from limpet.tables.server import StaleMessage, TableServer
from limpet.tables.worker import Worker
from tests.tables.trainings import keep_views_at_their_limit

WORDS = tables.Table(
    "words", 1, optimizer=tables.SGD(lr=1.0), initializer=tables.Constant(0.0), dtype=torch.float32
)
RATES = Rates({"words": 1.0})


def consumed_once(reports):
    return None


class Model:
    """Workers as state machines, and a network that delays, repeats, and loses messages."""

    def __init__(self, seed, staleness=None, *, loses_servers=False):
        self.loses_servers = loses_servers
        self.random = r = random.Random(seed)
        count = r.randint(1, 4)
        bounds = [4096 * i // count for i in range(count + 1)]
        self.servers = [TableServer([WORDS], range(a, b)) for a, b in itertools.pairwise(bounds)]
        # an id of each server: what it counts is the number of pushes that it has applied
        ids = np.arange(20_000)
        buckets = bucket_of(ids)
        self.ids = [
            int(ids[(buckets >= a) & (buckets < b)][0]) for a, b in itertools.pairwise(bounds)
        ]
        self.coordinator = Coordinator(lambda: RATES, staleness)
        self.coordinator.queue = SimpleNamespace(report_consumed=consumed_once)
        self.workers, self.lost, self.network, self.cuts = {}, [], [], []
        self.untold, self.held, self.refused = {}, [], 0
        self.expected = {}
        self.missing = [0] * count  # the pushes that each server has lost
        self.version, self.version_missing = 0, [0] * count  # the step of the last cut, and then
        for server in self.servers:
            server.restart(0, 0)
        for _ in range(r.randint(1, 5)):
            self.add_worker()

    def add_worker(self):
        name = f"worker {len(self.workers) + len(self.lost)}"
        self.coordinator.join(name)
        self.workers[name] = SimpleNamespace(
            name=name, number=1, committed=0, entry=None, phase="push", acknowledged=set()
        )

    def sender(self, worker):
        generation = self.coordinator.generation
        return Sender(generation, worker.name, worker.committed, worker.entry)

    def push(self, server, sender, number):
        gradient = torch.tensor([[-1.0]])
        rows = {"words": (np.array([self.ids[server]]), gradient)}
        return self.servers[server].push(sender, number, Push(rows, {}, {}))

    def deliver(self, message):
        kind, server, arguments, worker = message
        try:
            if kind == "push":
                if not self.push(server, *arguments):
                    self.refused += 1
                    self.network.append(message)
                elif (
                    worker is not None and worker.phase == "wait" and arguments[1] == worker.number
                ):
                    worker.acknowledged.add(server)
            elif kind == "pull":
                self.servers[server].pull(*arguments)
            else:
                self.servers[server].lose(*arguments)
                if worker is not None:
                    self.untold[worker] -= 1
                    if not self.untold[worker]:  # all have answered
                        self.coordinator.forget(worker)
        except StaleMessage:
            generation = arguments[0] if kind == "lose" else arguments[0].generation
            if generation == self.coordinator.generation:
                assert kind != "lose"
                assert arguments[0].worker in self.lost

    def cut(self):
        """A mark reaches the servers at different moments, between other messages."""
        mark = self.coordinator.mark()
        expected = Counter({name: entry.step for name, entry in mark.ledger.items()})
        self.expected[mark.epoch] = (self.coordinator.step, expected)
        self.cuts.append((mark, list(range(len(self.servers)))))

    def mark_one(self):
        mark, left = self.cuts[0]
        server = left.pop(self.random.randrange(len(left)))
        if self.random.random() < 0.5:
            self.servers[server].hold(mark)
            self.servers[server].hold(mark)  # it comes twice
            self.held.append((server, mark.epoch))
        else:
            with self.servers[server].at_mark(mark):
                assert self.pushes(server) == self.expected[mark.epoch][0]
            with self.servers[server].at_mark(mark):  # it comes twice
                pass
        if not left:
            self.cuts.pop(0)
            self.version, self.version_missing = mark.step, [*self.missing]

    def pushes(self, server, cut=""):
        """How many pushes a server has applied, or has lost."""
        value = self.servers[server].pull(None, "words", np.array([self.ids[server]]), cut)
        return int(value[0, 0]) + self.missing[server]

    def lose_servers(self):
        """Some servers return to the last cut; the others apply all commits."""
        mark, lost = self.coordinator.mark(), {self.random.randrange(len(self.servers))}
        lost |= {n for n in range(len(self.servers)) if self.random.random() < 0.2}
        for n, server in enumerate(self.servers):
            if n in lost:
                self.servers[n] = TableServer([WORDS], server.buckets)
                value = [[self.version - self.version_missing[n]]]
                ids = np.array([self.ids[n]])
                self.servers[n].fill("words", ids, torch.tensor(value).float(), 0)
                self.missing[n] = mark.step - value[0][0]
            else:
                server.mark(mark)
            assert self.pushes(n) == mark.step
        self.coordinator.restart(mark.step)
        for server in self.servers:
            server.restart(self.coordinator.generation, self.coordinator.epoch)
        for worker in list(self.workers):
            self.lost.append(worker)
            self.workers.pop(worker)
            self.add_worker()
        self.held, self.cuts = [], []

    def evaluate_one(self):
        """Read a cut that is held, and maybe release it."""
        server, epoch = held = self.random.choice(self.held)
        assert self.pushes(server, str(epoch)) == self.expected[epoch][0]
        if self.random.random() < 0.3:
            self.servers[server].release(str(epoch))
            self.held.remove(held)

    def act(self, worker):
        if worker.phase == "push":
            for server in range(len(self.servers)):
                message = ("push", server, (self.sender(worker), worker.number), worker)
                self.network.append(message)
            worker.phase, worker.acknowledged = "wait", set()
        elif worker.phase == "wait" and len(worker.acknowledged) == len(self.servers):
            request = Commit(worker.name, worker.number, [])
            answer = self.coordinator.commit(request)
            if self.random.random() < 0.2:
                again = self.coordinator.commit(request)
                assert answer in ("stale", again)
                answer = again if isinstance(again, Entry) else answer
            if isinstance(answer, Entry):
                worker.committed, worker.entry = worker.number, answer
            worker.number, worker.phase = worker.number + 1, "pull"
        elif worker.phase == "pull":
            for server in range(len(self.servers)):
                if self.random.random() < 0.5:
                    arguments = (self.sender(worker), "words", np.array([], np.int64))
                    self.network.append(("pull", server, arguments, None))
            worker.phase = "push"

    def lose(self):
        name = self.random.choice(sorted(self.workers))
        worker = self.workers.pop(name)
        self.lost.append(name)
        kept = self.random.random()
        mine = [m for m in self.network if m[3] is worker and self.random.random() > kept]
        self.network = [m for m in self.network if all(m is not lost for lost in mine)]
        committed, entry = self.coordinator.lose(name)
        self.untold[name] = len(self.servers)
        for server in range(len(self.servers)):
            arguments = self.coordinator.generation, name, committed, entry
            self.network.append(("lose", server, arguments, name))
        self.add_worker()

    def run(self, actions):
        for _ in range(actions):
            chance = self.random.random()
            if self.held and self.random.random() < 0.1:
                self.evaluate_one()
            if self.loses_servers and self.random.random() < 0.01:
                self.lose_servers()
            if chance < 0.45 and self.network:
                message = self.network.pop(self.random.randrange(len(self.network)))
                self.deliver(message)
                if self.random.random() < 0.1:
                    late = (*message[:3], None)
                    self.network.append(late)  # the same message again, later
            elif chance < 0.85:
                self.act(self.random.choice(list(self.workers.values())))
            elif chance < 0.92 and self.cuts:
                self.mark_one()
            elif chance < 0.97 and not self.cuts:
                self.cut()
            elif len(self.workers) > 1:
                self.lose()
        while self.held:
            self.evaluate_one()
        while self.network:
            self.deliver(self.network.pop())
        while self.cuts:
            self.mark_one()
        self.cut()
        while self.cuts:
            self.mark_one()
        while self.held:
            self.evaluate_one()
        return self.coordinator


@pytest.mark.parametrize("seed", range(60))
def test_each_cut_is_the_ledger_on_every_server(seed):
    """Each push adds 1 to a row of each server: so at a mark, each row is the number of commits,
    and stays so at a cut that is held."""
    model = Model(seed)
    coordinator = model.run(800)
    assert coordinator.step > 1
    assert not any(server.shards["words"].rows._cuts for server in model.servers)


def test_no_push_is_held_while_old_rows_are_at_their_limit(monkeypatch):
    keep_views_at_their_limit(monkeypatch)
    models = [Model(seed) for seed in range(10)]
    assert sum(model.run(800).step for model in models) > 100
    assert sum(model.refused for model in models) > 100


@pytest.mark.parametrize("seed", range(20))
def test_a_refused_push_has_no_effect(seed):
    model = Model(seed, staleness=2)
    model.run(800)


@pytest.mark.parametrize("seed", range(30))
def test_after_a_loss_the_other_servers_have_all_commits_once(seed):
    model = Model(seed, loses_servers=True)
    assert model.run(800).generation > 0


def test_without_a_mark_servers_lose_commits_with_another_one(monkeypatch):
    """The test can fail."""
    monkeypatch.setattr(TableServer, "mark", lambda self, mark: None)
    with pytest.raises(AssertionError):
        for seed in range(30):
            Model(seed, loses_servers=True).run(800)


def test_without_epochs_a_cut_contains_more_than_its_ledger(monkeypatch):
    """The test can fail: without the rule of epochs, it does."""
    monkeypatch.setattr(
        TableServer, "_commit", lambda self, worker, entry: self._apply(worker, entry)
    )
    with pytest.raises(AssertionError):
        for seed in range(60):
            Model(seed).run(800)


def test_the_rates_of_a_push_are_divided_by_the_steps_of_others_since():
    """B 29."""
    coordinator = Coordinator(lambda: Rates({"words": 0.6}, [0.3]), scaled=True)
    coordinator.queue = SimpleNamespace(report_consumed=consumed_once)
    coordinator.join("a")
    coordinator.join("b")
    for number in (1, 2, 3):
        entry = coordinator.commit(Commit("a", number, []))
        assert entry.rates == Rates({"words": 0.6}, [0.3])
    entry = coordinator.commit(Commit("b", 1, []))
    assert entry.step == 4
    assert entry.rates == Rates({"words": 0.6 / 3}, [0.3 / 3])


def test_a_push_that_is_too_stale_is_refused():
    """B 25: then, its worker is up to date."""
    coordinator = Coordinator(lambda: RATES, staleness=1)
    coordinator.queue = SimpleNamespace(report_consumed=consumed_once)
    for worker in "ab":
        coordinator.join(worker)
    for number in (1, 2):
        coordinator.commit(Commit("a", number, []))
    assert coordinator.commit(Commit("b", 1, [])) == "stale"
    assert coordinator.commit(Commit("b", 2, [])).step == 3


def test_a_worker_that_waits_asks_less_and_less_often(monkeypatch):
    """With many workers, each of which sends its whole push again. A new step begins anew."""
    waits, refused = [], [True] * 40
    monkeypatch.setattr(time, "sleep", waits.append)

    def call(method, arguments):
        if method == "push":
            return {0: not (refused and refused.pop())}
        return {0: (0, {})}

    worker = Worker(
        "worker 1",
        [],
        [0],
        call=call,
        ask=lambda request: Entry(request.number, 0, 1, Rates({})),
        queue=SimpleNamespace(evaluation=None),
        generation=1,
        seed=0,
    )
    for _ in range(2):
        assert worker.step()
        refused[:] = [True] * 40
    assert len(waits) == 80
    assert waits[:40] == waits[40:]
    assert waits[0] == 0.005
    assert waits == sorted(waits[:40]) * 2
    assert max(waits) == 0.1
    assert all(after <= 1.3 * before for before, after in itertools.pairwise(waits[:40]))


def test_a_worker_that_leaves_out_a_step_gets_its_mini_batch_again_also_after_a_loss():
    coordinator = Synchronous(lambda: RATES, 3)
    coordinator._round = {n: Batch(n, []) for n in range(3)}
    coordinator._batch_size = 1

    def ask(worker):
        answer = coordinator.next_batch(NextBatch(worker, 1))
        return answer.number if isinstance(answer, Batch) else answer

    assert [ask("a"), ask("b"), ask("a"), ask("b")] == [0, 1, 0, 1]
    coordinator.lose("a")
    assert [ask("b"), ask("c"), ask("d"), ask("e")] == [1, 0, 2, "wait"]


def test_a_fill_waits_for_the_old_rows_of_its_own_table_only(monkeypatch):
    keep_views_at_their_limit(monkeypatch)
    others = tables.Table("others", 1, optimizer=tables.SGD(lr=1.0))
    server = TableServer([WORDS, others], range(4096))
    ids, vectors = np.arange(10), torch.ones(10, 1)
    server.fill("words", ids, vectors, 0)
    cut = server.shards["words"].rows.begin_view()
    server.fill("words", ids, vectors * 2, 0)
    assert server.shards["words"].rows.must_wait
    filling = threading.Thread(target=server.fill, args=("others", ids, vectors, 0), daemon=True)
    filling.start()
    filling.join(30)
    assert not filling.is_alive()
    cut.end()
