"""Evidence that training continued in two runs after one was copied from the other."""

from __future__ import annotations

from limpet.errors import FormatError, NotFound
from limpet.format import names
from limpet.format.names import Version
from limpet.format.records import MAX_RECORD
from limpet.run.catalog import Catalog, read_sessions
from limpet.run.lineage import branch_numbers, branch_origin, read_parent
from limpet.run.listing import Listing
from limpet.snapshot.location import get_bounded


def find_divergence(
    catalog: Catalog, listing: Listing, other: Catalog, other_listing: Listing
) -> str | None:
    """Return evidence that training continued in two runs after one was copied from the other.

    The result names a file, branch, or version that only one history contains. It is None if there
    is no evidence.

    A copy lacks the new versions of its original and keeps those that the original has deleted.
    Each run may therefore have versions that the other lacks. Three facts hold within one history:

    - No version is between a version and its parent on their branch, unless one training wrote all
      of them: it may save while the version before is still being promoted from a local disk.
    - No other snapshot has the name of the parent.
    - A run that starts a branch holds the newest version of the branch before it, and only
      ``sweep(abandoned=True)`` deletes that version.
    """
    for number in sorted({*listing.branches} & {*other_listing.branches}):
        file = names.branch_name(number)
        if _read_raw_branch(catalog, file) != _read_raw_branch(other, file):
            return f"another {file}"
    branch, other_branch = max(branch_numbers(listing)), max(branch_numbers(other_listing))
    if branch < other_branch and _newest_step(listing, branch) > _newest_known_step(
        other, other_listing, branch
    ):
        return f"branch {other_branch}"
    newest = _newest_step(other_listing, other_branch)
    if branch > other_branch and newest > _newest_known_step(catalog, listing, other_branch):
        return str(Version(newest, other_branch))
    versions, other_versions = set(listing.versions), set(other_listing.versions)
    for version in sorted(versions - other_versions):
        if conflict := _find_conflict(catalog, version, other, versions, other_versions):
            return str(conflict)
    for version in sorted(other_versions - versions):
        if _find_conflict(other, version, catalog, other_versions, versions):
            return str(version)
    return None


def _read_raw_branch(catalog: Catalog, file: str) -> bytes | None:
    """Return the bytes of the record of a branch, or None if it is too long for a record."""
    try:
        return get_bounded(catalog.store, file, MAX_RECORD)
    except FormatError:
        return None


def _find_conflict(
    catalog: Catalog,
    version: Version,
    other: Catalog,
    versions: set[Version],
    other_versions: set[Version],
) -> Version | None:
    """Return a version of the other run that contradicts ``version`` and its parent.

    Such a version is on the branch of ``version`` between it and its parent, or is another
    snapshot with the name of the parent. ``versions`` and ``other_versions`` are the versions of
    the two runs.
    """
    parent = read_parent(catalog, version)
    parent_version = None if parent is None else names.parse_version(parent.version)
    if parent is None or parent_version is None:
        return None
    between = [
        v
        for v in other_versions - versions
        if v.branch == version.branch
        and parent_version.step < v.step < version.step
        and not _is_of_same_training(catalog, version, other, v)
    ]
    if between or parent_version not in other_versions:
        return min(between, default=None)
    try:
        snapshot = other.open(parent_version)
    except (FormatError, NotFound):
        return None
    # a full copy of an incremental version has another digest; its attempt identifies it
    is_copy = snapshot.manifest.attempt == parent.digest[:12] or snapshot.bases
    return None if is_copy or snapshot.digest == parent.digest else parent_version


def _is_of_same_training(
    catalog: Catalog, version: Version, other: Catalog, earlier: Version
) -> bool:
    """Return True if the training that wrote ``version``, or one that it continued from a tier,
    wrote a version of the other run."""
    try:
        session = read_sessions(other.open(earlier))[:1]
        return session != [] and session[0] in read_sessions(catalog.open(version))
    except (FormatError, NotFound):
        return False


def _newest_step(listing: Listing, branch: int) -> int:
    """Return the newest step on a branch, or -1 if the branch has no versions."""
    return max((v.step for v in listing.versions if v.branch == branch), default=-1)


def _newest_known_step(catalog: Catalog, listing: Listing, branch: int) -> int:
    """Do the same as ``_newest_step``, but include the deleted versions at which branches began."""
    later = (n for n in listing.branches if n > branch)
    origins = (branch_origin(catalog, n, listing.folders) for n in later)
    steps = (v.step for v in origins if v is not None and v.branch == branch)
    return max([_newest_step(listing, branch), *steps])
