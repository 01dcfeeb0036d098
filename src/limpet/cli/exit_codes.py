"""Exit codes: one for every kind of failure, so that a script or a scheduler can react to it."""

from __future__ import annotations

import errno
from collections.abc import Iterable

import click

from limpet import errors
from limpet.notices.exit_status import GIVE_UP, SAVED, UNSAVED

(
    OK,
    OTHER,
    USAGE,
    DAMAGED,
    NOT_FOUND,
    STORE_FAILED,
    UNSUPPORTED,
    DIFFERS,
    EXISTS,
    UNAVAILABLE,
    NOT_COMMITTED,
    EVALUATION_FAILED,
) = range(12)
NOT_EXECUTABLE, NOT_STARTED = 126, 127
"""The command of ``run`` cannot be started: the codes that shells use."""

INTERRUPTED, BROKEN_PIPE = 130, 141
"""128 plus the number of the signal, as shells report it."""

MEANINGS: dict[int, str] = {
    OK: "success",
    OTHER: "another failure; the message explains it",
    USAGE: "the command line is invalid",
    DAMAGED: "damaged: bytes are missing or differ from what was written",
    NOT_FOUND: "there is no such snapshot, run, or version",
    STORE_FAILED: "the store failed: permissions, no space, or a disk error",
    UNSUPPORTED: "not possible with this snapshot, or its format is too new",
    DIFFERS: "diff found differences",
    EXISTS: "something else already exists there; nothing was changed",
    UNAVAILABLE: "the store is temporarily unavailable; try again",
    NOT_COMMITTED: "nothing was committed",
    EVALUATION_FAILED: "evaluate: a version could not be evaluated, now or before; its record has"
    " the cause",
    SAVED: "run: the training stopped and saved; run it again, not counted as a failure",
    UNSAVED: "run: the training stopped without a save; run it again",
    GIVE_UP: "run: the training cannot make progress; do not run it again",
    NOT_EXECUTABLE: "run: the command cannot be executed",
    NOT_STARTED: "run: there is no such command",
    INTERRUPTED: "interrupted",
}

# The first match applies.
_CODES_BY_ERROR: tuple[tuple[type[errors.LimpetError], int], ...] = (
    (errors.FormatTooNew, UNSUPPORTED),
    (errors.FormatError, DAMAGED),
    (errors.NotFound, NOT_FOUND),
    (errors.NoSnapshot, NOT_FOUND),
    (errors.AlreadyExists, EXISTS),
    (errors.Unavailable, UNAVAILABLE),
    (errors.StoreError, STORE_FAILED),
    (errors.PlanError, UNSUPPORTED),
    (errors.CommitError, NOT_COMMITTED),
)


def exit_code(error: BaseException) -> int:
    for kind, code in _CODES_BY_ERROR:
        if isinstance(error, kind):
            return code
    if isinstance(error, OSError):
        return NOT_FOUND if error.errno in (errno.ENOENT, errno.ENOTDIR) else STORE_FAILED
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else OTHER


def exit_on_errors(ctx: click.Context, found: Iterable[BaseException]) -> None:
    """Exit with ``DAMAGED`` if one error is damage, otherwise with the code of the first error."""
    codes = [exit_code(e) for e in found]
    if codes:
        ctx.exit(DAMAGED if DAMAGED in codes else codes[0])


def epilog() -> str:
    """Return the table of exit codes for ``limpet --help``. ``docs/commands.md`` repeats it."""
    return "\n".join(("\b\nExit codes:", *(f"  {c:>3}  {text}" for c, text in MEANINGS.items())))
