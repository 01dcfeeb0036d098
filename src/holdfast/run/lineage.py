"""The line: the versions of a run that count, from the first to the newest, across branches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

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
from holdfast.run.catalog import Listing

if TYPE_CHECKING:
    from holdfast.run.run import Run

_LOOKS = 10
"""Most looks for two that agree; a training that saves faster than that is looked at as it is."""


def line(run: Run, listing: Listing, number: int) -> list[Version]:
    """The versions of a branch, and before them those of the branches that it came from, up to
    where it left each; oldest first. Raises ``NotFound`` if there is no such branch."""
    versions = listing.versions
    known = _branches(listing)
    if number not in known:
        raise NotFound(
            f"{run.url} has no branch {number}",
            expected=f"one of {', '.join(map(str, sorted(known)))}",
            found=number,
            key=names.branch_name(number),
            store=run.url,
        )
    found: list[Version] = []
    limit = None
    while True:
        own = [v for v in versions if v.branch == number and (limit is None or v.step <= limit)]
        found = own + found
        left = None if number == 0 else left_from(run, number, versions)
        if left is None:
            return found
        number, limit = left.branch, left.step


def newest_branch(run: Run, listing: Listing) -> int:
    """The highest number that has versions, or of which is known where it left from."""
    versions = listing.versions
    held = {v.branch for v in versions}
    for number in sorted({*listing.branches, *held}, reverse=True):
        if number == 0 or number in held or left_from(run, number, versions) is not None:
            return number
    return 0


def unknown_origins(run: Run, listing: Listing) -> list[int]:
    """The branches with versions of which cannot be told where they left from, so that what came
    before them cannot be told from what was abandoned."""
    versions = listing.versions
    held = {v.branch for v in versions} - {0}
    return sorted(n for n in held if left_from(run, n, versions) is None)


def left_from(run: Run, number: int, versions: Iterable[Version]) -> Version | None:
    """The version that a branch left from: by its record, or, should that be damaged, by the
    parent of its first version. None if neither tells: the line then begins with the branch."""
    file = names.branch_name(number)
    try:
        version = names.parse_version(run.read_branch(number).from_version)
    except FormatTooNew:
        raise
    except (FormatError, NotFound) as e:
        events.emit("skipped", version=file, error=e)
        version = _first_parent(run, number, versions)
    if version is not None and version.branch >= number:
        raise ManifestInvalid(
            f"{file} of {run.url} breaks the format",
            expected=f"a branch that left from one before {number}",
            found=str(version),
            file=file,
        )
    return version


def _first_parent(run: Run, number: int, versions: Iterable[Version]) -> Version | None:
    for version in sorted(v for v in versions if v.branch == number):
        parent = _parent(run, version)
        found = None if parent is None else names.parse_version(parent.version)
        if found is not None and found.branch < number:
            return found
    return None


def _parent(run: Run, version: Version) -> Parent | None:
    """What was saved or resumed just before; None if there is nothing such, or that is not told."""
    try:
        return run.open(version).manifest.parent
    except (FormatError, NotFound):
        return None


# -- the newest ----------------------------------------------------------------------------------


def newest(
    run: Run, use: Callable[[Snapshot], object], at: int | None, branch: int | None
) -> tuple[Snapshot | None, list[tuple[Version, HoldfastError]]]:
    """See ``Run.newest``."""
    skipped: dict[Version, HoldfastError] = {}
    deleted: dict[Version, HoldfastError] = {}
    while True:
        listing = settled(run)
        versions = run.line(listing, branch)
        for version in reversed([v for v in versions if at is None or v.step == at]):
            try:
                snapshot = run.open(version)
                use(snapshot)
            except (FormatTooNew, Denied, Unavailable):
                raise
            except (FormatError, StoreError) as e:
                if isinstance(e, NotFound) and version not in run.listing().versions:
                    deleted[version] = e
                    break  # it is no damage, and its writer has saved a newer one by then
                events.emit("skipped", version=str(version), error=e)
                skipped[version] = e
            else:
                return snapshot, list(skipped.items())
        else:
            if changed(run, listing):
                continue
            failed = {**deleted, **skipped}
            if failed:
                raise _none_left(run.url, at, failed) from next(iter(failed.values()))
            if at is not None or listing.versions:
                raise _none(run.url, at, versions, listing.versions)
            return None, []


def settled(run: Run) -> Listing:
    """A look that shows the same versions as the one before. No list is of one moment: of a version
    that is committed and an older one that is deleted meanwhile it may show neither."""
    listing = run.listing()
    for _ in range(_LOOKS):
        before, listing = listing, run.listing()
        if before.versions == listing.versions:
            break
    return listing


def changed(run: Run, listing: Listing) -> bool:
    """Whether a version of that look is gone by now, or there was none and now is: what was looked
    for in vain may have been there all the time."""
    now = run.listing().versions
    return not set(listing.versions) <= set(now) or (not listing.versions and bool(now))


def _none_left(url: str, at: int | None, failed: Mapping[Version, HoldfastError]) -> NoSnapshot:
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


def _none(url: str, at: int | None, line: list[Version], versions: list[Version]) -> NoSnapshot:
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
    found, todo = instead(at, line, versions)
    return NoSnapshot(
        f"{url} has no {wanted} on the line that is asked for",
        expected=f"a {wanted}",
        found=found,
        todo=todo,
        skipped=(),
    )


def instead(
    step: int | None, line: Sequence[Version], versions: Sequence[Version]
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
    near = sorted(line, key=lambda v: abs(v.step - step))[:3]
    return (
        ", ".join(map(str, sorted(near))) or "none",
        "`holdfast ls RUN` shows all versions, those on other branches too",
    )


# -- two runs ------------------------------------------------------------------------------------


def forked(one: Run, ours: Listing, other: Run, theirs: Listing) -> str | None:
    """What ``other`` has that ``one`` never had, if both have gone on since one was copied from
    the other; None if nothing shows that.

    A copy lacks what is new and keeps what its original has deleted, so each may well have
    versions that the other lacks. But nothing was ever between a version and its parent on their
    branch, nor another version in the place of the parent; and whoever left a branch had the newest
    version of it, which only a sweep of what is abandoned deletes.
    """
    for number in sorted({*ours.branches} & {*theirs.branches}):
        file = names.branch_name(number)
        if one.store.get(file, MAX_RECORD) != other.store.get(file, MAX_RECORD):
            return f"another {file}"
    branch, its_branch = (max(_branches(each)) for each in (ours, theirs))
    if branch < its_branch and _last(ours, branch) > _last(theirs, branch):
        return f"branch {its_branch}"
    if branch > its_branch and _last(theirs, its_branch) > _last(ours, its_branch):
        return str(Version(_last(theirs, its_branch), its_branch))
    mine, its = set(ours.versions), set(theirs.versions)
    for version in sorted(mine - its):
        stranger = _stranger(one, version, other, mine, its)
        if stranger is not None:
            return str(stranger)
    for version in sorted(its - mine):
        if _stranger(other, version, one, its, mine) is not None:
            return str(version)
    return None


def _stranger(
    run: Run, version: Version, other: Run, mine: set[Version], its: set[Version]
) -> Version | None:
    """What the other run has between a version and its parent, on its branch, or as another
    snapshot in the parent's place. ``mine``, ``its``: the versions of this run and of the other."""
    parent = _parent(run, version)
    named = None if parent is None else names.parse_version(parent.version)
    if parent is None or named is None:
        return None
    steps = range(named.step + 1, version.step)
    between = [v for v in its - mine if v.branch == version.branch and v.step in steps]
    if between or named not in its:
        return min(between, default=None)
    try:
        found = other.open(named)
    except (FormatError, NotFound):
        return None
    # the full copy of an incremental one, which has another digest, is known by its attempt
    copied = found.manifest.attempt == parent.digest[:12] or found.bases
    return None if copied or found.digest == parent.digest else named


def _branches(listing: Listing) -> set[int]:
    return {0, *listing.branches, *(v.branch for v in listing.versions)}


def _last(listing: Listing, branch: int) -> int:
    """The newest step on a branch; -1 if there is none."""
    return max((v.step for v in listing.versions if v.branch == branch), default=-1)
