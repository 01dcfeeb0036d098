"""The scripts of the README and of the tutorial are exact, wherever they are killed."""

import os
import signal
import subprocess
import sys

import pytest

import limpet
from tests.docs.test_docs import ROOT, blocks, sides_of_diff
from tests.forging import values_equal

pytestmark = pytest.mark.slow

KILL = """
        with open("losses", "a") as losses:
            print(ckpt.current_step, loss.item().hex(), file=losses)
        if ckpt.current_step == int(os.environ["KILL_AT"]):
            ckpt.wait()
            os.kill(os.getpid(), signal.SIGKILL)
"""

KILLED = -signal.SIGKILL


def read_diff(page):
    (diff,) = [b.code for b in blocks(ROOT / page) if b.language == "diff"]
    return diff


def write_script(diff, *folders):
    """Write the changed script, which can be killed, into folders."""
    before, script = sides_of_diff(diff)
    compile(before, "before", "exec")
    (step,) = [line for line in script.splitlines() if "ckpt.step" in line]
    script = "import os, signal\n" + script.replace(step, step + KILL)
    script = script.replace("num_workers=2", "num_workers=4")
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text(script)


def run_script(folder, kill_at, *arguments):
    """Run the script in the folder. Return its exit code, and the epochs that it completed."""
    options = "-W", "error", "-W", "ignore:This DataLoader will create"
    done = subprocess.run(
        [sys.executable, *options, "train.py", *arguments],
        cwd=folder,
        env={**os.environ, "KILL_AT": str(kill_at), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, [line.split(":")[0] for line in done.stdout.splitlines()]


def read_losses(folder):
    return [line.split() for line in (folder / "losses").read_text().splitlines()]


def test_the_script_of_the_readme_ends_with_the_same_bits_after_kills(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    write_script(read_diff("README.md"), whole, killed)
    epochs = [f"epoch {i}" for i in range(10)]

    assert run_script(whole, 0) == (0, epochs)
    assert run_script(killed, 75) == (KILLED, [])
    # the version of step 300 is saved before its epoch ends: this end and its metrics follow
    assert run_script(killed, 300) == (KILLED, epochs[:2])
    assert run_script(killed, 0) == (0, epochs[2:])
    assert run_script(killed, 0) == (0, [])

    assert limpet.Run(whole / "runs/a").metrics(1000) == limpet.Run(killed / "runs/a").metrics(1000)
    at = "runs/a@latest"
    assert values_equal(limpet.load(whole / at), limpet.load(killed / at))


def test_the_tutorial_changes_few_lines():
    lines = read_diff("docs/tutorial.md").splitlines()
    assert len([line for line in lines if line.startswith(("+", "-"))]) <= 12


def test_the_losses_of_the_tutorial_are_exact_with_four_workers_and_augmentation(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    write_script(read_diff("docs/tutorial.md"), whole, killed)
    epochs = [f"epoch {i}" for i in range(4)]

    assert run_script(whole, 0, "run") == (0, epochs)
    assert run_script(killed, 90, "run") == (KILLED, epochs[:1])  # in the middle of an epoch
    assert run_script(killed, 120, "run") == (KILLED, epochs[1:2])  # right after a save
    assert run_script(killed, 0, "run") == (0, epochs[2:])

    expected = read_losses(whole)
    assert [step for step, _ in expected] == [str(step) for step in range(1, 201)]
    found = read_losses(killed)
    assert found == expected[:90] + expected[80:120] + expected[120:]
    assert values_equal(limpet.load(whole / "run@latest"), limpet.load(killed / "run@latest"))
