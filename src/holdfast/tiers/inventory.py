"""What the hosts hold in memory, and which captured states all ranks could load from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Literal

import msgspec

from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import FormatError, StoreError
from holdfast.format.manifest import MAX_MANIFEST, Manifest, Parent, decode_manifest
from holdfast.format.names import MANIFEST, Version, parse_version
from holdfast.run.catalog import read_captured_with, read_sessions
from holdfast.run.lineage import branch_origin, newest_version
from holdfast.run.run import Run
from holdfast.storage.store import Store

TierName = Literal["memory", "local"]

WHERE: dict[TierName, str] = {"memory": "in memory", "local": "on the local disk"}
"""Where a tier has its states, by its name."""


class HostInventory(msgspec.Struct, frozen=True):
    """The captured states in the memory of one host, as the first rank of it sees them.

    ``manifests``: the bytes of each manifest, by folder; ``files``: the length of each file, by
    key. ``rank``: the rank that serves them.
    """

    rank: int
    manifests: dict[str, bytes] = {}
    files: dict[str, int] = {}


class Candidate(msgspec.Struct, frozen=True):
    """A captured state, of which every file is in the memory of some host.

    ``digest``: that of its manifest; ``parent``: the newest durable version before it; ``sources``:
    for each file, the ranks that serve it. ``tier``: the name of the tier that has it. ``problem``
    says why the state cannot be loaded, if it cannot.
    """

    folder: str
    digest: str
    branch: int
    parent: Parent | None
    sources: dict[str, list[int]]
    tier: TierName = "memory"
    problem: str = ""

    @property
    def version(self) -> Version:
        version = parse_version(self.folder)
        if version is None:
            raise ValueError(f"{self.folder} is not a version")
        return version


def take_inventory(store: Store, rank: int) -> HostInventory:
    """Return what is in the memory of this host. What cannot be read is left out."""
    files = {stat.key: stat.length for stat in store.list("")}
    manifests: dict[str, bytes] = {}
    for key, length in files.items():
        folder, _, name = key.partition("/")
        if name == MANIFEST and parse_version(folder) is not None and length <= MAX_MANIFEST:
            with suppress(StoreError):
                manifests[folder] = store.get(key, MAX_MANIFEST)
    return HostInventory(rank, manifests, files)


def find_candidates(inventories: Sequence[HostInventory], tier: TierName) -> list[Candidate]:
    """Return the captured states of a tier, newest first, also those that cannot be loaded.

    If the hosts have different manifests of one version, the one that most hosts have counts: a
    training that was cut off may have left another one on a host that was away.
    """
    manifests: dict[str, list[bytes]] = {}
    for inventory in inventories:
        for folder, raw in inventory.manifests.items():
            manifests.setdefault(folder, []).append(raw)
    found = []
    for folder, raws in manifests.items():
        raw = max(sorted(set(raws)), key=raws.count)
        found.append(_make_candidate(folder, raw, inventories, tier))
    return sorted(found, key=lambda c: (c.version.step, c.branch), reverse=True)


def _make_candidate(
    folder: str, raw: bytes, inventories: Sequence[HostInventory], tier: TierName
) -> Candidate:
    """Return a candidate. Its manifest must be intact, and every file somewhere in full length."""
    version = parse_version(folder)
    branch = 0 if version is None else version.branch
    try:
        manifest, digest = decode_manifest(raw, f"{folder}/{MANIFEST}")
    except FormatError as e:
        return Candidate(folder, "", branch, None, {}, tier, str(e))
    sources = {f"{folder}/{MANIFEST}": [i.rank for i in inventories if _has(i, folder, raw)]}
    for name, length in files_of(manifest).items():
        key = f"{folder}/{name}"
        sources[key] = [i.rank for i in inventories if i.files.get(key) == length]
    missing = [key for key, ranks in sources.items() if not ranks]
    problem = f"No host has {missing[0]} in full length" if missing else ""
    return Candidate(folder, digest, manifest.branch, manifest.parent, sources, tier, problem)


def _has(inventory: HostInventory, folder: str, raw: bytes) -> bool:
    return inventory.manifests.get(folder) == raw


def files_of(manifest: Manifest) -> Mapping[str, int]:
    """Return the names and the lengths of a state's files besides its manifest."""
    files: dict[str, int] = {}
    for shard in manifest.shards:
        files[shard.name] = shard.length
        files[shard.index.name] = shard.index.length
    return files


class CurrentLine:
    """The current lineage of a run, of which ``newest`` is the newest version, or None.

    ``branch``: its number. ``durable``: the newest version, or None if there is none, or if its
    manifest is damaged. Raises ``FormatError`` for the record of a branch, and ``StoreError``.
    """

    def __init__(self, run: Run) -> None:
        listing = run.listing()
        self.newest = newest_version(run.catalog, listing)
        self.branch = number = run.branch(listing)
        self._last_steps: dict[int, float] = {number: inf}
        while number and (origin := branch_origin(run.catalog, number, listing.folders)):
            number = origin.branch
            self._last_steps[number] = origin.step
        self.durable: Snapshot | None = None
        self._session = ""
        self._is_damaged = False
        if self.newest is not None:
            try:
                durable = run.open(self.newest)
                self._session = next(iter(read_sessions(durable)), "")
                self.durable = durable
            except FormatError:
                self._is_damaged = True

    def is_newer(self, version: Version) -> bool:
        """Return True if a version of this lineage is newer than all that the run has."""
        is_later = self.newest is None or version.step > self.newest.step
        return is_later and version.step <= self._last_steps.get(version.branch, -1)

    def is_same(self, candidate: Candidate, captured: Snapshot) -> bool:
        """Return True if a captured state of the same step is that of the newest version.

        A copy on a local disk has the same manifest. A capture names the save of the same call of
        ``step``: a later save of this step may have another state, and another training may have
        captured the step. If the manifest of the newest version is damaged, this cannot be told,
        and the state counts. Reads the manifest of ``captured``; raises ``FormatError``.
        """
        if self.durable is None:
            return True
        if candidate.tier == "local":
            return candidate.digest == self.durable.digest
        return read_captured_with(captured) == self.durable.manifest.attempt

    def is_continued_by(self, candidate: Candidate, captured: Snapshot) -> bool:
        """Return True if a captured state continues from the newest version of the run, or from
        none.

        It names that version as its parent, or the same training, or one that it has resumed from,
        captured it before the version was committed. A host that was away for a while may have a
        state from before. If the manifest of the newest version is damaged, this cannot be told,
        and the state counts. Reads the manifest of ``captured``; raises ``FormatError``.
        """
        if self._is_damaged:
            return True
        parent = None if candidate.parent is None else candidate.parent.digest
        if parent == (None if self.durable is None else self.durable.digest):
            return True
        return self._session != "" and self._session in read_sessions(captured)
