"""The end of a process whose thread is in a call of the TCPStore."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.exits import ROUNDS

pytestmark = pytest.mark.slow


def test_no_process_aborts_while_its_interpreter_ends():
    """PyTorch ends the process with "terminate called" and code -6 if a call returns then."""
    command = [sys.executable, "-m", "tests.ranks.exits"]
    process = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "terminate called" not in process.stderr
    assert json.loads(process.stdout.splitlines()[-1]) == dict.fromkeys(ROUNDS, 0)
