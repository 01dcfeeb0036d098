"""Retention: which versions a keep policy deletes, and when.

A deletion relies on the versions that are kept instead, so their files are looked up again before.
That costs more with more versions: a training with many applies retention after so many saves that
the cost of one does not depend on their number. (A limit in seconds would depend on the machine.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from limpet import events
from limpet.errors import LimpetError, NotFound
from limpet.format.names import MANIFEST, MAX_STEP, Version
from limpet.run.catalog import Catalog, VersionRecord
from limpet.run.lineage import lineage_of
from limpet.run.listing import FolderFiles, Listing
from limpet.run.policy import (
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    KeepSteps,
    KeepUnion,
    Record,
)
from limpet.run.sweep import Roots, delete_versions, find_roots, finish_deletions, link_reason
from limpet.snapshot.reader import SnapshotReader
from limpet.text import format_list
from limpet.threads import look_up_each

_MAX_ROUNDS = 10
"""Maximum number of decisions. Each one finds that what the one before relied on has changed."""

VERSIONS_PER_SAVE = 50
"""Number of versions for each of which retention of a training waits for another save."""


BeforeDeletion = Callable[
    [Collection[Version], Mapping[Version, VersionRecord]], Collection[Version]
]
"""Called with the versions that are to be deleted, and all versions that exist, after the pins were
read. Returns the versions that must not be deleted yet."""


class Retention:
    """Applies a keep policy after every ``n // 50``-th save of a writer in a run of ``n`` versions:
    at most 2 % more versions exist in the meantime, and none after ``finish``."""

    def __init__(
        self, catalog: Catalog, policy: KeepPolicy, before_deletion: BeforeDeletion
    ) -> None:
        self._catalog = catalog
        self._policy = policy
        self._before_deletion = before_deletion
        self._saves = self._interval = 0
        self.is_held = False  # True: the newest version may refer to damage; the others stay

    def after_save(self, snapshot: SnapshotReader) -> None:
        """Apply retention if it is due after the save of ``snapshot``. If it raises, with the field
        ``committed``, the next save tries again."""
        keeps_all = type(self._policy) is KeepPolicy
        if keeps_all and not self._catalog.half_deleted:
            return
        if not keeps_all:
            self._catalog.add_committed(snapshot)
        self._saves += 1
        if self._saves >= self._interval:
            self._interval = 0
            self.finish(snapshot)
            self._interval = self._catalog.version_count // VERSIONS_PER_SAVE

    def finish(self, newest: SnapshotReader | None) -> None:
        """Apply retention after the ``newest`` version, unless that was done. A policy that uses
        metrics decides again, because some may have been added since."""
        if self.is_held or (not self._saves and (newest is None or ignores_metrics(self._policy))):
            return
        self._saves = 0
        try:
            retain(self._catalog, self._policy, self._before_deletion)
        except LimpetError as e:
            saved = newest and newest.location.folder
            advice = f"{saved} was saved, but old versions could not be deleted"
            raise e.with_advice(advice, committed=str(saved)) from e


def retain(
    catalog: Catalog, policy: KeepPolicy, before_deletion: BeforeDeletion = lambda *_: ()
) -> list[Version]:
    """See ``Run.retain``."""
    if type(policy) is KeepPolicy and not catalog.half_deleted:
        return []
    finish_deletions(catalog)
    roots = find_roots(catalog, look_again_from=MAX_STEP, listing=catalog.listing())
    metrics: _Metrics = {}
    if not (found := _select(catalog, policy, roots, metrics)):
        return []

    def decide(candidates: Collection[Version]) -> Mapping[Version, FolderFiles]:
        for _ in range(_MAX_ROUNDS):
            # a version that refers to one of these is newer
            roots = find_roots(catalog, look_again_from=min(candidates, default=Version(0)).step)
            folders = _select(catalog, policy, roots, metrics, candidates, before_deletion)
            if folders is not None:
                return folders
        return {}  # the run changes all the time; the next retention decides

    return delete_versions(catalog, found, decide)[0]


def delete(catalog: Catalog, versions: Collection[Version]) -> int:
    """See ``Run.delete``."""
    leased = {name for lease in catalog.leases.live().values() for name in lease.versions}
    if catalog.leases.unreadable or leased.intersection(map(str, versions)):
        catalog.leases.confirm()
    _, files = delete_versions(catalog, versions, partial(_require_deletable, catalog))
    return sum(stat.length for stat in files)


def _require_deletable(
    catalog: Catalog, versions: Collection[Version]
) -> dict[Version, FolderFiles]:
    """Return the files of the versions. Raises ``LimpetError`` if one must stay."""
    roots = find_roots(catalog)
    listing, known = roots.listing, roots.version_records
    for version in versions:
        if version not in known:
            raise NotFound(
                f"There is no {version} in {catalog.store.url}",
                key=f"{version}/{MANIFEST}",
                store=catalog.store.url,
            )
    folders = {v: catalog.files(v, listing) for v in versions}
    _, kept = roots.select_deletable(versions)
    linked = {v: link_reason(folder) for v, folder in folders.items() if folder.links}
    newest_first = [v for v in reversed(lineage_of(catalog, listing)) if known[v].digest]
    needed = next((v for v in newest_first if catalog.is_intact(v, known[v])), None)
    reasons = {**linked, **kept}
    if needed is not None and needed in versions:
        reasons.setdefault(needed, "it is the newest intact version; a training continues from it")
    if reasons:
        version, text = min(reasons), " ".join(reasons.values())
        raise LimpetError(
            f"{version} of {catalog.store.url} was not deleted: {reasons[version]}",
            found=format_list([f"{v}: {reasons[v]}" for v in sorted(reasons)[1:]], 5) or None,
            todo=". ".join(["Nothing was deleted", *(_TODO[why] for why in _TODO if why in text)]),
            version=str(version),
            versions=tuple(map(str, sorted(reasons))),
        )
    return folders


_TODO = {  # by a part of the reason for which a version stays
    "is pinned": "`limpet pin RUN STEP --remove` removes a pin",
    "refers to it": "What others refer to can be deleted together with them",
    "symbolic link": "A link and its target can be deleted only by hand",
    "newest": "To delete a whole run, delete its folder (if it also holds runs: version_* in it)."
    " An older version can be the newest one after resume(at=...) has started a branch from it",
}

_Metrics = dict[tuple[Version, str], Mapping[str, float] | None]
"""The metrics of versions, by version and digest, as they were read before the notices. None:
`limpet verify` has found the version damaged."""


def _read_records(
    catalog: Catalog,
    policy: KeepPolicy,
    roots: Roots,
    metrics: _Metrics,
    candidates: Collection[Version] | None,
) -> list[Record]:
    """Return the readable versions of the current lineage as the input of a policy. Results about
    ``candidates`` are read again. One with an unreadable result, which may be the best
    version, joins ``roots.pinned``."""
    known = roots.version_records
    versions = [v for v in lineage_of(catalog, roots.listing) if known[v].digest]

    def add_metrics(version: Version) -> None:
        digest = known[version].digest
        evaluations = catalog.evaluations.read(version, digest)
        found = {**known[version].metrics, **evaluations.metrics()}
        metrics[version, digest] = None if evaluations.damage() else found
        if evaluations.is_damaged:
            roots.pinned.setdefault(version, "a result about it is unreadable")

    if not ignores_metrics(policy):
        again = {*(candidates or ())}
        unread = [v for v in versions if v in again or (v, known[v].digest) not in metrics]
        look_up_each(unread, add_metrics)
    return [
        Record(v, found, r.trained_seconds)
        for v, r in ((v, known[v]) for v in versions)
        if (found := metrics.get((v, r.digest), r.metrics)) is not None
    ]


def _select(
    catalog: Catalog,
    policy: KeepPolicy,
    roots: Roots,
    metrics: _Metrics,
    candidates: Collection[Version] | None = None,
    before_deletion: BeforeDeletion = lambda *_: (),
) -> dict[Version, FolderFiles] | None:
    """Return those of ``candidates`` to delete, with their files, or None if a version that counts
    is not as in ``roots``. Without ``candidates``, this is a first look: no files are looked up."""
    listing, known = roots.listing, roots.version_records
    records = _read_records(catalog, policy, roots, metrics, candidates)
    intact: dict[Version, bool] = {}
    unread: set[Version] = set()
    while True:
        records = [r for r in records if intact.get(r.version, True)]
        to_keep = {*policy.keep(records), *(r.version for r in records[-1:]), *unread}
        unkept = {r.version for r in records if r.version not in to_keep}
        unkept &= unkept if candidates is None else {*candidates}
        linked = unkept & (listing.linked | catalog.linked)
        deletable, _ = roots.select_deletable(unkept - linked)
        if candidates is None or not deletable:
            _report_linked(catalog, linked)
            return dict.fromkeys(deletable, FolderFiles())
        # the pins were read before: what a pin protected until now is complete
        if now_unread := {*before_deletion(deletable, known)}:
            unread |= now_unread
            continue
        relied_on = _relied_on(policy, records, deletable) - intact.keys()
        # with metrics, what `limpet verify` has found was read, too
        now = _look_again(catalog, listing, relied_on, reads_records=ignores_metrics(policy))
        if any(record != known[v] for v, (record, _) in now.items()):
            return None
        intact |= {v: is_intact for v, (_, is_intact) in now.items()}
        folders = {v: catalog.files(v, listing) for v in deletable}
        found_links = {v for v, folder in folders.items() if folder.links}
        catalog.linked |= found_links
        if not found_links and all(is_intact for _, is_intact in now.values()):
            _report_linked(catalog, linked)
            return folders


def _relied_on(
    policy: KeepPolicy, records: Sequence[Record], deletable: Collection[Version]
) -> set[Version]:
    """Return the versions to look up before a deletion: those, and those kept instead."""
    # Often these are only the newest ones. If the policy would delete the same versions of a run
    # that has only those from the oldest deletable one on (and the one before it), it does not
    # matter whether the older ones still exist: the policies of this package keep no more versions
    # of a run that has more.
    first = next(i for i, r in enumerate(records) if r.version in deletable)
    newest = records[max(0, first - 1) :]
    if not _consists_of(policy, KeepLast, KeepEvery, KeepSteps, KeepBest) or (
        policy.keep(newest) & set(deletable)
    ):
        newest = records
    return {r.version for r in newest}


def _consists_of(policy: KeepPolicy, *kinds: type[KeepPolicy]) -> bool:
    """Return True if a policy is one of these kinds, or a union of such policies."""
    if type(policy) is KeepUnion:
        return _consists_of(policy.first, *kinds) and _consists_of(policy.second, *kinds)
    return type(policy) in kinds


def ignores_metrics(policy: KeepPolicy) -> bool:
    """Return True if a policy decides without metrics. Those of a user may use them."""
    return type(policy) is KeepPolicy or _consists_of(policy, KeepLast, KeepEvery, KeepSteps)


def _look_again(
    catalog: Catalog, listing: Listing, versions: Collection[Version], *, reads_records: bool
) -> dict[Version, tuple[VersionRecord | None, bool]]:
    """Return the record of each version as it is now, and whether it is intact."""
    found: dict[Version, tuple[VersionRecord | None, bool]] = {}

    def look(version: Version) -> None:
        record = catalog.read_version(version, listing)
        is_intact = partial(catalog.is_intact, reads_records=reads_records)
        found[version] = record, record is not None and is_intact(version, record)

    look_up_each(sorted(versions), look)
    return found


def _report_linked(catalog: Catalog, versions: Collection[Version]) -> None:
    """Report versions that are kept because they are symbolic links, once for each version."""
    if new := sorted(set(versions) - catalog.reported_links):
        catalog.reported_links |= set(new)
        names = format_list([str(v) for v in new], 3)
        error = LimpetError(
            "it is a symbolic link, or consists of links, so retention does not delete it"
        )
        events.emit("skipped", version=names, error=error)
