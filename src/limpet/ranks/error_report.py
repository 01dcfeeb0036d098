"""Send an error of one rank to the other ranks, and raise it there."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import msgspec

from limpet import errors
from limpet.errors import (
    AlreadyExists,
    CommitError,
    FormatError,
    LimpetError,
    NoSnapshot,
    NotFound,
    PlanError,
    RankFailed,
)
from limpet.text import without_surrogates

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


class RaisedReport(msgspec.Struct, frozen=True):
    """An error with which the training of a rank has ended.

    ``module`` and ``name``: those of its class; ``args``: its arguments if all of them are plain;
    ``text``: its text; ``trace``: its traceback; ``fields``: those of a ``LimpetError`` that are
    plain values or tuples of strings.
    """

    rank: int
    module: str
    name: str
    args: tuple[str | int | float | bool | None, ...] | None
    text: str
    trace: str
    fields: dict[str, str | int | float | bool | tuple[str, ...] | None]


_RAISED = msgspec.json.Decoder(RaisedReport)

_MAX_LENGTH = 4000

COMMIT_BEGUN = "commit begun"
"""Replaces the error report once rank 0 has begun the commit. The first value set is final."""


def encode_error(error: BaseException, rank: int, operation: str, commit_begun: bool) -> str:
    """Encode an error of this rank for the other ranks.

    ``commit_begun``: whether rank 0 had begun the commit before the error.
    """
    described = (
        error
        if isinstance(error, LimpetError)
        else LimpetError(str(error), **({"outcome": "unknown"} if commit_begun else {}))
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
            _short_fields(described),
        )
    )


def encode_json(value: object) -> str:
    """Encode a struct or a dataclass as JSON.

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
    return without_surrogates(value) if isinstance(value, str) else value


def format_with_notes(error: BaseException) -> str:
    """Return the text of an error with its notes, which name the rank that reported the error."""
    notes = getattr(error, "__notes__", ())
    return " ".join([str(error), *(f"{note.rstrip('.')}." for note in notes)])


def _short_fields(error: LimpetError) -> dict[str, Any]:
    return {k: v for k, v in error.fields.items() if _is_short(v)}


def _is_short(value: Any) -> bool:
    """Return True if a field of an error is short and plain enough to be sent with the error."""
    return isinstance(value, str | int | float | bool | None) or (
        type(value) is tuple
        and len(value) <= _MAX_LENGTH
        and all(type(key) is str for key in value)
    )


def decode_error(text: str, rank: int, operation: str) -> LimpetError:
    """Return the error that this rank raises because another rank failed."""
    report = ERROR_REPORT.decode(text)
    error_class = getattr(errors, report.error_class, None)
    cause: Exception = RuntimeError(f"{report.error_class}: {report.what}")
    if isinstance(error_class, type) and issubclass(error_class, LimpetError):
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


def encode_raised(error: BaseException, rank: int) -> str:
    """Encode the error with which the training of this rank has ended, for the other ranks."""
    args = error.args if all(_is_plain(a) for a in error.args) else None
    kind = type(error)
    trace = "".join(traceback.format_exception(error))
    return encode_json(
        RaisedReport(
            rank,
            kind.__module__,
            kind.__qualname__,
            args,
            str(error)[:_MAX_LENGTH],
            trace[-4 * _MAX_LENGTH :],
            _short_fields(error) if isinstance(error, LimpetError) else {},
        )
    )


def decode_raised(text: str) -> BaseException:
    """Return the error that this rank raises because the training of another rank has raised.

    It has the same class if that is an ``Exception`` of a module that this process has imported,
    and takes these arguments. Otherwise, it is a ``RankFailed``. Nothing is imported or unpickled.
    A note has the traceback of the other rank.
    """
    report = _RAISED.decode(text)
    error = _rebuild(report)
    if error is None:
        error = RankFailed(
            f"The training of rank {report.rank} has raised {report.name}: {report.text}",
            todo=f"See the log of rank {report.rank}",
            rank=report.rank,
        )
    error.add_note(f"Raised on rank {report.rank}, whose traceback is:\n{report.trace}")
    return error


def is_from_torch(error: BaseException) -> bool:
    """Return True if PyTorch's own code raised a ``RuntimeError``, as a collective operation does
    when another rank has left."""
    if not isinstance(error, RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__, -1)
    return bool(frames) and f"{os.sep}torch{os.sep}" in frames[-1].filename


def _rebuild(report: RaisedReport) -> BaseException | None:
    """Return an error of the class in a report, or None if that is not possible."""
    found: Any = sys.modules.get(report.module)
    for name in report.name.split("."):
        found = getattr(found, name, None)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        return None
    if issubclass(found, LimpetError):
        fields: dict[str, Any] = {"rank": report.rank, **report.fields}
        return found(report.text.rstrip("."), **fields)
    if report.args is None:
        return None
    try:
        error = found(*report.args)
    except Exception:  # noqa: BLE001  (the class wants other arguments: RankFailed says the same)
        return None
    return error if str(error)[:_MAX_LENGTH] == report.text else None


def _is_plain(value: Any) -> bool:
    is_number = type(value) in (int, float, bool) or value is None
    return is_number or (type(value) is str and len(value) <= _MAX_LENGTH)
