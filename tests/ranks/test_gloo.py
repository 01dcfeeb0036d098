"""The same on real processes: FSDP2, HSDP, tensor parallel, DDP, stages, over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .scenarios import SCENARIOS
from .world import SIZE

pytestmark = pytest.mark.slow


def outcomes(folder):
    """What each scenario came to, on each rank. All of them share one start of the processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    environ = os.environ | {"HOLDFAST_SILENT": "30", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(SIZE)]
    started = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "tests.ranks.scenarios", str(rank), str(port), folder]
            with log.open("w") as out:
                started.append(
                    subprocess.Popen(command, stdout=out, stderr=out, env=environ, cwd=root)
                )
        codes = [process.wait(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
    told = [folder / f"{rank}.json" for rank in range(SIZE)]
    assert codes == [0] * SIZE, "\n".join(log.read_text()[-2000:] for log in logs)
    return [json.loads(path.read_text()) for path in told]


def test_on_real_processes(tmp_path):
    """One test, so that workers of pytest-xdist do not each start the processes."""
    told = outcomes(tmp_path)
    failed = [
        f"{name} on rank {rank}: {one[name]}"
        for name in [scenario.__name__ for scenario in SCENARIOS]
        for rank, one in enumerate(told)
        if one[name] != "passed"
    ]
    assert not failed, "\n".join(failed)
