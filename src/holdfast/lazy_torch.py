"""Torch, if the program has loaded it."""

from __future__ import annotations

import sys
from typing import Any

from holdfast.types import DTYPES


def torch_or_none() -> Any:
    """The torch module if the program has loaded it. What is no torch object needs no torch."""
    return sys.modules.get("torch")


_dtype_names: dict[Any, str | None] = {}


def dtype_name(dtype: Any) -> str | None:
    """The name of a torch dtype if its elements are bytes that can be written."""
    if dtype not in _dtype_names:
        name = str(dtype).removeprefix("torch.")
        _dtype_names[dtype] = name if name in DTYPES else None
    return _dtype_names[dtype]
