"""Garbage collection: the deletion of versions, retention, and the sweep of orphans.

Deletion is safe at every moment for a reader, and for a save that is about to refer to the
version. It has four steps:

1. Keep the version if a pin names it or a manifest refers to it.
2. Delete its manifest.
3. Read the pins again, and then the manifests. Keep the files that a pin or a manifest now
   protects.
4. Delete the other files.

A reader or a save first pins a version and then checks that its manifest exists
(``engine/snapshot/pins.py``). A save commits its own manifest before it removes its pin. Deletion
therefore always reads pins before manifests. If a save has no pin when the pins are read and no
manifest when the manifests are read, it checks for the deleted manifest only after the deletion.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from holdfast import events
from holdfast.engine.snapshot import pins
from holdfast.errors import FormatError, HoldfastError, NotFound
from holdfast.format import names
from holdfast.format.names import Version
from holdfast.run.catalog import Catalog, Listing, VersionRecord, find_manifest, find_orphans
from holdfast.run.lineage import branches_of_unknown_origin, lineage_of
from holdfast.run.policy import KeepPolicy
from holdfast.storage.store import Stat

GRACE = 24 * 3600.0
"""Default minimum age, in seconds, at which ``sweep`` removes a file that no manifest names."""

MIN_GRACE = 60.0
"""Minimum age, in seconds, at which ``sweep`` removes a partial file that names no attempt.

It is the time allowed for the upload of a small file such as a pin, which no pin protects.
"""

REMOTE_PIN_TTL = 7 * GRACE
"""Age, in seconds, at which a pin expires if it is unreadable or its process cannot be checked.

A process on another machine cannot be checked.
"""

ALL_ABANDONED = "all abandoned versions"
"""The entry in ``SweepResult.kept`` if the abandoned versions cannot be determined."""

_ATTEMPT = re.compile(r"\.([0-9a-f]{12})\.(?:safetensors|index\.json)")


@dataclass(frozen=True, slots=True)
class Roots:
    """The garbage-collection roots of a run: what protects a version or file from deletion.

    ``pinned`` maps each pinned version to the reason. ``active_attempts`` holds the attempts of
    saves in progress. ``stale_pins`` holds the pins that no longer protect anything. If
    ``block_reason`` is not None, nothing may be deleted, for this reason. ``referenced_files``
    holds the keys of the files that a manifest names or refers to.
    """

    pinned: dict[Version, str]
    active_attempts: set[str]
    stale_pins: list[Stat]
    block_reason: str | None
    listing: Listing
    version_records: dict[Version, VersionRecord]
    referenced_files: set[str]

    def select_deletable(
        self, candidates: Collection[Version]
    ) -> tuple[set[Version], dict[Version, str]]:
        """Return the candidates that can be deleted together, and why the others cannot."""
        if self.block_reason is not None:
            return set(), dict.fromkeys(candidates, self.block_reason)
        deletable = {v for v in candidates if v not in self.pinned}
        kept = {v: self.pinned[v] for v in candidates if v not in deletable}
        remaining = [v for v in self.version_records if v not in deletable]
        while remaining:
            version = remaining.pop()
            for base in self.version_records[version].bases & deletable:
                deletable.remove(base)
                kept[base] = f"{version} refers to it"
                remaining.append(base)
        return deletable, kept

    def reason_to_keep(self, version: Version, stat: Stat) -> str | None:
        """Return why a file must be kept although its version's manifest does not name it.

        The result is None if nothing protects the file.
        """
        if version in self.pinned and version not in self.version_records:
            return self.pinned[version]
        if stat.key in self.referenced_files:
            return "an incremental version refers to it"
        if any(not r.digest and version in r.bases for r in self.version_records.values()):
            return "an unreadable manifest may refer to it"
        if names.parse_attempt(stat.key.rpartition("/")[2]) in self.active_attempts:
            return "a save is in progress"
        return self.block_reason


def find_roots(catalog: Catalog, now: float | None = None) -> Roots:
    """Read the pins of a run, and then its manifests.

    ``now`` replaces the current time, in seconds since the epoch.
    """
    now = time.time() if now is None else now
    # process pins sort before "pin.", so the listing can stop there
    files = takewhile(lambda stat: stat.key < "pin.", catalog.store.list(""))
    pinned: dict[Version, str] = {}
    attempts: set[str] = set()
    stale: list[Stat] = []
    block_reason = None
    for stat, record in pins.read_process_pins(catalog.store, list(files)):
        alive = None if isinstance(record, FormatError) else pins.is_holder_alive(record)
        if alive is False or (alive is None and now - stat.modified >= REMOTE_PIN_TTL):
            stale.append(stat)
        elif isinstance(record, FormatError):
            events.emit("skipped", version=stat.key, error=record)
            block_reason = f"{stat.key} is unreadable and may protect any version"
        else:
            attempts.add(record.attempt)
            version = names.parse_version(record.version or "")
            if version is not None:
                pinned[version] = "a process is using it"
    listing = catalog.listing()
    # a folder without a manifest is not a version, so a lasting pin protects nothing in it
    pinned |= dict.fromkeys(listing.lasting_pins.keys() & {*listing.versions}, "it is pinned")
    version_records = catalog.read_versions(listing)
    referenced = {key for r in version_records.values() for key in r.files}
    return Roots(pinned, attempts, stale, block_reason, listing, version_records, referenced)


# -- deleting ------------------------------------------------------------------------------------


def delete(catalog: Catalog, version: Version) -> int:
    """See ``Run.delete``."""
    roots = find_roots(catalog)
    if version not in roots.listing.versions:
        raise NotFound(
            f"There is no {version} in {catalog.store.url}",
            key=f"{version}/{names.MANIFEST}",
            store=catalog.store.url,
        )
    deletable, kept = roots.select_deletable([version])
    if not deletable:
        raise HoldfastError(
            f"{version} of {catalog.store.url} was not deleted: {kept[version]}",
            todo="Delete the versions that refer to it first. `holdfast pin RUN STEP --remove`"
            " removes a pin",
            version=str(version),
        )
    return sum(s.length for s in _delete_versions(catalog, deletable, roots.listing))


def retain(catalog: Catalog, policy: KeepPolicy) -> list[Version]:
    """See ``Run.retain``."""
    if type(policy) is KeepPolicy and not catalog.half_deleted:
        return []
    roots = find_roots(catalog)
    _finish_deletions(catalog, roots)
    records = catalog.intact_records(
        lineage_of(catalog, roots.listing), roots.listing, roots.version_records
    )
    to_keep = {*policy.keep(records), *(r.version for r in records[-1:])}
    deletable, _ = roots.select_deletable([r.version for r in records if r.version not in to_keep])
    if deletable:
        _delete_versions(catalog, deletable, roots.listing)
    return sorted(deletable)


def _delete_versions(catalog: Catalog, versions: Iterable[Version], listing: Listing) -> list[Stat]:
    """Perform steps 2 to 4 for deletable versions, and return the deleted files.

    Manifests are deleted from the newest to the oldest. No manifest therefore refers to a deleted
    version, even if the process ends in between.
    """
    removed = []
    for version in sorted(versions, reverse=True):
        files = listing.folders[version]
        manifest = find_manifest(files)
        catalog.half_deleted[version] = [s for s in files if s is not manifest]
        if manifest is not None:
            catalog.store.delete(manifest.key)
            removed.append(manifest)
        events.emit("deleted", version=str(version))
    return removed + _finish_deletions(catalog, find_roots(catalog))


def _finish_deletions(catalog: Catalog, roots: Roots) -> list[Stat]:
    """Perform steps 3 and 4 for all half-deleted versions, and return the deleted files.

    Retention tries again the next time it runs for files that are protected or could not be
    deleted. After a restart, these files are orphans that ``sweep`` removes.
    """
    removed = []
    for version, files in list(catalog.half_deleted.items()):
        if version in roots.listing.versions:  # the deletion failed, or the step was saved again
            del catalog.half_deleted[version]
            continue
        kept = [s for s in files if roots.reason_to_keep(version, s) is not None]
        for stat in files:
            if stat not in kept:
                catalog.store.delete(stat.key)
                removed.append(stat)
        if kept:
            catalog.half_deleted[version] = kept
        else:
            del catalog.half_deleted[version]
    return removed


# -- sweep ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The result of a sweep, or of a dry run.

    ``removed`` holds the keys of the removed files, and ``nbytes`` their total length in bytes.
    ``kept`` holds pairs of a file's key or a version's name and the reason why it was kept.
    """

    removed: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    nbytes: int = 0


def sweep(
    catalog: Catalog, *, grace: float, abandoned: bool, dry_run: bool, now: float
) -> SweepResult:
    """See ``Run.sweep``."""
    listing, partials = catalog.listing(), list(catalog.store.partials(""))
    # The roots are read after the listing. A save that has begun since then has none of the listed
    # files, and a save that has ended since then has a manifest.
    roots = find_roots(catalog, now)
    state = _Sweep(catalog, roots, dry_run, now)
    for stat in roots.stale_pins:
        state.remove(Stat(stat.key, 0, 0.0))
    for version, record in roots.version_records.items():
        if not record.digest:
            files = listing.folders.get(version, ())
            state.kept += [(s.key, "the manifest in its folder is unreadable") for s in files]
    for version, stat in find_orphans(listing, roots.version_records):
        state.remove_orphan(stat, roots.reason_to_keep(version, stat), grace)
    for version, stat in listing.lasting_pins.items():
        if version not in roots.version_records:
            state.remove_orphan(stat, None, grace)
    for stat in partials:
        match = _ATTEMPT.search(stat.key)
        attempt = match[1] if match else None
        # a partial file that names no attempt, such as a manifest, may belong to any active save
        in_progress = attempt in roots.active_attempts or (
            attempt is None and roots.active_attempts
        )
        min_age = grace if attempt else max(grace, MIN_GRACE)
        state.remove_orphan(stat, "a save is in progress" if in_progress else None, min_age)
    if abandoned:
        state.delete_abandoned()
    nbytes = sum(s.length for s in state.removed)
    return SweepResult([s.key for s in state.removed], state.kept, nbytes)


@dataclass(slots=True)
class _Sweep:
    """The state of one sweep in progress."""

    catalog: Catalog
    roots: Roots
    dry_run: bool
    now: float
    removed: list[Stat] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)

    def delete_abandoned(self) -> None:
        """Delete the versions that are not on the current lineage."""
        listing = self.roots.listing
        unknown = branches_of_unknown_origin(self.catalog, listing)
        if unknown:
            file = names.branch_name(unknown[-1])
            reason = f"{file} is unreadable, and no version of the branch names its origin"
            self.kept.append((ALL_ABANDONED, reason))
            return
        abandoned = {*listing.versions} - {*lineage_of(self.catalog, listing)}
        deletable, kept = self.roots.select_deletable(abandoned)
        self.kept += [(str(v), reason) for v, reason in sorted(kept.items())]
        if self.dry_run:
            self.removed += [s for v in sorted(deletable) for s in listing.folders[v]]
        else:
            self.removed += _delete_versions(self.catalog, deletable, listing)

    def remove_orphan(self, stat: Stat, keep_reason: str | None, grace: float) -> None:
        """Remove an orphan, unless something protects it or it is younger than ``grace`` seconds.

        ``keep_reason`` says what protects it, if anything.
        """
        keep_reason = keep_reason or self.roots.block_reason
        if keep_reason is not None:
            self.kept.append((stat.key, keep_reason))
        elif self.now - stat.modified < grace:
            self.kept.append((stat.key, f"younger than {grace:.0f} s"))
        else:
            self.remove(stat)

    def remove(self, stat: Stat) -> None:
        if not self.dry_run:
            self.catalog.store.delete(stat.key)
        self.removed.append(stat)
