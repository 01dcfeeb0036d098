"""NumPy dtypes as JSON, in the form of the header of a ``.npy`` file."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_DESCR = re.compile(r"[<>|][biufcmMSUV][0-9]{0,9}(\[[0-9]{0,9}[a-zA-Z]{1,2}(/[0-9]{1,9})?\])?")


def to_descr(dtype: np.dtype[Any]) -> Any:
    """Return a NumPy dtype as JSON. Raises ``ValueError`` if it would not survive a round trip."""
    if dtype.hasobject or _has_own_meaning(dtype):
        raise ValueError(f"the elements of dtype {dtype} are not plain bytes")

    def to_lists(descr: Any) -> Any:
        return [to_lists(d) for d in descr] if isinstance(descr, list | tuple) else descr

    descr = to_lists(np.lib.format.dtype_to_descr(dtype))
    decoded = from_descr(descr)
    if decoded != dtype or decoded.type is not dtype.type:
        raise ValueError(f"the dtype {dtype} cannot be represented in JSON")
    return descr


def _has_own_meaning(dtype: np.dtype[Any]) -> bool:
    """Return True if a dtype in it is of another package, or has metadata (``.npy`` has none)."""
    inner = [f[0] for f in (dtype.fields or {}).values()]
    inner += [dtype.subdtype[0]] if dtype.subdtype else []
    is_own = dtype.isbuiltin == 2 or bool(dtype.metadata)
    return is_own or any(map(_has_own_meaning, inner))


def from_descr(descr: Any) -> np.dtype[Any]:
    """Return the dtype of a ``to_descr``. Raises ``ValueError`` or ``TypeError`` if malformed."""

    def check(d: Any, depth: int) -> Any:
        if type(d) is str and _DESCR.fullmatch(d):
            return d
        if type(d) is not list or depth > 16:
            raise ValueError("not a dtype that NumPy writes")
        return [
            (tuple(n) if type(n) is list else n, check(inner, depth + 1), *map(tuple, shape))
            for n, inner, *shape in d
        ]

    dtype = np.lib.format.descr_to_dtype(check(descr, 0))
    if dtype.hasobject or dtype.subdtype is not None:
        raise ValueError("a dtype with objects or a subarray is never loaded")
    return dtype
