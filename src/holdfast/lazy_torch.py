"""Access to torch without importing it."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from holdfast.types import DTYPES


def torch_or_none() -> Any:
    """Return the torch module if the program has imported it, else None.

    A program without torch has no torch objects, so it does not need the import.
    """
    return sys.modules.get("torch")


@cache
def dtype_name(dtype: Any) -> str | None:
    """Return the name of a torch dtype, or None if Holdfast cannot store its elements."""
    name = str(dtype).removeprefix("torch.")
    return name if name in DTYPES else None
