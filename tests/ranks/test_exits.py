"""The end of a process whose thread is in a call of the TCPStore."""

import json
import sys
from pathlib import Path

import pytest

from tests.ranks.exits import ROUNDS
from tests.waiting import run_process

pytestmark = pytest.mark.slow


def test_no_process_aborts_while_its_interpreter_ends():
    """PyTorch ends the process with "terminate called" and code -6 if a call returns then."""
    command = [sys.executable, "-m", "tests.ranks.exits"]
    process = run_process(command, 120, cwd=Path(__file__).parents[2])
    assert process.returncode == 0, process.stderr
    assert "terminate called" not in process.stderr
    assert json.loads(process.stdout.splitlines()[-1]) == dict.fromkeys(ROUNDS, 0)
