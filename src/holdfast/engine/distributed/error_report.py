"""Send an error of one rank to the other ranks, and raise it there."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast import errors
from holdfast.errors import (
    AlreadyExists,
    CommitError,
    FormatError,
    HoldfastError,
    NoSnapshot,
    NotFound,
    PlanError,
    RankFailed,
)

_SAME_ON_ALL_RANKS = (PlanError, CommitError, FormatError, AlreadyExists, NoSnapshot, NotFound)
"""Errors of the common operation, which every rank raises. Others concern one rank only."""


class ErrorReport(msgspec.Struct, frozen=True):
    """An error that a rank sends to the other ranks.

    ``operation``: the common operation in which the error occurred; ``error_class``: the name of
    its class; ``fields``: the fields of the error with plain values or tuples of strings.
    """

    rank: int
    operation: str
    error_class: str
    what: str
    expected: str | None
    found: str | None
    todo: str | None
    fields: dict[str, str | int | float | bool | tuple[str, ...] | None]


class Arrival(msgspec.Struct, frozen=True):
    """The first rank that joins a collective, its operation, and the cause of the operation."""

    rank: int
    operation: str
    cause: str


ERROR_REPORT = msgspec.json.Decoder(ErrorReport)
ARRIVAL = msgspec.json.Decoder(Arrival)

_MAX_LENGTH = 4000

COMMIT_BEGUN = "commit begun"
"""Replaces the error report once rank 0 has begun the commit. The first value set is final."""


def encode_error(error: BaseException, rank: int, operation: str, commit_begun: bool) -> str:
    """Encode an error of this rank for the other ranks.

    ``commit_begun``: whether rank 0 had begun the commit before the error.
    """
    described = (
        error
        if isinstance(error, HoldfastError)
        else HoldfastError(str(error), **({"outcome": "unknown"} if commit_begun else {}))
    )
    expected, found, todo = (
        None if part is None else str(part)[:_MAX_LENGTH]
        for part in (described.expected, described.found, described.todo)
    )
    return encode_json(
        ErrorReport(
            rank,
            operation,
            type(error).__name__,
            described.what[:_MAX_LENGTH],
            expected,
            found,
            todo,
            {k: v for k, v in described.fields.items() if _is_short(v)},
        )
    )


def encode_json(value: msgspec.Struct) -> str:
    """Encode a struct as JSON.

    Surrogates, which UTF-8 cannot encode but file names may contain, are escaped.
    """
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_escape_surrogates(msgspec.to_builtins(value))).decode()


def _escape_surrogates(value: Any) -> Any:
    if isinstance(value, dict):
        return {_escape_surrogates(k): _escape_surrogates(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_surrogates(v) for v in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def format_with_notes(error: BaseException) -> str:
    """Return the text of an error with its notes, which name the rank that reported the error."""
    notes = getattr(error, "__notes__", ())
    return " ".join([str(error), *(f"{note.rstrip('.')}." for note in notes)])


def _is_short(value: Any) -> bool:
    """Return True if a field of an error is short and plain enough to be sent with the error."""
    return isinstance(value, str | int | float | bool | None) or (
        type(value) is tuple
        and len(value) <= _MAX_LENGTH
        and all(type(key) is str for key in value)
    )


def decode_error(text: str, rank: int, operation: str) -> HoldfastError:
    """Return the error that this rank raises because another rank failed."""
    report = ERROR_REPORT.decode(text)
    error_class = getattr(errors, report.error_class, None)
    cause: Exception = RuntimeError(f"{report.error_class}: {report.what}")
    if isinstance(error_class, type) and issubclass(error_class, HoldfastError):
        cause = error_class(
            report.what,
            expected=report.expected,
            found=report.found,
            todo=report.todo,
            **{"rank": report.rank, **report.fields},
        )
        if isinstance(cause, _SAME_ON_ALL_RANKS):
            cause.add_note(f"Reported by rank {report.rank}")
            return cause
    uncertain = report.fields.get("committed") or report.fields.get("outcome") == "unknown"
    failed = RankFailed(
        f"Rank {report.rank} failed during {operation}"
        f"{'' if uncertain else '; nothing was committed'}. {report.error_class}: {report.what}",
        expected=report.expected,
        found=report.found,
        todo=report.todo or f"Check the log of rank {report.rank}",
        **{**report.fields, "rank": report.rank},
    )
    failed.__cause__ = cause
    return failed
