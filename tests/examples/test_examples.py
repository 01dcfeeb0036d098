"""The examples, run as a person would run them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--width", "32", "--layers", "1", "--batch", "2", "--length", "16", "--log", "1"]

pytestmark = pytest.mark.slow


def python(script: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", EXAMPLES / script, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def train(folder: Path, run: str, steps: int) -> list[str]:
    words = ["--run", run, "--steps", str(steps), "--every", "3", *SMALL]
    done = python("train.py", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_train_saves_what_it_says(tmp_path: Path) -> None:
    lines = train(tmp_path, "run", 10)
    assert lines[0] == "starting afresh"
    assert lines[10].startswith("step    10  loss ")
    assert lines[11].startswith("4 saves of ")
    snapshots = holdfast.Run(tmp_path / "run").snapshots()
    assert [s.step for s in snapshots] == [6, 9, 10], "the last three, and the last step of all"
    newest = snapshots[-1]
    assert newest["progress/step"] == 10
    assert newest["progress/samples"] == 20
    assert f"loss {snapshots[1].metadata['metrics']['loss']:.4f}" in lines[9]
    assert newest.verify().ok


def test_train_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    """The losses after a resume are those that the undisturbed run printed."""
    whole = train(tmp_path, "a", 9)
    # another run, as this one was after step 6
    shutil.copytree(tmp_path / "a" / "version_6", tmp_path / "b" / "version_6")
    again = train(tmp_path, "b", 9)
    assert again[0] == "going on from b/version_6"
    assert again[1:4] == whole[7:10]


def test_train_is_trained_longer_with_the_rates_of_the_longer_schedule(tmp_path: Path) -> None:
    train(tmp_path, "run", 4)
    again = train(tmp_path, "run", 9)
    assert again[0] == "going on from run/version_4"
    snapshots = holdfast.Run(tmp_path / "run").snapshots()
    assert [s.step for s in snapshots] == [4, 6, 9]
    rates = [s["optimizer/groups/0/lr"] for s in snapshots]
    assert rates[0] == rates[2] == 0, "at the end of each"
    assert rates[1] == pytest.approx(3e-3 * 7 / 100)


def test_demo(tmp_path: Path) -> None:
    done = python("demo.py", "--quick", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = " ".join(done.stdout.split())
    assert "SIGKILL while version_" in told
    assert "has the leftovers of a shard and no manifest: it does not exist" in told
    assert told.count("are equal, bit for bit") == 2
    assert "SkippedVersion: version_40 is skipped" in told
    assert "$ holdfast verify run-b" in told
    assert "holdfast.load refuses the damaged file" in told
    assert "checks held, in" in told
    assert "✗" not in told


def test_a_training_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    done = python("elastic.py", "--quick", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 6 checks held, in" in done.stdout
    ranks = re.findall(r"(?:starting afresh|going on from step (\d+)) on (\d) ranks?", done.stdout)
    assert [n for _, n in ranks] == ["4", "4", "2", "3", "1"]
    assert [int(step or 0) for step, _ in ranks] == [0, 0, 4, 12, 16]
