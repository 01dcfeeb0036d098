"""What the writer and the reader share."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from torch.futures import Future

from limpet.errors import LimpetError
from limpet.snapshot.location import Location, Url, locate

METADATA_KEY = "dcp"
"""Member of a manifest's ``metadata`` if DCP saved the snapshot; its blobs are DCP's pickles."""


class SnapshotStorage:
    """The methods that DCP calls on a writer and on a reader of the snapshot at ``url`` alike."""

    url: Url

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.url if isinstance(self.url, str | os.PathLike) else self.url.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            locate(checkpoint_id)
        except LimpetError:
            return False
        return True

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan


def rank_location(url: Url, rank: int) -> Location:
    """Return where a rank saves its own snapshot at ``url`` if DCP does not use collectives."""
    location = locate(url)
    return replace(location, folder=location.key(f"rank_{rank}"))


def completed_future(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
