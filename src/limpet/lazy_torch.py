"""Access to torch without importing it."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from limpet.errors import LimpetError
from limpet.text import advise_install
from limpet.types import DTYPES


def torch_or_none() -> Any:
    """Return torch if the program has imported it, else None: then it has no torch objects."""
    return sys.modules.get("torch")


def import_torch(what: str) -> Any:
    """Import torch. Raises ``LimpetError``, which says ``what`` needs it, if it is missing."""
    try:
        import torch
    except ImportError as e:
        raise LimpetError(what, todo=advise_install("torch")) from e
    return torch


@cache
def dtype_name(dtype: Any) -> str | None:
    """Return the name of a torch dtype, or None if Limpet cannot store its elements."""
    name = str(dtype).removeprefix("torch.")
    return name if name in DTYPES else None


def rank_and_world_size() -> tuple[int, int]:
    """Return those of ``torch.distributed``, or (0, 1) if it is not initialized."""
    torch = torch_or_none()
    if torch is None or not torch.distributed.is_available():
        return 0, 1
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
