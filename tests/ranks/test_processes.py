"""Ranks that are processes, over gloo and a TCPStore.

At the stages of a save, they are killed or stopped, or their disks are full. One test runs them
under torchrun.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch.distributed as dist

from limpet.storage.local.store import LocalStore
from tests.ranks.faults import assert_versions_intact
from tests.ranks.processes import STAGES
from tests.waiting import check_at_once, run_process, wait_until

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SILENT, STUCK = 4, 8
TIME_LIMIT = 3 * STUCK
RANK_0_STAGES = {"before the check", "before the manifest", "in the manifest", "after the manifest"}
COMMITTED_STAGES = {"after the manifest"}


class Processes:
    """Starts ranks, by way of a process that forks them."""

    def __init__(self):
        command = [sys.executable, "-m", "tests.ranks.processes"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True)
        self.pids: list[int] = []
        self._lock = Lock()
        assert self._line() == "ready"

    def _line(self):
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(self, spec):
        assert self.process.stdin is not None
        with self._lock:
            self.process.stdin.write(json.dumps(spec) + "\n")
            self.process.stdin.flush()
            pid = int(self._line())
        self.pids.append(pid)
        return pid

    def close(self):
        for pid in self.pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


def is_alive(pid):
    """Return True if the process still exists and is one of the ranks."""
    with suppress(OSError):
        return b"tests.ranks.processes" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@pytest.fixture(scope="module")
def processes():
    processes = Processes()
    yield processes
    processes.close()


class Job:
    """Ranks that are started several times over one store, as by torchrun.

    ``agent``: this process hosts the store, as torchrun does. Otherwise, rank 0 hosts it.
    """

    def __init__(self, processes, tmp_path, agent=True, size=3):
        self.processes = processes
        self.folder = Path(tempfile.mkdtemp(dir=tmp_path))
        self.root = self.folder / "run"
        self.size = size
        self.restart = -1
        self.agent = agent
        self.store: Any = None
        if agent:
            timeout = timedelta(seconds=30)
            self.store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)

    def start(self, calls, **options):
        """Start all ranks. ``options``: those of ``JobStart``, such as the fault."""
        self.restart += 1
        port = free_port() if self.store is None else self.store.port
        return JobStart(self, port, calls, **options)


class JobStart:
    """One start of a job, with ``fault`` at one ``stage`` of the rank ``victim``."""

    def __init__(self, job, port, calls, victim=-1, stage="", fault="", silent=SILENT):
        self.job = job
        self.victim = victim
        self.reports = [job.folder / f"{job.restart}-{r}.jsonl" for r in range(job.size)]
        spec = {
            "size": job.size,
            "port": port,
            "host": not job.agent,
            "restart": job.restart,
            "root": str(job.root),
            "calls": calls,
            "destroy_group": not fault,
            "env": {"LIMPET_SILENT": str(silent), "LIMPET_STUCK": str(STUCK)},
        }
        self.pids = [
            job.processes.start(
                {
                    **spec,
                    "rank": rank,
                    "report": str(self.reports[rank]),
                    "stage": stage,
                    "fault": fault if rank == victim else "",
                }
            )
            for rank in range(job.size)
        ]

    def read_reports(self, rank):
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in self.reports[rank].read_text().splitlines()]
        return []

    def wait_until_injected(self):
        """Wait until the victim has reported its fault. Return the time of the fault.

        The other ranks do not wait for the victim after their commit, and can end before it.
        """

        def injected_at():
            return [r["at"] for r in self.read_reports(self.victim) if "injected" in r]

        wait_until(injected_at, 60, lambda: self.read_reports(self.victim))
        (at,) = injected_at()
        return float(at)

    def wait(self, ranks=None):
        """Wait until the ranks have ended. Return the report of each rank on its last call."""
        ranks = list(range(self.job.size)) if ranks is None else ranks
        wait_until(
            lambda: not any(is_alive(self.pids[r]) for r in ranks),
            60,
            lambda: [self.read_reports(r) for r in ranks],
        )
        for rank in ranks:
            reports = self.read_reports(rank)
            assert any(report.get("ended") for report in reports), (rank, reports)
        return [self.read_reports(r)[-2] for r in ranks]


def free_port():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def check_survivors(start, outcomes, stage, failed_rank):
    """Check that the other ranks commit, or raise within the time limit and name the victim."""
    injected_at = start.wait_until_injected()
    for outcome in outcomes:
        assert outcome["at"] - injected_at < TIME_LIMIT
        if stage in COMMITTED_STAGES:
            assert "digest" in outcome, outcome
            continue
        assert outcome["error"] == "RankFailed", outcome
        assert outcome["rank"] == failed_rank, outcome
        uncertain = stage in ("before the manifest", "in the manifest")
        assert outcome["uncertain"] == uncertain, outcome


def check_restart(job, stage):
    """Check that the job starts again, saves, and loads, and that all versions are intact."""
    step = 2 if stage in COMMITTED_STAGES else 1
    store = LocalStore(job.root)
    manifests = [s.key for s in store.list("") if s.key.endswith("manifest.json")]
    assert manifests == ["version_1/manifest.json"][: step - 1]
    restart = job.start([("save", step), ("save_async", step + 1), ("load", step + 1)])
    restart.wait()
    for rank in range(job.size):
        reports = restart.read_reports(rank)
        assert not [report for report in reports if "error" in report], reports
    assert_versions_intact(store, list(range(1, step + 2)))


def equivalent_stage(stage):
    """Return the stage with the same outcome.

    Before its release, a rank has sent everything that the other ranks wait for.
    """
    return "after the manifest" if stage == "before the release" else stage


VICTIM_STAGES = [(0, s) for s in STAGES] + [(2, s) for s in STAGES if s not in RANK_0_STAGES]
KILLED = [(*pair, ("save", "save_async")[n % 2]) for n, pair in enumerate(VICTIM_STAGES)]
STOPPED = [
    (0, "after the partition", "save_async"),
    (0, "before the manifest", "save"),
    (2, "in the shard", "save"),
    (2, "before the receipt", "save_async"),
]


def test_the_other_ranks_raise_or_commit_when_a_rank_is_killed(processes, tmp_path):
    def check(victim, stage, operation):
        job = Job(processes, tmp_path)
        start = job.start([(operation, 1)], victim=victim, stage=stage, fault="kill")
        others = [r for r in range(3) if r != victim]
        check_survivors(start, start.wait(others), equivalent_stage(stage), victim)
        check_restart(job, equivalent_stage(stage))

    check_at_once(check, KILLED)


def test_a_stopped_rank_that_continues_after_a_restart_does_no_harm(processes, tmp_path):
    def check(victim, stage, operation):
        job = Job(processes, tmp_path)
        start = job.start([(operation, 1)], victim=victim, stage=stage, fault="stop")
        others = [r for r in range(3) if r != victim]
        check_survivors(start, start.wait(others), stage, victim)
        check_restart(job, stage)
        os.kill(start.pids[victim], signal.SIGCONT)
        [outcome] = start.wait([victim])
        assert outcome["error"] in ("RankFailed", "CommitError"), outcome
        assert_versions_intact(LocalStore(job.root), [1, 2])

    check_at_once(check, STOPPED)


def test_all_ranks_raise_when_a_disk_is_full_and_save_again(processes, tmp_path):
    def check(victim, stage, operation):
        job = Job(processes, tmp_path)
        calls = [(operation, 1), (operation, 1), ("load", 1)]
        start = job.start(calls, victim=victim, stage=stage, fault="full")
        start.wait()
        for rank in range(3):
            failed, saved, loaded, _ = [r for r in start.read_reports(rank) if "injected" not in r]
            if rank == victim:
                assert failed["error"] in ("NoSpace", "OSError")
            else:
                assert (failed["error"], failed["rank"]) == ("RankFailed", victim)
                assert "No space left" in failed["text"]
            assert not failed["uncertain"]
            assert "digest" in saved
            assert "error" not in loaded
        assert_versions_intact(LocalStore(job.root), [1])

    stages = [(0, "in the shard"), (2, "before the index")]
    check_at_once(check, [(*stage, o) for stage in stages for o in ("save", "save_async")])


def check_no_error(start):
    start.wait()
    assert not [report for r in range(3) for report in start.read_reports(r) if "error" in report]
    assert_versions_intact(LocalStore(start.job.root), [1])


def test_a_rank_that_holds_the_gil_for_seconds_does_not_fail(processes, tmp_path):
    """A call to C holds the GIL for 3 seconds, so the rank sends no heartbeats."""
    calls = [("save", 1), ("load", 1)]
    options = {"stage": "before the shard", "fault": "hold_gil", "silent": 5}
    check_no_error(Job(processes, tmp_path).start(calls, victim=1, **options))


def test_a_job_that_is_suspended_as_a_whole_continues_its_save(processes, tmp_path):
    """As by a scheduler, or with its virtual machine. No rank was silent while others ran."""

    def check(operation, agent):
        job = Job(processes, tmp_path, agent)
        calls = [(operation, 1), ("load", 1)]
        start = job.start(calls, victim=1, stage="before the receipt", fault="late", silent=3)
        start.wait_until_injected()
        time.sleep(1.5)  # the others have begun to watch this rank
        for rank in (0, 1, 2):
            os.kill(start.pids[rank], signal.SIGSTOP)
        time.sleep(4)
        for rank in (0, 2, 1):
            os.kill(start.pids[rank], signal.SIGCONT)
            time.sleep(0.2)
        check_no_error(start)

    check_at_once(check, [(o, agent) for o in ("save", "save_async") for agent in (True, False)])


def test_the_other_ranks_raise_when_the_rank_that_hosts_the_store_is_killed(processes, tmp_path):
    def check(stage):
        job = Job(processes, tmp_path, agent=False)
        start = job.start([("save", 1)], victim=0, stage=stage, fault="kill")
        check_survivors(start, start.wait([1, 2]), stage, None)
        check_restart(job, stage)

    check_at_once(check, [("after the partition",), ("before the manifest",)])


TRAINING = """
import os, signal, sys
import numpy as np, torch, torch.distributed as dist
import limpet
from limpet.saving import save
from tests.ranks.processes import join_process_group
from tests.ranks.faults import state_of
from tests.trainings import train_step

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
spec = {"host": False, "port": int(os.environ["MASTER_PORT"])}
join_process_group({**spec, "restart": os.environ["TORCHELASTIC_RESTART_COUNT"]}, rank, size)
first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
original = save.write_local_shard
def write_local_shard(job, base):
    receipt = original(job, base)
    if first_start and rank == 1 and job.location.folder == "version_4":
        print("killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return receipt
save.write_local_shard = write_local_shard
whole = {**state_of(0, 1, 0)}
whole["weights"] = whole["weights"].tensor
rows = np.array_split(np.arange(1000), size)[rank]
part = whole["weights"][rows]
state = {**whole, "weights": limpet.Boxed(part, (int(rows[0]),), (1000,))}
with limpet.Checkpointer(sys.argv[1], state, save=limpet.EverySteps(1)) as ckpt:
    resumed = ckpt.resume()
    print(f"rank {rank} resumed at {resumed.step if resumed else 0}", flush=True)
    whole["weights"] = limpet.load(resumed.url)["weights"] if resumed else whole["weights"]
    whole["history"], whole["small"] = state["history"], state["small"]
    while ckpt.current_step < 6:
        loss = train_step(whole)
        part[...] = whole["weights"][rows]
        state["history"] = whole["history"]
        dist.barrier()
        ckpt.step({"loss": loss})
dist.destroy_process_group()
"""


def test_training_continues_after_torchrun_restarts_the_ranks(tmp_path):
    """One of two ranks is killed in its fourth save.

    The ranks that torchrun starts then find the keys of the first start in the same store. They
    resume from version 3 and continue to save.
    """
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "--max-restarts", "3"]
    command += ["--monitor-interval", "0.2"]
    settings = {"LIMPET_SILENT": "20", "LIMPET_STUCK": "40", "OMP_NUM_THREADS": "1"}
    completed = run_process(
        [*command, str(script), str(tmp_path / "run")],
        240,
        cwd=REPOSITORY,
        env={**os.environ, **settings, "PYTHONPATH": f"{REPOSITORY}:{os.environ['PYTHONPATH']}"},
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr[-8000:]
    assert completed.stdout.count("killed") == 1
    for rank in range(2):
        assert f"rank {rank} resumed at 0" in completed.stdout
        assert f"rank {rank} resumed at 3" in completed.stdout, completed.stdout
    assert_versions_intact(LocalStore(tmp_path / "run"), [1, 2, 3, 4, 5, 6])
