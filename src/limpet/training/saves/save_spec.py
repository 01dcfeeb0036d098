"""What a save of a training writes besides the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from limpet.deadline import Deadline
from limpet.format.manifest import Parent
from limpet.format.names import Version, parse_version
from limpet.ranks.group import Group, broadcast_from_first
from limpet.run.evaluations.metrics import to_numbers
from limpet.run.run import Run
from limpet.saving.job import VersionMetadata
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

    def to_metadata(
        self,
        parent: SnapshotReader | None,
        training: Mapping[str, Any],
        objectives: Mapping[str, str],
    ) -> VersionMetadata:
        """Return what the manifest stores. ``training``: more training metadata."""
        return VersionMetadata(
            step=self.version.step,
            branch=self.version.branch,
            parent=None if parent is None else Parent(parent.location.folder, parent.digest),
            reason=self.reason,
            metrics=to_numbers(self.metrics),
            note=self.note,
            training={**self.training_metadata, **training},
            objectives=objectives,
        )


def version_of(snapshot: SnapshotReader) -> Version:
    """Return the version of a snapshot, from the name of its folder if possible.

    This avoids a read of the manifest, which another rank may have written.
    """
    return parse_version(snapshot.location.folder) or snapshot.version


def open_on_all_ranks(run: Run, version: Version, group: Group) -> SnapshotReader:
    """Open a committed version on all ranks, or raise on all ranks."""
    snapshots: list[SnapshotReader] = []
    broadcast_from_first(
        group,
        f"the opening of {version}",
        lambda: True,
        bool,
        on_each=lambda: snapshots.append(run.catalog.open(version)),
    )
    return snapshots[0]
