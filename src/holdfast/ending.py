"""What is told when a training ends, and nothing else tells it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

from holdfast import events
from holdfast.errors import SaveFailed


def tell_besides(error: BaseException, told: Sequence[str]) -> None:
    """What went wrong besides what has ended the training: by notes on that, and by warnings,
    since neither ``SystemExit`` nor what the caller catches is shown. Where warnings are errors
    the notes must do, or stderr for what is no error."""
    for each in told:
        error.add_note(f"Besides, {each}")
        ended = f"The training ended by {type(error).__name__}. Besides, {each}"
        try:
            warnings.warn(ended, SaveFailed, stacklevel=3)
        except SaveFailed:
            if not isinstance(error, Exception):
                with suppress(Exception):  # there may be none
                    sys.stderr.write(f"holdfast: {ended}\n")


def tell_unsaved(run: str, step: int, since: int, skipped: bool) -> None:
    """The steps after ``since`` are in no version; ``skipped``: one was due and left out."""
    events.emit("left_unsaved", run=run, step=step, since=since)
    if skipped:
        told = f"Steps {since + 1} to {step} are in no version of {run}: the save that was due was"
        told += ' left out (busy="skip"). Call ckpt.save() at the end'
        warnings.warn(told, SaveFailed, stacklevel=4)
