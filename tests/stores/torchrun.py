"""Runs a script under torchrun, as a user would."""

import os
import sys

from tests.waiting import run_process


def run_torchrun(script, *arguments, ranks=2, **environment):
    """Return the lines that begin with "rank ", sorted. Raises ``AssertionError`` if a rank fails.

    The ranks write to one pipe. They buffer what they print, because without buffering, ``print``
    writes a line and its end separately, and another rank's line may come in between.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "",
        "RES_OPTIONS": "timeout:1 attempts:1",
        **environment,
    }
    done = run_process([*command, script, *arguments], 120, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
