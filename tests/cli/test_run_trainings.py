"""``limpet run`` with real trainings, which get SIGTERM: what its exit code says."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from limpet.run.run import Run
from tests.cli.supervised import finish, is_alive, read_pid, started, wait_until

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("training_worker.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run_until_sigterm(folder, action, *options, run="run", by_torchrun=False):
    """Run a training, send SIGTERM to ``limpet run`` once it has made three steps, and wait."""
    launcher, ranks = (TORCHRUN, 2) if by_torchrun else ([sys.executable], 1)
    command = [*launcher, WORKER, folder / run, folder / "ready", action]
    with started("--json", *options, "--", *command) as process:
        pids = [read_pid(folder / f"ready.{rank}") for rank in range(ranks)]
        process.send_signal(signal.SIGTERM)
        result = finish(process)
    assert not any(is_alive(pid) for pid in pids)
    return result


def saved_steps(run):
    return [s.step for s in Run(run).snapshots()]


@pytest.mark.parametrize(
    ("action", "expected", "codes"),
    [
        ("train", 75, [75]), ("fail", 1, [1]), ("raise", 1, [1]), ("exit", 1, [1]),
        ("exit-0", 0, [0]), ("lost", 76, []), ("end", 0, [0]), ("exit-later", 76, [0]),
    ],
)  # fmt: skip
def test_a_training_that_gets_a_notice(action, expected, codes, tmp_path):
    result = run_until_sigterm(tmp_path, action)
    assert result.code == expected, result.err
    assert [s["code"] for s in result.json["statuses"]] == codes
    # a training that ends normally saves its last step, too
    is_saved = action in ("train", "end", "exit-later")
    assert len(saved_steps(tmp_path / "run")) == is_saved
    if action == "fail":
        assert "rank 0 failed in" in result.err
        assert "ValueError: the loss is NaN" in result.err


@pytest.mark.parametrize(("action", "expected"), [("fail", 1), ("apart", 75)])
def test_a_training_under_torchrun_that_gets_a_notice(action, expected, tmp_path):
    """torchrun returns 1 in any case, or aborts while it exits. ``apart``: each worker is rank 0 of
    its own group."""
    result = run_until_sigterm(tmp_path, action, by_torchrun=True)
    assert result.code == expected, result.err
    command = result.json["command"]
    assert command["exit_code"] == 1 or command["killed_by"] == signal.SIGABRT
    assert [s["code"] for s in result.json["statuses"]] == [expected] * 2


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_a_signal_that_requests_a_save_does_not_stop_the_training(by_torchrun, tmp_path):
    """torchrun itself would stop: it ends at every signal."""
    launcher, ranks = (TORCHRUN, 2) if by_torchrun else ([sys.executable], 1)
    command = [*launcher, WORKER, tmp_path / "run", tmp_path / "ready", "request"]
    with started("--json", "--", *command) as process:
        for rank in range(ranks):
            read_pid(tmp_path / f"ready.{rank}")
        for count in (1, 2):
            process.send_signal(signal.SIGUSR1)
            wait_until(lambda count=count: len(saved_steps(tmp_path / "run")) == count)
        process.send_signal(signal.SIGTERM)
        result = finish(process)
    assert result.code == 75, result.err
    assert result.json["signals"] == [signal.SIGTERM]
    assert len(saved_steps(tmp_path / "run")) > 2  # at once, or also at the end of the grace


def test_a_long_step_ends_before_the_grace_and_what_was_saved_counts(tmp_path):
    """A thread saves the third step. The process must have ended when ``limpet run`` kills."""
    result = run_until_sigterm(tmp_path, "long", "--grace", "6s")
    assert result.code == 75, result.err
    assert result.json["killed"] == 0
    assert saved_steps(tmp_path / "run") == [3]


def test_a_training_that_has_ended_is_no_reason_to_run_again(tmp_path):
    """The shell is killed by the signal, so only the statuses can say that all is saved."""
    script = '"$1" "$2" "$3/a" "$3/a" done && "$1" "$2" "$3/b" "$3/b" train'
    with started("--", "sh", "-c", script, "sh", sys.executable, WORKER, tmp_path) as process:
        read_pid(tmp_path / "b.0")
        process.send_signal(signal.SIGTERM)
        result = finish(process)
    assert result.code == 75, result.err
    assert len(saved_steps(tmp_path / "b")) == 1


def test_a_run_whose_name_is_not_utf_8(tmp_path):
    run = os.fsdecode(b"run-\xff")
    result = run_until_sigterm(tmp_path, "train", run=run)
    assert result.code == 75, result.err
    (status,) = result.json["statuses"]
    assert status["run"].endswith("run-\\udcff")
    assert len(saved_steps(tmp_path / run)) == 1


# Two trainings in one process. The first one completes after a notice, the second one does not.
TWO = """
import os, signal, sys, time
import numpy as np
import limpet

def train(run, fails):
    state = {"x": np.zeros(4), "progress": limpet.Progress()}
    with limpet.Checkpointer(run, state, save=limpet.AtEnd()) as ckpt:
        ckpt.resume()
        ckpt.step()
        if fails:
            raise ValueError("the loss is NaN")
        os.kill(os.getpid(), signal.SIGTERM)
        while not ckpt._preemption.is_pending:
            time.sleep(0.01)

train(sys.argv[1] + "-a", False)
try:
    train(sys.argv[1] + "-b", True)
except ValueError:
    sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 1])
def test_a_later_training_in_the_process_makes_the_end_of_an_earlier_one_void(code, tmp_path):
    statuses = tmp_path / "statuses"
    statuses.mkdir()
    command = [sys.executable, "-c", TWO, str(tmp_path / "run"), str(code)]
    environment = {**os.environ, "LIMPET_STATUS": str(statuses)}
    assert subprocess.run(command, env=environment, check=False).returncode == code
    (record,) = statuses.iterdir()
    assert b'"left":null,"status":null' in record.read_bytes()
