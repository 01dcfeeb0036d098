"""What is known of the versions of a run, so that deciding about a thousand of them after every
save does not read a thousand manifests: manifests and evaluations never change, so each is read
once in the life of a ``Run``, and the little that decisions need of it is kept.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast import events
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot, open_location
from holdfast.errors import FormatError, HoldfastError, ManifestInvalid, NotFound
from holdfast.format import names
from holdfast.format.manifest import MAX_MANIFEST
from holdfast.format.names import Version
from holdfast.format.records import (
    MAX_RECORD,
    Branch,
    Evaluation,
    decode_branch,
    decode_evaluation,
)
from holdfast.run.metrics import check_metrics, select_numbers, to_numbers
from holdfast.run.policy import Record
from holdfast.storage.store import Stat, Store

_VERSION = re.compile(rb"version_[0-9]{1,18}(?:\.[1-9][0-9]{0,8})?")


@dataclass(frozen=True, slots=True)
class Listing:
    """One look at a run's store: objects by version folder, the numbers of branches, pins of
    processes, and the versions that lasting pins are for."""

    folders: Mapping[Version, Sequence[Stat]]
    branches: list[int]
    process_pins: list[Stat]
    lasting_pins: dict[Version, Stat]

    @property
    def versions(self) -> list[Version]:
        """Versions with a manifest, that is: all that exist; oldest first."""
        return sorted(v for v, files in self.folders.items() if find_manifest(files) is not None)


def parse_listing(stats: Iterable[Stat]) -> Listing:
    """Group the objects of a run's store by what their names say."""
    folders: dict[Version, list[Stat]] = defaultdict(list)
    branches, pins, lasting = [], [], {}
    for stat in stats:
        folder, slash, rest = stat.key.partition("/")
        version = names.parse_version(folder)
        if slash and version is not None and "/" not in rest:
            folders[version].append(stat)
        elif (number := names.parse_branch(stat.key)) is not None:
            branches.append(number)
        elif names.parse_pin(stat.key) is not None:
            pins.append(stat)
        elif (version := names.parse_lasting_pin(stat.key)) is not None:
            lasting[version] = stat
    return Listing(dict(folders), sorted(branches), pins, lasting)


def find_manifest(files: Iterable[Stat]) -> Stat | None:
    """The manifest among the files of a version's folder."""
    return next((f for f in files if f.key.endswith("/" + names.MANIFEST)), None)


def find_orphans(
    listing: Listing, version_records: Mapping[Version, VersionRecord]
) -> list[tuple[Version, Stat]]:
    """The files in versions' folders that no manifest names or refers to: shards and indexes, and
    evaluations where there is no manifest. None beside a manifest that cannot be read: it may
    name them."""
    named = {key for k in version_records.values() for key in k.files}
    found = []
    for version, files in listing.folders.items():
        manifest = version_records.get(version)
        if manifest is None or manifest.digest:
            for stat in files:
                name = stat.key.rpartition("/")[2]
                evaluates = manifest is None and names.parse_evaluation(name) is not None
                if evaluates or (names.parse_attempt(name) is not None and stat.key not in named):
                    found.append((version, stat))
    return found


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """Of one version. ``files``: keys in the run and lengths of all that its manifest names or
    refers to. A manifest that is damaged has no ``digest`` and names nothing; whatever versions
    its bytes mention count as its ``bases`` then."""

    digest: str = ""
    files: Mapping[str, int] = field(default_factory=dict)
    bases: frozenset[Version] = frozenset()
    metrics: Mapping[str, float] = field(default_factory=dict)

    def is_intact(self, lengths: Mapping[str, int]) -> bool:
        """Whether the manifest is sound and every file is there in full length."""
        return self.digest != "" and all(lengths.get(k) == n for k, n in self.files.items())


class Catalog:
    """Reads what is to be known of versions, each file once. Raises ``StoreError`` where the
    store fails: what a manifest says cannot be told then, and nothing may be deleted."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._version_records: dict[Stat, VersionRecord] = {}
        self._evaluations: dict[tuple[Stat, str], tuple[Evaluation, ...]] = {}
        self.half_deleted: dict[Version, list[Stat]] = {}
        """Files of versions whose manifest this process has deleted, and which are still there."""

    @property
    def url(self) -> str:
        return self.store.url

    def location(self, version: Version) -> Location:
        return Location(self.store, str(version))

    def open(self, version: Version) -> Snapshot:
        """Open one version. Raises ``NotFound``, or ``FormatError``, also for a manifest that names
        another version than its folder."""
        snapshot = open_location(self.location(version))
        _ = snapshot.version
        return snapshot

    def listing(self) -> Listing:
        """List the store once."""
        return parse_listing(self.store.list(""))

    def read_branch(self, number: int) -> Branch:
        """Read the record of a branch. Raises ``NotFound`` or ``FormatError``."""
        file = names.branch_name(number)
        return decode_branch(self.store.get(file, MAX_RECORD), file)

    def read_versions(self, listing: Listing) -> dict[Version, VersionRecord]:
        """All versions that exist; one that is deleted meanwhile is left out."""
        found = {}
        for version in listing.versions:
            known = self.read_version(version, listing.folders[version])
            if known is not None:
                found[version] = known
        self._evict_deleted(listing)
        return found

    def read_version(self, version: Version, files: Sequence[Stat]) -> VersionRecord | None:
        """One version, by the files of its folder; None if it is gone."""
        manifest = find_manifest(files)
        if manifest is None:
            return None
        known = self._version_records.get(manifest)
        if known is None:
            try:
                known = self._version_records[manifest] = self._read_manifest(version, manifest)
            except NotFound:
                return None
        return known

    def _read_manifest(self, version: Version, manifest: Stat) -> VersionRecord:
        try:
            return make_version_record(self.open(version))
        except FormatError as e:
            events.emit("skipped", version=str(version), error=e)
            raw = self.store.get(manifest.key, MAX_MANIFEST)
            mentioned = {names.parse_version(m.decode()) for m in _VERSION.findall(raw)}
            return VersionRecord(bases=frozenset(v for v in mentioned if v is not None))

    def intact_records(
        self,
        lineage: Iterable[Version],
        listing: Listing,
        version_records: Mapping[Version, VersionRecord],
    ) -> list[Record]:
        """The intact versions of a line, oldest first, with their metrics."""
        lengths = {s.key: s.length for files in listing.folders.values() for s in files}
        return [
            Record(v, self.metrics(v, version_records[v], listing.folders[v]))
            for v in lineage
            if v in version_records and version_records[v].is_intact(lengths)
        ]

    def metrics(
        self, version: Version, version_record: VersionRecord, files: Sequence[Stat]
    ) -> dict[str, float]:
        """The metrics of the save and of evaluations; of a metric that several have the newest."""
        found = dict(version_record.metrics)
        for evaluation in self.evaluations(version, version_record.digest, files):
            found.update(evaluation.decoded_metrics())
        return found

    def evaluations(self, version: Version, digest: str, files: Sequence[Stat]) -> list[Evaluation]:
        """The evaluations of the snapshot with that manifest, oldest first; what is damaged or
        of another snapshot is skipped, with an event."""
        found: list[Evaluation] = []
        for stat in files:
            name = names.parse_evaluation(stat.key.rpartition("/")[2])
            if name is not None:
                found += self._cached_evaluation(stat, (*name, str(version), digest))
        return sorted(found, key=_creation_key)

    def _cached_evaluation(self, stat: Stat, expected: tuple[str, ...]) -> tuple[Evaluation, ...]:
        """The evaluation in a file; none if it is damaged or not what is expected."""
        read = self._evaluations.get((stat, expected[-1]))
        if read is None:
            try:
                read = (self._read_evaluation(stat.key, expected),)
            except NotFound:
                return ()
            except FormatError as e:
                events.emit("skipped", version=stat.key, error=e)
                read = ()
            self._evaluations[stat, expected[-1]] = read
        return read

    def _read_evaluation(self, key: str, expected: tuple[str, ...]) -> Evaluation:
        found = decode_evaluation(self.store.get(key, MAX_RECORD), key)
        said = (found.name, found.attempt, found.version, found.manifest_digest)
        if said != expected:
            raise ManifestInvalid(
                f"{key} evaluates another snapshot, or has the name of another",
                expected=", ".join(expected),
                found=", ".join(said),
                file=key,
            )
        return found

    def _evict_deleted(self, listing: Listing) -> None:
        there = {stat for files in listing.folders.values() for stat in files}
        for stat in list(self._version_records):
            if stat not in there:
                self._version_records.pop(stat, None)
        for pair in list(self._evaluations):
            if pair[0] not in there:
                self._evaluations.pop(pair, None)


def make_version_record(snapshot: Snapshot) -> VersionRecord:
    """What is known of an open snapshot."""
    files = {}
    for shard in snapshot.manifest.shards:
        files[snapshot.location.key(shard.name)] = shard.length
        files[snapshot.location.key(shard.index.name)] = shard.index.length
        for other in shard.refers:
            files[snapshot.location.run_key(other.path.removeprefix("../"))] = other.length
    return VersionRecord(
        snapshot.digest, files, snapshot.bases, select_numbers(snapshot.metadata.get("metrics"))
    )


def read_training_metadata(snapshot: Snapshot) -> Mapping[str, Any]:
    """What a version notes of its training for the services, which another writer may have left
    out."""
    found = snapshot.metadata.get("training")
    return found if isinstance(found, dict) else {}


def new_evaluation(
    name: str,
    version: Version,
    digest: str,
    metrics: Mapping[str, Any],
    earlier: Iterable[Evaluation],
) -> Evaluation:
    """An attempt that is newer than all ``earlier`` ones, also where the clock has jumped: of
    which the newest is told by its time alone. Raises ``HoldfastError`` for what cannot be kept."""
    attempt = names.new_attempt()
    if names.parse_evaluation(names.evaluation_name(name, attempt)) is None:
        raise HoldfastError(
            f"No evaluation can be called {str(name)[:80]!r}",
            expected="1 to 64 of the characters a-z, A-Z, 0-9, - and _",
            found=repr(name)[:80],
        )
    past = [datetime.fromisoformat(e.created) + timedelta(seconds=1) for e in earlier]
    created = max([datetime.now(UTC), *past]).isoformat(timespec="seconds")
    return Evaluation(
        name, attempt, str(version), digest, created, to_numbers(check_metrics(metrics))
    )


def _creation_key(evaluation: Evaluation) -> tuple[str, str]:
    return evaluation.created, evaluation.attempt
