"""``lost="buckets"``: only the buckets of a lost server return to the newest version.

The servers are those of Ray, but in threads of this process: a killed one answers no calls. All
gradients are 1, so that a row is a function of how often its record counts.
"""

import itertools
import pickle
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import limpet
from limpet import tables
from limpet.errors import FormatError, LimpetError, Unavailable
from limpet.saving import save as recipe
from limpet.storage.local.store import LocalStore
from limpet.tables import ray_engine
from limpet.tables.dense import distribute
from limpet.tables.ids import bucket_of
from limpet.tables.local import LocalEngine
from limpet.tasks import Queue
from tests.cli.invoke import run_cli
from tests.tables.contents import differing, live, saved
from tests.trainings import flip_bit

RECORDS, BATCH, EPOCHS = 120, 4, 2
STEPS = EPOCHS * RECORDS // BATCH
WORDS = tables.Table("words", 2, optimizer=tables.Adagrad(0.1), admit_after=2)
SEEN = tables.Table("seen", 1, optimizer=tables.SGD(1.0), initializer=tables.Constant(0.0))


class ActorLost(Exception):
    """As ``ray.exceptions.RayActorError``."""


class Silent(BaseException):
    """Ends the thread of a server that was killed."""


class Actor:
    """A server as an actor. A killed one executes no call, begins no save, and has no heartbeat."""

    def __init__(self, server):
        self.server, self.is_dead, self.ended = server, False, Future()
        self.is_replaced = threading.Event()
        self.call = SimpleNamespace(remote=self._call)
        self.serve = SimpleNamespace(remote=self._serve)

    def _call(self, method, message):
        result, error = None, None
        if not self.is_dead:
            try:
                result = self.server.call(method, message._value)._value
            except Exception as e:
                error = e

        def get():
            if self.is_dead:
                raise ActorLost
            if error is not None:
                raise error
            return result

        return get

    def _serve(self):
        self.ended = ended = Future()
        if self.is_dead:
            ended.set_exception(ActorLost())
            return SimpleNamespace(future=lambda: ended)

        def run():
            with suppress(LimpetError, Silent):
                self.server.serve()
            with suppress(Exception):  # it was killed
                ended.set_result(None)

        threading.Thread(target=run, daemon=True).start()
        return SimpleNamespace(future=lambda: ended)

    def kill(self):
        self.is_dead = True
        self.server._tables.begin_save = self.be_silent
        if (group := self.server._group) is not None:
            group.kv._send_heartbeat = lambda: None
        if not self.ended.done():
            self.ended.set_exception(ActorLost())

    def be_silent(self, *arguments):
        self.is_replaced.wait(60)
        raise Silent

    def replace(self):
        self.kill()
        self.is_replaced.set()


class Engine(ray_engine.RayEngine):
    """The engine of Ray, with servers and workers in threads."""

    prepare, start_worker, _run = LocalEngine.prepare, LocalEngine.start_worker, LocalEngine._run
    stop_worker, join = LocalEngine.stop_worker, LocalEngine.join

    def __init__(self, specs, count, dense, options):
        exceptions = SimpleNamespace(RayActorError=ActorLost, RayTaskError=())
        ray = {"get": lambda call: call(), "kill": Actor.replace, "is_initialized": lambda: True}
        self._ray = SimpleNamespace(exceptions=exceptions, **ray)
        self._host, self._setup = "127.0.0.1", pickle.dumps(([*specs], count, dense))
        self.servers, self.lost, self._group, self._joined = count, set(), None, 0
        self._actors = [self._start_server(number) for number in range(count)]

    def _start_server(self, number, *, replaces=False):
        return Actor(ray_engine.LimpetTableServer([], self._setup, number, replaces=replaces))

    def call(self, method, arguments):
        if threading.current_thread().name.startswith("limpet-worker"):
            return ray_engine.call_servers(self._ray, self._actors, method, arguments)
        return super().call(method, arguments)


@pytest.fixture(autouse=True)
def _engine(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(ray_engine, "RayEngine", Engine)
    monkeypatch.setattr(ray_engine, "await_start", lambda ray, actors: None)


def make_dense(gamma=0.5):
    model = torch.nn.ParameterList(torch.zeros(size) for size in (3, 2, 2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 16, gamma)


def train_ones(worker, then=lambda: None):
    model = make_dense()[0]
    worker.dense(model)
    bags = [tables.Embedding(worker.tables, name) for name in ("words", "seen")]
    while (records := worker.next(BATCH)) is not None:
        sum(bag(torch.tensor(records)).sum() for bag in bags).backward()
        sum(parameter.sum() for parameter in model.parameters()).backward()
        worker.step({"first": records[0]})
        then()


class Training:
    """``kills``: by step, the servers that are killed after it. ``first``: by step, its first
    record."""

    def __init__(
        self, url, kills, *, count=2, workers=1, every=7, lost="buckets", ray=None, **options
    ):
        self.queue, self.kills, self.workers = Queue(), dict(kills), workers
        self.queue.add("training", RECORDS, task_size=BATCH, epochs=EPOCHS, name="train")
        self.gamma = 0.5 if workers == 1 else 1.0  # servers apply commits of several in any order
        dense = partial(make_dense, self.gamma)
        more = {"engine": "ray", "ray": ray, "lost": lost, "dense": dense}
        self.servers, self.ray = tables.Servers([WORDS, SEEN], count, **more), ray
        self.url, self.first, self.events = url, {}, []
        self.state = {"tables": self.servers, "queue": self.queue}
        self.options = {"save": limpet.EverySteps(every), "incremental": True, **options}
        self.after = lambda step: None
        # after the steps of kills, no worker tells the servers what is committed
        self._tells, self._commit = threading.Event(), self.servers._coordinator.commit
        self._tells.set()
        self.servers._coordinator.commit = self._commit_untold
        join = self.engine.join
        self.engine.join = lambda: (self._tells.set(), join())

    @property
    def engine(self):
        return self.servers._engine

    def kill(self, *numbers):
        for number in numbers:
            self.engine._actors[number].kill()

    def _step(self, metrics):
        step = self.ckpt.current_step + 1
        self.first[step] = int(metrics["first"])
        self._step_of_ckpt(metrics)
        self.after(step)
        self.kill(*self.kills.pop(step, ()))

    def _commit_untold(self, request):
        answer = self._commit(request)
        if self.servers._coordinator.step in self.kills:
            self._tells.clear()
        return answer

    def run(self, train=None):
        def note(name, fields):
            self.events.append((name, fields))
            if name in ("buckets_returned", "resumed"):
                self._tells.set()

        wait = partial(self._tells.wait, 5)
        train = train or (train_ones if self.ray else partial(train_ones, then=wait))

        self.ckpt = limpet.Checkpointer(self.url, self.state, **self.options)
        with limpet.events.attach(note), self.servers, self.ckpt:
            self._step_of_ckpt, self.ckpt.step = self.ckpt.step, self._step
            self.ckpt.resume()
            more = {"workers": self.workers, "queue": self.queue, "ray": self.ray}
            self.servers.train(train, ckpt=self.ckpt, **more)
            self.statistics = self.servers.statistics()
            self.lookups = self.servers.lookup("seen", range(RECORDS)).flatten().tolist()
        return self

    def names(self, name):
        return [fields for found, fields in self.events if found == name]


ZERO, HALF, ONE = np.float32([0, 0.5, 1])
BUCKETS = bucket_of(np.arange(RECORDS)).tolist()


def replay(first, losses, first_buckets, gamma):
    """Return what a training must have, by step and number of losses: how often each record counts,
    and the value and the momentum of the dense tensors of each server."""
    counts, dense = Counter(), [(ZERO, ZERO) for _ in first_buckets]
    states, left = {}, [*losses]
    for step in range(max(first) + 1):
        if step:
            counts.update(range(first[step], first[step] + BATCH))
            rate = gamma ** ((step - 1) // 16)
            dense = [(value, HALF * m + ONE) for value, m in dense]
            dense = [(value - np.float32(rate) * m, m) for value, m in dense]
        states[step, len(losses) - len(left)] = counts.copy(), [*dense]
        while left and left[0]["step"] == step:
            loss = left.pop(0)
            old_counts, old_dense = next(
                state for (s, _), state in states.items() if s == loss["version_step"]
            )
            for record in range(RECORDS):
                if BUCKETS[record] in range(loss["first_bucket"], loss["stop_bucket"]):
                    counts[record] = old_counts[record]
            server = first_buckets.index(loss["first_bucket"])
            dense[server] = old_dense[server]
            states[step, len(losses) - len(left)] = counts.copy(), [*dense]
    assert not left
    return states


def rows_of(counts):
    """Return the contents of tables whose records count so often, in one process."""
    servers = tables.Servers([WORDS, SEEN])
    for number in range(1, max(counts.values(), default=0) + 1):
        ids = torch.tensor([record for record, count in counts.items() if count >= number])
        for name in ("words", "seen"):
            tables.Embedding(servers, name)(ids).sum().backward()
        servers.step()
    return without_steps(live(servers))


def without_steps(found):
    """A returned row has other last steps than those of one process."""
    for sets in found.values():
        for row in [row for rows in sets for row in rows.values()]:
            row.pop("last_steps")
    return found


def check(training, count=2):
    """Each version has exactly what the pushes before it and its losses say. Return the losses."""
    versions = limpet.Run(training.url).snapshots()
    trees = [version.load() for version in versions]
    losses, firsts = training.servers.losses, [part.start for part in training.servers.ranges]
    states = replay(training.first, losses, firsts, training.gamma)
    names = distribute(make_dense()[0], count)
    known = 0
    for version, tree in zip(versions, trees, strict=True):
        found = tree["tables"]["words"].get("losses", [])
        assert found == losses[: len(found)] == tree["tables"]["seen"].get("losses", [])
        is_full = len(tree["tables"]["seen"]["segments"]) == 1
        assert is_full or known == len(found)
        known = len(found)
        counts, dense = states[version.step, len(found)]
        expected = rows_of(counts)
        assert not differing(without_steps(saved(version)), expected)
        restored = tables.Servers([WORDS, SEEN], 3)
        version.load({"tables": restored}, unexpected="ignore")
        assert not differing(without_steps(live(restored)), expected)
        for server, (value, momentum) in enumerate(dense):
            for name in names[server]:
                assert {*tree["model"][name].tolist()} <= {value}
                slots = tree["optimizer"]["state"].get(f"model.{name}", {})
                assert {*slots.get("momentum_buffer", torch.zeros(0)).tolist()} <= {momentum}
    assert versions[-1].step == STEPS
    # a return to the version of the last step changes nothing, and nothing is saved after it
    assert {loss["version_step"] for loss in losses[known:]} <= {STEPS}
    assert training.lookups == [-float(counts[record]) for record in range(RECORDS)]
    returned = sum(loss["stop_bucket"] - loss["first_bucket"] for loss in losses)
    assert {each["buckets_returned"] for each in training.statistics.values()} == {returned}
    assert len(training.names("buckets_returned")) == len(losses)
    return losses


def segments(training):
    """By step, the number of segments of a table in each version."""
    versions = limpet.Run(training.url).snapshots()
    return {v.step: len(v.tree["tables"]["seen"]["segments"]) for v in versions}


def steps_of(losses):
    return [(loss["version_step"], loss["step"]) for loss in losses]


def test_without_a_loss_versions_are_incremental(tmp_path):
    training = Training(tmp_path, {}).run()
    assert check(training) == []
    assert max(segments(training).values()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("step", [3, 23, STEPS])
def test_the_buckets_of_a_lost_server_return_to_a_version(tmp_path, numbers, step):
    training = Training(tmp_path, {step: numbers}).run()
    assert steps_of(check(training)) == [(step // 7 * 7, step)] * len(numbers)
    (lost,) = training.names("server_lost")
    assert lost["servers"] == ", ".join(f"server {number}" for number in numbers)
    assert not training.names("resumed")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_servers_are_lost_many_times(tmp_path, workers):
    kills = {1: [0], 2: [1], 8: [2], 9: [0, 2], 21: [1], 35: [0], 36: [0], 50: [2, 1]}
    training = Training(tmp_path, kills, count=3, workers=workers).run()
    losses = check(training, 3)
    assert len(losses) >= 10  # maybe again, while others are replaced
    assert not training.kills


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("method", ["begin_save", "end_staging", "end_save"])
def test_a_server_is_lost_during_a_save(tmp_path, method, number):
    """It is silent from then on."""
    training, saves = Training(tmp_path, {}), itertools.count()
    actor = training.engine._actors[number]
    part = actor.server._tables
    call = getattr(part, method)

    def die(*arguments):
        if next(saves) == 5:
            training.kill(number)
            actor.be_silent()
        return call(*arguments)

    setattr(part, method, die)
    losses = check(training.run())
    is_saved = method == "end_save"
    assert [loss["version_step"] for loss in losses] == [35 if is_saved else 28]
    assert (35 in segments(training)) == is_saved


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::limpet.errors.SaveFailed")
def test_the_outcome_of_the_save_in_flight_is_unknown(tmp_path, monkeypatch):
    """The version exists, but the training does not know: the lost buckets return to the one
    before, and the next version does not refer to what the other servers call the base."""
    put_manifest, training = recipe.put_manifest, Training(tmp_path, {}, on_error="warn")

    def lose(location, manifest, plan):
        found = put_manifest(location, manifest, plan)
        if location.folder.endswith("version_35"):
            training.kill(1)
            raise Unavailable("no answer")
        return found

    monkeypatch.setattr(recipe, "put_manifest", lose)
    assert [loss["version_step"] for loss in check(training.run())] == [28]
    assert segments(training).keys() >= {28, 35}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["join", "recover", "restart"])
@pytest.mark.parametrize("others", [[0], [1], [0, 1]], ids=str)
def test_servers_are_lost_while_one_is_replaced(tmp_path, method, others):
    training = Training(tmp_path, {24: [1]})
    start = training.engine._start_server

    def start_server(number, *, replaces):
        actor = start(number, replaces=replaces)
        call = getattr(actor.server, method)

        def die(*arguments):
            training.engine._start_server = start
            setattr(actor.server, method, call)
            found = call(*arguments)
            training.kill(*others)
            return found

        setattr(actor.server, method, die)
        return actor

    training.engine._start_server = start_server
    losses = check(training.run())
    assert {loss["first_bucket"] for loss in losses} >= {training.servers.ranges[1].start}
    assert {loss["step"] for loss in losses} == {24}


@pytest.mark.slow
def test_a_loss_before_the_first_save_on_another_number_of_servers(tmp_path):
    """The ranges are neither those of the version, nor equal ones."""
    first = Training(tmp_path, {}, count=3)
    first.after = lambda step: setattr(first.servers._driver, "_is_stopping", step == 30)
    first.run()
    again = Training(tmp_path, {33: [1]}, every=100)
    again.first = first.first
    losses = check(again.run())
    assert steps_of(losses) == [(30, 33)]
    assert losses[0]["first_bucket"] not in (4096 // 2, 4096 // 3, 8192 // 3)


@pytest.mark.slow
def test_losses_are_those_of_the_restored_version(tmp_path):
    training = Training(tmp_path, {24: [0], 40: [1]}).run()
    losses = check(training)
    assert steps_of(losses) == [(21, 24), (35, 40)]
    servers = tables.Servers([WORDS, SEEN], 3)
    for step, known in ((60, 2), (35, 1), (21, 0)):
        limpet.load(f"{tmp_path}@{step}", into={"tables": servers}, unexpected="ignore")
        expected = sum(loss["stop_bucket"] - loss["first_bucket"] for loss in losses[:known])
        assert servers.statistics()["words"]["buckets_returned"] == expected
        limpet.save(tmp_path / f"copy-{step}", {"tables": servers})
        table = limpet.load(tmp_path / f"copy-{step}")["tables"]["words"]
        assert table.get("losses", []) == losses[:known]
        assert ("losses" in table) == bool(known)


class Ended(Exception):
    pass


def test_a_version_that_cannot_be_read_ends_the_training_and_leaves_the_servers_invalid(tmp_path):
    training, store = Training(tmp_path, {23: [1]}), LocalStore(str(tmp_path))

    def damage(step):
        if step == 23:
            training.ckpt.wait()
            for found in [*store.list("version_21")]:
                if found.key.endswith(".safetensors"):
                    flip_bit(store, found.key, byte=-1)

    def train_again(*arguments, **options):
        with pytest.raises(FormatError):
            train_once(*arguments, **options)
        with pytest.raises(LimpetError, match="The tables are not valid"):
            train_once(*arguments, **options)
        raise Ended

    train_once, training.servers.train = training.servers.train, train_again
    training.after = damage
    with pytest.raises(Ended):
        training.run()


def test_without_any_version_the_training_ends(tmp_path):
    training = Training(tmp_path, {3: [1]}, save=limpet.Never())
    with pytest.raises(LimpetError, match=r"A server was lost, and .* has no version to return to"):
        training.run()


def train_and_evaluate(worker):
    model = make_dense()[0]
    worker.dense(model)
    bags = [tables.Embedding(worker.tables, name) for name in ("words", "seen")]

    def evaluate(records):
        return {"seen": (bags[1](torch.tensor(records)).sum(), len(records) / RECORDS)}

    while (records := worker.next(BATCH, evaluate=evaluate)) is not None:
        sum(bag(torch.tensor(records)).sum() for bag in bags).backward()
        sum(parameter.sum() for parameter in model.parameters()).backward()
        worker.step({"first": records[0]})


@pytest.mark.slow
@pytest.mark.parametrize("on", ["cut", "paused"])
def test_an_evaluation_in_progress_begins_again(tmp_path, on):
    """Also that of the last step, which no step follows."""
    training = Training(tmp_path, {}, workers=2)
    with_evaluation = training.servers.train

    def train_evaluated(*arguments, **options):
        queue, ckpt, every = training.queue, training.ckpt, limpet.EverySteps(20)
        with limpet.TrainingEvaluation(
            ckpt, data=RECORDS, batch_size=6, every=every, queue=queue, on=on
        ) as evaluation:
            step = evaluation.step

            def step_and_kill():
                step()
                if evaluation.is_running and ckpt.current_step in left:
                    left.remove(ckpt.current_step)
                    training.kill(1)

            evaluation.step, left = step_and_kill, [20, STEPS]
            with_evaluation(*arguments, evaluation=evaluation, **options)
            assert left == []
            training.newest = evaluation.newest

    training.servers.train = train_evaluated
    losses = check(training.run(train_and_evaluate))
    assert losses
    assert training.newest.last_step == STEPS
    ended = [each for each in training.names("training_evaluated") if each["state"] == "ABANDONED"]
    assert {each["cause"] for each in ended} == {"a server of the tables was lost"}
    assert training.newest.metrics["seen"] == pytest.approx(sum(training.lookups))


def test_too_many_losses_without_a_step_end_the_training(tmp_path):
    training = Training(tmp_path, {3: [1]})
    start = training.engine._start_server

    def start_server(number, *, replaces):
        actor = start(number, replaces=replaces)
        actor.server.restart = lambda *arguments: training.kill(number)
        return actor

    training.engine._start_server = start_server
    with pytest.raises(LimpetError, match="server 1 of the tables was lost"):
        training.run()
    assert len(training.names("server_lost")) == 5


def test_a_base_that_verify_has_found_damaged_is_not_referred_to(tmp_path):
    """Only the driver knows of the damage, and all servers must write all rows."""
    training, store = Training(tmp_path, {}, every=10), LocalStore(tmp_path)

    def damage(step):
        if step == 25:
            training.ckpt.wait()
            shards = store.list("version_20")
            flip_bit(store, max(s.key for s in shards if s.key.endswith(".safetensors")))
            assert run_cli("verify", tmp_path).code == 3

    training.after = damage
    training.run()
    steps = [s.step for s in limpet.Run(tmp_path).snapshots() if s.verify().ok]
    assert steps[-4:] == [30, 40, 50, 60]


def test_all_return_by_default(tmp_path):
    training = Training(tmp_path, {24: [1]}, lost="all").run()
    assert check(training) == []
    assert [fields["step"] for fields in training.names("resumed")] == [21]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lost": "server", "engine": "ray"}, 'lost= must be "all" or "buckets", not .server.'),
        ({"lost": "buckets"}, 'lost= must be "all" without engine="ray"'),
        ({"lost": "buckets", "engine": "ray", "grads_to_wait": 2}, 'lost= must be "all"'),
    ],
)
def test_invalid_arguments(options, message):
    with pytest.raises(LimpetError, match=message):
        tables.Servers([WORDS], 2, **options)
