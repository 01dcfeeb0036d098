"""Access to torch without importing it."""

from __future__ import annotations

import sys
from typing import Any

from holdfast.types import DTYPES


def torch_or_none() -> Any:
    """Return the torch module if the program has imported it, else None.

    A program without torch has no torch objects, so it does not need the import.
    """
    return sys.modules.get("torch")


_dtype_names: dict[Any, str | None] = {}


def dtype_name(dtype: Any) -> str | None:
    """Return the name of a torch dtype, or None if Holdfast cannot store its elements."""
    if dtype not in _dtype_names:
        name = str(dtype).removeprefix("torch.")
        _dtype_names[dtype] = name if name in DTYPES else None
    return _dtype_names[dtype]
