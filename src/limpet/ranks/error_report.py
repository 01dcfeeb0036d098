"""The error of one process, as plain values, and how another process raises it.

The ranks of a job, the peers of a tier, and the workers of a queue all send this ``ErrorReport``.
Nothing is imported or unpickled for it.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
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

_MAX_LENGTH = 4000

COMMIT_BEGUN = "commit begun"
"""Replaces the error report once rank 0 has begun the commit. The first value set is final."""

Plain = str | int | float | bool | None


class ErrorReport(msgspec.Struct, frozen=True):
    """An error of another process. The four parts have at most 4,000 characters each; ``fields``
    are plain values or tuples of strings; ``args`` are those of an error that is not Limpet's."""

    module: str
    name: str
    what: str
    expected: str | None = None
    found: str | None = None
    todo: str | None = None
    fields: dict[str, Plain | tuple[str, ...]] = {}
    args: tuple[Plain, ...] | None = None
    trace: str = ""
    rank: int = 0
    operation: str = ""

    @classmethod
    def of(
        cls,
        error: BaseException,
        rank: int = 0,
        operation: str = "",
        trace: str = "",
        **more: Plain,
    ) -> ErrorReport:
        """Return the report of an error. ``more``: further fields."""
        kind = type(error)
        is_limpet = isinstance(error, LimpetError)
        parts: tuple[Any, ...] = (error_text(error), None, None, None)
        if isinstance(error, LimpetError):
            parts = error.what, error.expected, error.found, error.todo
            more = {**{k: v for k, v in error.fields.items() if _is_short(v)}, **more}
        what, expected, found, todo = (p if p is None else _clean(str(p)) for p in parts)
        is_plain = not is_limpet and all(map(_is_plain, error.args))
        return cls(
            module=kind.__module__,
            name=kind.__qualname__,
            what=what or "",
            expected=expected,
            found=found,
            todo=todo,
            fields=_escape_surrogates(more),
            args=_escape_surrogates(error.args) if is_plain else None,
            trace=without_surrogates(trace[-4 * _MAX_LENGTH :]),
            rank=getattr(error, "limpet_rank", rank),
            operation=operation,
        )

    def to_limpet_error(self) -> LimpetError | None:
        """Return the error if it is one of Limpet's own classes."""
        found = getattr(errors, self.name, None) if self.module == errors.__name__ else None
        is_error = isinstance(found, type) and issubclass(found, LimpetError)
        return self._fill(found) if is_error and found is not None else None

    def to_peer_error(self) -> LimpetError:
        """Return the error to raise for a peer: of the same class, or a ``LimpetError``."""
        return self.to_limpet_error() or self._fill(LimpetError)

    def to_error(self) -> BaseException | None:
        """Return an error of the same class, if that is an ``Exception`` of a module that this
        process has imported, and takes these arguments; otherwise None."""
        found: Any = sys.modules.get(self.module)
        for name in self.name.split("."):
            found = getattr(found, name, None)
        if not (isinstance(found, type) and issubclass(found, Exception)):
            return None
        if issubclass(found, LimpetError):
            return self._fill(found)
        if self.args is None:
            return None
        try:
            error = found(*self.args)
        except Exception:  # noqa: BLE001  (it wants other arguments: RankFailed says the same)
            return None
        return error if _clean(error_text(error)) == self.what else None

    def _fill(self, kind: type[LimpetError]) -> LimpetError:
        parts = {"expected": self.expected, "found": self.found, "todo": self.todo}
        return kind(self.what, **{**self.fields, **parts})  # type: ignore[arg-type]


class Arrival(msgspec.Struct, frozen=True):
    """The first rank that joins a collective, its operation, and, if it does so because its
    training has raised an error, that one, also encoded by ``encode_raised``."""

    rank: int
    operation: str
    cause: str
    raised: str


ERROR_REPORT = msgspec.json.Decoder(ErrorReport)
ARRIVAL = msgspec.json.Decoder(Arrival)


def encode_error(error: BaseException, rank: int, operation: str, commit_begun: bool) -> str:
    """Encode an error of this rank. ``commit_begun``: rank 0 had begun the commit before."""
    is_unknown = commit_begun and not isinstance(error, LimpetError)
    more = {"outcome": "unknown"} if is_unknown else {}
    return encode_json(ErrorReport.of(error, rank, operation, **more))


def encode_json(value: object) -> str:
    """Encode a struct or dataclass as JSON, with surrogates, which file names may have, escaped."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_escape_surrogates(msgspec.to_builtins(value))).decode()


def format_with_notes(error: BaseException) -> str:
    """Return the text of an error with its notes, which name the rank that reported the error."""
    notes = getattr(error, "__notes__", ())
    return " ".join([error_text(error), *(f"{note.rstrip('.')}." for note in notes)])


def decode_error(text: str, operation: str) -> BaseException:
    """Return the error to raise because another rank failed, or its training has raised."""
    report = ERROR_REPORT.decode(text)
    if report.trace:
        return decode_raised(text)
    report = msgspec.structs.replace(report, fields={"rank": report.rank, **report.fields})
    found = report.to_limpet_error()
    if isinstance(found, _SAME_ON_ALL_RANKS):
        found.add_note(f"Reported by rank {report.rank}")
        return found
    uncertain = report.fields.get("committed") or report.fields.get("outcome") == "unknown"
    uncertain = uncertain or not operation.startswith("the save of ")
    failed = RankFailed(
        f"Rank {report.rank} failed during {operation}"
        f"{'' if uncertain else '; nothing was committed'}. {report.name}: {report.what}",
        expected=report.expected,
        found=report.found,
        todo=report.todo or f"Check the log of rank {report.rank}",
        **{**report.fields, "rank": report.rank},
    )
    failed.__cause__ = found or RuntimeError(f"{report.name}: {report.what}")
    return failed


def error_text(error: BaseException) -> str:
    """Return the text of an exception. An error of the user's ``__str__`` must not replace it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (of any class)
        return "(its str() failed)"


def describe_cause(error: BaseException) -> str:
    """Return the class and the text of an exception that ended a training."""
    return f"{type(error).__name__}: {error_text(error)}"[:1000]


def encode_raised(error: BaseException, rank: int) -> str:
    """Encode the error with which the training of this rank has ended, for the other ranks."""
    trace = "".join(traceback.format_exception(error))
    return encode_json(ErrorReport.of(error, rank, trace=trace))


def decode_raised(text: str) -> BaseException:
    """Return the error to raise because another rank's training has raised, with its traceback as a
    note: a ``RankFailed`` if that class cannot be made here."""
    report = ERROR_REPORT.decode(text)
    report = msgspec.structs.replace(report, fields={"rank": report.rank, **report.fields})
    error = report.to_error()
    if error is None:
        error = RankFailed(
            f"The training of rank {report.rank} has raised {report.name}: {report.what}",
            todo=f"See the log of rank {report.rank}",
            rank=report.rank,
        )
    with suppress(AttributeError):  # a collective that it ends here names that rank, too
        error.limpet_rank = report.rank  # type: ignore[attr-defined]
    error.add_note(f"Raised on rank {report.rank}, whose traceback is:\n{report.trace}")
    return error


def is_from_torch(error: BaseException) -> bool:
    """Return True if PyTorch's own code raised a ``RuntimeError``, as a collective operation does
    when another rank has left."""
    if not isinstance(error, RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__, -1)
    return bool(frames) and f"{os.sep}torch{os.sep}" in frames[-1].filename


def _clean(text: str) -> str:
    return without_surrogates(text[:_MAX_LENGTH])


def _escape_surrogates(value: Any) -> Any:
    if isinstance(value, dict):
        return {_escape_surrogates(k): _escape_surrogates(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_escape_surrogates(v) for v in value)
    return without_surrogates(value) if isinstance(value, str) else value


def _is_plain(value: Any) -> bool:
    is_number = type(value) in (int, float, bool) or value is None
    return is_number or (type(value) is str and len(value) <= _MAX_LENGTH)


def _is_short(value: Any) -> bool:
    """Return True if a field of an error is short and plain enough to be sent with the error."""
    return isinstance(value, str | int | float | bool | None) or (
        type(value) is tuple
        and len(value) <= _MAX_LENGTH
        and all(type(key) is str for key in value)
    )
