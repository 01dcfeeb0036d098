"""Ranks that are processes, over gloo and a TCPStore: killed, stopped, with full disks, at every
stage; and all of it under torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.storage.local import LocalStore
from tests.ranks.faults import assert_versions_intact
from tests.ranks.processes import STAGES

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SILENT, STUCK = 2, 4
BOUND = 3 * STUCK
OF_RANK_0 = {"before it checks", "before the manifest", "in the manifest", "after the manifest"}
COMMITTED = {"after the manifest"}


class Harbour:
    """Forks ranks."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.ranks.processes"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True)
        self.pids: list[int] = []
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(self, order: dict[str, Any]) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        self.pids.append(int(self._line()))
        return self.pids[-1]

    def close(self) -> None:
        for pid in self.pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait(20)
        self.process.stdout.close()  # type: ignore[union-attr]


def alive(pid: int) -> bool:
    """Whether it is still one of ours."""
    with suppress(OSError):
        return b"tests.ranks.processes" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@pytest.fixture(scope="module")
def harbour() -> Iterator[Harbour]:
    made = Harbour()
    yield made
    made.close()


class Job:
    """Ranks that are started again and again over one store, as torchrun does it."""

    def __init__(self, harbour: Harbour, tmp_path: Path, size: int, agent: bool = True) -> None:
        self.harbour = harbour
        self.folder = tmp_path
        self.root = tmp_path / "run"
        self.size = size
        self.restart = -1
        self.agent = agent
        self.store: Any = None
        if agent:
            wait = timedelta(seconds=30)
            self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait, wait_for_workers=False)

    def start(self, calls: list[tuple[str, int]], **more: Any) -> Attempt:
        """``more``: the ``victim``, the ``stage`` and the ``act`` that happens to it."""
        self.restart += 1
        port = free_port() if self.store is None else self.store.port
        return Attempt(self, port, calls, **more)


class Attempt:
    def __init__(
        self,
        job: Job,
        port: int,
        calls: list[tuple[str, int]],
        victim: int = -1,
        stage: str = "",
        act: str = "",
        silent: float = SILENT,
    ) -> None:
        self.job = job
        self.victim = victim
        self.reports = [job.folder / f"{job.restart}-{r}.jsonl" for r in range(job.size)]
        order = {
            "size": job.size,
            "port": port,
            "host": not job.agent,
            "restart": job.restart,
            "root": str(job.root),
            "calls": calls,
            "leave": not act,
            "env": {"HOLDFAST_SILENT": str(silent), "HOLDFAST_STUCK": str(STUCK)},
        }
        self.pids = [
            job.harbour.start(
                {
                    **order,
                    "rank": rank,
                    "report": str(self.reports[rank]),
                    "stage": stage,
                    "act": act if rank == victim else "",
                }
            )
            for rank in range(job.size)
        ]

    def told(self, rank: int) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in self.reports[rank].read_text().splitlines()]
        return []

    def wait(self, ranks: list[int] | None = None) -> list[dict[str, Any]]:
        """What ranks have said of their last call, once they have ended."""
        ranks = list(range(self.job.size)) if ranks is None else ranks
        end = time.monotonic() + 60
        while any(alive(self.pids[r]) for r in ranks):
            assert time.monotonic() < end, [self.told(r) for r in ranks]
            time.sleep(0.02)
        for rank in ranks:
            assert any(t.get("ended") for t in self.told(rank)), (rank, self.told(rank))
        return [self.told(r)[-2] for r in ranks]


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def check_survivors(
    attempt: Attempt, outcomes: list[dict[str, Any]], stage: str, lost: Any
) -> None:
    happened = [t["at"] for t in attempt.told(attempt.victim) if "happened" in t]
    assert len(happened) == 1
    for outcome in outcomes:
        assert outcome["at"] - happened[0] < BOUND
        if stage in COMMITTED:
            assert "digest" in outcome, outcome
            continue
        assert outcome["error"] == "RankFailed", outcome
        assert outcome["rank"] == lost, outcome
        assert outcome["unsure"] == (stage in ("before the manifest", "in the manifest")), outcome


def starts_again(job: Job, stage: str) -> None:
    """Promises 1 to 8 of what was left, and of the versions that follow."""
    step = 2 if stage in COMMITTED else 1
    store = LocalStore(job.root)
    there = [s.key for s in store.list("") if s.key.endswith("manifest.json")]
    assert there == ["version_1/manifest.json"][: step - 1]
    again = job.start([("save", step), ("save_async", step + 1), ("load", step + 1)])
    again.wait()
    for rank in range(job.size):
        told = again.told(rank)
        assert not [t for t in told if "error" in t], told
    assert_versions_intact(store, list(range(1, step + 2)))


def outcome_of(stage: str) -> str:
    """A rank that is about to let go has said all that the others wait for."""
    return "after the manifest" if stage == "before it lets go" else stage


PLACES = [(0, s) for s in STAGES] + [(2, s) for s in STAGES if s not in OF_RANK_0]
KILLED = [(*place, ("save", "save_async")[n % 2]) for n, place in enumerate(PLACES)]
STOPPED = [
    (0, "told who writes what", "save_async"),
    (0, "before the manifest", "save"),
    (2, "in its shard", "save"),
    (2, "before its receipt", "save_async"),
]


@pytest.mark.parametrize(("victim", "stage", "what"), KILLED)
def test_a_rank_is_killed(
    harbour: Harbour, tmp_path: Path, victim: int, stage: str, what: str
) -> None:
    job = Job(harbour, tmp_path, 3)
    attempt = job.start([(what, 1)], victim=victim, stage=stage, act="kill")
    rest = [r for r in range(3) if r != victim]
    check_survivors(attempt, attempt.wait(rest), outcome_of(stage), victim)
    starts_again(job, outcome_of(stage))


@pytest.mark.parametrize(("victim", "stage", "what"), STOPPED)
def test_a_rank_is_stopped_and_wakes_when_the_job_has_started_again(
    harbour: Harbour, tmp_path: Path, victim: int, stage: str, what: str
) -> None:
    job = Job(harbour, tmp_path, 3)
    attempt = job.start([(what, 1)], victim=victim, stage=stage, act="stop")
    rest = [r for r in range(3) if r != victim]
    check_survivors(attempt, attempt.wait(rest), stage, victim)
    starts_again(job, stage)
    os.kill(attempt.pids[victim], signal.SIGCONT)
    [woken] = attempt.wait([victim])
    assert woken["error"] in ("RankFailed", "CommitError"), woken
    assert_versions_intact(LocalStore(job.root), [1, 2])


@pytest.mark.parametrize("what", ["save", "save_async"])
@pytest.mark.parametrize(("victim", "stage"), [(0, "in its shard"), (2, "before its index")])
def test_the_disk_of_a_rank_is_full(
    harbour: Harbour, tmp_path: Path, victim: int, stage: str, what: str
) -> None:
    """The ranks live on, and save again."""
    job = Job(harbour, tmp_path, 3)
    calls = [(what, 1), (what, 1), ("load", 1)]
    attempt = job.start(calls, victim=victim, stage=stage, act="full")
    attempt.wait()
    for rank in range(3):
        failed, saved, loaded, _ = [t for t in attempt.told(rank) if "happened" not in t]
        if rank == victim:
            assert failed["error"] in ("NoSpace", "OSError")
        else:
            assert (failed["error"], failed["rank"]) == ("RankFailed", victim)
            assert "No space left" in failed["text"]
        assert not failed["unsure"]
        assert "digest" in saved
        assert "error" not in loaded
    assert_versions_intact(LocalStore(job.root), [1])


def test_a_rank_that_holds_its_interpreter_for_long_is_not_given_up(
    harbour: Harbour, tmp_path: Path
) -> None:
    """3 seconds in a call to C: no pulse, no answer, and nothing wrong."""
    job = Job(harbour, tmp_path, 3)
    attempt = job.start(
        [("save", 1), ("load", 1)], victim=1, stage="before its shard", act="hold_gil", silent=5
    )
    attempt.wait()
    assert not [t for r in range(3) for t in attempt.told(r) if "error" in t]
    assert_versions_intact(LocalStore(job.root), [1])


@pytest.mark.parametrize("stage", ["told who writes what", "before the manifest"])
def test_the_rank_that_hosts_the_store_is_killed(
    harbour: Harbour, tmp_path: Path, stage: str
) -> None:
    job = Job(harbour, tmp_path, 3, agent=False)
    attempt = job.start([("save", 1)], victim=0, stage=stage, act="kill")
    check_survivors(attempt, attempt.wait([1, 2]), stage, None)
    starts_again(job, stage)


TRAINING = """
import os, signal, sys
import numpy as np, torch, torch.distributed as dist
import holdfast
from holdfast.engine.saving import save
from tests.ranks.processes import join_process_group
from tests.ranks.faults import state_of
from tests.trainings import train_step

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
order = {"host": False, "port": int(os.environ["MASTER_PORT"])}
join_process_group({**order, "restart": os.environ["TORCHELASTIC_RESTART_COUNT"]}, rank, size)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
real = save.write_local_shard
def write_local_shard(job, base):
    made = real(job, base)
    if first and rank == 2 and job.location.folder == "version_4":
        print("killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return made
save.write_local_shard = write_local_shard
whole = {**state_of(0, 1, 0)}
whole["weights"] = whole["weights"].tensor
rows = np.array_split(np.arange(1000), size)[rank]
part = whole["weights"][rows]
state = {**whole, "weights": holdfast.Boxed(part, (int(rows[0]),), (1000,))}
with holdfast.Checkpointer(sys.argv[1], state, save=holdfast.EverySteps(1)) as ckpt:
    resumed = ckpt.resume()
    print(f"rank {rank} resumed at {resumed.step if resumed else 0}", flush=True)
    whole["weights"] = holdfast.load(resumed.url)["weights"] if resumed else whole["weights"]
    whole["history"], whole["small"] = state["history"], state["small"]
    while ckpt.current_step < 6:
        loss = train_step(whole)
        part[...] = whole["weights"][rows]
        state["history"] = whole["history"]
        dist.barrier()
        ckpt.step({"loss": loss})
dist.destroy_process_group()
"""


def test_torchrun_starts_the_ranks_again(tmp_path: Path) -> None:
    """One of four is killed in its fourth save; what torchrun starts then finds the notes of the
    first start on the same board, goes on from version 3, and saves on."""
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command += ["--master-port", str(free_port()), "--max-restarts", "3", "--monitor-interval", "1"]
    settings = {"HOLDFAST_SILENT": "20", "HOLDFAST_STUCK": "40", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "run")],
        cwd=REPOSITORY,
        env={**os.environ, **settings, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    assert done.stdout.count("killed") == 1
    for rank in range(4):
        assert f"rank {rank} resumed at 0" in done.stdout
        assert f"rank {rank} resumed at 3" in done.stdout, done.stdout
    assert_versions_intact(LocalStore(tmp_path / "run"), [1, 2, 3, 4, 5, 6])
