"""The examples run unchanged in S3 and in HDFS."""

import sys
import uuid
from pathlib import Path

import pytest

import limpet
from tests.waiting import run_process

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("kind", "example", "run"),
    [
        (kind, example, run)
        for kind in ("s3", "hdfs")
        for example, run in (("demo.py", "run-b"), ("elastic.py", "elastic"))
    ],
)
def test_the_demo_passes(request, kind, example, run):
    server = request.getfixturevalue(kind)
    root = f"{server}/runs" if kind == "s3" else f"{server.url}/{uuid.uuid4().hex}"
    command = [sys.executable, EXAMPLES / example, "--quick", "--root", root]
    done = run_process(command, 300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks passed" in done.stdout
    assert limpet.Run(f"{root}/{run}").latest().verify().ok
