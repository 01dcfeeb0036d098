"""A cache of the facts about a run's versions that retention and selection need.

Without it, retention would read a thousand manifests after each save of a run with a thousand
versions.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from limpet import events
from limpet.errors import BrokenLink, DigestMismatch, FormatError, LimpetError, NotFound
from limpet.format import names
from limpet.format.manifest import MAX_MANIFEST
from limpet.format.names import Version
from limpet.format.records import MAX_RECORD, Branch, decode_branch
from limpet.format.sealed import sealed_digest
from limpet.run.lease import LeaseObserver
from limpet.run.listing import FolderFiles, Listing, find_link_targets, find_links, list_files
from limpet.run.policy import Record
from limpet.run.records import EvaluationReader, VersionEvaluations
from limpet.snapshot.location import Location, get_bounded, is_snapshot
from limpet.snapshot.reader import SnapshotReader, open_location
from limpet.storage.store import Stat, Store, list_level
from limpet.types import MIB

_PART = 4 * MIB
_VERSION = re.compile(rb"version_[0-9]{1,18}(?:\.[1-9][0-9]{0,8})?")


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """The facts about one version that retention and selection need. A damaged manifest has no
    ``digest`` and no ``files``; its ``bases`` are all versions named in its bytes."""

    digest: str = ""
    files: Mapping[str, int] = field(default_factory=dict)  # lengths, of base versions, too
    bases: frozenset[Version] = frozenset()  # that this one needs, by references or links
    metrics: Mapping[str, float] = field(default_factory=dict)
    manifest: Stat | None = None
    began: float | None = None  # the time at which the run began, and the training since then
    trained_seconds: float | None = None
    created: str | None = None
    objectives: Mapping[str, str] = field(default_factory=dict)  # modes of metrics


class Catalog:
    """Reads records once, because none ever changes; but a step may be saved again, so who depends
    on a version *looks again*. After a ``StoreError``, nothing may be deleted."""

    def __init__(self, store: Store, *, check_leaves: bool = True) -> None:
        self.store = store
        self._check_leaves = check_leaves
        self._versions: dict[str, Version] = {}
        self._folders: list[Version] = []
        self._present: frozenset[Version] = frozenset()
        self._version_records: dict[Version, VersionRecord] = {}
        self._committed: dict[Version, VersionRecord] = {}
        self._damaged: set[Version] = set()
        self._branches: dict[int, Branch] = {}
        self._reported: set[str] = set()
        self.evaluations = EvaluationReader(store, self._report)
        self.leases = LeaseObserver(store)
        self.half_deleted: dict[Version, list[Stat]] = {}
        """Remaining files of versions whose manifest this process has deleted."""
        self.linked: set[Version] = set()
        """Versions with files that are symbolic links, found when they were to be deleted."""
        self.reported_links: set[Version] = set()

    def open(self, version: Version) -> SnapshotReader:
        """Open one version. Raises ``NotFound``, or ``FormatError`` if the manifest is damaged or
        names another version than its folder."""
        snapshot = open_location(
            Location(self.store, str(version)), check_leaves=self._check_leaves
        )
        _ = snapshot.version  # reads the manifest and compares its version with the folder's name
        return snapshot

    def add_committed(self, snapshot: SnapshotReader) -> None:
        """Take over a version that this process has committed: no need to decode its manifest."""
        self._committed[snapshot.version] = make_version_record(snapshot)

    @property
    def version_count(self) -> int:
        return len(self._version_records)

    def listing(self) -> Listing:
        """List the folder of the run, once and not below it."""
        found, linked, branches, pins, lasting, leases = [], [], [], [], [], []
        known = self._versions
        for entry in list_level(self.store, ""):
            name, kind = entry.name, entry.kind
            version = known.get(name)
            if version is None and name.startswith("version_"):
                version = names.parse_version(name)
            if version is not None:
                if kind != "object":
                    known[name] = version
                    found.append(version)
                    if kind == "link":
                        linked.append(version)
            elif kind == "folder":
                continue
            elif name.startswith("branch-"):
                if (number := names.parse_branch(name)) is not None:
                    branches.append(number)
            elif name.startswith("pin-"):
                if (version := names.parse_lasting_pin(name)) is not None:
                    lasting.append(version)
                elif names.is_pin_name(name):
                    pins.append(name)
            elif names.parse_lease(name) is not None:
                leases.append(name)
        return Listing(
            self._sort(found),
            frozenset(linked),
            sorted(branches),
            sorted(pins),
            frozenset(lasting),
            leases,
            cache(lambda version: is_snapshot(Location(self.store, str(version)))),
        )

    def _sort(self, found: list[Version]) -> list[Version]:
        """Sort versions that are almost those of the last call, which saves most comparisons."""
        present = frozenset(found)
        if present != self._present:
            kept = [v for v in self._folders if v in present]
            self._folders = sorted([*kept, *present.difference(kept)])
            self._present = present
        if len(self._versions) > 2 * len(found) + 100:  # drop the names of deleted versions
            self._versions = {str(v): v for v in found}
        return self._folders

    def files(self, version: Version, listing: Listing) -> FolderFiles:
        """List the folder of a version, and nothing below it; in other folders, only the files that
        the manifest names, as far as it is known."""
        record = self._version_records.get(version, VersionRecord())
        return list_files(self.store, version, listing, record.files)

    def read_branch(self, number: int) -> Branch:
        """Read the record of a branch. Raises ``NotFound`` or ``FormatError``."""
        if (branch := self._branches.get(number)) is None:
            file = names.branch_name(number)
            branch = self._branches[number] = decode_branch(
                get_bounded(self.store, file, MAX_RECORD), file
            )
        return branch

    def read_versions(
        self, listing: Listing, look_again_from: int = 0
    ) -> dict[Version, VersionRecord]:
        """Return the record of every version. One that is known, intact, and of a step before
        ``look_again_from`` is not looked at again. Links are looked for only if that is 0."""
        folders = self._present if listing.folders is self._folders else set(listing.folders)
        for version in [v for v in self._version_records if v not in folders]:
            self.forget(version)
        records = dict(self._version_records)
        first = bisect_left(listing.folders, Version(look_again_from))
        older = (v for v in listing.folders[:first] if v not in records)
        for version in (*older, *self._damaged.intersection(records), *listing.folders[first:]):
            record = self.read_version(version, listing, look_for_links=look_again_from == 0)
            if record is not None:
                records[version] = record
            else:
                records.pop(version, None)
        return records

    def read_version(
        self, version: Version, listing: Listing, *, look_for_links: bool = True
    ) -> VersionRecord | None:
        """Return the record of a version as the store has it now, or None if there is none. The
        manifest is read only if its status has changed, links also on request."""
        record = self._version_records.get(version)
        try:
            manifest = self.store.stat(f"{version}/{names.MANIFEST}")
            if record is None or record.manifest != manifest:
                self.forget(version)
                record = self._read_manifest(version, manifest)
            elif not look_for_links:
                return record
        except NotFound:
            self.forget(version)
            return None
        except BrokenLink as e:  # it may refer to any older version, until its target is back
            self._report(str(version), e)
            older = (v for v in listing.folders if v.step < version.step)
            return VersionRecord(bases=frozenset(older))
        if links := find_links(self.store, version, listing, record.files):
            targets = find_link_targets(self.store, links)
            needed = frozenset(v for v in targets if v not in (None, version))
            record = replace(record, bases=record.bases | needed)
        self._version_records[version] = record
        (self._damaged.discard if record.digest else self._damaged.add)(version)
        return record

    def _read_manifest(self, version: Version, manifest: Stat) -> VersionRecord:
        record = self._committed.pop(version, None)
        try:
            file = f"{version}/{names.MANIFEST}"
            if record is None or record.digest != sealed_digest(
                get_bounded(self.store, file, MAX_MANIFEST), file
            ):
                record = make_version_record(self.open(version))
        except BrokenLink:
            raise
        except FormatError as e:
            self._report(str(version), e)
            mentioned = map(names.parse_version, self._find_version_names(manifest))
            record = VersionRecord(bases=frozenset(v for v in mentioned if v is not None))
        return replace(record, manifest=manifest)

    def is_intact(
        self, version: Version, record: VersionRecord, *, reads_records: bool = True
    ) -> bool:
        """Return True if a manifest is valid, every file exists with its full length, and, with
        ``reads_records``, `limpet verify` has found no damage."""
        try:
            has_files = record.digest != "" and all(
                self.store.stat(key).length == length for key, length in record.files.items()
            )
        except (NotFound, BrokenLink):
            return False
        if not (has_files and reads_records):
            return has_files
        return not self.evaluations.read(version, record.digest).damage()

    def _find_version_names(self, manifest: Stat) -> set[str]:
        """Return every version's name in the bytes of a damaged manifest. No longer one was ever
        written, so what follows ``MAX_MANIFEST`` is not its content."""
        found: set[str] = set()
        length = min(manifest.length, MAX_MANIFEST)
        # the parts overlap by more than the length of a name
        for offset in range(0, length, _PART):
            part = bytearray(min(_PART + 64, length - offset))
            self.store.get_range(manifest.key, offset, len(part), memoryview(part))
            found |= {match.decode() for match in _VERSION.findall(part)}
        return found

    def check(self, snapshot: SnapshotReader, known: VersionEvaluations | None = None) -> None:
        """Raise ``FormatError`` if a file is missing or has another length, or if `limpet verify`
        has found damage, and has not found the version intact since; and ``NotFound``. ``known``:
        what is recorded, if it was read."""
        snapshot.check_files()
        records = known or self.evaluations.read(snapshot.version, snapshot.digest)
        if damage := records.damage():
            raise DigestMismatch(
                f"`limpet verify` found wrong bytes in {snapshot.version}",
                todo=f"After a repair, run it again: limpet verify {snapshot.url}",
                damage=damage,
            )

    def intact_records(
        self, lineage: Iterable[Version], version_records: Mapping[Version, VersionRecord]
    ) -> list[Record]:
        """Return the intact versions of a lineage as the input of keep policies, oldest first."""
        records = []
        for v in lineage:
            known = version_records.get(v)
            if known is not None and self.is_intact(v, known, reads_records=False):
                found = self.evaluations.read(v, known.digest)
                if not found.damage():
                    metrics = {**known.metrics, **found.metrics()}
                    records.append(Record(v, metrics, known.trained_seconds))
        return records

    def _report(self, name: str, error: LimpetError) -> None:
        """Emit the event ``skipped`` for a damaged file, once while it is damaged."""
        if name not in self._reported:
            self._reported.add(name)
            events.emit("skipped", version=name, error=error)

    def forget(self, version: Version) -> None:
        """Drop what is known of a version that does not exist any more."""
        self._version_records.pop(version, None)
        self._damaged.discard(version)
        self.evaluations.forget(version)
        self._reported.discard(str(version))


def make_version_record(snapshot: SnapshotReader) -> VersionRecord:
    files = {}
    for shard in snapshot.manifest.shards:
        files[snapshot.location.file_key(shard.path)] = shard.length
        files[snapshot.location.file_key(shard.index_path)] = shard.index.length
        for reference in shard.refers:
            files[snapshot.location.file_key(reference.path)] = reference.length
    training = read_training_metadata(snapshot)
    times = (training.get(name) for name in ("began", "trained_seconds"))
    began, seconds = (t if isinstance(t, int | float) and 0 <= t < 1e18 else None for t in times)
    return VersionRecord(
        snapshot.digest,
        files,
        snapshot.bases,
        snapshot.metrics,
        began=began,
        trained_seconds=seconds,
        created=snapshot.manifest.created,
        objectives=read_objectives(snapshot),
    )


def read_objectives(snapshot: SnapshotReader) -> dict[str, str]:
    """Return the metrics that the policies of the training use, each with ``min``, ``max``, or
    ``BOTH_MODES``; none for a snapshot that no ``Checkpointer`` has saved."""
    recorded = snapshot.read_metadata("objectives")
    found = recorded.items() if isinstance(recorded, dict) else ()
    return {name: mode for name, mode in found if isinstance(name, str) and isinstance(mode, str)}


def read_training_metadata(snapshot: SnapshotReader) -> Mapping[str, Any]:
    """Return the state of early stopping and goodput that a version stores, if it stores one."""
    training = snapshot.read_metadata("training")
    return training if isinstance(training, dict) else {}


def read_sessions(snapshot: SnapshotReader) -> list[str]:
    """Return the session of the training that wrote a version, and then those that it continues,
    which wrote the versions before. There are none if no training wrote it."""
    sessions = read_training_metadata(snapshot).get("sessions")
    return [s for s in sessions if isinstance(s, str)] if isinstance(sessions, list) else []
