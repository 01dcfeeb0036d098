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
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from holdfast import events
from holdfast.engine.snapshot import pins
from holdfast.errors import BrokenLink, FormatError, HoldfastError, NotFound
from holdfast.format import names
from holdfast.format.names import Version
from holdfast.run.catalog import Catalog, VersionRecord
from holdfast.run.lineage import branches_of_unknown_origin, lineage_of
from holdfast.run.listing import FolderFiles, Listing
from holdfast.storage.store import Stat, Store

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


@dataclass(frozen=True)
class Roots:
    """The garbage-collection roots of a run: what protects a version or file from deletion.

    ``pinned`` maps each pinned version to the reason. ``active_attempts`` holds the attempts of
    saves in progress. ``stale_pins`` holds the keys of the pins that no longer protect anything. If
    ``block_reason`` is not None, nothing may be deleted, for this reason. ``listing`` shows the
    versions of ``version_records``.
    """

    pinned: dict[Version, str]
    active_attempts: set[str]
    stale_pins: list[str]
    block_reason: str | None
    listing: Listing
    version_records: dict[Version, VersionRecord]

    @cached_property
    def _incremental(self) -> list[Version]:
        return [v for v, record in self.version_records.items() if record.bases]

    @cached_property
    def _referenced_files(self) -> frozenset[str]:
        """The keys of the files that incremental versions consist of."""
        return frozenset(k for v in self._incremental for k in self.version_records[v].files)

    @cached_property
    def _possible_bases(self) -> frozenset[Version]:
        """The versions to which an unreadable manifest may refer."""
        unreadable = (r.bases for r in self.version_records.values() if not r.digest)
        return frozenset().union(*unreadable)

    def select_deletable(
        self, candidates: Collection[Version]
    ) -> tuple[set[Version], dict[Version, str]]:
        """Return the candidates that can be deleted together, and why the others cannot."""
        if self.block_reason is not None:
            return set(), dict.fromkeys(candidates, self.block_reason)
        deletable = {v for v in candidates if v not in self.pinned}
        kept = {v: self.pinned[v] for v in candidates if v not in deletable}
        remaining = [v for v in self._incremental if v not in deletable]
        while remaining:
            version = remaining.pop()
            for base in self.version_records[version].bases & deletable:
                deletable.remove(base)
                kept[base] = f"{version} refers to it"
                if base in self.version_records:
                    remaining.append(base)
        return deletable, kept

    def reason_to_keep(self, version: Version, stat: Stat) -> str | None:
        """Return why a file must be kept although its version's manifest does not name it.

        The result is None if nothing protects the file.
        """
        if version in self.pinned and version not in self.version_records:
            return self.pinned[version]
        if stat.key in self._referenced_files:
            return "an incremental version refers to it"
        if version in self._possible_bases:
            return "an unreadable manifest may refer to it"
        if names.parse_attempt(stat.key.rpartition("/")[2]) in self.active_attempts:
            return "a save is in progress"
        return self.block_reason


def find_roots(
    catalog: Catalog,
    now: float | None = None,
    look_again_from: int = 0,
    listing: Listing | None = None,
) -> Roots:
    """Read the pins of a run, and then its manifests.

    ``now`` replaces the current time, in seconds since the epoch. ``look_again_from`` is as for
    ``Catalog.read_versions``. ``listing``: use these pins and versions. That is enough to decide,
    but not to delete files: a listing is not atomic, and may lack both the pin and the version of
    a save.
    """
    now = time.time() if now is None else now
    pinned: dict[Version, str] = {}
    attempts: set[str] = set()
    stale: list[str] = []
    block_reason = None
    keys = pins.list_process_pins(catalog.store) if listing is None else listing.process_pins
    for key, record in pins.read_process_pins(catalog.store, keys):
        alive = None if isinstance(record, FormatError) else pins.is_holder_alive(record)
        if alive is False or (alive is None and _is_expired(catalog.store, key, now)):
            stale.append(key)
        elif isinstance(record, FormatError):
            events.emit("skipped", version=key, error=record)
            block_reason = f"{key} is unreadable and may protect any version"
        else:
            attempts.add(record.attempt)
            version = names.parse_version(record.version or "")
            if version is not None:
                pinned[version] = "a process is using it"
    listing = catalog.listing() if listing is None else listing
    version_records = catalog.read_versions(listing, look_again_from)
    # a folder without a manifest is not a version, so a lasting pin protects nothing in it
    lasting = (v for v in listing.lasting_pins if v in version_records)
    pinned |= dict.fromkeys(lasting, "it is pinned")
    listing = replace(listing, exists=version_records.__contains__)
    return Roots(pinned, attempts, stale, block_reason, listing, version_records)


def _is_expired(store: Store, key: str, now: float) -> bool:
    """Return True if a pin is so old that it protects nothing, although its process is unknown."""
    try:
        return now - store.stat(key).modified >= REMOTE_PIN_TTL
    except BrokenLink:
        return False
    except NotFound:
        return True  # removed meanwhile


# -- deleting ------------------------------------------------------------------------------------


def delete(catalog: Catalog, version: Version) -> int:
    """See ``Run.delete``."""
    roots = find_roots(catalog)
    if version not in roots.version_records:
        raise NotFound(
            f"There is no {version} in {catalog.store.url}",
            key=f"{version}/{names.MANIFEST}",
            store=catalog.store.url,
        )
    folder = catalog.files(version, roots.listing)
    deletable, kept = roots.select_deletable([version])
    if not deletable or folder.links:
        raise HoldfastError(
            f"{version} of {catalog.store.url} was not deleted:"
            f" {kept.get(version) or link_reason(folder)}",
            todo="Nothing is deleted through a link. Remove the link and its target yourself"
            if deletable
            else "Delete the versions that refer to it first. `holdfast pin RUN STEP --remove`"
            " removes a pin",
            version=str(version),
        )
    return sum(s.length for s in delete_versions(catalog, {version: folder}))


def link_reason(folder: FolderFiles) -> str:
    """Return why a version with symbolic links is never deleted."""
    return f"{folder.links[0]} is a symbolic link"


def delete_versions(catalog: Catalog, folders: Mapping[Version, FolderFiles]) -> list[Stat]:
    """Perform steps 2 to 4 for deletable versions, and return the deleted files.

    Manifests are deleted from the newest to the oldest. No manifest therefore refers to a deleted
    version, even if the process ends in between.
    """
    removed = []
    for version in sorted(folders, reverse=True):
        manifest_key = f"{version}/{names.MANIFEST}"
        files = folders[version].stats
        catalog.half_deleted[version] = [s for s in files if s.key != manifest_key]
        catalog.forget(version)
        catalog.store.delete(manifest_key)
        removed += [s for s in files if s.key == manifest_key]
        events.emit("deleted", version=str(version))
    # a version that refers to one of these is newer
    roots = find_roots(catalog, look_again_from=min((v.step for v in folders), default=0))
    return removed + finish_deletions(catalog, roots)


def finish_deletions(catalog: Catalog, roots: Roots) -> list[Stat]:
    """Perform steps 3 and 4 for all half-deleted versions, and return the deleted files.

    Retention tries again the next time it runs for files that are protected or could not be
    deleted. After a restart, these files are orphans that ``sweep`` removes.
    """
    removed = []
    for version, files in list(catalog.half_deleted.items()):
        if version in roots.version_records:  # the deletion failed, or the step was saved again
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
    ``hidden_uploads``: see ``Traits``.
    """

    removed: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    nbytes: int = 0
    hidden_uploads: str = ""


def sweep(
    catalog: Catalog, *, grace: float, abandoned: bool, dry_run: bool, now: float
) -> SweepResult:
    """See ``Run.sweep``."""
    listing, partials = catalog.listing(), list(catalog.store.partials(""))
    files = catalog.all_files(listing)
    # The roots are read after the listing. A save that has begun since then has none of the listed
    # files, and a save that has ended since then has a manifest.
    roots = find_roots(catalog, now)
    state = _Sweep(catalog, roots, dry_run, now)
    for key in roots.stale_pins:
        state.remove(Stat(key, 0, 0.0))
    for version, record in roots.version_records.items():
        if not record.digest and version in files:
            unreadable = "the manifest in its folder is unreadable"
            state.kept += [(s.key, unreadable) for s in files[version].stats]
    for version, stat in find_orphans(files, roots.version_records):
        is_linked = {stat.key, str(version)} & {*files[version].links}
        reason = "it is a symbolic link" if is_linked else roots.reason_to_keep(version, stat)
        state.remove_orphan(stat, reason, grace)
    for version in listing.lasting_pins - roots.version_records.keys():
        with suppress(NotFound, BrokenLink):
            state.remove_orphan(catalog.store.stat(names.pin_name(str(version))), None, grace)
    for stat in partials:
        match = _ATTEMPT.search(stat.key)
        attempt = match[1] if match else None
        if attempt is None and catalog.store.traits.part_size:
            continue  # such a store shows everybody's uploads; a small file of a run is not one
        # a partial file that names no attempt, such as a manifest, may belong to any active save
        in_progress = attempt in roots.active_attempts or (
            attempt is None and roots.active_attempts
        )
        min_age = grace if attempt else max(grace, MIN_GRACE)
        state.remove_orphan(stat, "a save is in progress" if in_progress else None, min_age)
    if abandoned:
        state.delete_abandoned()
    nbytes = sum(s.length for s in state.removed)
    hidden = catalog.store.traits.hidden_uploads
    return SweepResult([s.key for s in state.removed], state.kept, nbytes, hidden)


def find_orphans(
    files: Mapping[Version, FolderFiles], version_records: Mapping[Version, VersionRecord]
) -> Iterator[tuple[Version, Stat]]:
    """Yield the files in version folders that no manifest names or refers to.

    These are shards and indexes, and evaluations in folders without a manifest. A folder with an
    unreadable manifest contributes no files, because that manifest may name them.
    """
    referenced = {key for r in version_records.values() for key in r.files}
    for version, folder in files.items():
        record = version_records.get(version)
        if record is None or record.digest:
            for stat in folder.stats:
                name = stat.key.rpartition("/")[2]
                is_evaluation = record is None and names.parse_evaluation(name) is not None
                is_attempt_file = names.parse_attempt(name) is not None
                if is_evaluation or (is_attempt_file and stat.key not in referenced):
                    yield version, stat


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
        folders = {v: self.catalog.files(v, listing) for v in abandoned}
        linked = {v: link_reason(f) for v, f in folders.items() if f.links}
        deletable, kept = self.roots.select_deletable(abandoned - linked.keys())
        self.kept += [(str(v), reason) for v, reason in sorted({**kept, **linked}.items())]
        if self.dry_run:
            self.removed += [s for v in sorted(deletable) for s in folders[v].stats]
        else:
            self.removed += delete_versions(self.catalog, {v: folders[v] for v in deletable})

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
