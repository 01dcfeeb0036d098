"""The examples run unchanged in S3."""

import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("example", "run"), [("demo.py", "run-b"), ("elastic.py", "elastic")])
def test_the_demo_passes(s3, example, run):
    command = [sys.executable, EXAMPLES / example, "--quick", "--root", f"{s3}/runs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks passed" in done.stdout
    assert holdfast.Run(f"{s3}/runs/{run}").latest().verify().ok
