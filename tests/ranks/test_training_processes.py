"""Whole trainings on real processes over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .courses import COURSES
from .world import SIZE

pytestmark = pytest.mark.slow


def outcomes(folder: Path) -> list[dict[str, str]]:
    """What each course came to, on each rank. All of them share one start of the processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    environ = os.environ | {"HOLDFAST_SILENT": "30", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(SIZE)]
    started: list[Any] = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "tests.ranks.courses", str(rank), str(port), folder]
            with log.open("w") as out:
                started.append(
                    subprocess.Popen(command, stdout=out, stderr=out, env=environ, cwd=root)
                )
        codes = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    told = [folder / f"{rank}.json" for rank in range(SIZE)]
    assert codes == [0] * SIZE, "\n".join(log.read_text()[-2000:] for log in logs)
    return [json.loads(path.read_text()) for path in told]


def test_trainings(tmp_path: Path) -> None:
    """One test, so that workers of pytest-xdist do not each start the processes."""
    told = outcomes(tmp_path)
    failed = [
        f"{course.__name__} on rank {rank}: {one[course.__name__]}"
        for course in COURSES
        for rank, one in enumerate(told)
        if one[course.__name__] != "passed"
    ]
    assert not failed, "\n".join(failed)
    costs = [json.loads((tmp_path / f"cost{rank}.json").read_text()) for rank in range(2)]
    print(f"a step with nothing due: median {costs[0]:.0f} ns, {costs[1]:.0f} ns")
