"""An error of one rank, as the others hear it and raise it."""

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
"""Errors of what the ranks do together: every rank raises the same. Others are of one rank."""


class ErrorReport(msgspec.Struct, frozen=True):
    """An error on its way to the other ranks. ``kind``: the name of its class; ``fields``: those of
    plain values, and of keys; ``during``: what they do together."""

    rank: int
    operation: str
    error_class: str
    what: str
    expected: str | None
    found: str | None
    todo: str | None
    fields: dict[str, str | int | float | bool | tuple[str, ...] | None]


class Arrival(msgspec.Struct, frozen=True):
    """What the first who came to a meeting has said: what is done there, and what led to it."""

    rank: int
    operation: str
    cause: str


_MAX_LENGTH = 4000

COMMIT_BEGUN = "decided"
"""Stands where an error would, once rank 0 has decided: who comes first has its way."""


def encode_error(error: BaseException, rank: int, operation: str, commit_begun: bool) -> str:
    """What the others are told of an error of this rank. ``decided``: by rank 0, before it."""
    fields: dict[str, Any] = {"outcome": "unknown"} if commit_begun else {}
    said: list[Any] = [str(error), None, None, None]
    if isinstance(error, HoldfastError):
        fields = {k: v for k, v in error.fields.items() if _is_short(v)}
        said = [error.what, error.expected, error.found, error.todo]
    what, expected, found, todo = (None if s is None else str(s)[:_MAX_LENGTH] for s in said)
    told = ErrorReport(
        rank, operation, type(error).__name__, what or "", expected, found, todo, fields
    )
    return encode_json(told)


def encode_json(value: msgspec.Struct) -> str:
    """As JSON; of text that UTF-8 lacks, such as a file's name may have, something like it."""
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
    """An error in words, with its notes: they say which rank it was told by."""
    notes = getattr(error, "__notes__", ())
    return " ".join([str(error), *(f"{note.rstrip('.')}." for note in notes)])


def _is_short(value: Any) -> bool:
    """Whether a field of an error is sent with it."""
    if type(value) is tuple:
        return len(value) <= _MAX_LENGTH and all(type(key) is str for key in value)
    return isinstance(value, str | int | float | bool | None)


def decode_error(text: str, rank: int, operation: str) -> HoldfastError:
    """What this rank raises, since another has failed."""
    told = msgspec.json.decode(text, type=ErrorReport)
    kind = getattr(errors, told.error_class, None)
    cause: Exception
    if isinstance(kind, type) and issubclass(kind, HoldfastError):
        fields = {"rank": told.rank, **told.fields}
        same = kind(told.what, expected=told.expected, found=told.found, todo=told.todo, **fields)
        if issubclass(kind, _SAME_ON_ALL_RANKS):
            same.add_note(f"Told by rank {told.rank}")
            return same
        cause = same
    else:
        cause = RuntimeError(f"{told.error_class}: {told.what}")
    end = "" if told.fields.get("committed") else ", which came to nothing"
    failed = RankFailed(
        f"Rank {told.rank} has failed in {operation}{end}. {told.error_class}: {told.what}",
        expected=told.expected,
        found=told.found,
        todo=told.todo or "Look at that rank's log",
        **{**told.fields, "rank": told.rank},
    )
    failed.__cause__ = cause
    return failed
