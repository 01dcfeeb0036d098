"""Checks of the arguments of evaluations."""

from __future__ import annotations

from limpet.errors import LimpetError
from limpet.text import to_repr


def check_argument(owner: str, name: str, value: object, is_valid: bool, expected: str) -> None:
    """Raise ``LimpetError`` unless the argument ``name`` of ``owner`` is valid."""
    if not is_valid:
        raise LimpetError(
            f"Invalid value for {name}= of {owner}", expected=expected, found=to_repr(value)[:200]
        )


def is_count(value: object, least: int) -> bool:
    """Return True for an int of at least ``least`` that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_seconds(owner: str, name: str, value: object, most: float) -> None:
    """Raise ``LimpetError`` unless the argument is a number above 0, and at most ``most``."""
    is_valid = isinstance(value, int | float) and 0 < value <= most
    check_argument(owner, name, value, is_valid, f"seconds: a number above 0, at most {most:g}")
