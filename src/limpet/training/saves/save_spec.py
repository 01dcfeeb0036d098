"""What a save of a training writes besides the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from limpet.deadline import Deadline
from limpet.format.names import Version, parse_version
from limpet.snapshot.reader import SnapshotReader


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """The version to save, the reason, and the metadata for its manifest.

    ``on_finished`` is called with True if the save was committed, and with False if it failed.
    ``deadline`` is the time by which the process leaves. Retention is then left to the next one.
    """

    version: Version
    reason: str
    metrics: Mapping[str, Any]
    note: Mapping[str, Any]
    training_metadata: Mapping[str, Any]
    on_finished: Callable[[bool], None] = lambda committed: None
    deadline: Deadline | None = None


def version_of(snapshot: SnapshotReader) -> Version:
    """Return the version of a snapshot, from the name of its folder if possible.

    This avoids a read of the manifest, which another rank may have written.
    """
    return parse_version(snapshot.location.folder) or snapshot.version
