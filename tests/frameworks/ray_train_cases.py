"""Workers, drivers, and nodes of Ray Train are lost. ``test_ray_train.py`` runs this file."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray.train
import torch
from ray._raylet import GcsClient
from ray.train.v2.api.preemption import PreemptionInfo

import limpet
from limpet.errors import LimpetError
from limpet.integrations import ray_train
from tests.frameworks import ray_trainings
from tests.frameworks.harness import Process, compare
from tests.waiting import run_process, wait_until

os.environ |= {  # before the cluster starts
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",  # it asks the dashboard, which is off
}

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own code


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of an undisturbed training, without Ray."""
    process, run = Process(), tmp_path_factory.mktemp("whole") / "run"
    process.run(ray_trainings.train, run, ranks=2)
    process.close()
    return run


class Node:
    """Another node of the cluster, in this machine."""

    def __init__(self, base):
        self._known = {node["NodeID"] for node in ray.nodes()}
        command = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=2"]
        command += [f"--address={os.environ['RAY_ADDRESS']}", "--object-store-memory=80000000"]
        with (base / "node.log").open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(lambda: self.id is not None, 60)

    @property
    def id(self):
        found = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        return next((id for id in found if id not in self._known), None)

    def drain(self, seconds):
        deadline = int((time.time() + seconds) * 1000)
        client = GcsClient(address=os.environ["RAY_ADDRESS"])
        preempted = 2
        assert client.drain_node(self.id, preempted, "a test", deadline) == (True, "")

    def close(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


def test_the_driver_a_worker_and_a_node_are_lost(cluster, whole, tmp_path):
    """One training: a start of Ray Train takes seconds."""
    # the driver, and with it all workers, at step 5
    command = [sys.executable, "-m", "tests.frameworks.ray_trainings", str(tmp_path)]
    done = run_process(command, 120, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    # a worker, at step 9, on a node that is then drained; there is place on the first one then
    others = ray.util.placement_group([{"CPU": 2}])
    assert others.wait(60)
    node = Node(cluster)

    def lose():
        wait_until(lambda: any(tmp_path.glob("step 10 *")), 90)
        node.drain(8)
        ray.util.remove_placement_group(others)

    thread = threading.Thread(target=lose)
    thread.start()
    try:
        # one failure is allowed: the drain does not count
        result = ray_trainings.fit(tmp_path, max_failures=1, kill_at={"worker": (9, 0)})
    finally:
        thread.join()
        node.close()
    assert {path.name for path in tmp_path.glob("*er")} == {"worker", "driver"}
    assert result.path == str(tmp_path / "run")
    compare(whole, tmp_path / "run")
    # saves may have been in flight at the kills, but before the drain, all steps were saved
    snapshots = limpet.Run(result.path).snapshots()
    last = max(s.step for s in snapshots if s.metadata["reason"] == "preemption")
    starts = sorted({int(path.name.split()[-1]) for path in tmp_path.glob("step *")})
    assert len(starts) == 4, starts
    assert 0 == starts[0] < starts[1] <= 4 < starts[2] <= 8 < starts[3] == last, starts
    assert not any(tmp_path.glob(f"step {last + 1} of the start at {starts[2]}"))
    # the report of Ray refers to the version, without a copy
    assert Path(result.checkpoint.path) == tmp_path / "run" / "version_24"
    assert limpet.load(result.checkpoint.path)["loader"] == limpet.load(f"{whole}@24")["loader"]
    assert result.metrics == {"steps": 24}


# -- without workers -------------------------------------------------------------------------------


def in_training(monkeypatch, **attributes):
    """What the functions of Ray Train return in ``train_loop_per_worker``."""
    context = SimpleNamespace(**attributes)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(ray_train, "get_train_context", lambda: context)


@pytest.mark.parametrize(
    ("kind", "path", "url"),
    [
        ("local", "/results/run", "/results/run"),
        ("s3", "bucket/results/run", "s3://bucket/results/run"),
        ("gcs", "bucket/run", "gs://bucket/run"),
    ],
)
def test_the_run_is_the_storage_path(monkeypatch, kind, path, url):
    files = SimpleNamespace(type_name=kind)
    storage = SimpleNamespace(storage_filesystem=files, experiment_fs_path=path)
    in_training(monkeypatch, get_storage=lambda: storage)
    assert ray_train._storage_url() == url
    files.type_name = "py::own"
    with pytest.raises(LimpetError, match=r"on a file system 'py::own': pass its URL as run="):
        ray_train.checkpointer({"x": 1})


def test_the_time_that_a_drain_leaves(monkeypatch):
    preemption = SimpleNamespace(preemption_info=None)
    in_training(monkeypatch, preemption_context=preemption)
    assert ray_train._seconds_left() is None
    preemption.preemption_info = PreemptionInfo(None, {"a": [0]})
    assert 60 < ray_train._seconds_left() < 120
    preemption.preemption_info = PreemptionInfo(int(time.time() * 1000) + 40_000, {"a": [0]})
    assert 39 < ray_train._seconds_left() <= 40


def test_a_worker_that_ray_does_not_stop_fails(monkeypatch):
    """It must not return: that would end the training as if it were complete."""
    waits = []
    monkeypatch.setattr(ray_train.time, "sleep", waits.append)
    with pytest.raises(LimpetError, match="has not stopped this worker"):
        ray_train._wait_for_the_end()
    assert waits == [3600.0]


def test_options_are_those_of_a_checkpointer(tmp_path):
    with pytest.raises(LimpetError, match="Checkpointer has no argument every="):
        ray_train.checkpointer({"x": 1}, tmp_path / "run", every=3)
    state = {"x": torch.ones(2)}
    with ray_train.checkpointer(state, tmp_path / "run", preemption=None, at_end=False) as ckpt:
        ckpt.step()
    assert not limpet.Run(tmp_path / "run").snapshots()
