"""The scripts of the README and of the tutorial are exact, wherever they are killed."""

import signal

import pytest

import limpet
from tests.docs.forked import run_forked
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


def run_scripts(*runs):
    """Run the script in each folder, killed at a step (0: not). Return the exit codes, and the
    epochs that each run completed."""
    options = "-W", "error", "-W", "ignore:This DataLoader will create"
    ended, _ = run_forked(
        ["torch", "limpet"],
        [
            (folder, ["train.py", *arguments], {"KILL_AT": kill_at})
            for folder, kill_at, *arguments in runs
        ],
        *options,
    )
    return [(code, [line.split(":")[0] for line in lines]) for code, lines in ended]


def read_losses(folder):
    return [line.split() for line in (folder / "losses").read_text().splitlines()]


def test_the_script_of_the_readme_ends_with_the_same_bits_after_kills(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    write_script(read_diff("README.md"), whole, killed)
    epochs = [f"epoch {i}" for i in range(10)]

    # the version of step 300 is saved before its epoch ends: this end and its metrics follow
    runs = (whole, 0), (killed, 75), (killed, 300), (killed, 0), (killed, 0)
    expected = [(0, epochs), (KILLED, []), (KILLED, epochs[:2]), (0, epochs[2:]), (0, [])]
    assert run_scripts(*runs) == expected

    assert limpet.Run(whole / "runs/a").metrics(1000) == limpet.Run(killed / "runs/a").metrics(1000)
    at = "runs/a@latest"
    assert values_equal(limpet.load(whole / at), limpet.load(killed / at))


def test_the_tutorial_changes_few_lines():
    lines = read_diff("docs/tutorial.md").splitlines()
    assert len([line for line in lines if line.startswith(("+", "-"))]) <= 12


def test_the_script_of_the_tutorial_can_be_copied():
    _, script = sides_of_diff(read_diff("docs/tutorial.md"))
    assert (ROOT / "examples" / "tutorial.py").read_text().endswith(f'"""\n\n{script}')


def test_the_losses_of_the_tutorial_are_exact_with_four_workers_and_augmentation(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    write_script(read_diff("docs/tutorial.md"), whole, killed)
    epochs = [f"epoch {i}" for i in range(4)]

    # in the middle of an epoch, and right after a save
    kills = [(whole, 0), (killed, 90), (killed, 120), (killed, 0)]
    runs = [(folder, kill_at, "run") for folder, kill_at in kills]
    expected_runs = [(0, epochs), (KILLED, epochs[:1]), (KILLED, epochs[1:2]), (0, epochs[2:])]
    assert run_scripts(*runs) == expected_runs

    expected = read_losses(whole)
    assert [step for step, _ in expected] == [str(step) for step in range(1, 201)]
    found = read_losses(killed)
    assert found == expected[:90] + expected[80:120] + expected[120:]
    assert values_equal(limpet.load(whole / "run@latest"), limpet.load(killed / "run@latest"))
