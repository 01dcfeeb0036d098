"""The line: the versions of a run that count, from the first to the newest, across branches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast import events
from holdfast.errors import FormatError, FormatTooNew, ManifestInvalid, NotFound
from holdfast.format import names
from holdfast.format.names import Version
from holdfast.known import Listing

if TYPE_CHECKING:
    from holdfast.run import Run


def line(run: Run, listing: Listing, number: int) -> list[Version]:
    """The versions of a branch, and before them those of the branches that it came from, up to
    where it left each; oldest first. Raises ``NotFound`` if there is no such branch."""
    versions = listing.versions
    known = {0, *listing.branches, *(v.branch for v in versions)}
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
        try:
            parent = run.open(version).manifest.parent
        except (FormatError, NotFound):
            continue
        found = names.parse_version(parent.version) if parent is not None else None
        if found is not None and found.branch < number:
            return found
    return None
