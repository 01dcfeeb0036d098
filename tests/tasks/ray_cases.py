"""A training whose workers Ray places and restarts. ``tests/evaluation/test_ray.py`` runs this."""

import os
import signal
from collections import Counter

import pytest

from limpet.errors import TaskError
from limpet.tasks import Queue, RemoteQueue, TaskServer
from tests.tasks.test_processes import expected_results
from tests.tasks.worker import evaluate


class Worker:
    """Trains on all records that it gets: it writes their numbers. The first worker is killed."""

    def train(self, address, folder):
        with (
            RemoteQueue.connect(address) as queue,
            open(f"{folder}/records-{os.getpid()}", "a") as file,
        ):
            records = 0
            while not queue.finished("training"):
                queue.evaluation.evaluate_one(evaluate)
                task = queue.training.get(timeout=0.05)
                while task is not None and task.records_left:
                    position = task.position
                    task.consumed(1)
                    records += 1
                    file.write(f"{task.epoch} {task.data} {position}\n")
                    file.flush()
                    if records == 7:
                        self._die_once(folder)
            while queue.evaluation.evaluate_one(evaluate):
                pass
            return records

    @staticmethod
    def _die_once(folder):
        try:
            os.close(os.open(f"{folder}/died", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def remote(worker, **options):
    import ray

    return ray.remote(num_cpus=0.5, max_restarts=3, max_task_retries=3, **options)(worker)


def test_ray_restarts_a_worker_and_every_record_counts_once(cluster, tmp_path):
    """Leases never end, so only the end of a connection gives the tasks of the worker back."""
    import ray

    queue = Queue(lease_seconds=None)
    queue.add("training", {"a": 40, "b": range(3, 60)}, task_size=16, epochs=2, name="train")
    job = queue.add("evaluation", 103, task_size=10, name="val")
    actor = remote(Worker)
    with TaskServer(queue) as server:
        address = server.listen(ray.util.get_node_ip_address())
        workers = [actor.remote() for _ in range(2)]
        counts = ray.get([w.train.remote(address, str(tmp_path)) for w in workers], timeout=120)
    assert (tmp_path / "died").exists()
    files = list(tmp_path.glob("records-*"))
    assert len(files) == 3, "two workers, and the one that Ray has started again"
    lines = Counter(line for file in files for line in file.read_text().splitlines())
    expected = [
        f"{epoch} {data} {record}"
        for epoch in range(2)
        for data, records in (("a", range(40)), ("b", range(3, 60)))
        for record in records
    ]
    assert lines == Counter(expected)
    assert sum(counts) == len(expected) - 7, "those of the killed attempt are reported to nobody"
    assert queue.finished("training")
    assert job.results() == expected_results(103, 10)


def test_a_worker_on_ray_gets_the_error_if_the_owner_has_ended(cluster, tmp_path):
    import ray

    queue = Queue()
    queue.add("training", 10, task_size=10, name="train")
    with TaskServer(queue) as server:
        address = server.listen(ray.util.get_node_ip_address())
    worker = remote(Worker).remote()
    with pytest.raises(TaskError, match="Cannot connect to the owner of the task queue"):
        ray.get(worker.train.remote(address, str(tmp_path)), timeout=120)
