"""Refusals of an ``ElasticSampler`` that is created or used in a wrong way."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

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


def check_is_batch_sampler(caller: FrameType) -> None:
    """Raise ``LimpetError`` if a pass begins for the ``sampler=`` of a ``DataLoader``.

    ``caller``: the frame that begins the pass. PyTorch would make batches of batches.
    """
    module: Any = sys.modules.get("torch.utils.data.sampler")
    if module is not None and caller.f_code is module.BatchSampler.__iter__.__code__:
        raise LimpetError(
            "An ElasticSampler was passed to a DataLoader as sampler=",
            expected="batch_sampler=, because it yields batches of indices",
            found="sampler=, which yields single indices",
            todo="Write DataLoader(dataset, batch_sampler=sampler), without batch_size=, shuffle=,"
            " and drop_last=",
        )
