"""Worker processes: killed in the middle of a task, hung, and gone without a word."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from limpet.errors import JobFailed, LeaseLost
from limpet.tasks import Queue, TaskServer
from tests.tasks.worker import evaluate

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def start_worker(to, mode, *fds):
    """Start a worker process. ``to``: a file descriptor, or an address."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.tasks.worker", to, mode],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        pass_fds=fds,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def worker(owner, mode):
    """Start a worker process for a server of this process or an address. Kill it at the end."""
    if isinstance(owner, str):
        process = start_worker(owner, mode)
    else:
        with owner.connect(mode) as end:
            process = start_worker(str(end.fileno()), mode, end.fileno())
    with process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process):
    """Wait for what the worker prints."""
    return process.stdout.readline().strip()


def expected_results(records, task_size):
    """What one process computes over all the data."""
    queue = Queue()
    job = queue.add("evaluation", records, task_size=task_size, name="alone")
    while queue.evaluation.evaluate_one(evaluate):
        pass
    return job.results()


def test_workers_that_are_killed_change_no_result():
    """Two of three workers are killed with SIGKILL while they hold a task. Leases never end, so
    only the end of their connections tells."""
    queue = Queue(lease_seconds=None)
    job = queue.add("evaluation", 103, task_size=10, name="e")
    with TaskServer(queue) as server, worker(server, "hang") as a, worker(server, "hang") as b:
        held = {first_line(a), first_line(b)}
        assert held == {"1", "2"}
        a.send_signal(signal.SIGKILL)
        with worker(server, "work") as c:
            assert first_line(c) == "ready"
            b.send_signal(signal.SIGKILL)
            job.wait(60)
            assert job.results() == expected_results(103, 10)
            assert c.wait(30) == 0


def test_a_task_that_always_kills_its_worker_fails_its_job():
    queue = Queue(lease_seconds=None, attempts=2)
    job = queue.add("evaluation", 1, task_size=1, name="e")
    with TaskServer(queue) as server:
        for _ in range(2):
            with worker(server, "hang") as process:
                assert first_line(process) == "1"
        with pytest.raises(JobFailed, match=r"2 attempts.*worker 'hang \(connection 2\)' was lost"):
            job.wait(30)


def test_a_trainer_that_is_killed_leaves_the_exact_position():
    queue = Queue(lease_seconds=None)
    queue.add("training", 20, task_size=20, name="t")
    with TaskServer(queue) as server, worker(server, "train") as process:
        assert first_line(process) == "5"
        process.kill()
        task = queue.training.get(timeout=30)
        assert (task.position, task.attempt) == (5, 2)


def test_a_worker_that_hangs_loses_its_lease():
    """It is stopped, so its connection stays: only the time of its lease ends."""
    queue = Queue(lease_seconds=0.3)
    job = queue.add("evaluation", 40, task_size=10, name="e")
    with TaskServer(queue) as server, worker(server, "hang") as hung:
        assert first_line(hung) == "1"
        hung.send_signal(signal.SIGSTOP)
        with worker(server, "work") as process:
            job.wait(60)
            assert job.results() == expected_results(40, 10)
            assert process.wait(30) == 0


def test_nothing_waits_for_an_owner_that_is_gone():
    queue = Queue()
    queue.add("evaluation", 1, task_size=1, name="e")
    held: Any = queue.evaluation.get("somebody else")
    server = TaskServer(queue)
    with worker(server, "work") as process:
        assert first_line(process) == "ready"
        server.close()
        assert process.wait(30) != 0
    held.renew()
    queue.recover("somebody else")
    with pytest.raises(LeaseLost):
        held.renew()
