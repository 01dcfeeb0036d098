"""Prediction tasks: the workers store the output themselves, and each task is done once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import limpet
from limpet.errors import JobFailed, LimpetError, PlanError, TaskError
from limpet.tasks import PredictionTask, Queue, RemoteQueue, TaskServer
from tests.tasks.clock import FakeClock

ROOT = Path(__file__).parents[2]


def add(queue, records=4, task_size=2, name="p", **options):
    return queue.add("prediction", records, task_size=task_size, name=name, **options)


# -- as a user writes it -----------------------------------------------------------------------


def save_run(run):
    """Two versions: the better one by ``val_loss`` doubles its input, the newer one returns 0."""
    model = torch.nn.Linear(1, 1, bias=True)
    keep = limpet.KeepBest(1, "val_loss", mode="min") | limpet.KeepLast(1)
    with limpet.Checkpointer(run, {"model": model}, save=limpet.EverySteps(1), keep=keep) as ckpt:
        for weight, loss in ((2.0, 0.1), (0.0, 0.9)):
            torch.nn.init.constant_(model.weight, weight)
            torch.nn.init.constant_(model.bias, 0.0)
            ckpt.step({"val_loss": loss})


@pytest.mark.slow
def test_two_workers_predict_1000_records_once_each_although_one_is_killed(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    out.mkdir()
    save_run(str(run))

    def worker(*hangs):
        command = [sys.executable, "-m", "tests.tasks.predicting", address, str(run), str(out)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([*command, *hangs], cwd=ROOT, env=env, text=True, **pipes)

    queue = Queue(lease_seconds=None)  # only the end of its connection tells that a worker is lost
    job = add(queue, records=1000, task_size=64)
    with TaskServer(queue) as server:
        address = server.listen()
        with worker("hangs") as killed, worker() as other:  # both import torch
            assert killed.stdin is not None
            assert killed.stdout is not None
            killed.stdin.close()
            task = int(killed.stdout.readline())
            killed.send_signal(signal.SIGKILL)
            other.communicate(timeout=60)
            assert other.returncode == 0
        job.wait(0)
    assert (out / f"{task}.txt").exists(), "the other worker got the task of the killed one"
    merged = "".join((out / f"{i}.txt").read_text() for i in range(1, job.tasks + 1))
    assert merged.splitlines() == [f"{i} {2 * i:.1f}" for i in range(1000)]
    assert job.results() == [None] * 16


# -- the queue ----------------------------------------------------------------------------------


def test_predictions_are_handed_out_independently_of_the_other_kinds():
    queue = Queue()
    queue.add("training", 4, task_size=2, name="t")
    queue.add("evaluation", 4, task_size=2, name="e")
    add(queue)
    task = queue.prediction.get("w")
    assert isinstance(task, PredictionTask)
    assert (task.job, task.start, task.stop) == ("p", 0, 2)
    assert queue.training.get("w").job == "t"
    assert queue.evaluation.get("w").job == "e"
    assert task.done(), "the worker holds one of each kind"
    assert not task.done(), "the first report counts"


def test_a_result_is_optional_and_results_are_in_the_order_of_the_tasks():
    queue = Queue()
    job = add(queue, records=5)
    first, second, third = (queue.prediction.get(w) for w in "abc")
    assert third.done({"rows": 1})
    assert first.done()
    with pytest.raises(TaskError, match="only None, bools, numbers"):
        second.done(torch.ones(1))
    with pytest.raises(TaskError, match="did not end"):
        job.results()
    assert second.done(7)
    assert queue.prediction.finished()
    assert job.results() == [None, 7, {"rows": 1}]
    assert add(queue) is not job, "its name is free again"


def test_a_worker_that_forgets_to_report_loses_its_attempts_and_the_loop_raises():
    """A loop of workers would otherwise end as if all records were predicted."""
    queue = Queue(attempts=3)
    job = add(queue, records=2)
    with pytest.raises(JobFailed, match=r"records 0 to 1.*asked for another task.*add the job"):
        while not queue.prediction.finished():
            queue.prediction.get("w")
    with pytest.raises(JobFailed):
        job.wait(0)
    assert queue.prediction.finished(), "whoever waits for the job has got the error"


@pytest.mark.parametrize("end", ["fail", "release", "lease", "recover"])
def test_a_task_returns_to_the_queue(end):
    clock = FakeClock()
    queue = Queue(lease_seconds=10, clock=clock)
    add(queue, records=2)
    task = queue.prediction.get("w")
    match end:
        case "fail":
            task.fail(ValueError("no memory"))
        case "release":
            task.release()
        case "lease":
            clock.advance(11)
        case "recover":
            queue.recover("w")
    again = queue.prediction.get("other")
    assert again.id == task.id
    assert again.attempt > task.attempt
    assert task.done(), "a late report counts, because the output is the same"
    assert not again.done()


def test_a_canceled_job_is_gone():
    queue = Queue()
    job = add(queue)
    job.cancel()
    assert queue.prediction.finished()
    assert queue.prediction.get() is None
    with pytest.raises(TaskError, match="canceled"):
        job.wait(0)


def test_a_stream_is_no_data_of_a_prediction_and_no_part_of_a_task_is_consumed():
    queue = Queue()
    with pytest.raises(LimpetError, match="The end of each data set"):
        add(queue, records={"s": None})
    add(queue)
    task = queue.prediction.get("w")
    with pytest.raises(TaskError):
        queue.report_consumed([task.report._replace(position=1)])
    with pytest.raises(LimpetError, match="'training' or 'evaluation' or 'prediction'"):
        queue.get("predictions")


def test_a_prediction_continues_from_a_saved_queue(tmp_path):
    queue = Queue()
    add(queue, records=6)
    queue.prediction.get("w").done()
    queue.prediction.get("w").done(2)
    state = {"queue": queue}
    limpet.save(tmp_path / "version_1", state, step=1)
    resumed = Queue()
    job = add(resumed, records=6)
    limpet.load(tmp_path / "version_1", into={"queue": resumed})
    task = resumed.prediction.get("v")
    assert task.id == 3
    task.done()
    assert job.results() == [None, 2, None]
    other = Queue()
    add(other, name="another")
    with pytest.raises(PlanError, match="does not have job 'another'"):
        limpet.load(tmp_path / "version_1", into={"queue": other})


def test_a_worker_of_another_process_gets_the_same():
    queue = Queue()
    job = add(queue, records=3)
    with TaskServer(queue) as server, RemoteQueue.connect(server.listen(), "w") as remote:
        first = remote.prediction.get()
        assert isinstance(first, PredictionTask)
        assert first.done()
        assert remote.prediction.get().done(3)
        assert remote.prediction.finished()
    assert job.results() == [None, 3]
