"""Warnings to the user of a Checkpointer."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

from limpet.errors import (
    CommitError,
    LimpetError,
    RankFailed,
    SaveFailed,
    StoreError,
    UnsavedSteps,
)
from limpet.ranks.error_report import format_with_notes
from limpet.run.policy import Never, SavePolicy
from limpet.text import warn_user
from limpet.training.lifecycle import Lifecycle, is_process_ending
from limpet.training.saver import Saver
from limpet.training.step_counter import StepCounter


def raise_or_warn(
    call: Callable[[], object], on_error: Literal["raise", "warn"], saver: Saver
) -> None:
    """Call ``call``; with ``on_error="warn"``, turn a store failure into a warning."""
    try:
        call()
    except (StoreError, CommitError) as e:
        if on_error == "raise" or not is_store_failure(e):
            raise
        warn_save_failed(e, saver.saved_step)


def is_store_failure(error: StoreError | CommitError) -> bool:
    """Return True if a store or a commit failed, on this rank or on another one.

    Other failures of one rank also reach the other ranks as ``RankFailed``. For those, the result
    is False.
    """
    cause = error.__cause__ if isinstance(error, RankFailed) else None
    reported_by_rank = cause is not None and not error.fields.get("lost")
    return not reported_by_rank or isinstance(cause, StoreError | CommitError)


def warn_save_failed(error: LimpetError, last_saved_step: int) -> None:
    """Warn of a save that failed, or of a failure after the commit."""
    message = (
        "Old versions accumulate"
        if error.is_after_commit
        else f"NOTHING WAS SAVED; there is no version since step {last_saved_step}"
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
                    sys.stderr.write(f"limpet: {warning}\n")


def warn_unsaved_steps(run_url: str, step: int, last_saved_step: int, reason: str) -> None:
    """Warn that the steps after ``last_saved_step`` are not in any version, and why."""
    warn_user(describe_unsaved_steps(run_url, step, last_saved_step, reason), UnsavedSteps)


def describe_unsaved_steps(run_url: str, step: int, last_saved_step: int, reason: str) -> str:
    """Return the text of that warning."""
    is_one = step <= last_saved_step + 1
    steps = f"Step {step} is" if is_one else f"Steps {last_saved_step + 1} to {step} are"
    return f"{steps} not in any version of {run_url}: {reason}"


def warn_collected(
    policy: SavePolicy,
    lifecycle: Lifecycle,
    saver: Saver,
    step_counter: StepCounter,
    line: tuple[str, int],
) -> None:
    """Warn of the unsaved steps of a Checkpointer that was never closed.

    It may be collected at any moment, in any thread, and at the end of the process. Therefore
    nothing is saved, and no sink is called, which could hold a lock. ``line``: the user's line that
    made the first step. At the end of the process, Python would print a traceback if warnings are
    errors; the message then is a line on stderr.
    """
    step, begun_step = step_counter.step, saver.begun_step
    if not lifecycle.can_save or step == begun_step or isinstance(policy, Never):
        return
    ended = "the process ended" if is_process_ending() else "the Checkpointer was discarded"
    reason = f"{ended} before close(). Use a with block, or call close()"
    if not policy.at_end:
        reason += f", and write save={policy} | AtEnd()"
    message = describe_unsaved_steps(saver.run.url, step, begun_step, reason)
    try:
        warnings.warn_explicit(message, UnsavedSteps, *line)
    except UnsavedSteps:
        if not is_process_ending():
            raise
        with suppress(Exception):  # stderr may be missing or closed
            sys.stderr.write(f"limpet: {message}\n")


def describe_cause(error: BaseException) -> str:
    """Return the class and the text of an exception that ended a training."""
    return f"{type(error).__name__}: {error}"[:1000]


def unsaved_reason(policy: SavePolicy, error: BaseException | None, skipped: bool) -> str:
    """Return why the last steps were not saved, and what to do.

    ``error`` is the exception that ended the training. ``skipped`` is True if a save that was due
    was skipped.
    """
    if error is not None:
        return (
            f"the training ended with an exception ({describe_cause(error)}). Only OnException()"
            " saves then, in a with block"
        )
    if policy.at_end:
        return "the process was ending. Call close() earlier, or use a with block"
    return (
        'the save that was due was skipped (busy="skip").'
        if skipped
        else f"{policy} saves nothing at the end of the training."
    ) + f" Write save={policy} | AtEnd(), or call ckpt.save() after the last step"
