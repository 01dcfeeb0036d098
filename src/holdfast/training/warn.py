"""Warnings to the user of a Checkpointer."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

from holdfast import events
from holdfast.engine.distributed.error_report import format_with_notes
from holdfast.errors import CommitError, HoldfastError, RankFailed, SaveFailed, StoreError


def is_store_failure(error: StoreError | CommitError) -> bool:
    """Whether it was a store that failed, or a commit, on whichever rank. What else fails on one
    rank the others hear of by a ``RankFailed`` too; there it is no such error."""
    cause = error.__cause__ if isinstance(error, RankFailed) else None
    told = cause is not None and not error.fields.get("lost")
    return not told or isinstance(cause, StoreError | CommitError)


def warn_save_failed(error: HoldfastError, last_saved_step: int, stacklevel: int) -> None:
    """Warn of a save that failed, or of what failed after it; training goes on."""
    told = "Old versions pile up"
    if not error.fields.get("committed"):
        told = f"NOTHING WAS SAVED, and training goes on unsaved since step {last_saved_step}"
    warnings.warn(f"{told}: {format_with_notes(error)}", SaveFailed, stacklevel=stacklevel)


def last_save_message(error: BaseException) -> str:
    """That the save at the end of a training has failed."""
    return f"the last save failed: {format_with_notes(error)}"


def attach_secondary_errors(error: BaseException, messages: Sequence[str]) -> None:
    """What went wrong besides what has ended the training: by notes on that, and by warnings,
    since neither ``SystemExit`` nor what the caller catches is shown. Where warnings are errors
    the notes must do, or stderr for what is no error."""
    for each in messages:
        error.add_note(f"Besides, {each}")
        ended = f"The training ended by {type(error).__name__}. Besides, {each}"
        try:
            warnings.warn(ended, SaveFailed, stacklevel=3)
        except SaveFailed:
            if not isinstance(error, Exception):
                with suppress(Exception):  # there may be none
                    sys.stderr.write(f"holdfast: {ended}\n")


def warn_unsaved_steps(run_url: str, step: int, last_saved_step: int, skipped: bool) -> None:
    """The steps after ``since`` are in no version; ``skipped``: one was due and left out."""
    events.emit("left_unsaved", run=run_url, step=step, since=last_saved_step)
    if skipped:
        told = f"Steps {last_saved_step + 1} to {step} are in no version of {run_url}:"
        told += ' the save that was due was left out (busy="skip"). Call ckpt.save() at the end'
        warnings.warn(told, SaveFailed, stacklevel=4)
