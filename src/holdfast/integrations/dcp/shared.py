"""Helpers that the writer and the reader share."""

from __future__ import annotations

import os
from typing import Any

from torch.futures import Future

from holdfast.engine.snapshot.location import Url, locate
from holdfast.errors import HoldfastError

METADATA_KEY = "dcp"
"""Member of a manifest's ``metadata`` if DCP saved the snapshot; its blobs are DCP's pickles."""


def completed_future(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def to_checkpoint_id(url: Url) -> str | os.PathLike[str]:
    return url if isinstance(url, str | os.PathLike) else url.url


def is_valid_url(url: str | os.PathLike[str]) -> bool:
    try:
        locate(url)
    except HoldfastError:
        return False
    return True
