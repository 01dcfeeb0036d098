"""The restore ladder under ``limpet run``, with and without torchrun."""

import sys
from pathlib import Path

import numpy as np
import pytest

import limpet
from limpet.format.names import Version, restart_name
from limpet.loading.snapshot import reader_of
from limpet.notices.exit_status import FAILED, GIVE_UP
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from limpet.tiers.restarts import Restart, write_restart
from tests.cli.supervised import run_to_end

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("dying_worker.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
CREATED = "2026-01-02T03:04:05+00:00"


def records(run):
    return sorted(int(p.name[8]) for p in run.glob("restart-*.json"))


def make_run(folder, restarts):
    """Make a run with the versions 10 and 20, and restarts on these rungs, all of which failed."""
    state = {"weights": np.zeros(4), "progress": limpet.Progress()}
    with limpet.Checkpointer(folder, state, save=EverySteps(10)) as ckpt:
        for _ in range(20):
            state["weights"] += 1
            ckpt.step()
    run = Run(folder)
    digest = reader_of(run.open(Version(20))).digest
    for number, rung in enumerate(restarts):
        left = "version_20" if rung == 2 else None
        record = Restart(rung, 20, "version_20", digest, None, left, CREATED)
        write_restart(run.store, restart_name(rung, f"{number:012x}"), record)
    return run


def test_a_training_that_always_dies_at_one_step_ends_with_93(tmp_path):
    run = tmp_path / "run"
    make_run(run, [0, 0, 0, 2, 2])
    result = run_to_end("--", sys.executable, WORKER, run, "always")
    assert result.code == FAILED
    assert records(run) == [0, 0, 0, 2, 2, 2]
    for _ in range(2):
        result = run_to_end("--json", "--", sys.executable, WORKER, run, "always")
        assert result.code == GIVE_UP
        (status,) = result.json["statuses"]
        assert status["why"].startswith("6 restarts have made no progress beyond step 20: 2")
        assert status["why"].endswith("once, and run it again"), "it fits into the status"
        assert f"exit code 93: rank 0 gave up in {run}: 6 restarts" in result.err
        assert "Traceback" not in result.err

    by_hand = run_to_end("--", "env", "-u", "LIMPET_STATUS", sys.executable, WORKER, run, "x")
    assert "began at step 20" in by_hand.out, "a person may start it all the same"


def test_one_version_back_is_enough_and_the_training_completes(tmp_path):
    make_run(tmp_path / "run", [0, 0, 0])
    result = run_to_end("--", sys.executable, WORKER, tmp_path / "run", "from-20")
    assert result.code == 0
    assert "began at step 10" in result.out
    assert "Training has left version_20 behind" in result.err
    assert records(tmp_path / "run") == [0, 0, 0], "its own record is removed"
    result = run_to_end("--", sys.executable, WORKER, tmp_path / "run", "from-20")
    assert result.code == 0
    assert records(tmp_path / "run") == [], "and step 30 makes the others void"


def test_all_workers_of_torchrun_leave_and_it_returns_93(tmp_path):
    make_run(tmp_path / "run", [0, 0, 0, 2, 2, 2])
    command = [*TORCHRUN, "--max-restarts=3", WORKER, tmp_path / "run", "always"]
    result = run_to_end("--json", "--", *command)
    assert result.code == GIVE_UP
    assert sorted(s["rank"] for s in result.json["statuses"]) == [0, 1]
    assert {s["code"] for s in result.json["statuses"]} == {GIVE_UP}
    assert result.json["command"]["exit_code"] == 0, "so torchrun restarts nothing"
    assert result.err.count("limpet: 6 restarts have made no progress") == 1
    assert "exit code 93: rank 0 (and 1 more) gave up" in result.err


def test_a_rank_that_fails_under_torchrun_counts(tmp_path):
    """Rank 1 fails, and torchrun stops rank 0, which must not take that for a good end."""
    make_run(tmp_path / "run", [0, 0])
    command = [*TORCHRUN, "--max-restarts=0", WORKER, tmp_path / "run", "from-20"]
    result = run_to_end("--", *command)
    assert result.code == FAILED
    assert result.out.count("began at step 20") == 2
    assert records(tmp_path / "run") == [0, 0, 0]
