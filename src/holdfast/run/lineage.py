"""The line: the versions of a run that count, from the first to the newest, across branches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast import events
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import (
    Denied,
    FormatError,
    FormatTooNew,
    HoldfastError,
    ManifestInvalid,
    NoSnapshot,
    NotFound,
    StoreError,
    Unavailable,
)
from holdfast.format import names
from holdfast.format.manifest import Parent
from holdfast.format.names import Version
from holdfast.format.records import MAX_RECORD
from holdfast.run.catalog import Catalog, Listing

_MAX_LISTINGS = 10
"""Most looks for two that agree; a training that saves faster than that is looked at as it is."""


def lineage_of(catalog: Catalog, listing: Listing, number: int) -> list[Version]:
    """The versions of a branch, and before them those of the branches that it came from, up to
    where it left each; oldest first. Raises ``NotFound`` if there is no such branch."""
    versions = listing.versions
    known = _branch_numbers(listing)
    if number not in known:
        raise NotFound(
            f"{catalog.url} has no branch {number}",
            expected=f"one of {', '.join(map(str, sorted(known)))}",
            found=number,
            key=names.branch_name(number),
            store=catalog.url,
        )
    found: list[Version] = []
    limit = None
    while True:
        own = [v for v in versions if v.branch == number and (limit is None or v.step <= limit)]
        found = own + found
        left = None if number == 0 else branch_origin(catalog, number, versions)
        if left is None:
            return found
        number, limit = left.branch, left.step


def current_lineage(catalog: Catalog, listing: Listing, branch: int | None = None) -> list[Version]:
    """``lineage_of`` a branch, by default of the newest one."""
    number = newest_branch(catalog, listing) if branch is None else branch
    return lineage_of(catalog, listing, number)


def newest_branch(catalog: Catalog, listing: Listing) -> int:
    """The highest number that has versions, or of which is known where it left from."""
    versions = listing.versions
    held = {v.branch for v in versions}
    for number in sorted({*listing.branches, *held}, reverse=True):
        if number == 0 or number in held or branch_origin(catalog, number, versions) is not None:
            return number
    return 0


def branches_of_unknown_origin(catalog: Catalog, listing: Listing) -> list[int]:
    """The branches with versions of which cannot be told where they left from, so that what came
    before them cannot be told from what was abandoned."""
    versions = listing.versions
    held = {v.branch for v in versions} - {0}
    return sorted(n for n in held if branch_origin(catalog, n, versions) is None)


def branch_origin(catalog: Catalog, number: int, versions: Iterable[Version]) -> Version | None:
    """The version that a branch left from: by its record, or, should that be damaged, by the
    parent of its first version. None if neither tells: the line then begins with the branch."""
    file = names.branch_name(number)
    try:
        version = names.parse_version(catalog.read_branch(number).from_version)
    except FormatTooNew:
        raise
    except (FormatError, NotFound) as e:
        events.emit("skipped", version=file, error=e)
        version = _origin_from_parents(catalog, number, versions)
    if version is not None and version.branch >= number:
        raise ManifestInvalid(
            f"{file} of {catalog.url} breaks the format",
            expected=f"a branch that left from one before {number}",
            found=str(version),
            file=file,
        )
    return version


def _origin_from_parents(
    catalog: Catalog, number: int, versions: Iterable[Version]
) -> Version | None:
    for version in sorted(v for v in versions if v.branch == number):
        parent = _read_parent(catalog, version)
        found = None if parent is None else names.parse_version(parent.version)
        if found is not None and found.branch < number:
            return found
    return None


def _read_parent(catalog: Catalog, version: Version) -> Parent | None:
    """What was saved or resumed just before; None if there is nothing such, or that is not told."""
    try:
        return catalog.open(version).manifest.parent
    except (FormatError, NotFound):
        return None


# -- the newest ----------------------------------------------------------------------------------


def find_newest(
    catalog: Catalog, use: Callable[[Snapshot], object], at: int | None, branch: int | None
) -> tuple[Snapshot | None, list[tuple[Version, HoldfastError]]]:
    """See ``Run.newest``."""
    skipped: dict[Version, HoldfastError] = {}
    deleted: dict[Version, HoldfastError] = {}
    while True:
        listing = stable_listing(catalog)
        versions = current_lineage(catalog, listing, branch)
        for version in reversed([v for v in versions if at is None or v.step == at]):
            try:
                snapshot = catalog.open(version)
                use(snapshot)
            except (FormatTooNew, Denied, Unavailable):
                raise
            except (FormatError, StoreError) as e:
                if isinstance(e, NotFound) and version not in catalog.listing().versions:
                    deleted[version] = e
                    break  # it is no damage, and its writer has saved a newer one by then
                events.emit("skipped", version=str(version), error=e)
                skipped[version] = e
            else:
                return snapshot, list(skipped.items())
        else:
            if is_stale(catalog, listing):
                continue
            failed = {**deleted, **skipped}
            if failed:
                raise _no_intact_version_error(catalog.url, at, failed) from next(
                    iter(failed.values())
                )
            if at is not None or listing.versions:
                raise _no_such_version_error(catalog.url, at, versions, listing.versions)
            return None, []


def stable_listing(catalog: Catalog) -> Listing:
    """A look that shows the same versions as the one before. No list is of one moment: of a version
    that is committed and an older one that is deleted meanwhile it may show neither."""
    listing = catalog.listing()
    for _ in range(_MAX_LISTINGS):
        before, listing = listing, catalog.listing()
        if before.versions == listing.versions:
            break
    return listing


def is_stale(catalog: Catalog, listing: Listing) -> bool:
    """Whether a version of that look is gone by now, or there was none and now is: what was looked
    for in vain may have been there all the time."""
    now = catalog.listing().versions
    return not set(listing.versions) <= set(now) or (not listing.versions and bool(now))


def _no_intact_version_error(
    url: str, at: int | None, failed: Mapping[Version, HoldfastError]
) -> NoSnapshot:
    wanted = "version" if at is None else f"version of step {at}"
    overwritten = [e for e in failed.values() if e.fields.get("live_state")]
    return NoSnapshot(
        f"{url} has no intact {wanted} on the line that is asked for",
        expected=f"an intact {wanted}",
        found="; ".join(f"{v}: {e.what}" for v, e in failed.items()),
        todo="`holdfast ls RUN` shows all, those of other branches too (resume(branch=...)), and"
        " `holdfast verify RUN` what is damaged; copy an intact version back, or begin anew in"
        " another folder",
        skipped=tuple(map(str, failed)),
        **({"live_state": "not valid"} if overwritten else {}),
    )


def _no_such_version_error(
    url: str, at: int | None, lineage: list[Version], versions: list[Version]
) -> NoSnapshot:
    """There is nothing damaged, but nothing of that step, or nothing on that line."""
    if not versions:
        return NoSnapshot(
            f"{url} has no versions",
            expected=f"one of step {at}",
            found="none at all",
            todo="Leave out at= to begin a training",
            skipped=(),
        )
    wanted = "version" if at is None else f"version of step {at}"
    found, todo = alternatives(at, lineage, versions)
    return NoSnapshot(
        f"{url} has no {wanted} on the line that is asked for",
        expected=f"a {wanted}",
        found=found,
        todo=todo,
        skipped=(),
    )


def alternatives(
    step: int | None, lineage: Sequence[Version], versions: Sequence[Version]
) -> tuple[str, str]:
    """What there is where a line has no version of a step (None: no version), and what to do."""
    others = [v for v in versions if v.step == step]
    if others:
        branch = others[-1].branch
        return (
            f"{', '.join(map(str, others))} on another branch",
            f"Name the branch as well: branch={branch} in Python, {step}.{branch} in a command or"
            " an address",
        )
    if step is None:
        branch = versions[-1].branch
        return ", ".join(map(str, versions[-3:])), f"resume(branch={branch}) goes on from there"
    near = sorted(lineage, key=lambda v: abs(v.step - step))[:3]
    return (
        ", ".join(map(str, sorted(near))) or "none",
        "`holdfast ls RUN` shows all versions, those on other branches too",
    )


# -- two runs ------------------------------------------------------------------------------------


def find_divergence(
    catalog: Catalog, listing: Listing, other: Catalog, other_listing: Listing
) -> str | None:
    """What ``other`` has that ``one`` never had, if both have gone on since one was copied from
    the other; None if nothing shows that.

    A copy lacks what is new and keeps what its original has deleted, so each may well have
    versions that the other lacks. But nothing was ever between a version and its parent on their
    branch, nor another version in the place of the parent; and whoever left a branch had the newest
    version of it, which only a sweep of what is abandoned deletes.
    """
    for number in sorted({*listing.branches} & {*other_listing.branches}):
        file = names.branch_name(number)
        if catalog.store.get(file, MAX_RECORD) != other.store.get(file, MAX_RECORD):
            return f"another {file}"
    branch, its_branch = (max(_branch_numbers(each)) for each in (listing, other_listing))
    if branch < its_branch and _newest_step(listing, branch) > _newest_step(other_listing, branch):
        return f"branch {its_branch}"
    if branch > its_branch and _newest_step(other_listing, its_branch) > _newest_step(
        listing, its_branch
    ):
        return str(Version(_newest_step(other_listing, its_branch), its_branch))
    mine, its = set(listing.versions), set(other_listing.versions)
    for version in sorted(mine - its):
        stranger = _find_conflict(catalog, version, other, mine, its)
        if stranger is not None:
            return str(stranger)
    for version in sorted(its - mine):
        if _find_conflict(other, version, catalog, its, mine) is not None:
            return str(version)
    return None


def _find_conflict(
    catalog: Catalog,
    version: Version,
    other: Catalog,
    versions: set[Version],
    other_versions: set[Version],
) -> Version | None:
    """What the other run has between a version and its parent, on its branch, or as another
    snapshot in the parent's place. ``mine``, ``its``: the versions of this run and of the other."""
    parent = _read_parent(catalog, version)
    named = None if parent is None else names.parse_version(parent.version)
    if parent is None or named is None:
        return None
    steps = range(named.step + 1, version.step)
    between = [
        v for v in other_versions - versions if v.branch == version.branch and v.step in steps
    ]
    if between or named not in other_versions:
        return min(between, default=None)
    try:
        found = other.open(named)
    except (FormatError, NotFound):
        return None
    # the full copy of an incremental one, which has another digest, is known by its attempt
    copied = found.manifest.attempt == parent.digest[:12] or found.bases
    return None if copied or found.digest == parent.digest else named


def _branch_numbers(listing: Listing) -> set[int]:
    return {0, *listing.branches, *(v.branch for v in listing.versions)}


def _newest_step(listing: Listing, branch: int) -> int:
    """The newest step on a branch; -1 if there is none."""
    return max((v.step for v in listing.versions if v.branch == branch), default=-1)
