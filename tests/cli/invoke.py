"""Commands run in this process, and small runs for them in memory."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from click.testing import CliRunner

from holdfast.cli import cli
from holdfast.run.policy import EverySteps
from holdfast.storage.memory import MemoryStore
from tests.trainings import train, training


class CommandResult(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run_cli(*words: object) -> CommandResult:
    """Run a command. Never a traceback: whatever escapes it fails the test."""
    result = CliRunner().invoke(cli, [str(w) for w in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.stderr
    return CommandResult(result.exit_code, result.stdout, result.stderr)


def make_run(store: MemoryStore) -> MemoryStore:
    """Versions 20, 40 and 60, the metric ``loss`` with each."""
    with training(store, EverySteps(20)) as (state, ckpt):
        train(state, ckpt, 60)
    return store


def train_branch(store: MemoryStore, start: int, last_step: int) -> None:
    """Train again from a version, on a branch."""
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume(at=start)
        train(state, ckpt, last_step)
