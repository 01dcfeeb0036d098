"""Start ``limpet run`` as a process, and wait for what it and its commands do."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from limpet.notices.process_tree import read_process
from tests import waiting
from tests.cli.invoke import CommandResult

RUN = [sys.executable, "-m", "limpet", "run"]
LIMIT = 60.0
"""Seconds after which a test fails that waits for something."""

WORKER = Path(__file__).with_name("status_worker.py")
"""A worker that writes a status; see its docstring."""


def wait_until(condition):
    """Wait for what a process does after its start."""
    waiting.wait_until(condition, LIMIT)


def is_alive(pid):
    try:
        return not read_process(pid).ended
    except OSError:
        return False


def run_to_end(*arguments, environment=None, prefix=(), **options):
    """Run ``limpet run`` until it ends. ``prefix`` is a command before it."""
    done = subprocess.run(
        [*prefix, *RUN, *arguments], capture_output=True, text=True, check=False, timeout=LIMIT,
        env={**os.environ, **(environment or {})}, **options,
    )  # fmt: skip
    return CommandResult(done.returncode, done.stdout, done.stderr)


@contextmanager
def started(*arguments, prefix=(), **options):
    """Start ``limpet run`` with these arguments. It is killed if the test fails."""
    options = {"stdout": subprocess.PIPE, **options}
    process = subprocess.Popen(
        [*prefix, *RUN, *arguments], stderr=subprocess.PIPE, text=True, **options
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # twice: it then kills what it has started
            process.send_signal(signal.SIGINT)
            try:
                print(*process.communicate(timeout=15))  # pytest shows it if the test fails
            except subprocess.TimeoutExpired:
                process.kill()
                print(*process.communicate())


def finish(process):
    """Wait for the end of a started ``limpet run``."""
    out, err = process.communicate(timeout=LIMIT)
    return CommandResult(process.returncode, out, err)


def read_pid(file):
    """Wait for a file with a process id and return the id."""
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())
