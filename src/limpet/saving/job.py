"""A save between its two halves, and the manifest that it will commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from limpet import machine
from limpet.arguments import whole
from limpet.errors import LimpetError
from limpet.format import names, tree
from limpet.format.manifest import Manifest, Parent, Shard
from limpet.layout.devices import merge_device_maps
from limpet.ranks.collective import Collective
from limpet.saving.commit import NO_RESULT, CommitResult, Receipt
from limpet.saving.image import Image, Piece, release_buffers
from limpet.saving.partition import Partition
from limpet.saving.staging import DeferredStaging
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import MappedUpload
from limpet.text import to_repr
from limpet.threads import Workers, no_op
from limpet.version import __version__


@dataclass(frozen=True, slots=True)
class VersionMetadata:
    """The content of a manifest other than the state.

    ``metrics``: numbers by name; ``note``: plain values from the user; ``training``: data that the
    layers above the engine need when training resumes; ``objectives``: the metrics whose best
    versions are wanted, each with its mode.
    """

    step: int | None = None
    branch: int = 0
    parent: Parent | None = None
    reason: str = "request"
    metrics: Mapping[str, Any] = field(default_factory=dict)
    note: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    objectives: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ``LimpetError`` unless ``step`` is one, before anything is written."""
        step = whole(self.step, 0, names.MAX_STEP)
        if step is None and self.step is not None:
            raise LimpetError(
                f"step must be a whole number, 0 or more, with at most 18 digits; found"
                f" {to_repr(self.step)[:80]}"
            )
        object.__setattr__(self, "step", step)

    def to_node(self) -> Any:
        """Return the manifest's ``metadata`` without the statistics. Raises ``Unsupported``."""
        content = {"reason": self.reason, "metrics": dict(self.metrics), "note": dict(self.note)}
        optional = {"training": self.training, "objectives": self.objectives}
        content |= {name: dict(value) for name, value in optional.items() if value}
        return tree.encode_root(content, "metadata", tree.reject_value)


@dataclass(slots=True)
class SaveJob(AbstractContextManager["SaveJob"]):
    """A save between its two halves: staged, or ready to be staged piece by piece. A ``with`` block
    releases what it holds.

    ``upload``: this rank's shard, if it is staged into a store in memory; ``deferred``: the pieces
    that remain to be staged in the background; ``staging_error``: the
    error with which this rank failed to stage the save while other ranks may have succeeded;
    ``devices``: those of this rank's tensors, by key (``FlatState.devices``).
    ``copy_to_peers``: called with the ``Receipt`` of this rank's files once they are written.
    """

    location: Location
    metadata: VersionMetadata
    base: SnapshotReader | None
    collective: Collective
    metadata_node: Any
    partition: Partition
    image: Image
    pieces: list[Piece]
    workers: Workers
    started_at: float
    staged_at: float = 0.0
    upload: MappedUpload | None = None
    deferred: DeferredStaging | None = None
    staging_error: Exception | None = None
    devices: Mapping[str, Any] = field(default_factory=dict)
    copy_to_peers: Callable[[Any], object] = no_op
    result: CommitResult = NO_RESULT

    def __exit__(self, *exception: object) -> None:
        """Release the buffers and the references to the live state, and leave the collective."""
        if self.deferred is not None:
            self.deferred.release()
        self.release_memory()
        self.collective.close()

    def release_memory(self) -> None:
        """Release the buffers, and abort the upload unless it was committed."""
        release_buffers(self.pieces, self.workers.pool)
        if self.upload is not None:
            self.upload.abort()

    def build_manifest(
        self, shards: Sequence[Shard], chain: int, receipts: Sequence[Receipt]
    ) -> Manifest:
        """Return the manifest that commits these shards.

        ``chain``: the number of versions from this one back to a full one, if a shard refers to
        another version; ``receipts``: those of all ranks.
        """
        metadata = self.metadata
        version = names.parse_version(self.location.folder.rpartition("/")[2])
        step = version.step if metadata.step is None and version is not None else metadata.step
        statistics = {
            "bytes": sum(s.length for s in shards),
            "staged_seconds": round(self.staged_at - self.started_at, 6),
            "written_seconds": round(time.perf_counter() - self.staged_at, 6),
        }
        added: dict[str, Any] = {"statistics": {"dict": statistics}}
        devices = merge_device_maps(receipt.devices for receipt in receipts)
        if devices is not None:
            added["devices"] = tree.encode(devices, "metadata/devices", tree.reject_value)
        return Manifest(
            attempt=self.partition.attempt,
            created=machine.utc_now(),
            writer=f"limpet {__version__}",
            step=step,
            branch=metadata.branch,
            parent=metadata.parent,
            chain=chain if any(s.refers for s in shards) else 0,
            shards=shards,
            metadata={"dict": {**self.metadata_node["dict"], **added}},
            tree=self.partition.tree,
        )
