"""The error of a process, as its parts, for the process at the other end of a connection."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from limpet import errors
from limpet.errors import LimpetError
from limpet.text import without_surrogates

_MAX_PART = 4000

Part = Annotated[str, Meta(max_length=8 * _MAX_PART)]


class ErrorParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of the class of an error, and its parts, each of at most 4,000 characters."""

    error_class: Annotated[str, Meta(max_length=100)]
    what: Part
    expected: Part | None
    found: Part | None
    todo: Part | None

    @classmethod
    def of(cls, error: LimpetError) -> ErrorParts:
        """Return the parts of an error."""
        parts = (error.expected, error.found, error.todo)
        texts = (None if part is None else _to_part(str(part)) for part in parts)
        return cls(type(error).__name__, _to_part(error.what), *texts)

    def to_error(self) -> LimpetError:
        """Return the error to raise here: of the same class, if Limpet has it."""
        error_class = getattr(errors, self.error_class, None)
        if not (isinstance(error_class, type) and issubclass(error_class, LimpetError)):
            error_class = LimpetError
        return error_class(self.what, expected=self.expected, found=self.found, todo=self.todo)


def _to_part(text: str) -> str:
    return without_surrogates(text[:_MAX_PART])
