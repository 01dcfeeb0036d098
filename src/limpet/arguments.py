"""Numbers that callers pass: of Python, of NumPy, or of any other library."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any


def whole(value: object, least: int = 0, most: int | None = None) -> int | None:
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


def seconds(value: object) -> float | None:
    """Return ``real(value)`` if it is greater than 0, else None."""
    number = real(value)
    return number if number is not None and number > 0 else None
