"""``limpet run -- COMMAND``: run a training, and return an exit code that a scheduler can use."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import click

from limpet.cli.exit_codes import NOT_EXECUTABLE, NOT_STARTED
from limpet.cli.output import duration_option, json_option, parse_duration, print_json
from limpet.errors import LimpetError
from limpet.machine import IS_LINUX
from limpet.notices import exit_status
from limpet.notices.final_code import STOP_SIGNALS, Decision, Ended, decide, last_attempt
from limpet.notices.supervise import supervise
from limpet.settings import MEMORY_SUFFIX, command_environment, read_settings
from limpet.text import hide_secrets, to_printable

_STDERR = 2

_FLUSH_SECONDS = 10.0
"""Seconds for the save of the newest state in memory, if the command was asked to stop: the
scheduler will kill this process."""

_LONG_SECONDS = 600.0
"""The same, if the command has failed by itself."""


def _parse_grace(ctx: click.Context, param: click.Parameter, value: str) -> float:
    seconds = parse_duration(ctx, param, value)
    if seconds < 1:
        raise click.BadParameter(f"{value!r} is less than 1 s; a training cannot save in that time")
    return seconds


@click.command(
    "run",
    context_settings={"allow_interspersed_args": False},
)
@duration_option(
    "--grace",
    "25s",
    "From the first signal to stop until all processes are killed: 90 (seconds), 15m.",
    _parse_grace,
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@json_option
@click.pass_context
def command(ctx: click.Context, grace: float, command: tuple[str, ...], as_json: bool) -> None:
    """Run COMMAND, such as "torchrun train.py", and forward signals to it.

    The exit code is 0 if the training is complete, 75 if it saved and must be run again, 76 if it
    stopped without a save, 93 if it must not be run again, and 1 for a failure. No process of the
    command survives. Options after COMMAND belong to it; "--" in front of it is optional.

    With --json, the standard output of COMMAND goes to the standard error.
    """
    if not IS_LINUX:
        raise LimpetError(
            f"`limpet run` needs Linux: {sys.platform} lacks /proc, which shows the processes of"
            " a training, and prctl, which adopts them",
            todo="Start the training by itself; it resumes when it is started again",
        )
    read_settings()
    folder = _make_folder()
    try:
        environment = command_environment(str(folder), grace)
        try:
            ended = supervise(
                command,
                environment,
                grace,
                _say,
                find_requesting=lambda n: exit_status.requesting_workers(_read_records(folder), n),
                stdout=_STDERR if as_json else None,
            )
        except OSError as e:
            _exit_not_started(ctx, command[0], e, as_json)
        # all writers have ended, so nothing newer can appear in memory
        flushed = _flush_memory(folder, _FLUSH_SECONDS if ended.stopped else _LONG_SECONDS)
        records = _read_records(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    decision = decide(ended, records)
    if flushed and decision.code == exit_status.UNSAVED:
        decision = replace(decision, code=exit_status.SAVED, why=f"{decision.why}; {flushed}")
    must_run_again = decision.code in (exit_status.SAVED, exit_status.UNSAVED)
    advice = "; run it again" if must_run_again else ""
    if decision.code != exit_status.DONE:
        _say(f"exit code {decision.code}: {decision.why}{advice}")
    if as_json:
        with suppress(OSError):  # as in ``_say``
            print_json(_describe(decision, ended, records))
            sys.stdout.flush()
    ctx.exit(decision.code)


def _make_folder() -> Path:
    """Return a new private folder for the statuses."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="limpet-run-"))
        import fcntl  # the command needs Linux

        # systemd-tmpfiles, which removes old files from /tmp, leaves locked folders alone
        fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)
    except OSError as e:
        raise LimpetError(
            "Cannot create a folder for the statuses of the workers",
            expected="a writable folder for temporary files",
            found=str(e),
            todo="Set TMPDIR to one on this machine, such as /dev/shm",
        ) from e
    return folder


def _flush_memory(folder: Path, seconds: float) -> str:
    """Save the newest states in memory, and return what was saved, for people; "" if the newest was
    not. An error is shown, and changes no exit code: the state stays for the next start."""
    saved = ""
    if not any(folder.glob(f"*{MEMORY_SUFFIX}")):
        return saved
    from limpet.tiers.flush import flush_recorded  # it starts threads, which take signals

    for result in flush_recorded(str(folder), seconds, _make_stoppable_clock(seconds)):
        if isinstance(result, Exception):
            saved = ""
            _say(f"a snapshot in a tier was not saved: {result}")
        else:
            saved = f"the snapshot of step {result.step} was saved"
            _say(f"{saved} as {result.url}")
    return saved


def _make_stoppable_clock(seconds: float) -> Callable[[], float]:
    """Return a clock of a flush of so many seconds. At a signal to stop, it skips all but the last
    ``_FLUSH_SECONDS`` of them."""
    end, skipped = time.monotonic() + seconds, list[float]()

    def read() -> float:
        now = time.monotonic()
        # the signals are still blocked, so one that has arrived stays pending
        if not skipped and not signal.sigpending().isdisjoint(STOP_SIGNALS):
            skipped.append(max(0.0, end - now - _FLUSH_SECONDS))
        return now + sum(skipped)

    return read


def _read_records(folder: Path) -> list[exit_status.WorkerRecord]:
    try:
        return exit_status.read_records(str(folder))
    except OSError as e:
        # The exit code of the command still counts. A worker that could not write its status
        # exited with its own code. A signal goes to all, as if none had asked for it.
        _say(f"cannot read the statuses of the workers: {e}")
        return []


def _say(line: str) -> None:
    """Print a line for people on the standard error."""
    # nobody may be reading any more, which must not change the exit code
    with suppress(OSError):
        click.echo(f"limpet: {to_printable(hide_secrets(line))}", err=True)


def _exit_not_started(ctx: click.Context, name: str, error: OSError, as_json: bool) -> NoReturn:
    """Report that the command cannot be started, with the exit code that shells use."""
    missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
    code = NOT_STARTED if missing else NOT_EXECUTABLE
    message = f"Cannot run {hide_secrets(name)!r}: {error.strerror}"
    _say(message)
    if as_json:
        document = {"kind": type(error).__name__, "message": message, "fields": {}}
        print_json({"error": document, "exit": code})
    ctx.exit(code)


def _describe(
    decision: Decision, ended: Ended, records: Sequence[exit_status.WorkerRecord]
) -> dict[str, object]:
    return {
        "exit": decision.code,
        "why": decision.why,
        "command": {"exit_code": ended.exit_code, "killed_by": ended.killed_by},
        "signals": list(ended.forwarded),
        "killed": len(ended.killed),
        "statuses": [asdict(r.status) for r in last_attempt(records) if r.status is not None],
    }
