"""Warnings to the user of a Checkpointer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from holdfast import events
from holdfast.engine.distributed.error_report import format_with_notes
from holdfast.errors import CommitError, HoldfastError, RankFailed, SaveFailed, StoreError
from holdfast.text import warn_user


def is_store_failure(error: StoreError | CommitError) -> bool:
    """Return True if a store or a commit failed, on this rank or on another one.

    Other failures of one rank also reach the other ranks as ``RankFailed``. For those, the result
    is False.
    """
    cause = error.__cause__ if isinstance(error, RankFailed) else None
    reported_by_rank = cause is not None and not error.fields.get("lost")
    return not reported_by_rank or isinstance(cause, StoreError | CommitError)


def warn_save_failed(error: HoldfastError, last_saved_step: int) -> None:
    """Warn of a save that failed, or of a failure after the commit. Training continues."""
    message = (
        "Old versions accumulate"
        if error.is_after_commit
        else f"NOTHING WAS SAVED; training continues, with no save since step {last_saved_step}"
    )
    warn_user(f"{message}: {format_with_notes(error)}", SaveFailed)


def attach_secondary_errors(error: BaseException, messages: Sequence[str]) -> None:
    """Report further failures when ``error`` ends the training.

    Each failure becomes a note on ``error`` and a warning. The note alone is not enough: Python
    shows neither ``SystemExit`` nor an exception that the caller catches. If warnings are errors,
    only the note remains, and for exceptions such as ``SystemExit`` a line on stderr.
    """
    for message in messages:
        error.add_note(f"In addition, {message}")
        warning = f"The training ended with {type(error).__name__}. In addition, {message}"
        try:
            warn_user(warning, SaveFailed)
        except SaveFailed:
            if not isinstance(error, Exception):
                with suppress(Exception):  # stderr may be missing or closed
                    sys.stderr.write(f"holdfast: {warning}\n")


def warn_unsaved_steps(run_url: str, step: int, last_saved_step: int, skipped: bool) -> None:
    """Report that the steps after ``last_saved_step`` are not in any version.

    If ``skipped`` is True, a save that was due was skipped, and a warning is issued as well.
    """
    events.emit("left_unsaved", run=run_url, step=step, since=last_saved_step)
    if skipped:
        warn_user(
            f"Steps {last_saved_step + 1} to {step} are not in any version of {run_url}: the save"
            ' that was due was skipped (busy="skip"). Call ckpt.save() at the end of the training',
            SaveFailed,
        )
