"""Refusals of an ``ElasticSampler`` that is created or used in a wrong way."""

from __future__ import annotations

from limpet.errors import LimpetError


def require(what: str, condition: bool, expected: str, found: object) -> None:
    """Raise ``LimpetError`` unless ``condition`` is true."""
    if not condition:
        raise LimpetError(what, expected=expected, found=found)


def check_is_number(length: object) -> None:
    """Raise ``LimpetError`` for a data set instead of the number of its samples."""
    is_number = hasattr(length, "__index__")
    if not is_number and hasattr(length, "__getitem__") and not isinstance(length, str):
        raise LimpetError(
            "An ElasticSampler was created with a data set",
            expected="the number of its samples",
            found=type(length).__name__,
            todo="Write ElasticSampler(len(dataset), batch_size=...)",
        )
