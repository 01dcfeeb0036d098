"""What the hosts hold in a tier, and which snapshots all ranks could load from there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from operator import attrgetter
from typing import Literal

import msgspec

from limpet.errors import FormatError, NotFound, StoreError
from limpet.format.manifest import MAX_MANIFEST, Manifest, Parent, decode_manifest
from limpet.format.names import MANIFEST, Version, parse_version
from limpet.run.catalog import read_sessions, read_training_metadata
from limpet.run.lineage import branch_origin, newest_version
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import Store

TierName = Literal["memory", "local"]

WHERE: dict[TierName, str] = {"memory": "in memory", "local": "on the local disk"}
"""Where a tier has its states, by its name."""


class HostFiles(msgspec.Struct, frozen=True, array_like=True):
    """What one host has of a snapshot. ``digest``: "" without an intact manifest. ``held``: the
    start and the end of ranges of the files of ``files_of`` that it has in full length."""

    rank: int
    folder: str
    digest: str = ""
    parent: Parent | None = None
    count: int = 0  # of the files that the manifest names
    held: list[int] = []
    problem: str = ""  # why the manifest is damaged


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """The ``rank`` and ``held`` of a ``HostFiles``. The host has the manifest, too."""

    rank: int
    held: list[int]


class Sources(msgspec.Struct, frozen=True, array_like=True):
    """Where the files of a state are: its ``holders``, in the order of their ranks. ``count``: the
    number of files besides the manifest."""

    count: int = 0
    holders: list[Holder] = []

    @property
    def ranks(self) -> list[int]:
        """The ranks that serve the manifest."""
        return [holder.rank for holder in self.holders]

    def by_file(self) -> list[list[int]]:
        """Return, for each file by its number, the ranks that serve it."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        for holder in self.holders:
            for first, end in zip(holder.held[::2], holder.held[1::2], strict=True):
                for ranks in found[first:end]:
                    ranks.append(holder.rank)
        return found

    @property
    def first_missing(self) -> int | None:
        """The number of the first file that no host has in full length, or None."""
        end = 0
        held = (holder.held for holder in self.holders)
        for first, stop in sorted(pair for h in held for pair in zip(h[::2], h[1::2], strict=True)):
            if first > end:
                break
            end = max(end, stop)
        return end if end < self.count else None


class TierSnapshot(msgspec.Struct, frozen=True):
    """A snapshot in a tier, the newest durable version before it (``parent``), and where its files
    are. ``problem`` says why its manifest cannot be read, if it cannot."""

    folder: str
    digest: str
    parent: Parent | None
    sources: Sources
    tier: TierName = "memory"
    problem: str = ""

    @property
    def version(self) -> Version:
        version = parse_version(self.folder)
        if version is None:
            raise ValueError(f"{self.folder} is not a version")
        return version

    @property
    def is_whole(self) -> bool:
        """True if its manifest is intact, and every file is on some host in full length."""
        return not self.problem and self.sources.first_missing is None

    def check_whole(self, reader: SnapshotReader) -> None:
        """Raise ``NotFound`` if it is not whole. ``reader``: the same state, to name the file.
        Raises the errors of its manifest."""
        problem, missing = self.problem, self.sources.first_missing
        if not problem and missing is not None:
            name = [*files_of(reader.manifest)][missing]
            problem = f"No host has {self.folder}/{name} in full length"
        if problem:
            raise NotFound(problem)


def take_inventory(store: Store, rank: int) -> list[HostFiles]:
    """Return what is on this host, of which ``rank`` is the first rank."""
    folders: dict[str, dict[str, int]] = {}
    for stat in store.list(""):
        folder, _, name = stat.key.partition("/")
        if parse_version(folder) is not None:
            folders.setdefault(folder, {})[name] = stat.length
    states = []
    for folder, lengths in folders.items():
        state = HostFiles(rank, folder)
        if lengths.get(MANIFEST, 1 + MAX_MANIFEST) <= MAX_MANIFEST:
            with suppress(StoreError):
                raw = store.get(f"{folder}/{MANIFEST}", MAX_MANIFEST)
                state = describe_files(rank, folder, raw, lengths)
        states.append(state)
    return states


def describe_files(rank: int, folder: str, raw: bytes, lengths: Mapping[str, int]) -> HostFiles:
    """Return what a host has of a state. ``raw``: the bytes of its manifest; ``lengths``: those of
    the files on the host, by name."""
    try:
        manifest, digest = decode_manifest(raw, f"{folder}/{MANIFEST}")
    except FormatError as e:
        return HostFiles(rank, folder, problem=str(e))
    files = files_of(manifest)
    held = _find_held(files, lengths)
    return HostFiles(rank, folder, digest, manifest.parent, len(files), held)


def _find_held(files: Mapping[str, int], lengths: Mapping[str, int]) -> list[int]:
    """Return which ``files`` are there in full length (see ``HostFiles.held``)."""
    held: list[int] = []
    for number, (name, length) in enumerate(files.items()):
        if lengths.get(name) == length:
            if held and held[-1] == number:
                held[-1] += 1
            else:
                held += number, number + 1
    return held


def find_snapshots(states: Iterable[HostFiles], tier: TierName) -> list[TierSnapshot]:
    """Return the snapshots of a tier, newest first, also those that cannot be loaded. Of different
    manifests of one version, that of most hosts counts: one may have been away."""
    by_folder: dict[str, list[HostFiles]] = {}
    for state in states:
        by_folder.setdefault(state.folder, []).append(state)
    found = [
        snapshot
        for folder, of_folder in by_folder.items()
        if (snapshot := _make_snapshot(folder, of_folder, tier)) is not None
    ]
    return sorted(found, key=attrgetter("version"), reverse=True)


def _make_snapshot(folder: str, states: Sequence[HostFiles], tier: TierName) -> TierSnapshot | None:
    """Return a snapshot, or None if no host has its manifest."""
    counts = Counter(state.digest for state in states if state.digest)
    if not counts:
        problem = next((state.problem for state in states if state.problem), "")
        return TierSnapshot(folder, "", None, Sources(), tier, problem) if problem else None
    digest = max(sorted(counts), key=counts.__getitem__)
    equal = sorted((s for s in states if s.digest == digest), key=attrgetter("rank"))
    holders = [Holder(s.rank, s.held) for s in equal]
    first = equal[0]
    return TierSnapshot(folder, digest, first.parent, Sources(first.count, holders), tier)


def files_of(manifest: Manifest) -> Mapping[str, int]:
    """Return the lengths by name of a state's files but its manifest: shard, index, shard, ..."""
    files: dict[str, int] = {}
    for shard in manifest.shards:
        files[shard.name] = shard.length
        files[shard.index.name] = shard.index.length
    return files


class CurrentLine:
    """The current lineage of a run. ``newest``: its newest version; ``durable``: the same, if its
    manifest is intact. Raises ``FormatError`` for a branch, and ``StoreError``."""

    def __init__(self, run: Run) -> None:
        listing = run.listing()
        self._catalog = run.catalog
        self.newest = newest_version(run.catalog, listing)
        self.branch = number = run.branch(listing)
        self._last_steps: dict[int, float] = {number: inf}
        while number and (origin := branch_origin(run.catalog, number, listing.folders)):
            number = origin.branch
            self._last_steps[number] = origin.step
        self.durable: SnapshotReader | None = None
        self._session = ""
        self._is_damaged = False
        if self.newest is not None:
            try:
                durable = run.catalog.open(self.newest)
                self._session = next(iter(read_sessions(durable)), "")
                self.durable = durable
            except FormatError:
                self._is_damaged = True

    def is_newer(self, version: Version) -> bool:
        """Return True if a version of this lineage is newer than all that the run has."""
        is_later = self.newest is None or version.step > self.newest.step
        return is_later and version.step <= self._last_steps.get(version.branch, -1)

    def is_same(self, snapshot: TierSnapshot, reader: SnapshotReader) -> bool:
        """Return True if a snapshot of this step is that of the newest version, or if the damaged
        manifest of that cannot tell. Raises ``FormatError`` for the manifest of ``reader``."""
        if self.durable is None:
            return True
        if snapshot.tier == "local":
            return snapshot.digest == self.durable.digest
        # The save of the same call of ``step``: a later save of this step may have another state,
        # and so may a snapshot that another training has made.
        return read_training_metadata(reader).get("saved_with") == self.durable.manifest.attempt

    def is_continued_by(self, snapshot: TierSnapshot, reader: SnapshotReader) -> bool:
        """Return True if a snapshot continues from the newest version, or from none, or if that
        version is damaged. Reads the manifest of ``reader``; raises ``FormatError``."""
        if self._is_damaged:
            return True
        parent = None if snapshot.parent is None else snapshot.parent.digest
        if parent == (None if self.durable is None else self.durable.digest):
            return True
        # made before the version was committed, by its training, or by one that has resumed from it
        return self._session != "" and self._session in read_sessions(reader)
