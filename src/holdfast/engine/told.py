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

_ALIKE = (PlanError, CommitError, FormatError, AlreadyExists, NoSnapshot, NotFound)
"""Errors of what the ranks do together: every rank raises the same. Others are of one rank."""


class Told(msgspec.Struct, frozen=True):
    """An error on its way to the other ranks. ``kind``: the name of its class; ``fields``: those of
    plain values, and of keys; ``during``: what they do together."""

    rank: int
    during: str
    kind: str
    what: str
    expected: str | None
    found: str | None
    todo: str | None
    fields: dict[str, str | int | float | bool | tuple[str, ...] | None]


_LONGEST = 4000

DECIDED = "decided"
"""Stands where an error would, once rank 0 has decided: who comes first has its way."""


def tell(error: BaseException, rank: int, during: str, decided: bool) -> str:
    """What the others are told of an error of this rank. ``decided``: by rank 0, before it."""
    fields: dict[str, Any] = {"outcome": "unknown"} if decided else {}
    said: list[Any] = [str(error), None, None, None]
    if isinstance(error, HoldfastError):
        fields = {k: v for k, v in error.fields.items() if _is_short(v)}
        said = [error.what, error.expected, error.found, error.todo]
    what, expected, found, todo = (None if s is None else str(s)[:_LONGEST] for s in said)
    told = Told(rank, during, type(error).__name__, what or "", expected, found, todo, fields)
    return msgspec.json.encode(told).decode()


def _is_short(value: Any) -> bool:
    """Whether a field of an error is sent with it."""
    if type(value) is tuple:
        return len(value) <= _LONGEST and all(type(key) is str for key in value)
    return isinstance(value, str | int | float | bool | None)


def raised(text: str, rank: int, what: str) -> HoldfastError:
    """What this rank raises, since another has failed."""
    told = msgspec.json.decode(text, type=Told)
    kind = getattr(errors, told.kind, None)
    cause: Exception
    if isinstance(kind, type) and issubclass(kind, HoldfastError):
        fields = {"rank": told.rank, **told.fields}
        same = kind(told.what, expected=told.expected, found=told.found, todo=told.todo, **fields)
        if issubclass(kind, _ALIKE):
            same.add_note(f"Told by rank {told.rank}")
            return same
        cause = same
    else:
        cause = RuntimeError(f"{told.kind}: {told.what}")
    end = "" if told.fields.get("committed") else ", which came to nothing"
    failed = RankFailed(
        f"Rank {told.rank} has failed in {what}{end}. {told.kind}: {told.what}",
        expected=told.expected,
        found=told.found,
        todo=told.todo or "Look at that rank's log",
        **{**told.fields, "rank": told.rank},
    )
    failed.__cause__ = cause
    return failed
