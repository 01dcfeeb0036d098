"""Every public call takes numbers of NumPy, and refuses other values before it does anything."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import limpet
from limpet.errors import LimpetError
from limpet.evaluation import Selection, Workers
from limpet.preemption import (
    AwsNotice,
    AzureNotice,
    CallNotice,
    FileNotice,
    GcpNotice,
    Notice,
    SignalNotice,
    SlurmNotice,
    Status,
    leave_code,
)
from limpet.storage.memory import MemoryStore
from limpet.tasks import Queue, RemoteQueue, TaskBatches, TaskServer


def kind_of(value):
    return f"{type(value).__name__} {value}"


Call = Callable[[MemoryStore, Any], object]


def save(store, step):
    return limpet.save(store, {"x": 1}, step=step)


def save_async(store, step):
    return limpet.save_async(store, {"x": 1}, step=step).wait()


def write(store, step):
    with limpet.Run(store).writer() as writer:
        return writer.save({"x": 1}, step=step)


def train(store, epochs=None, **options):
    state = {"x": np.zeros(1), "progress": limpet.Progress()}
    with limpet.Checkpointer(store, state, save=limpet.Never(), **options) as ckpt:
        if epochs is not None:
            assert len([*ckpt.epochs(epochs)]) == 2


def step_by(store, **counts):
    state = {"x": np.zeros(1), "progress": limpet.Progress()}
    with limpet.Checkpointer(store, state, save=limpet.Never()) as ckpt:
        ckpt.step(**counts)


def load(_, timeout):
    saved = MemoryStore()
    limpet.save(saved, {"x": 1})
    limpet.load(saved, timeout=timeout)


def set_progress(store, count):
    progress = limpet.Progress()
    progress.step = count
    assert type(progress.step) is int


def evaluate(store, workers=0, **options):
    return limpet.Evaluation(store, print, print, data=print, workers=workers, **options)


def add_job(store, **sizes):
    Queue().add("evaluation", 4, name="job", **sizes)


def lease(store, remotely, **seconds):
    queue = Queue()
    queue.add("evaluation", 4, name="job", task_size=1)
    with TaskServer(queue) as server:
        remote = RemoteQueue(server.connect("worker"))
        with remote:
            owner = remote if remotely else queue
            get = {k: v for k, v in seconds.items() if k != "renew"}
            task = owner.get("evaluation", **get)
            if "renew" in seconds:
                task.renew(seconds["renew"])
            assert task.done(1)  # the connection was not lost


OF_LOADERS: dict[str, Call] = {
    "total_batch_size": lambda _, n: limpet.DataLoader(range(8), total_batch_size=n),
    "loader_ranks": lambda _, n: limpet.DataLoader(range(8), rank=0, ranks=n),
    "loader_rank": lambda _, n: limpet.DataLoader(range(8), rank=n, ranks=3),
}
COUNTS: dict[str, Call] = {
    **(OF_LOADERS if find_spec("torch") else {}),
    "EverySteps": lambda _, n: limpet.EverySteps(n),
    "EveryEpoch": lambda _, n: limpet.EveryEpoch(n),
    "AtSteps": lambda _, n: limpet.AtSteps([n]),
    "KeepLast": lambda _, n: limpet.KeepLast(n),
    "KeepEvery": lambda _, n: limpet.KeepEvery(n),
    "KeepSteps": lambda _, n: limpet.KeepSteps([n]),
    "KeepBest": lambda _, n: limpet.KeepBest(n, "loss"),
    "unscored": lambda _, n: limpet.KeepBest(1, "loss", unscored=n),
    "StopWhen": lambda _, n: limpet.StopWhen("loss", patience=n),
    "MemoryTier": lambda _, n: limpet.MemoryTier(every=limpet.EverySteps(1), copies=n),
    "save": save,
    "save_async": save_async,
    "writer": write,
    "incremental": lambda store, n: limpet.Run(store).writer(incremental=n),
    "epochs": train,
    "steps": lambda store, n: step_by(store, steps=n),
    "batches": lambda store, n: step_by(store, batches=n),
    "Progress": set_progress,
    "TaskBatches": lambda _, n: TaskBatches(Queue().training, n),
    "TaskBatches_ranks": lambda _, n: TaskBatches(Queue().training, 4, rank=0, ranks=n),
    "TaskBatches_rank": lambda _, n: TaskBatches(Queue().training, 4, rank=n, ranks=3),
    "Queue": lambda _, n: Queue(attempts=n),
    "task_size": lambda store, n: add_job(store, task_size=n),
    "workers": lambda _, n: evaluate("run", workers=n),
    "batch_size": lambda store, n: evaluate(store, batch_size=n),
    "Workers": lambda _, n: Workers(n),
    "attempts": lambda _, n: Workers(attempts=n),
    "Selection": lambda _, n: Selection(every_steps=n),
    "SignalNotice": lambda _, n: SignalNotice(n),
    "full_every": lambda store, n: train(store, incremental=n),
}
SECONDS: dict[str, Call] = {
    "EverySeconds": lambda _, n: limpet.EverySeconds(n),
    "KeepEvery": lambda _, n: limpet.KeepEvery(seconds=n),
    "save": lambda store, n: limpet.save(store, {"x": 1}, timeout=n),
    "save_async": lambda store, n: limpet.save_async(store, {"x": 1}, timeout=n).wait(),
    "save_timeout": lambda store, n: train(store, save_timeout=n),
    "sweep": lambda store, n: limpet.Run(store).sweep(grace=n),
    "grace": lambda _, n: limpet.Preemption(grace=n),
    "SignalNotice": lambda _, n: SignalNotice(seconds=n),
    "FileNotice": lambda _, n: FileNotice("there", seconds=n),
    "interval": lambda _, n: CallNotice(print, interval=n),
    "TaskBatches": lambda _, n: TaskBatches(Queue().training, 4, lease_seconds=n),
    "Queue": lambda _, n: Queue(lease_seconds=n),
    "AwsNotice": lambda _, n: AwsNotice(before=n),
    "AzureNotice": lambda _, n: AzureNotice(before=n),
    "writer": lambda store, n: limpet.Run(store).writer(timeout=n),
    "load": load,
    "wait": lambda _, n: limpet.save_async(MemoryStore(), {"x": 1}).wait(n),
    "get": lambda store, n: lease(store, False, lease_seconds=n),
    "remote get": lambda store, n: lease(store, True, lease_seconds=n),
    "timeout": lambda store, n: lease(store, False, timeout=n),
    "remote timeout": lambda store, n: lease(store, True, timeout=n),
    "renew": lambda store, n: lease(store, False, renew=n),
    "remote renew": lambda store, n: lease(store, True, renew=n),
    "evaluation lease": lambda store, n: evaluate(store, lease_seconds=n),
    "Workers start": lambda _, n: Workers(start=n),
    "Workers load": lambda _, n: Workers(load=n),
    "Workers task": lambda _, n: Workers(task=n),
    "SlurmNotice": lambda _, n: SlurmNotice({"SLURM_JOB_ID": "77"}, before=n),
    "GcpNotice": lambda _, n: GcpNotice(maintenance_seconds=n),
    "Selection": lambda _, n: Selection(throttle=n),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2), np.array(2)], ids=kind_of)
def test_a_count_of_any_integer_type_is_taken(name, value):
    result = COUNTS[name](MemoryStore(), value)
    assert "np.int64" not in repr(result)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(
    "value", [-1, 2.0, True, np.float64(2), np.True_, "2", [2], float("nan")], ids=kind_of
)
def test_another_value_is_refused_before_anything_is_written(name, value):
    if name in ("incremental", "full_every") and value is True:
        return  # a value of its own
    store = MemoryStore()
    with pytest.raises(LimpetError) as caught:
        COUNTS[name](store, value)
    assert str(caught.value).count(". ") == 0
    assert [s.key for s in store.list("") if s.key.startswith(("version", "shard"))] == []


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize(
    "value", [60, 60.5, np.float32(60.5), np.float64(60), np.int32(60)], ids=kind_of
)
def test_seconds_of_any_real_type_are_taken(name, value):
    SECONDS[name](MemoryStore(), value)


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize(
    "value", [-1, -np.float32(1), True, np.True_, "60", [60], float("nan"), 1j], ids=kind_of
)
def test_other_seconds_are_refused_before_anything_is_written(name, value):
    store = MemoryStore()
    with pytest.raises(LimpetError) as caught:
        SECONDS[name](store, value)
    assert str(caught.value).count(". ") == 0
    assert [*store.list("")] == []


TAKES_ZERO = {
    "KeepSteps", "unscored", "save", "save_async", "writer", "epochs", "batches",
    "Progress", "loader_rank", "TaskBatches_rank", "workers", "Workers",
}  # fmt: skip
FINITE = ["EverySeconds", "KeepEvery", "grace", "timeout", "renew", "interval", "Workers task"]


@pytest.mark.parametrize(
    ("call", "value"),
    [(COUNTS[n], 0) for n in sorted(COUNTS.keys() - TAKES_ZERO)]
    + [(SECONDS[n], float("inf")) for n in FINITE],
)
def test_zero_and_infinity_are_refused_where_they_mean_nothing(call, value):
    with pytest.raises(LimpetError):
        call(MemoryStore(), value)


@pytest.mark.parametrize("step", [-1, True, 2.0, 10**18, "3"])
def test_the_error_about_a_step_is_one_sentence(step):
    with pytest.raises(LimpetError) as caught:
        save(MemoryStore(), step)
    message = str(caught.value)
    assert message.startswith("step must be a whole number, 0 or more, with at most 18 digits")
    assert message.count(". ") == 0


def test_a_step_of_numpy_is_stored_as_a_number():
    store = MemoryStore()
    limpet.save(store, {"x": 1}, step=np.int32(7))
    step = limpet.open(store).step
    assert (step, type(step)) == (7, int)


@pytest.mark.parametrize("seconds", [60, np.int64(60), np.float32(60), np.float64(60)], ids=kind_of)
def test_a_function_of_a_notice_returns_seconds_of_any_real_type(seconds):
    assert CallNotice(lambda: seconds).poll().seconds == 60
    notice = CallNotice(lambda: Notice("host", seconds, age=seconds)).poll()
    assert (notice.seconds, notice.age) == (60, 60)
    assert {type(notice.seconds), type(notice.age)} <= {int, float}


def test_the_steps_of_a_status_may_be_of_numpy(tmp_path, monkeypatch):
    monkeypatch.setenv("LIMPET_STATUS", str(tmp_path))
    assert leave_code(Status(75, step=np.int64(3), saved_step=np.int32(2))) == 0
    for step in (-1, 2.0, True):
        with pytest.raises(LimpetError, match="step of a Status must be"):
            Status(75, step=step)


def test_seconds_of_numpy_become_numbers_of_python_also_in_records(tmp_path):
    number = np.float32(60)
    kept = Workers(start=number, load=number, task=number), Selection(throttle=number)
    assert "np.float32" not in repr(kept)
    with limpet.Run(tmp_path).writer() as writer:
        writer.save({"x": 1}, step=1)
    found = limpet.Evaluation(
        tmp_path, lambda snapshot: snapshot, lambda model, batch: {"loss": (1.0, 1)},
        data=lambda: [1, 2], collate=list, workers=0, lease_seconds=number,
    ).run()  # fmt: skip
    assert [outcome.state for outcome in found] == ["DONE"]


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("seed", [True, 2.0, "2", np.True_], ids=kind_of)
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(LimpetError):
        limpet.DataLoader(range(8), seed=seed)
    negative = limpet.DataLoader(range(8), seed=np.int64(-3))
    assert negative.state_dict()["seed"] == 2**64 - 3


@pytest.mark.parametrize("value", [True, 2.0, "2", np.True_, None], ids=kind_of)
def test_a_port_and_the_numbers_of_a_box_are_whole_numbers(value):
    with TaskServer(Queue()) as server:
        assert server.listen(port=np.int64(0))
        with pytest.raises(LimpetError, match="port= must be a whole number, 0 to 65535"):
            server.listen(port=value)
    assert limpet.Boxed(np.zeros(2), (np.int64(2),), np.array([8])).offsets == (2,)
    for offsets, shape in (((value,), (8,)), ((2,), (value,))):
        with pytest.raises(LimpetError, match="a whole number for each dimension"):
            limpet.Boxed(np.zeros(2), offsets, shape)
