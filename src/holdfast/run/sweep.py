"""What deletes: versions, retention, and the sweep of what nothing names.

A version is deleted so that a reader, or a save that is to refer to it, is safe at every moment:

1. It is not touched if a pin names it or a manifest refers to it. 2. Its manifest is deleted.
3. The pins are looked at again, then the manifests: what a pin or a manifest has come to speak for
since is left alone. 4. The other files are deleted.

The other side pins first and then looks whether the manifest is there
(``engine/snapshot/pins.py``), and commits its own manifest before it takes the pin away. So pins
are always looked at before manifests: whoever has neither a pin at the first look nor a manifest
at the second one looks for the deleted manifest only after it is gone.
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
from holdfast.run.lineage import branches_of_unknown_origin, current_lineage
from holdfast.run.policy import KeepPolicy
from holdfast.storage.store import Stat

GRACE = 24 * 3600.0
"""Seconds that a file which no manifest names is left alone."""

MIN_GRACE = 60.0
"""Seconds that a small file may take on its way; nothing speaks for one, such as a pin."""

REMOTE_PIN_TTL = 7 * GRACE
"""Seconds after which a pin of another machine, whose life cannot be seen, counts no more, nor one
that cannot be read."""

ALL_ABANDONED = "all abandoned versions"
"""What stands for them among what was kept, where it cannot be told which they are."""

_ATTEMPT = re.compile(r"\.([0-9a-f]{12})\.(?:safetensors|index\.json)")


@dataclass(frozen=True, slots=True)
class Roots:
    """What speaks for versions and files, by one look at a run.

    ``pinned``: versions that may not go, with why. ``attempts``: those under way. ``dead``: pins
    that count no more. ``blind``: why nothing at all may go. ``files``: keys that a manifest names
    or refers to.
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
        """Which of the wanted versions can be deleted together, and why the others cannot."""
        if self.block_reason is not None:
            return set(), dict.fromkeys(candidates, self.block_reason)
        gone = {v for v in candidates if v not in self.pinned}
        stay = {v: self.pinned[v] for v in candidates if v not in gone}
        left = [v for v in self.version_records if v not in gone]
        while left:
            version = left.pop()
            for base in self.version_records[version].bases & gone:
                gone.remove(base)
                stay[base] = f"{version} refers to it"
                left.append(base)
        return gone, stay

    def reason_to_keep(self, version: Version, stat: Stat) -> str | None:
        """Why a file that no manifest of its own version names is to be left alone."""
        if version in self.pinned and version not in self.version_records:
            return self.pinned[version]
        if stat.key in self.referenced_files:
            return "an incremental version refers to it"
        if any(not k.digest and version in k.bases for k in self.version_records.values()):
            return "a manifest that cannot be read may refer to it"
        if names.parse_attempt(stat.key.rpartition("/")[2]) in self.active_attempts:
            return "a save is under way"
        return self.block_reason


def find_roots(catalog: Catalog, now: float | None = None) -> Roots:
    """Look at the pins of a run, and then at its manifests."""
    now = time.time() if now is None else now
    files = takewhile(lambda stat: stat.key < "pin.", catalog.store.list(""))
    pinned: dict[Version, str] = {}
    attempts: set[str] = set()
    dead: list[Stat] = []
    blind = None
    for stat, record in pins.read_process_pins(catalog.store, list(files)):
        lives = None if isinstance(record, FormatError) else pins.is_holder_alive(record)
        if lives is False or (lives is None and now - stat.modified >= REMOTE_PIN_TTL):
            dead.append(stat)
        elif isinstance(record, FormatError):
            events.emit("skipped", version=stat.key, error=record)
            blind = f"{stat.key} cannot be read, and may be for anything"
        else:
            attempts.add(record.attempt)
            version = names.parse_version(record.version or "")
            if version is not None:
                pinned[version] = "a process is using it"
    listing = catalog.listing()
    # what has no manifest is no version: a lasting pin keeps nothing of it
    lasting = listing.lasting_pins.keys() & {*listing.versions}
    pinned.update(dict.fromkeys(lasting, "it is pinned"))
    known = catalog.read_versions(listing)
    referenced = {key for k in known.values() for key in k.files}
    return Roots(pinned, attempts, dead, blind, listing, known, referenced)


# -- deleting ------------------------------------------------------------------------------------


def delete(catalog: Catalog, version: Version) -> int:
    """See ``Run.delete``."""
    claims = find_roots(catalog)
    if version not in claims.listing.versions:
        raise NotFound(
            f"There is no {version} in {catalog.url}",
            key=catalog.location(version).key(names.MANIFEST),
            store=catalog.url,
        )
    gone, stay = claims.select_deletable([version])
    if not gone:
        raise HoldfastError(
            f"{version} of {catalog.url} is not deleted: {stay[version]}",
            todo="Delete what refers to it first; `holdfast pin RUN STEP --remove` unpins it",
            version=str(version),
        )
    return sum(s.length for s in _delete_versions(catalog, gone, claims.listing))


def retain(catalog: Catalog, policy: KeepPolicy) -> list[Version]:
    """See ``Run.retain``."""
    if type(policy) is KeepPolicy and not catalog.half_deleted:
        return []
    claims = find_roots(catalog)
    if catalog.half_deleted:
        _finish_deletions(catalog, claims)
    records = catalog.intact_records(
        current_lineage(catalog, claims.listing), claims.listing, claims.version_records
    )
    kept = {*policy.keep(records), *(r.version for r in records[-1:])}
    gone, _ = claims.select_deletable([r.version for r in records if r.version not in kept])
    if gone:
        _delete_versions(catalog, gone, claims.listing)
    return sorted(gone)


def _delete_versions(catalog: Catalog, versions: Iterable[Version], listing: Listing) -> list[Stat]:
    """Steps 2 to 4, of versions that may go. Newest first, so that whenever this ends no manifest
    refers to a version that is gone."""
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
    """Steps 3 and 4. What is spoken for, or could not be deleted, is tried again when retention
    runs the next time; after a restart it is an orphan for ``sweep``."""
    removed = []
    for version, files in list(catalog.half_deleted.items()):
        if version in roots.listing.versions:  # not deleted after all, or saved anew
            del catalog.half_deleted[version]
            continue
        left = [s for s in files if roots.reason_to_keep(version, s) is not None]
        for stat in files:
            if stat not in left:
                catalog.store.delete(stat.key)
                removed.append(stat)
        if left:
            catalog.half_deleted[version] = left
        else:
            del catalog.half_deleted[version]
    return removed


# -- sweep ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What ``sweep`` removed (or would): keys and bytes; and what it left alone, files by key and
    versions by name, with why."""

    removed: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What a sweep was asked for."""

    grace: float
    abandoned: bool
    dry_run: bool
    now: float


def sweep(catalog: Catalog, options: SweepOptions) -> SweepResult:
    """See ``Run.sweep``."""
    listing, partials = catalog.listing(), list(catalog.store.partials(""))
    # Looked at last: a save that has begun since has none of the files that were listed, and one
    # that has ended since has its manifest.
    claims = find_roots(catalog, options.now)
    work = _Sweep(catalog, options, claims)
    for stat in claims.stale_pins:
        work.remove(Stat(stat.key, 0, 0.0))
    for version, known in claims.version_records.items():
        if not known.digest:
            why = "beside a manifest that cannot be read"
            work.kept += [(s.key, why) for s in listing.folders.get(version, ())]
    for version, stat in find_orphans(listing, claims.version_records):
        work.remove_orphan(stat, claims.reason_to_keep(version, stat))
    for version, stat in listing.lasting_pins.items():
        if version not in claims.version_records:
            work.remove_orphan(stat, None)
    for stat in partials:
        match = _ATTEMPT.search(stat.key)
        attempt = match[1] if match else None
        # what names no attempt (a manifest on its way) may be of any that is under way
        under_way = attempt in claims.active_attempts or (
            attempt is None and claims.active_attempts
        )
        grace = options.grace if attempt else max(options.grace, MIN_GRACE)
        work.remove_orphan(stat, "a save is under way" if under_way else None, grace)
    if options.abandoned:
        work.delete_abandoned()
    return SweepResult(work.removed, work.kept, work.nbytes)


@dataclass(slots=True)
class _Sweep:
    """One sweep under way."""

    catalog: Catalog
    options: SweepOptions
    roots: Roots
    removed: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    nbytes: int = 0

    def delete_abandoned(self) -> None:
        """Delete the versions that are not on the line."""
        listing = self.roots.listing
        unknown = branches_of_unknown_origin(self.catalog, listing)
        if unknown:
            why = f"{names.branch_name(unknown[-1])} cannot be read, and no version tells the same"
            self.kept.append((ALL_ABANDONED, why))
            return
        line = set(current_lineage(self.catalog, listing))
        gone, stay = self.roots.select_deletable([v for v in listing.versions if v not in line])
        self.kept += [(str(v), why) for v, why in sorted(stay.items())]
        if self.options.dry_run:
            stats = [s for v in sorted(gone) for s in listing.folders[v]]
        else:
            stats = _delete_versions(self.catalog, gone, listing)
        self.removed += [s.key for s in stats]
        self.nbytes += sum(s.length for s in stats)

    def remove_orphan(
        self, stat: Stat, keep_reason: str | None, grace: float | None = None
    ) -> None:
        """Remove an orphan, unless something speaks for it."""
        keep_reason = keep_reason or self.roots.block_reason
        grace = self.options.grace if grace is None else grace
        if keep_reason is not None:
            self.kept.append((stat.key, keep_reason))
        elif self.options.now - stat.modified < grace:
            self.kept.append((stat.key, f"younger than {grace:.0f} s"))
        else:
            self.remove(stat)

    def remove(self, stat: Stat) -> None:
        if not self.options.dry_run:
            self.catalog.store.delete(stat.key)
        self.removed.append(stat.key)
        self.nbytes += stat.length
