"""The lineage: the versions of a run that count, oldest first, across branches.

The branch with the highest number is current; no clock is compared. A branch starts from one with a
lower number, so a chain of records cannot form a cycle. A version of a later format is never
skipped as if it were damaged: going back because the software is too old would lose steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import ExitStack, suppress
from dataclasses import replace

from limpet import errors, events, machine
from limpet.format import names
from limpet.format.names import MAX_STEP, Version
from limpet.format.records import Branch, Ended, encode_record
from limpet.run.catalog import Catalog, read_sessions
from limpet.run.listing import BRANCH, STEP, Listing, to_int
from limpet.run.policy import Mode, Record, best_first
from limpet.snapshot import pins
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import MAX_PUTS, contended_error
from limpet.text import format_list

_MAX_LISTINGS = 10
"""Maximum number of listings to get two in a row that agree; then the last one is used."""

MAX_SEARCHES = 100
"""Maximum number of listings that are searched while versions are deleted before the read."""

_MAX_LISTED = 9
"""Maximum number of versions that an error lists."""


def lineage_of(catalog: Catalog, listing: Listing, branch: int | None = None) -> list[Version]:
    """Return the versions of a branch, by default the newest, and before them those of each
    ancestor up to the version at which its descendant began, oldest first. Raises ``NotFound``."""
    return [v for v in lineage_folders(catalog, listing, branch) if listing.exists(v)]


def lineage_folders(catalog: Catalog, listing: Listing, branch: int | None = None) -> list[Version]:
    """Do the same as ``lineage_of``, but leave the check that a version exists to the caller."""
    number = newest_branch(catalog, listing) if branch is None else branch
    if number and number not in listing.branches and not _has_versions(listing, number):
        numbers = {0, *listing.branches, *(v.branch for v in listing.versions)}
        raise errors.NotFound(
            f"{catalog.store.url} has no branch {number}",
            expected=f"one of {', '.join(map(str, sorted(numbers)))}",
            found=number,
            key=names.branch_name(number),
            store=catalog.store.url,
        )
    lineage: list[Version] = []
    for member, last in line_ends(catalog, listing, number).items():
        lineage[:0] = [v for v in listing.folders if v.branch == member and v.step <= last]
    return lineage


def line_ends(catalog: Catalog, listing: Listing, branch: int | None = None) -> dict[int, int]:
    """Return the branches of a lineage, by default of the newest branch, the last one first, each
    with the last step at which it belongs to the lineage."""
    number = newest_branch(catalog, listing) if branch is None else branch
    ends = {number: MAX_STEP}
    while number and (origin := branch_origin(catalog, number, listing.folders)) is not None:
        number = origin.branch
        ends[number] = origin.step
    return ends


def newest_version(catalog: Catalog, listing: Listing) -> Version | None:
    """Return the newest version of the current lineage, intact or not."""
    return next(filter(listing.exists, reversed(lineage_folders(catalog, listing))), None)


def last_written(listing: Listing) -> Version | None:
    """Return the version that was written last: a branch begins after all versions before it."""
    newest_first = sorted(listing.folders, key=lambda v: (-v.branch, -v.step))
    return next(filter(listing.exists, newest_first), None)  # not a request for each version


def find_sessions(catalog: Catalog, listing: Listing, snapshot: SnapshotReader) -> list[str]:
    """Return the sessions that a training continues that goes on from ``snapshot``: those of this
    version, and of the one that was written last, which it may leave behind."""
    last, sessions = last_written(listing), read_sessions(snapshot)
    with suppress(errors.FormatError, errors.NotFound):
        sessions += [] if last is None else read_sessions(catalog.open(last))
    return sessions


def find_end(catalog: Catalog, listing: Listing | None = None) -> str | None:
    """See ``Run.ended``."""
    listing = listing or stable_listing(catalog)
    version = newest_version(catalog, listing)
    if version is None or version.branch != newest_branch(catalog, listing):
        return None  # a training has gone back to the version, to continue from there
    record = catalog.read_version(version, listing)
    if record is None or not record.digest:
        return None
    ends = catalog.evaluations.read(version, record.digest).of(Ended)
    return ends[-1].reason or None if ends else None


def newest_branch(catalog: Catalog, listing: Listing) -> int:
    """Return the number of the newest branch that has versions or a known origin."""
    numbers = {*listing.branches, *(v.branch for v in listing.folders)} - {0}
    for number in sorted(numbers, reverse=True):
        if _has_versions(listing, number) or (
            branch_origin(catalog, number, listing.folders) is not None
        ):
            return number
    return 0


def _has_versions(listing: Listing, branch: int) -> bool:
    return any(listing.exists(v) for v in reversed(listing.folders) if v.branch == branch)


def branches_of_unknown_origin(catalog: Catalog, listing: Listing) -> list[int]:
    """Return the branches with versions but without a known origin, in ascending order: before
    them, abandoned versions cannot be recognized."""
    versions = listing.versions
    with_versions = {v.branch for v in versions} - {0}
    return sorted(n for n in with_versions if branch_origin(catalog, n, versions) is None)


def branch_origin(catalog: Catalog, number: int, versions: Iterable[Version]) -> Version | None:
    """Return where a branch started: by its record, otherwise by the oldest version with a parent
    on an earlier branch, or None. Raises ``ManifestInvalid`` and ``FormatTooNew``."""
    file = names.branch_name(number)
    try:
        version = names.parse_version(catalog.read_branch(number).from_version)
    except errors.FormatTooNew:
        raise
    except (errors.FormatError, errors.NotFound) as e:
        events.emit("skipped", version=file, error=e)
        version = _origin_from_parents(catalog, number, versions)
    if version is not None and version.branch >= number:
        raise errors.ManifestInvalid(
            f"{file} of {catalog.store.url} violates the format",
            expected=f"an origin on a branch before {number}",
            found=str(version),
            file=file,
        )
    return version


def _origin_from_parents(
    catalog: Catalog, number: int, versions: Iterable[Version]
) -> Version | None:
    for version in sorted(v for v in versions if v.branch == number):
        with suppress(errors.FormatError, errors.NotFound):
            parent = catalog.open(version).manifest.parent
            origin = None if parent is None else names.parse_version(parent.version)
            if origin is not None and origin.branch < number:
                return origin
    return None


def start_branch(catalog: Catalog, snapshot: SnapshotReader, version: Version, reason: str) -> int:
    """Durably start a branch at a version, of the run or of a tier; return the branch's number.
    Raises ``NotFound`` if the version was deleted from the run, or is being deleted."""
    with ExitStack() as protection:
        if snapshot.location.store.url == catalog.store.url:
            protection.enter_context(pins.protected(snapshot.location, version))
        for _ in range(MAX_PUTS):
            listing = catalog.listing()
            number = max([0, *listing.branches, *(v.branch for v in listing.folders)]) + 1
            record = Branch(number, str(version), snapshot.digest, machine.utc_now(), reason)
            # if another process starts a branch at the same time, try the next number
            with suppress(errors.AlreadyExists):
                catalog.store.put_if_absent(names.branch_name(number), encode_record(record))
                return number
    raise contended_error(names.branch_name(number), catalog.store.url)


def skipped_reason(skipped: Sized) -> str:
    """Return the reason for a branch that begins before these states; empty if there are none."""
    return f"{len(skipped)} newer damaged" if skipped else ""


def find_skipped(
    catalog: Catalog, listing: Listing, branches: Mapping[int, Branch | errors.LimpetError]
) -> dict[Version, Branch]:
    """Return the versions that were skipped as damaged, each with the branch that then began: so
    many as its reason counts, of those that followed its origin."""
    found: dict[Version, Branch] = {}
    for number, branch in branches.items():
        count = isinstance(branch, Branch) and re.fullmatch(r"(\d+) newer damaged", branch.reason)
        if isinstance(branch, Branch) and count:
            with suppress(errors.FormatError, errors.NotFound):
                origin = names.parse_version(branch.from_version)
                earlier = lineage_of(catalog, listing, number - 1)
                newer = [v for v in earlier if origin is not None and v > origin]
                found.update(dict.fromkeys(newer[: int(count[1])], branch))
    return found


# -- the newest version --------------------------------------------------------------------------


def find_latest(catalog: Catalog) -> SnapshotReader | None:
    """See ``Run.latest``."""
    return find_newest(catalog, catalog.check)[0]


def find_newest(
    catalog: Catalog,
    use: Callable[[SnapshotReader], object],
    at: int | None = None,
    branch: int | None = None,
) -> tuple[SnapshotReader | None, list[tuple[Version, errors.LimpetError]]]:
    """See ``Run.newest``. Only the versions that are tried are looked at."""
    at = None if at is None else to_int(at, STEP)
    branch = None if branch is None else to_int(branch, BRANCH)
    skipped: dict[Version, errors.LimpetError] = {}
    deleted: dict[Version, errors.LimpetError] = {}
    for _ in range(MAX_SEARCHES):
        listing = stable_listing(catalog)
        lineage = lineage_folders(catalog, listing, branch)
        tried, missing = list[Version](), list[Version]()
        for version in reversed([v for v in lineage if at is None or v.step == at]):
            if not listing.exists(version):
                missing.append(version)
                continue
            if missing and has_changed(catalog, listing, (), missing):
                break  # a missing one was deleted because its writer saved a newer one
            tried.append(version)
            try:
                snapshot = catalog.open(version)
                use(snapshot)
            except (errors.FormatTooNew, errors.Denied, errors.Unavailable):
                raise
            except (errors.FormatError, errors.StoreError) as e:
                if isinstance(e, errors.NotFound) and not catalog.listing().exists(version):
                    deleted[version] = e
                    break  # deleted, not damaged: list again, since its writer saved a newer one
                events.emit("skipped", version=str(version), error=e)
                skipped[version] = e
            else:
                return snapshot, list(skipped.items())
        else:
            if has_changed(catalog, listing, tried, missing):
                continue
            failed = {**deleted, **skipped}
            if failed or at is not None or listing.versions:
                lineage = [v for v in lineage if listing.exists(v)]
                error = _no_version_error(catalog.store.url, at, failed, lineage, listing.versions)
                raise error from next(iter(failed.values()), None)
            return None, []
    raise changing_run_error(catalog)


def find_best(catalog: Catalog, metric: str, mode: Mode) -> SnapshotReader | None:
    """See ``Run.best``."""
    for _ in range(MAX_SEARCHES):
        listing = stable_listing(catalog)
        existing, best = listing.versions, None
        for version in best_first(find_records(catalog, listing), metric, mode):
            with suppress(errors.NotFound):
                best = catalog.open(version)
                break
        # an old listing may lack a better version, for which retention deleted a listed one
        missing = {*listing.folders} - {*existing}
        if not has_changed(catalog, listing, existing, missing):
            return best
    raise changing_run_error(catalog)


def find_records(catalog: Catalog, listing: Listing) -> list[Record]:
    """See ``Run.records``."""
    version_records = catalog.read_versions(listing)
    listing = replace(listing, exists=version_records.__contains__)
    return catalog.intact_records(lineage_of(catalog, listing), version_records)


def stable_listing(catalog: Catalog) -> Listing:
    """List the run until two listings in a row agree: one listing may show neither a version that
    is committed nor an older one that is deleted during it."""
    listing = catalog.listing()
    for _ in range(_MAX_LISTINGS):
        previous, listing = listing, catalog.listing()
        if previous.folders == listing.folders:
            break
    return listing


def has_changed(
    catalog: Catalog, listing: Listing, existing: Iterable[Version], missing: Iterable[Version]
) -> bool:
    """Return True if a search of ``listing`` proves nothing: there is a new folder, one of
    ``existing`` is gone, or one of ``missing`` exists now."""
    again = catalog.listing()
    return (
        not set(again.folders) <= set(listing.folders)
        or not all(again.exists(v) for v in existing)
        or any(again.exists(v) for v in missing)
    )


def changing_run_error(catalog: Catalog) -> errors.NotFound:
    """Return the error for a run whose versions are deleted each time before they are read."""
    return errors.NotFound(
        f"The versions of {catalog.store.url} are deleted before they can be read",
        expected="a listing of the store that shows the versions that exist",
        found=f"deleted versions in {MAX_SEARCHES} listings",
        todo="Keep more versions (KeepLast), or pin the version. If nothing deletes versions, the"
        " store's listings are out of date",
        key="",
        store=catalog.store.url,
    )


def _no_version_error(
    url: str,
    at: int | None,
    failed: Mapping[Version, errors.LimpetError],
    lineage: Sequence[Version],
    versions: Sequence[Version],
) -> errors.NoSnapshot:
    """Return the error for a lineage without an intact version, or without one of step ``at``."""
    wanted = "version" if at is None else f"version of step {at}"
    if failed:
        state_invalid = any(e.is_state_invalid for e in failed.values())
        return errors.NoSnapshot(
            f"{url} has no intact {wanted} on the requested lineage",
            expected=f"an intact {wanted}",
            found=format_list([f"{v}: {e.what}" for v, e in failed.items()], _MAX_LISTED, "; "),
            todo="`limpet ls RUN` lists all versions, including those of other branches"
            ' (resume(at="STEP.BRANCH")). `limpet verify RUN` shows what is damaged. Copy an intact'
            " version back, or start again in another folder",
            skipped=tuple(map(str, failed)),
            **({"live_state": "not valid"} if state_invalid else {}),
        )
    return errors.NoSnapshot(
        f"{url} has no {wanted} on the requested lineage",
        expected=f"a {wanted}",
        found=describe_versions(lineage, versions),
        todo=OTHER_BRANCHES,
        skipped=(),
    )


def describe_versions(lineage: Sequence[Version], versions: Sequence[Version]) -> str:
    """Describe, for an error, the newest versions of a lineage in a run with ``versions``."""
    newest = [str(v) for v in lineage[-_MAX_LISTED:]]
    found = format_list(newest, _MAX_LISTED, total=len(lineage)) or "none"
    others = len(versions) - len(lineage)
    return found + (f" (and {others:,} on other branches)" if others else "")


OTHER_BRANCHES = (
    "`limpet ls RUN` lists all versions, including those on other branches, such as RUN@120.1,"
    ' resume(at="120.1"), for step 120 on branch 1'
)
