"""Run the examples as a user runs them, as separate processes."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

import limpet
from tests.docs.test_docs import ROOT, blocks
from tests.waiting import run_process

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--width", "32", "--layers", "1", "--batch", "2", "--length", "16", "--log", "1"]

pytestmark = pytest.mark.slow


def python(script, *arguments, folder):
    command = [sys.executable, "-W", "error", EXAMPLES / script, *arguments]
    return run_process(command, 850, cwd=folder)


def train(folder, run, epochs, steps):
    """Train for epochs of ``steps`` steps, and return the lines of the output."""
    arguments = ["--run", run, "--epochs", str(epochs), "--windows", str(2 * steps), "--every", "3"]
    arguments += SMALL
    done = python("train.py", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_train_saves_what_it_prints_and_prints_the_same_losses_after_a_resume(tmp_path):
    lines = train(tmp_path, "a", 2, 5)
    assert lines[0] == "starting from scratch"
    assert lines[6].startswith("epoch 0: held out ")
    assert lines[11].startswith("step    10  loss ")
    assert lines[13].startswith("4 saves of ")
    snapshots = limpet.Run(tmp_path / "a").snapshots()
    assert [s.step for s in snapshots] == [6, 9, 10], (
        "the last three versions, which include the last step"
    )
    newest = snapshots[-1]
    assert newest.step == 10
    assert newest["loader/epoch"] == 2
    assert f"loss {snapshots[1].metrics['loss']:.4f}" in lines[10]
    assert f"held out {newest.metrics['held_out']:.4f}" in lines[12]
    assert newest.verify().ok
    # a second run that contains only version 6 of the first
    shutil.copytree(tmp_path / "a" / "version_6", tmp_path / "b" / "version_6")
    resumed = train(tmp_path, "b", 2, 5)
    assert resumed[0] == f"resuming from {tmp_path}/b/version_6"
    assert resumed[1:6] == lines[8:13]


def test_train_resumed_for_more_epochs_uses_the_longer_learning_rate_schedule(tmp_path):
    train(tmp_path, "run", 1, 4)
    assert train(tmp_path, "run", 2, 4)[0] == f"resuming from {tmp_path}/run/version_4"
    snapshots = limpet.Run(tmp_path / "run").snapshots()
    assert [s.step for s in snapshots] == [4, 6, 8]
    rates = [s["optimizer/groups/0/lr"] for s in snapshots]
    assert rates[0] == rates[2] == 0, "the rate is 0 at the end of each schedule"
    assert rates[1] == pytest.approx(3e-3 * 7 / 100)


@pytest.mark.chaos
def test_demo_shows_every_result(tmp_path):
    done = python("demo.py", "--quick", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    output = " ".join(done.stdout.split())
    assert "SIGKILL while version_" in output
    assert "has a partial shard and no manifest, so it is not a version" in output
    assert output.count("are equal, bit for bit") == 2
    assert "SkippedVersion: version_40 is skipped" in output
    assert "$ limpet verify run-b" in output
    assert "limpet.load raises an error for the damaged file" in output
    assert "checks passed in" in output
    assert "✗" not in output


@pytest.mark.chaos
def test_elastic_training_resumes_with_any_number_of_ranks(tmp_path):
    done = python("elastic.py", "--quick", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 6 checks passed in" in done.stdout
    starts = re.findall(
        r"(?:starting from scratch|resuming from step (\d+)) on (\d) ranks?", done.stdout
    )
    assert [n for _, n in starts] == ["4", "4", "2", "3", "1"]
    assert [int(step or 0) for step, _ in starts] == [0, 0, 4, 12, 16]


@pytest.mark.chaos
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_tables_survive_the_loss_of_a_worker_a_server_and_the_driver(tmp_path):
    done = python("demo_tables.py", "--quick", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 9 checks passed in" in done.stdout
    killed = re.findall(r"SIGKILL to the (\w+) \d+, after step", done.stdout)
    assert killed == ["worker", "server", "driver", "worker"]
    assert "✗" not in done.stdout


@pytest.mark.chaos
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_train_resumes_after_the_kill_of_a_worker(tmp_path, monkeypatch):
    """And the script of the documentation runs."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    command = [sys.executable, EXAMPLES / "ray_train.py", "--storage", tmp_path / "storage"]
    done = run_process(command, 300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert (tmp_path / "storage" / "killed").exists()
    # the save of step 20 may have been in flight
    for line in ("epoch 0 ended at step 16", "resumed step (15|20) from", "epoch 3 ended at"):
        assert re.search(line, output), output
    assert re.findall(r"^step (\d+): ", done.stdout, re.MULTILINE) == ["55", "60", "64"]

    (script,) = [b for b in blocks(ROOT / "docs/frameworks/ray-train.md") if b.file]
    changed = script.code.replace("s3://bucket/results", f"{tmp_path}/results")
    (tmp_path / script.file).write_text(changed)
    command = [sys.executable, script.file]
    done = run_process(command, 300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert limpet.Run(tmp_path / "results" / "a").latest().step == 16


STOP_AT_THE_COMMIT = """
import os, sys
sys.path.insert(0, sys.argv.pop(1))
import fsdp, limpet

step = limpet.Checkpointer.step

def stop(self, metrics):
    step(self, metrics)
    self.wait()
    if self.statistics()["saves"]:
        os._exit(9)

limpet.Checkpointer.step = stop
fsdp.main()
"""


def test_the_log_of_fsdp_includes_the_steps_of_every_version(tmp_path):
    """A process that ends as soon as a version is committed has printed the losses up to it.

    A resumed run does not repeat these steps, so no other log would include them.
    """
    command = [sys.executable, "-c", STOP_AT_THE_COMMIT, EXAMPLES, "run", "--every", "3"]
    done = run_process(command, 300, cwd=tmp_path)
    assert done.returncode == 9, done.stderr
    assert [s.step for s in limpet.Run(tmp_path / "run").snapshots()] == [3]
    assert re.findall(r"^step +(\d+)  loss ", done.stdout, re.MULTILINE) == ["1", "2", "3"]
