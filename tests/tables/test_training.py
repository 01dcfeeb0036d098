"""Trainings with workers in threads: each record counts exactly once, whatever happens."""

import itertools
import random
import threading
import time
from contextlib import suppress
from threading import Event, Lock

import numpy as np
import pytest
import torch

import limpet
from limpet import tables
from limpet.errors import LimpetError
from limpet.tables.dense import distribute, named_tensors
from tests.waiting import wait_until

RECORDS = 300
"""Each record is an id of a table whose row counts how often the record was consumed."""


def counting_table(**options):
    return tables.Table(
        "seen", 1, optimizer=tables.SGD(lr=1.0), initializer=tables.Constant(0.0), **options
    )


def add_records(queue, records=RECORDS, task_size=64, epochs=1):
    return queue.add("training", records, task_size=task_size, epochs=epochs, name="records")


def count_records(worker, records):
    """Compute gradients that add 1 to the row of each record."""
    (-tables.Embedding(worker.tables, "seen")(torch.tensor(records))).sum().backward()


def train_counting(worker):
    while (records := worker.next(10)) is not None:
        count_records(worker, records)
        worker.step({"records": len(records)})


def seen(servers, records=RECORDS):
    module = tables.Embedding(servers, "seen")
    with torch.no_grad():
        return module(torch.arange(records)).flatten().int().tolist()


def consumed(queue_state, records):
    """Return how often each record was consumed, by the state of a queue."""
    counts = [0] * records
    (job,) = queue_state["jobs"]
    size = 64
    tasks_per_epoch = -(-records // size)
    for first, stop in job["completed"]:
        for number in range(first, stop):
            start = number % tasks_per_epoch * size
            for record in range(start, min(start + size, records)):
                counts[record] += 1
    for number, position in job["positions"]:
        start = number % tasks_per_epoch * size
        for record in range(start, position):
            counts[record] += 1
    return counts


class Training:
    """A training that counts records, with its state."""

    def __init__(self, run, *, servers=2, queue=None, epochs=1, save=None, options=None, **more):
        self.queue = limpet.tasks.Queue() if queue is None else queue
        self.job = add_records(self.queue, epochs=epochs)
        self.servers = tables.Servers([counting_table()], servers, **(options or {}))
        self.state = {
            "tables": self.servers, "queue": self.queue, "progress": limpet.Progress()
        }  # fmt: skip
        save = limpet.EverySteps(7) if save is None else save
        self.ckpt = limpet.Checkpointer(run, self.state, save=save, incremental=4, **more)

    def run(self, train=train_counting, workers=3):
        with self.ckpt:
            self.ckpt.resume()
            self.servers.train(train, workers=workers, queue=self.queue, ckpt=self.ckpt)
        return self


@pytest.mark.parametrize("options", [{}, {"staleness": 1}, {"grads_to_wait": 4}], ids=str)
@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (3, 2)])
def test_each_record_counts_once(tmp_path, options, servers, workers):
    """B 32, B 39."""
    training = Training(tmp_path, servers=servers, epochs=2, options=options).run(workers=workers)
    assert seen(training.servers) == [2] * RECORDS
    assert training.job.completed == training.job.tasks
    steps = training.ckpt.current_step
    assert steps == 16 if "grads_to_wait" in options else steps >= 60


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"grads_to_wait": 3}], ids=str)
def test_each_version_has_the_rows_of_the_records_that_its_queue_has_consumed(tmp_path, options):
    """Rows, queue, and step of a version are of one moment, though workers go on during saves."""
    training = Training(tmp_path, epochs=2, options=options, save=limpet.EverySteps(3)).run()
    run = limpet.Run(tmp_path)
    assert len(run.snapshots()) > 5
    for snapshot in run.snapshots():
        servers = tables.Servers([counting_table()], 2)
        state = limpet.load(snapshot.url, into={"tables": servers}, unexpected="ignore")
        assert state is not None
        plain = limpet.load(snapshot.url, keys=["queue/**", "progress/**"])
        counts = consumed(plain["queue"], RECORDS)
        assert seen(servers) == counts
        assert plain["progress"]["step"] == snapshot.step
        if not options:
            assert sum(counts) <= 10 * snapshot.step
    assert training.ckpt.current_step == run.latest().step


class Stop(Exception):
    """Ends a training at a random step, as a crash would."""


@pytest.mark.parametrize("options", [{}, {"grads_to_wait": 2}], ids=str)
def test_records_count_once_over_crashes_on_other_numbers_of_servers(tmp_path, options):
    generator, lock, left = random.Random(3), Lock(), 0

    def train(worker):
        nonlocal left
        while (records := worker.next(10)) is not None:
            with lock:
                left -= 1
                if left == 0:
                    raise Stop
            count_records(worker, records)
            worker.step()

    for attempt in itertools.count():
        left = generator.randint(3, 16)
        training = Training(
            tmp_path, servers=attempt % 4 + 1, options=options, save=limpet.EverySteps(2)
        )
        try:
            training.run(train, workers=attempt % 3 + 1)
            break
        except Stop:
            assert attempt < 40
    assert attempt > 2
    assert seen(training.servers) == [1] * RECORDS


def test_a_worker_that_hangs_is_replaced_and_its_step_never_happened(tmp_path):
    """B 37, B 40, B 53."""
    later, hangs, go_on = [0.0], Event(), Event()
    queue = limpet.tasks.Queue(lease_seconds=60.0, clock=lambda: time.monotonic() + later[0])
    pushed = []

    def train(worker):
        while (records := worker.next(10)) is not None:
            count_records(worker, records)
            if not hangs.is_set():
                hangs.set()
                later[0] += 1000.0  # no report for long
                go_on.wait(10)
                pushed.append(worker.name)
                assert not worker.step()
            worker.step()
        go_on.set()

    training = Training(tmp_path, queue=queue).run(train, workers=2)
    assert seen(training.servers) == [1] * RECORDS
    assert pushed


def test_the_error_of_a_worker_ends_the_training_and_a_resume_continues(tmp_path):
    def train(worker):
        train_counting(worker) if worker.name != "worker 2" else 1 / 0

    training = Training(tmp_path)
    with pytest.raises(ZeroDivisionError):
        training.run(train, workers=2)
    training = Training(tmp_path).run()
    assert seen(training.servers) == [1] * RECORDS


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"staleness": 1}, {"grads_to_wait": 3}], ids=str)
@pytest.mark.parametrize("resumes", [False, True])
def test_a_training_goes_on_in_the_same_process_after_an_error(tmp_path, options, resumes):
    """What is committed is applied by the next train(), or is undone by a resume."""
    training = Training(tmp_path, options=options, epochs=2, save=limpet.EverySteps(4))
    generator, errors = random.Random(5), []

    def train(worker):
        while (records := worker.next(10)) is not None:
            count_records(worker, records)
            worker.step()
            if training.ckpt.current_step >= fails_at:
                raise Stop

    with training.ckpt as ckpt:
        ckpt.resume()
        while not training.job.has_ended():
            fails_at = ckpt.current_step + generator.randint(3, 9)
            try:
                training.servers.train(train, workers=2, queue=training.queue, ckpt=ckpt)
            except Stop as e:
                errors.append(e)
                if resumes:
                    ckpt.resume()
                    training.servers.release(training.servers.hold())
                    state = training.queue.state_dict()
                    assert seen(training.servers) == consumed(state, RECORDS)
    assert len(errors) > 1
    assert seen(training.servers) == [2] * RECORDS


def test_workers_come_and_go(tmp_path):
    training = Training(tmp_path, epochs=3)

    def train(worker):
        names.add(worker.name)
        while (records := worker.next(10)) is not None:
            count_records(worker, records)
            worker.step()
            step = training.ckpt.current_step
            if step == 5:
                training.servers.resize_workers(4)
                wait_until(lambda: len(names) == 4)  # the rest may take less time than they begin
            elif step == 60:
                training.servers.resize_workers(1)

    names = set()
    training.run(train, workers=1)
    assert seen(training.servers) == [3] * RECORDS
    assert len(names) >= 4
    with pytest.raises(LimpetError, match="running train"):
        training.servers.resize_workers(2)


def test_a_mini_batch_of_a_lost_worker_goes_to_one_that_waits(tmp_path):
    """In synchronous mode, and at once: the one that waits asks no more."""
    training = Training(tmp_path, epochs=2, options={"grads_to_wait": 2})
    servers, ckpt = training.servers, training.ckpt
    names, made, has_advanced = set(), [], []

    def train(worker):
        names.add(worker.name)
        while (records := worker.next(10)) is not None:
            count_records(worker, records)
            made.append(step := ckpt.current_step)
            if made.count(step) == 2 and sorted(names) == [worker.name, "worker 2"]:
                servers.resize_workers(1)  # this one ends, and the other one waits
                wait_until(lambda: ckpt.current_step > step, 5)
                has_advanced.append(True)
            worker.step()

    training.run(train, workers=2)
    assert has_advanced
    assert seen(servers) == [2] * RECORDS


def test_records_that_come_back_later_are_handed_out(tmp_path):
    """In synchronous mode, when all other records are consumed, and nobody makes a step."""
    training = Training(tmp_path, options={"grads_to_wait": 2})
    held = training.queue.get("training", "somebody else")
    run = threading.Thread(target=training.run, daemon=True)
    run.start()
    wait_until(lambda: training.job.completed == training.job.tasks - 1)
    time.sleep(0.5)  # they wait
    held.release()
    run.join(10)
    assert not run.is_alive()
    assert seen(training.servers) == [1] * RECORDS


@pytest.mark.parametrize("options", [{}, {"grads_to_wait": 2}], ids=str)
def test_a_resume_while_workers_run_replaces_them(tmp_path, options):
    """What they do belongs to a later step, and is not a part of the training any more."""
    training = Training(tmp_path, epochs=2, options=options)
    step, resumed = training.ckpt.step, []

    def step_and_resume(metrics):
        step(metrics)
        if training.ckpt.current_step == 9 and not resumed:
            driver = training.servers._driver
            wait_until(  # no look-up is under way
                lambda: driver._work.items.qsize() + len(driver._parked) == 2
            )
            resumed.append(training.ckpt.resume())

    training.ckpt.step = step_and_resume
    training.run(workers=2)
    assert [version.step for version in resumed] == [7]
    assert seen(training.servers) == [2] * RECORDS


def test_early_stopping_ends_all_workers(tmp_path):
    training = Training(tmp_path, epochs=50, stop=limpet.StopWhen("loss", patience=2, mode="min"))

    def train(worker):
        while (records := worker.next(10)) is not None:
            count_records(worker, records)
            worker.step({"loss": 1.0})

    training.run(train)
    assert training.ckpt.current_step < 100
    assert sum(seen(training.servers)) == 10 * training.ckpt.current_step


# -- dense parameters ------------------------------------------------------------------------------

DATA = torch.randint(0, 1000, (400, 3), generator=torch.Generator().manual_seed(5)) % 97


class Model(torch.nn.Module):
    def __init__(self, servers=None):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2),
            torch.nn.Linear(8, 1),
        )  # fmt: skip
        self.words = None
        if servers is not None:
            self.words = tables.EmbeddingBag(servers, "words", mode="sum")

    def forward(self, ids):
        return self.layers(self.words(ids))


def make_dense():
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


def train_model(worker):
    model = Model(worker.tables)
    worker.dense(model)
    while (records := worker.next(16)) is not None:
        ids = DATA[records]
        noise = random.random() + np.random.rand()  # of the mini-batch, too
        loss = ((model(ids) - ids.sum(1, keepdim=True) / 100 - noise) ** 2).mean()
        loss.backward()
        worker.step({"loss": loss.item()})


def run_model(run, servers, workers, *, crash_at=None, epochs=2, **options):
    torch.manual_seed(servers + workers)  # nothing may depend on it
    queue = limpet.tasks.Queue()
    queue.add("training", len(DATA), task_size=48, epochs=epochs, name="data")
    words = tables.Table("words", 4, optimizer=tables.Adam(lr=0.05))
    made = tables.Servers([words], servers, dense=make_dense, **options)
    state = {"tables": made, "queue": queue, "progress": limpet.Progress()}

    def train(worker):
        if crash_at is not None:
            step, real = worker.step, ckpt

            def step_or_crash(*metrics):
                if real.current_step >= crash_at:
                    raise Stop
                return step(*metrics)

            worker.step = step_or_crash
        train_model(worker)

    with limpet.Checkpointer(run, state, save=limpet.EverySteps(3), incremental=True) as ckpt:
        ckpt.resume()
        made.train(train, workers=workers, queue=queue, ckpt=ckpt)
    assert made.model is not None
    rows = made.client.pull("words", np.arange(97))
    return ckpt.current_step, rows, {n: t.clone() for n, t in made.model.state_dict().items()}


def same(a, b):
    steps, rows, dense = a
    return (
        steps == b[0] and torch.equal(rows, b[1])
        and all(torch.equal(dense[name], b[2][name]) for name in dense)
    )  # fmt: skip


@pytest.mark.slow
def test_a_synchronous_training_has_the_same_bits_for_any_number_of_workers_and_servers(tmp_path):
    """B 25: dense gradients are averaged, and those of rows summed, in the order of the data."""
    expected = run_model(tmp_path / "a", 1, 1, grads_to_wait=4)
    assert expected[0] == 14  # 25 mini-batches per epoch, the last round of an epoch has one
    for servers, workers in ((2, 3), (3, 2), (1, 4)):
        folder = tmp_path / f"{servers} {workers}"
        assert same(run_model(folder, servers, workers, grads_to_wait=4), expected)


@pytest.mark.slow
def test_a_synchronous_training_has_the_same_bits_after_crashes(tmp_path):
    expected = run_model(tmp_path / "a", 1, 1, grads_to_wait=4)
    for crash_at, servers, workers in ((4, 2, 2), (8, 1, 3), (11, 3, 1)):
        with pytest.raises(Stop):
            run_model(tmp_path / "b", servers, workers, crash_at=crash_at, grads_to_wait=4)
    assert same(run_model(tmp_path / "b", 2, 2, grads_to_wait=4), expected)


def test_one_worker_equals_a_plain_training(tmp_path):
    """Asynchronous with one worker: each step is that of the plain optimizers."""
    steps, rows, dense = run_model(tmp_path, 2, 1, epochs=1)
    model, optimizer, scheduler = make_dense()
    words = torch.nn.Embedding(97, 4)
    initial = tables.Servers([tables.Table("words", 4, optimizer=tables.SGD(lr=1.0))])
    words.weight.data = initial.client.pull("words", np.arange(97)).clone()
    assert steps == 25
    assert rows.shape == words.weight.shape
    assert dense.keys() == model.state_dict().keys()
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]


def test_every_server_applies_a_push_with_the_rates_of_its_step(tmp_path):
    """A row of each server gets -1 per step: its value is the sum of the rates of the steps."""

    def make():
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def train(worker):
        model = torch.nn.Linear(1, 1)
        worker.dense(model)
        while worker.next(100) is not None:
            (-model.weight.sum()).backward()
            worker.step()

    training = Training(tmp_path, options={"dense": make}, save=limpet.EverySteps(100))
    training.run(train, workers=3)
    expected = sum(0.5**step for step in range(training.ckpt.current_step))
    assert training.servers.model.weight.item() == pytest.approx(expected, rel=1e-6)


def test_what_cannot_be_distributed_is_refused(tmp_path):
    def lbfgs():
        model = torch.nn.Linear(1, 1)
        return model, torch.optim.LBFGS(model.parameters())

    with pytest.raises(LimpetError, match="LBFGS"):
        tables.Servers([counting_table()], dense=lbfgs)
    for make, message in (
        (torch.optim.lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau, whose step.. needs"),
        (lambda sgd: torch.optim.lr_scheduler.OneCycleLR(sgd, 1, 9), "cycle_momentum=False"),
        (lambda sgd: torch.optim.lr_scheduler.CyclicLR(sgd, 1, 9), "cycle_momentum=False"),
    ):
        model = torch.nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
        made = model, sgd, make(sgd)
        with pytest.raises(LimpetError, match=message):
            tables.Servers([counting_table()], dense=lambda made=made: made)
    with pytest.raises(LimpetError, match=r"\(model, optimizer\)"):
        tables.Servers([counting_table()], dense=lambda: torch.nn.Linear(1, 1))


@pytest.mark.parametrize("other", [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, bias=False)])
def test_another_model_in_a_worker_is_refused(tmp_path, other):
    """Also one whose tensors could have the values by broadcasting."""
    before = other.weight.detach().clone()

    def make():
        model = torch.nn.Linear(2, 1)
        return model, torch.optim.SGD(model.parameters(), 1.0)

    training = Training(tmp_path, options={"dense": make})
    with pytest.raises(LimpetError, match=r"another model.*\('bias', 1\)"):
        training.run(lambda worker: worker.dense(other), workers=1)
    assert torch.equal(other.weight, before)


def test_gradients_of_rows_that_were_not_looked_up_by_the_worker_are_refused(tmp_path):
    """No step has them."""
    training = Training(tmp_path)
    look_up = tables.Embedding(training.servers, "seen")

    def train(worker):
        while (records := worker.next(10)) is not None:
            with torch.no_grad():
                look_up(torch.tensor(records))
            if training.ckpt.current_step >= 3:
                look_up(torch.tensor(records)).sum().backward()
            worker.step()

    with pytest.raises(LimpetError, match=r"looked up in the Servers: use worker\.tables"):
        training.run(train, workers=1)
    assert training.ckpt.current_step == 3


def test_a_call_of_train_during_another_one_is_refused(tmp_path):
    training, errors = Training(tmp_path), []

    def train(worker):
        with pytest.raises(LimpetError, match="is running") as e:
            training.servers.train(
                train_counting, workers=1, queue=training.queue, ckpt=training.ckpt
            )
        errors.append(e)
        train_counting(worker)

    training.run(train, workers=2)
    assert len(errors) == 2
    assert seen(training.servers) == [1] * RECORDS


def test_mistakes_of_a_call_of_train(tmp_path):
    training = Training(tmp_path)
    with training.ckpt:
        for bad in ({"workers": 0}, {"queue": limpet.tasks.Queue()}, {"ckpt": None}):
            options = {"workers": 1, "queue": training.queue, "ckpt": training.ckpt} | bad
            with pytest.raises(LimpetError):
                training.servers.train(train_counting, **options)


def test_a_worker_that_leaves_out_a_step_gets_the_same_records_again(tmp_path):
    def train(worker):
        while (records := worker.next(10)) is not None:
            assert worker.next(10) == records
            count_records(worker, records)
            worker.step()

    for options in ({}, {"grads_to_wait": 3}):
        training = Training(tmp_path / str(options), options=options).run(train)
        assert seen(training.servers) == [1] * RECORDS


def test_the_number_of_records_of_a_mini_batch_may_change(tmp_path):
    sizes = []

    def train(worker):
        wanted = itertools.chain([10, 10, 7], itertools.repeat(25))
        while (records := worker.next(next(wanted))) is not None:
            sizes.append(len(records))
            count_records(worker, records)
            worker.step()

    training = Training(tmp_path).run(train, workers=1)
    assert sizes[:-1] == [10, 10, 7, *[25] * 10]
    assert seen(training.servers) == [1] * RECORDS


@pytest.mark.parametrize("options", [{}, {"grads_to_wait": 3}], ids=str)
def test_gradients_of_a_step_that_is_left_out_are_not_those_of_the_next_one(tmp_path, options):
    """Of dense parameters, as of rows."""

    def make():
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        return model, torch.optim.SGD(model.parameters(), 1.0)

    def train(worker):
        model = torch.nn.Linear(1, 1, bias=False)
        worker.dense(model)
        times = itertools.count()
        while (records := worker.next(10)) is not None:
            count_records(worker, records)
            (-model.weight.sum()).backward()
            if next(times) % 2:  # else, it gets them again
                worker.step()

    training = Training(tmp_path, options={"dense": make, **options}).run(train, workers=1)
    assert seen(training.servers) == [1] * RECORDS
    assert training.servers.model.weight.item() == training.ckpt.current_step


def test_a_worker_that_hangs_in_a_round_is_replaced(tmp_path):
    hangs, go_on = Event(), Event()

    def train(worker):
        while (records := worker.next(10)) is not None:
            count_records(worker, records)
            if worker.name == "worker 1":
                hangs.set()
                go_on.wait(10)
            worker.step()
        go_on.set()

    queue = limpet.tasks.Queue(lease_seconds=0.3)
    training = Training(tmp_path, queue=queue, options={"grads_to_wait": 3}).run(train, workers=2)
    assert seen(training.servers) == [1] * RECORDS
    assert hangs.is_set()


@pytest.mark.slow
def test_a_worker_of_an_earlier_call_does_not_end_the_turn_of_its_namesake(tmp_path, monkeypatch):
    """Two workers of a synchronous training that compute at once share the random generators."""
    monkeypatch.setattr("limpet.tables.local._END_SECONDS", 0.05)
    hung, go_on, inside, overlaps = [], Event(), [], []

    def hang_or_fail(worker):
        while worker.next(10) is not None:
            if worker.name == "worker 1":
                hung.append(threading.current_thread())
                go_on.wait(10)
            elif hung:
                raise Stop
            worker.step()

    def compute(worker):
        while (records := worker.next(10)) is not None:
            inside.append(worker.name)
            overlaps.extend(inside[1:])
            if not go_on.is_set() and worker.name == "worker 1":
                go_on.set()
                hung[0].join(10)
                time.sleep(0.1)  # another one may begin
            count_records(worker, records)
            inside.remove(worker.name)
            worker.step()

    queue = limpet.tasks.Queue(lease_seconds=0.5)
    training = Training(tmp_path, queue=queue, options={"grads_to_wait": 2})
    with training.ckpt as ckpt:
        for train in (hang_or_fail, compute):
            with suppress(Stop):
                training.servers.train(train, workers=2, queue=queue, ckpt=ckpt)
    assert go_on.is_set()
    assert not hung[0].is_alive()
    assert not overlaps
    assert seen(training.servers) == [1] * RECORDS


def test_gradients_of_before_a_resume_are_not_applied(tmp_path):
    servers = tables.Servers([counting_table()])
    with limpet.Checkpointer(tmp_path, {"tables": servers}) as ckpt:
        count_records(type("One", (), {"tables": servers}), [3])
        servers.step()
        ckpt.step()
        ckpt.save()
        count_records(type("One", (), {"tables": servers}), [3])
        ckpt.resume()
        servers.step()
        assert seen(servers)[3] == 1


def test_the_model_of_the_driver_is_the_first_one_and_is_pulled_when_it_has_changed(tmp_path):
    """B 21, B 22, B 23: servers have the model from the beginning, and nobody pushes one."""
    pulled = []

    def train(worker):
        model = Model(worker.tables)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(worker.name.split()[1]))
        worker.dense(model)
        pulled.append({name: t.clone() for name, t in model.state_dict().items()})
        while worker.next(100) is not None:
            worker.step()

    words = tables.Table("words", 4, optimizer=tables.SGD(lr=1.0))
    servers = tables.Servers([words], 2, dense=make_dense)
    queue = limpet.tasks.Queue()
    queue.add("training", 300, task_size=100, name="data")
    state = {"tables": servers, "queue": queue}
    with limpet.Checkpointer(tmp_path, state, save=limpet.Never()) as ckpt:
        servers.train(train, workers=2, queue=queue, ckpt=ckpt)
    first = make_dense()[0].state_dict()
    for found in pulled:
        assert all(torch.equal(found[name], tensor) for name, tensor in first.items())
    server = servers.servers[0]
    version, values = server.pull_dense(None, 0)
    assert values
    assert server.pull_dense(None, version) == (version, {})


@pytest.mark.parametrize("servers", [1, 2, 3, 5, 20])
def test_dense_tensors_are_distributed_in_the_order_of_the_model(servers):
    """Else, the list of an optimizer's parameters in a version depends on the number of servers."""
    layers = [torch.nn.Linear(n, n) for n in (3, 200, 4, 100, 100, 50)]
    model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(50))
    parts = distribute(model, servers)
    tensors = named_tensors(model)
    assert [name for part in parts for name in part] == [*tensors]
    sizes = [sum(tensors[name].nbytes for name in part) for part in parts]
    assert len(sizes) == servers
    most = max(tensor.nbytes for tensor in tensors.values())
    assert max(sizes) <= sum(sizes) / servers + most
