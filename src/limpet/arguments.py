"""Checks of arguments. Numbers may be of Python, of NumPy, or of any other library."""

from __future__ import annotations

import math
import operator
import sys
from numbers import Real
from typing import Any

from limpet.errors import LimpetError
from limpet.text import to_repr, with_article


def whole(value: object, least: float = 0, most: int | None = None) -> int | None:
    """Return a whole number of any integer type as an int; None for anything else, such as 2.0,
    True, or a number that is less than ``least`` or more than ``most``."""
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # the error is the answer
    except TypeError:
        return None
    return number if number >= least and (most is None or number <= most) else None


def real(value: Any) -> float | None:
    """Return a number of any real type as an int or a float; None for anything else, such as
    True. It may be infinite or NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float | Real):
        return None
    return value if type(value) in (int, float) else float(value)  # type: ignore[return-value]


def require(name: str, is_valid: bool, expected: str, found: object) -> None:
    """Raise ``LimpetError``, in one sentence, unless an argument is valid."""
    if not is_valid:
        raise _refusal(name, expected, found)


def _refusal(name: str, expected: str, found: object) -> LimpetError:
    text = to_repr(found)
    text = text if len(text) <= 120 else with_article(type(found).__name__)
    return LimpetError(f"{name} must be {expected}, not {text}")


def check_whole(
    name: str, value: object, expected: str, least: float = 0, most: int | None = None
) -> int:
    """Return a whole number as ``whole`` does. ``expected``: what the error says of it."""
    number = whole(value, least, most)
    if number is None:
        raise _refusal(name, expected, value)
    return number


def check_count(name: str, value: object, least: int = 1, unit: str = "") -> int:
    """Return a whole number, ``least`` or more, as an int. Each step calls this."""
    count = whole(value, least)
    if count is None:
        kind = f"a whole number of {unit}" if unit else "a whole number"
        raise _refusal(name, f"{kind}, {least} or more", value)
    return count


def check_rank(rank: object, ranks: object) -> tuple[int | None, int | None]:
    """Return ``rank`` and the number of ``ranks`` as ints, or None for both if none is given."""
    if rank is None and ranks is None:
        return None, None
    number, count = whole(rank), whole(ranks, 1)
    if number is None or count is None or number >= count:
        expected = "two whole numbers with 0 <= rank < ranks"
        raise _refusal("rank= and ranks=", expected, (rank, ranks))
    return number, count


def check_seconds(
    name: str,
    value: object,
    *,
    most: float = math.inf,
    may_be_zero: bool = False,
    may_be_infinite: bool = False,
) -> float:
    """Return a number of seconds, more than 0 and at most ``most``, as an int or a float."""
    number = real(value)
    longest = most if may_be_infinite else min(most, sys.float_info.max)
    if number is not None and (0 < number <= longest or (may_be_zero and number == 0)):
        return number
    expected = "0 or more seconds" if may_be_zero else "more than 0 seconds"
    expected += "" if most == math.inf else f", at most {most:g}"
    expected += "" if may_be_infinite else ", and finite"
    raise _refusal(name, expected, value)
