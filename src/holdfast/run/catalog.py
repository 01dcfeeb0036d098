"""A cache of the facts about a run's versions that retention and selection need.

Manifests and evaluations never change. A ``Run`` therefore reads each of them once and keeps only
the few facts that decisions need. Without the cache, retention would read a thousand manifests
after every save of a run with a thousand versions.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast import events
from holdfast.engine.snapshot.location import Location, get_bounded
from holdfast.engine.snapshot.snapshot import Snapshot, open_location
from holdfast.errors import FormatError, HoldfastError, ManifestInvalid, NotFound
from holdfast.format import names
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
from holdfast.types import MIB

_PART = 4 * MIB
_VERSION = re.compile(rb"version_[0-9]{1,18}(?:\.[1-9][0-9]{0,8})?")


@dataclass(frozen=True, slots=True)
class Listing:
    """One listing of a run's store.

    ``folders`` maps each version to the objects in its folder. ``branches`` holds the numbers of
    the recorded branches in ascending order. ``process_pins`` holds the pins of processes.
    ``lasting_pins`` maps each version that has a lasting pin to that pin.
    """

    folders: Mapping[Version, Sequence[Stat]]
    branches: list[int]
    process_pins: list[Stat]
    lasting_pins: dict[Version, Stat]

    @property
    def versions(self) -> list[Version]:
        """The versions that have a manifest, oldest first. No other version exists."""
        return sorted(v for v, files in self.folders.items() if find_manifest(files) is not None)


def find_manifest(files: Iterable[Stat]) -> Stat | None:
    """Return the manifest among the files of a version's folder, or None."""
    return next((f for f in files if f.key.endswith("/" + names.MANIFEST)), None)


def find_orphans(
    listing: Listing, version_records: Mapping[Version, VersionRecord]
) -> Iterator[tuple[Version, Stat]]:
    """Yield the files in version folders that no manifest names or refers to.

    These are shards and indexes, and evaluations in folders without a manifest. A folder with an
    unreadable manifest contributes no files, because that manifest may name them.
    """
    referenced = {key for r in version_records.values() for key in r.files}
    for version, files in listing.folders.items():
        record = version_records.get(version)
        if record is None or record.digest:
            for stat in files:
                name = stat.key.rpartition("/")[2]
                is_evaluation = record is None and names.parse_evaluation(name) is not None
                is_attempt_file = names.parse_attempt(name) is not None
                if is_evaluation or (is_attempt_file and stat.key not in referenced):
                    yield version, stat


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """The facts about one version that retention and selection need.

    ``files`` maps the key of every file that the manifest names or refers to, relative to the run,
    to the file's length in bytes. ``bases`` holds the versions that this version refers to. If the
    manifest is damaged, ``digest`` is empty, ``files`` is empty, and ``bases`` holds every version
    whose name occurs in the manifest's bytes.
    """

    digest: str = ""
    files: Mapping[str, int] = field(default_factory=dict)
    bases: frozenset[Version] = frozenset()
    metrics: Mapping[str, float] = field(default_factory=dict)

    def is_intact(self, lengths: Mapping[str, int]) -> bool:
        """Return True if the manifest is valid and every file exists with its full length.

        ``lengths`` maps keys to lengths in bytes.
        """
        return self.digest != "" and all(lengths.get(k) == n for k, n in self.files.items())


class Catalog:
    """A cached reader of manifests and evaluations.

    The catalog reads each file once. If the store fails, its methods raise ``StoreError``: the
    content of a manifest is then unknown, and nothing may be deleted.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._version_records: dict[Stat, VersionRecord] = {}
        self._evaluations: dict[tuple[Stat, str], tuple[Evaluation, ...]] = {}
        self.half_deleted: dict[Version, list[Stat]] = {}
        """Remaining files of versions whose manifest this process has deleted."""

    def open(self, version: Version) -> Snapshot:
        """Open one version.

        Raises ``NotFound``, or ``FormatError`` if the manifest is damaged or names a version other
        than that of its folder.
        """
        snapshot = open_location(Location(self.store, str(version)))
        _ = snapshot.version  # reads the manifest and compares its version with the folder's name
        return snapshot

    def listing(self) -> Listing:
        """List the store once, and group its objects by their names."""
        folders: dict[Version, list[Stat]] = defaultdict(list)
        branches, pins, lasting = [], [], {}
        for stat in self.store.list(""):
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

    def read_branch(self, number: int) -> Branch:
        """Read the record of a branch. Raises ``NotFound`` or ``FormatError``."""
        file = names.branch_name(number)
        return decode_branch(get_bounded(self.store, file, MAX_RECORD), file)

    def read_versions(self, listing: Listing) -> dict[Version, VersionRecord]:
        """Return the record of every version that exists.

        A version that another process deletes during the call is omitted.
        """
        records = {
            version: record
            for version in listing.versions
            if (record := self.read_version(version, listing.folders[version])) is not None
        }
        self._evict_deleted(listing)
        return records

    def read_version(self, version: Version, files: Sequence[Stat]) -> VersionRecord | None:
        """Return the record of one version, or None if the version no longer exists.

        ``files`` are the files of the version's folder.
        """
        manifest = find_manifest(files)
        if manifest is None:
            return None
        record = self._version_records.get(manifest)
        if record is None:
            try:
                record = self._version_records[manifest] = self._read_manifest(version, manifest)
            except NotFound:
                return None
        return record

    def _read_manifest(self, version: Version, manifest: Stat) -> VersionRecord:
        try:
            return make_version_record(self.open(version))
        except FormatError as e:
            events.emit("skipped", version=str(version), error=e)
            mentioned = map(names.parse_version, self._find_version_names(manifest))
            return VersionRecord(bases=frozenset(v for v in mentioned if v is not None))

    def _find_version_names(self, manifest: Stat) -> set[str]:
        """Return every version's name in the bytes of a damaged manifest of any length.

        The manifest is read in parts that overlap by more than the length of a name.
        """
        found: set[str] = set()
        for offset in range(0, manifest.length, _PART):
            part = bytearray(min(_PART + 64, manifest.length - offset))
            self.store.get_range(manifest.key, offset, len(part), memoryview(part))
            found |= {match.decode() for match in _VERSION.findall(part)}
        return found

    def intact_records(
        self,
        lineage: Iterable[Version],
        listing: Listing,
        version_records: Mapping[Version, VersionRecord],
    ) -> list[Record]:
        """Return the intact versions of a lineage with their metrics, oldest first."""
        lengths = {s.key: s.length for files in listing.folders.values() for s in files}
        return [
            Record(v, self.metrics(v, version_records[v], listing.folders[v]))
            for v in lineage
            if v in version_records and version_records[v].is_intact(lengths)
        ]

    def metrics(
        self, version: Version, version_record: VersionRecord, files: Sequence[Stat]
    ) -> dict[str, float]:
        """Return the metrics of the save, updated with those of the evaluations, oldest first."""
        metrics = dict(version_record.metrics)
        for evaluation in self.evaluations(version, version_record.digest, files):
            metrics.update(evaluation.decoded_metrics())
        return metrics

    def evaluations(self, version: Version, digest: str, files: Sequence[Stat]) -> list[Evaluation]:
        """Return the evaluations of the snapshot whose manifest has ``digest``, oldest first.

        For each evaluation that is damaged or of another snapshot, the catalog emits the event
        ``skipped`` and omits the evaluation.
        """
        evaluations: list[Evaluation] = []
        for stat in files:
            name_and_attempt = names.parse_evaluation(stat.key.rpartition("/")[2])
            if name_and_attempt is not None:
                expected = (*name_and_attempt, str(version), digest)
                evaluations += self._cached_evaluation(stat, expected)
        return sorted(evaluations, key=lambda e: (datetime.fromisoformat(e.created), e.attempt))

    def _cached_evaluation(self, stat: Stat, expected: tuple[str, ...]) -> tuple[Evaluation, ...]:
        """Return the evaluation in a file as a tuple of one, or an empty tuple.

        The tuple is empty if the file is missing, damaged, or not of the ``expected`` name,
        attempt, version, and manifest digest.
        """
        cached = self._evaluations.get((stat, expected[-1]))
        if cached is None:
            try:
                cached = (self._read_evaluation(stat.key, expected),)
            except NotFound:
                return ()
            except FormatError as e:
                events.emit("skipped", version=stat.key, error=e)
                cached = ()
            self._evaluations[stat, expected[-1]] = cached
        return cached

    def _read_evaluation(self, key: str, expected: tuple[str, ...]) -> Evaluation:
        evaluation = decode_evaluation(get_bounded(self.store, key, MAX_RECORD), key)
        found = (
            evaluation.name,
            evaluation.attempt,
            evaluation.version,
            evaluation.manifest_digest,
        )
        if found != expected:
            raise ManifestInvalid(
                f"{key} is an evaluation of another snapshot, or has the file name of another"
                " evaluation",
                expected=", ".join(expected),
                found=", ".join(found),
                file=key,
            )
        return evaluation

    def _evict_deleted(self, listing: Listing) -> None:
        existing = {stat for files in listing.folders.values() for stat in files}
        for stat in set(self._version_records) - existing:
            self._version_records.pop(stat, None)
        for stat, digest in list(self._evaluations):
            if stat not in existing:
                self._evaluations.pop((stat, digest), None)


def make_version_record(snapshot: Snapshot) -> VersionRecord:
    """Return the record of an open snapshot."""
    files = {}
    for shard in snapshot.manifest.shards:
        files[snapshot.location.key(shard.name)] = shard.length
        files[snapshot.location.key(shard.index.name)] = shard.index.length
        for reference in shard.refers:
            files[snapshot.location.run_key(reference.path.removeprefix("../"))] = reference.length
    return VersionRecord(
        snapshot.digest, files, snapshot.bases, select_numbers(snapshot.metadata.get("metrics"))
    )


def read_training_metadata(snapshot: Snapshot) -> Mapping[str, Any]:
    """Return the state of early stopping and goodput that a version stores.

    The result is empty if the writer of the version left this metadata out.
    """
    training = snapshot.metadata.get("training")
    return training if isinstance(training, dict) else {}


def _next_time(evaluation: Evaluation) -> datetime:
    """Return a time after that of an evaluation: a second later, or less in the year 9999.

    Raises ``HoldfastError`` if there is no later time.
    """
    time = datetime.fromisoformat(evaluation.created)
    remaining = datetime.max.replace(tzinfo=UTC) - time
    if not remaining:
        name = names.evaluation_name(evaluation.name, evaluation.attempt)
        raise HoldfastError(
            f"No evaluation can be newer than {evaluation.version}/{name}",
            found=f"the time {evaluation.created}, the last one",
            todo="Delete that file; the clock of the machine that wrote it was wrong",
        )
    return time + min(timedelta(seconds=1), remaining)


def new_evaluation(
    name: str,
    version: Version,
    digest: str,
    metrics: Mapping[str, Any],
    earlier: Iterable[Evaluation],
) -> Evaluation:
    """Return an evaluation that is newer than every evaluation in ``earlier``.

    Only the creation time orders evaluations. If the clock is behind, the new time is therefore
    after the newest earlier one. Raises ``HoldfastError`` for an invalid name or
    metric.
    """
    attempt = names.random_id()
    if names.parse_evaluation(names.evaluation_name(name, attempt)) is None:
        raise HoldfastError(
            f"{str(name)[:80]!r} is not a valid name for an evaluation",
            expected="1 to 64 of the characters a-z, A-Z, 0-9, -, and _",
            found=repr(name)[:80],
        )
    created = max([datetime.now(UTC).replace(microsecond=0), *map(_next_time, earlier)]).isoformat()
    return Evaluation(
        name, attempt, str(version), digest, created, to_numbers(check_metrics(metrics))
    )
