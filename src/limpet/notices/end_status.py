"""What a process leaves for ``limpet run`` when its training ends without leaving by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from limpet.deadline import Deadline
from limpet.errors import NoProgress, Preempted, RankFailed
from limpet.notices.exit_status import (
    DONE,
    FAILED,
    Status,
    forget_done,
    leave_code,
    leave_done_at_exit,
)
from limpet.ranks.error_report import is_from_torch
from limpet.threads import call_with_limit

E = TypeVar("E", BaseException, BaseException | None)

_NOTE_SECONDS = 0.5


def end_training(
    error: E,
    finish: Callable[[E], object],
    make_status: Callable[[int, str], Status],
    is_noticed: Callable[[], bool | None],
) -> None:
    """Call ``finish``, which ends the training because of ``error``, or normally with None.

    Then leave a status. ``is_noticed`` returns True after a notice, and None if the process must
    leave nothing, because it has left a status already.

    After a notice, an error leaves ``FAILED`` at once: the command is expected to stop then, so its
    exit code alone does not say that it failed. An error that may be the consequence of the stop
    leaves nothing: that of PyTorch for a connection to a rank that has ended, or for a worker of a
    ``DataLoader``, and an interrupt.

    After a normal end, the process leaves ``DONE`` when it exits (see ``leave_done_at_exit``). An
    exit with code 0 in the ``with`` block is a normal end. If ``finish`` raises after it, the last
    step may not be saved, and nothing is left.
    """
    forget_done()  # of an earlier training in this process
    is_failed = error is not None and (not isinstance(error, SystemExit) or bool(error.code))
    try:
        finish(error)
    finally:
        if error is not None and is_own_failure(error) and is_noticed():
            leave_code(make_status(FAILED, f"{type(error).__name__}: {error}"))
    noticed = is_noticed()
    if not is_failed and noticed is not None:
        done = make_status(DONE, "the training is complete")
        leave_done_at_exit(done if noticed else None)


def note_end(leave: Callable[[Deadline], object]) -> None:
    """Note that this restart has ended well, in half a second: the process must end now."""
    limit = Deadline.after(_NOTE_SECONDS, "the end of this process")
    call_with_limit(lambda: leave(limit), "limpet-end", _NOTE_SECONDS)


def is_own_failure(error: BaseException) -> bool:
    """Return False for an exit with code 0, an interrupt, and an error that may be the consequence
    of the stop of another process."""
    if isinstance(error, Preempted | NoProgress | RankFailed) or is_from_torch(error):
        return False
    return bool(error.code) if isinstance(error, SystemExit) else isinstance(error, Exception)
