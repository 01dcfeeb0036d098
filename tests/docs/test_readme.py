"""The script of the README is exact, wherever it is killed."""

import os
import signal
import subprocess
import sys

import pytest

import limpet
from tests.docs.test_docs import ROOT, blocks, sides_of_diff
from tests.forging import values_equal

KILL = """
        if ckpt.current_step == int(os.environ["KILL_AT"]):
            ckpt.wait()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def run_script(folder, kill_at):
    """Run the script in the folder. Return its exit code, and the epochs that it completed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "train.py"],
        cwd=folder,
        env={**os.environ, "KILL_AT": str(kill_at), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, [line.split(":")[0] for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_the_script_of_the_readme_ends_with_the_same_bits_after_kills(tmp_path):
    (diff,) = [b.code for b in blocks(ROOT / "README.md") if b.language == "diff"]
    before, script = sides_of_diff(diff)
    compile(before, "before", "exec")
    (step,) = [line for line in script.splitlines() if "ckpt.step" in line]
    script = "import os, signal\n" + script.replace(step, step + KILL)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(script)
    epochs = [f"epoch {i}" for i in range(10)]

    assert run_script(tmp_path / "whole", 0) == (0, epochs)
    killed = -signal.SIGKILL
    assert run_script(tmp_path / "killed", 75) == (killed, [])
    # the version of step 300 is saved before its epoch ends: this end and its metrics follow
    assert run_script(tmp_path / "killed", 300) == (killed, epochs[:2])
    assert run_script(tmp_path / "killed", 0) == (0, epochs[2:])
    assert run_script(tmp_path / "killed", 0) == (0, [])

    whole, resumed = (limpet.Run(tmp_path / name / "runs/a") for name in ("whole", "killed"))
    assert whole.metrics(1000) == resumed.metrics(1000)
    members = ["model", "optimizer", "sampler"]
    assert values_equal(
        limpet.load(tmp_path / "whole/runs/a@latest", keys=members),
        limpet.load(tmp_path / "killed/runs/a@latest", keys=members),
    )
