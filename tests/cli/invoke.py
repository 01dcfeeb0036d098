"""Run commands in this process, and make small runs in memory for them."""

import json
from typing import NamedTuple

from click.testing import CliRunner

from limpet.cli import cli
from limpet.run.policy import EverySteps
from tests.trainings import train, training


class CommandResult(NamedTuple):
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


def run_cli(*arguments):
    """Run a command. An unexpected exception fails the test."""
    result = CliRunner().invoke(cli, [str(w) for w in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.stderr
    return CommandResult(result.exit_code, result.stdout, result.stderr)


def check_error_line(result, code, *parts):
    """Assert the exit code, and one line of an error or a note that has all these parts."""
    assert result.code == code, result
    assert result.err.startswith("limpet: ")
    assert result.err.count("\n") == 1
    for part in parts:
        assert part in result.err


def make_run(store):
    """Save versions 20, 40, and 60 with the metric ``loss``."""
    with training(store, EverySteps(20)) as (state, ckpt):
        train(state, ckpt, 60)
    return store


def train_branch(store, start, last_step):
    """Continue from a version on a new branch."""
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume(at=start)
        train(state, ckpt, last_step)
