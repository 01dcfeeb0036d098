"""Garbage collection: the deletion of versions, and the sweep of orphans.

Deletion is safe at every moment for a reader, for a save that is about to refer to the version, for
a copy of the version, and for whoever records that it must stay. It has five steps:

1. Write a notice that this process deletes the version.
2. Keep the version if a pin, a lease, a manifest, a branch, or the policy is a reason to.
3. Delete its manifest.
4. Read the pins again, and then the manifests. Keep the files that a pin or a manifest now
   protects.
5. Delete the other files, and then the notice.

For the orphans of a sweep, these are steps 1, 4, and 5.

A reader or a save first pins a version and then checks that its manifest exists. A save commits its
own manifest before it removes its pin. Deletion therefore always reads pins before manifests. If a
save has no pin when the pins are read and no manifest when the manifests are read, it checks for
the deleted manifest only after the deletion.

Who records that a version stays also looks for notices, after its pin (``pins.protected``). If
there was none, then either the deletion has ended, and the manifest is missing, or the notice came
later, hence after the pin. Step 2, which reads the pins first, finds the pin or, if that is gone by
then, the record.

The files of a save have an attempt of their own, so nobody has decided to delete them before the
save pins them. Those of a copy have the attempt of its source: it may write, or use, files whose
deletion was decided. It therefore looks for notices, too, also for those of sweeps. A deletion that
never removes its notice has died, or its last call may still be in progress: the notice is then
valid until its process has ended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from limpet import events
from limpet.errors import BrokenLink, FormatError, NoSpace, NotFound
from limpet.format import names
from limpet.format.names import MAX_STEP, Version
from limpet.run import lease
from limpet.run.catalog import Catalog, VersionRecord
from limpet.run.lineage import branches_of_unknown_origin, lineage_of
from limpet.run.listing import FolderFiles, Listing, list_all_files
from limpet.snapshot import pins
from limpet.snapshot.location import Location
from limpet.storage.store import Stat

GRACE = 24 * 3600.0
"""Default minimum age, in seconds, at which ``sweep`` removes a file that no manifest names."""

MIN_GRACE = 60.0
"""Minimum age, in seconds, at which ``sweep`` removes a partial file that names no attempt: the
upload of a small file such as a pin, which no pin protects."""

ALL_ABANDONED = "all abandoned versions"
"""The entry in ``SweepResult.kept`` if the abandoned versions cannot be determined."""

_ATTEMPT = re.compile(r"\.([0-9a-f]{12})\.(?:safetensors|index\.json)")


# -- what protects versions and files ------------------------------------------------------------


@dataclass(frozen=True)
class Roots:
    """What protects the versions and files of a run: ``pinned`` versions, with the reasons, and
    ``active_attempts`` of saves. Because of a ``block_reason``, nothing may be deleted."""

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
        """Return why a file must stay that its version's manifest does not name, or None."""
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
    """Read the pins of a run, and then its manifests. With a ``listing``, its pins and versions
    count: enough to decide, but not to delete files, because a listing is not atomic."""
    now = time.time() if now is None else now
    pinned: dict[Version, str] = {}
    attempts: set[str] = set()
    stale: list[str] = []
    block_reason = None
    keys = pins.list_process_pins(catalog.store) if listing is None else listing.process_pins
    for key, record in pins.read_process_pins(catalog.store, keys):
        if pins.is_stale(catalog.store, key, record, now):
            stale.append(key)
        elif isinstance(record, FormatError):
            events.emit("skipped", version=key, error=record)
            block_reason = f"{key} is unreadable and may protect any version"
        else:
            attempts.add(record.attempt)
            version = names.parse_version(record.version or "")
            if version is not None:
                pinned[version] = "a process is using it"
    leases = lease.list_leases(catalog.store) if listing is None else listing.leases
    live, unreadable = catalog.leases.live(leases), catalog.leases.unreadable
    stale += [key for key in leases if key not in live and key not in unreadable]
    if unreadable:
        block_reason = f"{min(unreadable)} is unreadable and may protect any version"
    for key, held in live.items():
        using = f"the evaluation {held.name} is using it ({key})"
        pinned |= {v: using for v in map(names.parse_version, held.versions) if v is not None}
    listing = catalog.listing() if listing is None else listing
    version_records = catalog.read_versions(listing, look_again_from)
    # a folder without a manifest is not a version, so a lasting pin protects nothing in it
    lasting = (v for v in listing.lasting_pins if v in version_records)
    pinned |= dict.fromkeys(lasting, "it is pinned")
    listing = replace(listing, exists=version_records.__contains__)
    return Roots(pinned, attempts, stale, block_reason, listing, version_records)


# -- deleting ------------------------------------------------------------------------------------


def link_reason(folder: FolderFiles) -> str:
    """Return why a version with symbolic links is never deleted."""
    return f"{folder.links[0]} is a symbolic link"


def delete_versions(
    catalog: Catalog,
    versions: Collection[Version],
    decide: Callable[[Collection[Version]], Mapping[Version, FolderFiles]],
) -> tuple[list[Version], list[Stat]]:
    """Delete those of ``versions`` that ``decide`` selects from them after the notices, the newest
    first, so that no manifest refers to a deleted version even if the process ends in between.
    Returns the deleted versions, oldest first, and files."""
    remaining = {*versions}
    deleted: list[Version] = []
    removed: list[Stat] = []

    def delete(folders: Mapping[Version, FolderFiles], *, announced: bool) -> None:
        for version in sorted(folders, reverse=True):
            manifest_key = f"{version}/{names.MANIFEST}"
            files = folders[version].stats
            catalog.half_deleted[version] = [s for s in files if s.key != manifest_key]
            catalog.forget(version)
            try:
                catalog.store.delete(manifest_key)
            except NotFound:  # some stores say so: the process that was faster deletes the rest
                del catalog.half_deleted[version]
                continue
            removed.extend(s for s in files if s.key == manifest_key)
            deleted.append(version)
            events.emit("deleted", version=str(version))
        removed.extend(finish_deletions(catalog, announced=announced))

    while True:
        try:
            with pins.announce_deletion(Location(catalog.store, ""), sorted(remaining)):
                delete(decide(remaining), announced=True)
                return sorted(deleted), removed
        except NoSpace:  # until this frees some, there is none for a record that protects either
            folders = decide(remaining)
            if not folders:
                return sorted(deleted), removed
            newest = max(folders)
            delete({newest: folders[newest]}, announced=False)
            remaining.remove(newest)


def finish_deletions(catalog: Catalog, *, announced: bool = False) -> list[Stat]:
    """Perform steps 4 and 5 for all half-deleted versions, and return the deleted files. Those that
    stay are tried again; after a restart, they are orphans. ``announced``: there are notices."""
    half_deleted = catalog.half_deleted

    def select(roots: Roots) -> list[Stat]:
        for version in half_deleted.keys() & roots.version_records.keys():
            del half_deleted[version]  # the deletion failed, or the step was saved again
        return [
            stat
            for version, files in half_deleted.items()
            for stat in files
            if roots.reason_to_keep(version, stat) is None
        ]

    if not half_deleted:
        return []
    # a version that refers to one of these is newer
    oldest = min(version.step for version in half_deleted)
    # a pin may protect all of them for days: no notice is written then
    if not announced and not select(find_roots(catalog, look_again_from=oldest)):
        return []
    notices = () if announced else [*half_deleted]
    removed = _delete_selected(catalog, select, notices, look_again_from=oldest)
    keys = {stat.key for stat in removed}
    for version, files in [*half_deleted.items()]:
        half_deleted[version] = [stat for stat in files if stat.key not in keys]
        if not half_deleted[version]:
            del half_deleted[version]
    return removed


def _delete_selected(
    catalog: Catalog,
    select: Callable[[Roots], list[Stat]],
    notices: Iterable[Version | None],
    *,
    look_again_from: int,
    now: float | None = None,
) -> list[Stat]:
    """Perform steps 4 and 5, with ``notices``, for what ``select`` returns. Return the files."""
    removed: dict[str, Stat] = {}
    batch, limit = list[Stat](), 1

    def decide() -> list[Stat]:
        roots = find_roots(catalog, now, look_again_from)
        return [stat for stat in select(roots) if stat.key not in removed]

    def delete(stats: list[Stat]) -> None:
        for stat in stats:
            catalog.store.delete(stat.key)
            removed[stat.key] = stat

    while True:
        try:
            with pins.announce_deletion(Location(catalog.store, ""), notices):
                delete(decide())
                return [*removed.values()]
        except NoSpace:
            # There is no space for the pin of a copy either, so delete without a notice, and try it
            # again after each file. Some stores, such as those with snapshots, free none, so the
            # roots are read again only after 1, 2, 4, ... files.
            if not batch:
                batch, limit = decide()[:limit], 2 * limit
            if not batch:
                return [*removed.values()]
            delete([batch.pop(0)])


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
    listing = catalog.listing()
    partials = [s for s in catalog.store.partials("") if _is_of_run(s.key)]
    files = list_all_files(catalog.store, listing)
    # The roots are read after the listing. A save that has begun since then has none of the listed
    # files, and a save that has ended since then has a manifest. A copy that has begun since then
    # may have some of them, so the roots are read again after the notice.
    catalog.leases.live(listing.leases)
    if catalog.leases.unreadable or (abandoned and listing.leases):
        catalog.leases.confirm()
    state = _Sweep(catalog, listing, files, partials, grace, now)
    removed = state.select(roots := find_roots(catalog, now))
    if removed and not dry_run:
        folders = (names.version_of_key(stat.key) for stat in removed)
        oldest = min((v.step for v in folders if v is not None), default=MAX_STEP)
        keys = {stat.key for stat in removed}

        def select(roots: Roots) -> list[Stat]:
            return [stat for stat in state.select(roots) if stat.key in keys]

        # a lasting pin of a missing version protects the version that is saved there next
        dangling = listing.lasting_pins - roots.version_records.keys()
        notices = [None, *dangling]
        removed = _delete_selected(catalog, select, notices, look_again_from=oldest, now=now)
    if abandoned:
        removed += state.delete_abandoned(roots, dry_run)
    nbytes = sum(s.length for s in removed)
    hidden = catalog.store.traits.hidden_uploads
    return SweepResult([s.key for s in removed], state.kept, nbytes, hidden)


def _is_of_run(key: str) -> bool:
    """Return True for a file in one of the folders of a run. Other folders have other writers, such
    as that of a run within the run, whose pins are there."""
    folder, slash, rest = key.partition("/")
    is_own = folder in (names.NOTICES, names.METRICS_LOG) or names.parse_version(folder) is not None
    return not slash or names.is_spread_folder(folder) or (is_own and "/" not in rest)


def find_orphans(
    files: Mapping[Version, FolderFiles], version_records: Mapping[Version, VersionRecord]
) -> Iterator[tuple[Version, Stat]]:
    """Yield the shards and indexes that no manifest names or refers to, and evaluations in folders
    without a manifest. An unreadable manifest may name all files of its folder."""
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
    """What a sweep has listed, and what it decided to keep, with the reasons."""

    catalog: Catalog
    listing: Listing
    files: Mapping[Version, FolderFiles]
    partials: Sequence[Stat]
    grace: float
    now: float
    kept: list[tuple[str, str]] = field(default_factory=list)

    def select(self, roots: Roots) -> list[Stat]:
        """Return the files to remove: stale pins, partial files, and orphans."""
        self.kept = []
        removed = [Stat(key, 0, 0.0) for key in (*roots.stale_pins, *self._stale_notices())]
        for stat in self.partials:
            match = _ATTEMPT.search(stat.key)
            attempt = match[1] if match else None
            if attempt is None and self.catalog.store.traits.part_size:
                continue  # such a store shows everybody's uploads; a small file of a run is not one
            # a partial file without an attempt, such as a manifest, may belong to any active save
            in_progress = attempt in roots.active_attempts or (
                attempt is None and roots.active_attempts
            )
            reason = "a save is in progress" if in_progress else roots.block_reason
            min_age = self.grace if attempt else max(self.grace, MIN_GRACE)
            removed += self._unless_kept(stat, reason, min_age)
        for version, record in roots.version_records.items():
            if not record.digest and version in self.files:
                unreadable = "the manifest in its folder is unreadable"
                self.kept += [(s.key, unreadable) for s in self.files[version].stats]
        for version, stat in find_orphans(self.files, roots.version_records):
            is_linked = {stat.key, str(version)} & {*self.files[version].links}
            reason = "it is a symbolic link" if is_linked else roots.reason_to_keep(version, stat)
            removed += self._unless_kept(stat, reason, self.grace)
        for version in self.listing.lasting_pins - roots.version_records.keys():
            with suppress(NotFound, BrokenLink):
                stat = self.catalog.store.stat(names.pin_name(str(version)))
                removed += self._unless_kept(stat, roots.reason_to_keep(version, stat), self.grace)
        return removed

    def _stale_notices(self) -> list[str]:
        store = self.catalog.store
        found = pins.read_process_pins(store, pins.list_notices(Location(store, "")))
        return [key for key, notice in found if pins.is_stale(store, key, notice, self.now)]

    def _unless_kept(self, stat: Stat, reason: str | None, min_age: float) -> list[Stat]:
        """Return the file, or nothing if there is a reason to keep it: ``reason``, or its age."""
        if reason is None and self.now - stat.modified < min_age:
            reason = f"younger than {min_age:.0f} s"
        if reason is None:
            return [stat]
        self.kept.append((stat.key, reason))
        return []

    def delete_abandoned(self, roots: Roots, dry_run: bool) -> list[Stat]:
        """Delete the versions that are not on the current lineage, and return their files."""
        folders = self._find_abandoned(roots)
        if dry_run or not folders:
            return [stat for v in sorted(folders) for stat in folders[v].stats]

        # The removal of the orphans and the listing of the folders may have taken long. A training
        # may have continued from an abandoned version meanwhile, and others pinned.
        return delete_versions(
            self.catalog,
            folders,
            lambda among: self._find_abandoned(find_roots(self.catalog, self.now), among),
        )[1]

    def _find_abandoned(
        self, roots: Roots, among: Collection[Version] | None = None
    ) -> dict[Version, FolderFiles]:
        """Return the files of the versions (``among`` these) that are not on the current lineage
        and can be deleted; none if the lineage is unknown."""
        listing = roots.listing
        if unknown := branches_of_unknown_origin(self.catalog, listing):
            file = names.branch_name(unknown[-1])
            reason = f"{file} is unreadable, and no version of the branch names its origin"
            self._keep({ALL_ABANDONED: reason})
            return {}
        abandoned = {*listing.versions} - {*lineage_of(self.catalog, listing)}
        abandoned &= abandoned if among is None else {*among}
        folders = {v: self.catalog.files(v, listing) for v in sorted(abandoned)}
        linked = {v: link_reason(f) for v, f in folders.items() if f.links}
        deletable, kept = roots.select_deletable(folders.keys() - linked.keys())
        self._keep({str(v): reason for v, reason in sorted({**kept, **linked}.items())})
        return {v: folders[v] for v in deletable}

    def _keep(self, reasons: Mapping[str, str]) -> None:
        self.kept += [kept for kept in reasons.items() if kept not in self.kept]
