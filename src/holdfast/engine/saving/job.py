"""A save between its two halves, and what its manifest will say."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast import machine
from holdfast.buffers import Pool
from holdfast.engine.distributed.collective import Meeting
from holdfast.engine.saving.commit import UNKNOWN, Outcome
from holdfast.engine.saving.image import Image, Piece
from holdfast.engine.saving.overlap import Rest
from holdfast.engine.saving.partition import Dealt
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.format import names, tree
from holdfast.format.manifest import Increment, Incremental, Manifest, Parent, Shard
from holdfast.version import __version__


@dataclass(frozen=True, slots=True)
class Label:
    """What a manifest says beside the state. ``metrics``: numbers by name; ``note``: the user's;
    ``training``: what the services above must find again when the training is resumed."""

    step: int | None = None
    branch: int = 0
    parent: Parent | None = None
    reason: str = "request"
    metrics: Mapping[str, Any] = field(default_factory=dict)
    note: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    def node(self) -> Any:
        """The manifest's ``metadata``, but for the statistics. Raises ``Unsupported``."""
        about = {"reason": self.reason, "metrics": dict(self.metrics), "note": dict(self.note)}
        if self.training:
            about["training"] = dict(self.training)
        return tree.encode(about, "metadata", tree.refuse)


@dataclass(slots=True)
class Draft:
    """A save between its two halves: staged, or ready to be staged piece by piece. ``failed``: by
    what this rank alone has failed to stage it."""

    place: Location
    label: Label
    base: Snapshot | None
    meeting: Meeting
    about: Any
    dealt: Dealt
    image: Image
    pieces: list[Piece]
    pool: Pool
    began: float
    staged: float = 0.0
    rest: Rest | None = None
    failed: Exception | None = None
    outcome: Outcome = UNKNOWN

    @property
    def attempt(self) -> str:
        return self.dealt.attempt

    def manifest(self, shards: Sequence[Shard], chain: int) -> Manifest:
        """The manifest that commits these shards. ``chain``: how many versions lie between this one
        and a full one, if a shard refers to another version."""
        label = self.label
        version = names.parse_version(self.place.folder.rpartition("/")[2])
        step = version.step if label.step is None and version is not None else label.step
        statistics = {
            "bytes": sum(s.length for s in shards),
            "staged_seconds": round(self.staged - self.began, 6),
            "written_seconds": round(time.perf_counter() - self.staged, 6),
        }
        about = {**self.about["dict"], "statistics": {"dict": statistics}}
        fields: dict[str, Any] = {
            "attempt": self.attempt,
            "created": machine.now(),
            "writer": f"holdfast {__version__}",
            "step": step,
            "branch": label.branch,
            "parent": label.parent,
            "metadata": {"dict": about},
            "tree": self.dealt.tree,
        }
        if not any(s.refers for s in shards):
            return Manifest(shards=shards, **fields)
        parts = [Increment(s.name, s.length, s.index, s.refers) for s in shards]
        return Incremental(shards=parts, chain=chain, **fields)
