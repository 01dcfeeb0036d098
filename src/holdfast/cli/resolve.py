"""Resolve an argument to a run or a snapshot, or report what is there instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.engine.snapshot.location import (
    Location,
    Url,
    is_snapshot,
    locate,
    path_advice,
    suggest_similar_path,
    versions_in,
)
from holdfast.engine.snapshot.snapshot import Snapshot, open_snapshot
from holdfast.engine.snapshot.spread import unspread
from holdfast.errors import AlreadyExists, NoSnapshot, NotFound
from holdfast.format import names
from holdfast.format.names import split_address
from holdfast.run.address import ADDRESS_FORMS, open_version
from holdfast.run.listing import Listing
from holdfast.run.run import Run
from holdfast.storage.local.store import LocalStore
from holdfast.storage.open import open_store
from holdfast.storage.store import Store


def resolve_snapshot(url: str) -> Snapshot:
    """Return the snapshot at ``url``, which may be ``RUN@120``, ``RUN@120.1``, or ``RUN@latest``.

    Raises ``NotFound``, which states what is there instead.
    """
    if _is_address(url):
        resolve_run(split_address(url)[0])  # raises an error that states what is there instead
        return open_version(url)
    url = _normalize_path(url)
    try:
        return open_snapshot(url)
    except NotFound as e:
        if "versions" in e.fields:
            raise
    raise _not_found_error(url, "snapshot")


def resolve_run(url: str, *, require_version: bool = True) -> tuple[Run, Listing]:
    """Return the run at ``url`` and its listing.

    Raises ``NotFound`` if there is no run, and ``NoSnapshot`` if ``require_version`` is True and
    the run has no version.
    """
    if _may_be_run(url) and not (_has_version_name(url) and _is_snapshot(url)):
        run = Run(url)
        listing = run.listing()
        has_files = bool(listing.folders or listing.branches or listing.process_pins)
        has_files = has_files or bool(run.spread_folders())
        if listing.versions or (
            not require_version
            and (has_files or next(iter(run.store.partials("")), None) is not None)
        ):
            return run, listing
        if has_files:
            raise NoSnapshot(
                f"{url} has no version",
                found=format_count(len(listing.folders), "uncommitted save"),
                todo="A save may be in progress; `holdfast sweep` removes leftover files",
            )
    if _is_address(url):
        run_url, _ = split_address(url)
        resolve_run(run_url, require_version=require_version)  # raises an error if there is no run
        raise NotFound(f"{url} is one version, not a run", todo=f"Use the run: {run_url}")
    if _is_snapshot(url):
        parent = _normalize_path(url).rstrip("/").rpartition("/")[0]
        raise NotFound(
            f"{url} is one snapshot, not a run",
            todo=f"Use the run that contains it: {parent or '.'}",
        )
    raise _not_found_error(url, "run")


def resolve_run_or_snapshot(url: str) -> tuple[Run, Listing] | Snapshot:
    """Return the run or the snapshot at ``url``.

    If both are there, return the run; ``stray_snapshot_warning`` then warns about the snapshot.
    Raises as ``resolve_run`` and ``resolve_snapshot`` do.
    """
    is_run = not _is_address(url) and (
        not _is_snapshot(url) or versions_in(locate(_normalize_path(url)))
    )
    return resolve_run(url) if is_run else resolve_snapshot(url)


def check_version_name(snapshot: Snapshot, location: Location) -> None:
    """Check that a copy of the snapshot may have the name of the location.

    Raises ``AlreadyExists`` if it is the name of another version.
    """
    manifest = snapshot.manifest
    version = names.parse_version(location.folder.rpartition("/")[2])
    if version is not None and (version.step, version.branch) != (manifest.step, manifest.branch):
        raise AlreadyExists(
            f"{snapshot.url} cannot become {version}",
            expected="the snapshot's own step and branch, or a name that is not a version",
            found=f"step {manifest.step}, branch {manifest.branch}",
        )


def check_run_target(run: Run) -> None:
    """Check that a run may be written to ``run``.

    Raises ``AlreadyExists`` if the location is a snapshot, or has the name of a version.
    """
    if _has_version_name(run.url) or _is_snapshot(run.store):
        raise AlreadyExists(
            f"{run.url} is the location of a snapshot, not of a run; nothing was changed",
            todo="Give a folder for the whole run",
        )


def stray_snapshot_warning(run: Run) -> str | None:
    """Return a warning if a snapshot lies directly in the folder of the run, else None.

    ``save`` refuses to write into the folder of a run, but the snapshot may have been there first.
    """
    if not _is_snapshot(run.store):
        return None
    return (
        f"{run.url} is a run, but its folder also contains a snapshot that is not a version. This"
        f" command ignores that snapshot. If you do not need it, delete {names.MANIFEST} in the"
        " folder, then the shard-* files there"
    )


def _is_address(url: str) -> bool:
    """Return True if ``url`` is an address within a run; an existing path of that name takes
    precedence."""
    if split_address(url)[1] is None or _is_snapshot(url):
        return False
    path = _local_path(url)
    return path is None or not os.path.lexists(path)


def resolve_run_allow_empty(url: str) -> Run:
    """Return the run at ``url``, even if its training has not saved anything yet.

    If there is no run yet, the folder must exist and contain nothing except files of a run.
    Otherwise raises as ``resolve_run`` does.
    """
    try:
        return resolve_run(url, require_version=False)[0]
    except NotFound:
        path = _local_path(url)
        if (
            path is None
            or not os.path.isdir(path)
            or not all(map(_is_run_member, os.listdir(path)))
        ):
            raise
        return Run(url)


def _has_version_name(url: str) -> bool:
    return names.parse_version(os.path.basename(_normalize_path(url).rstrip("/"))) is not None


def _is_snapshot(url: Url) -> bool:
    """Return True if there is a manifest, damaged or not."""
    return is_snapshot(Location(open_store(url), ""))


def _normalize_path(url: str) -> str:
    """Return a path whose last level is a name, so that it has a parent folder."""
    if "://" not in url and os.path.basename(url.rstrip("/")) in ("", ".", ".."):
        return os.path.abspath(url) if url else url
    return url


def _local_path(url: Url) -> str | None:
    """Return the path of a location in a local store; None for other stores."""
    store = unspread(open_store(url))
    return store.url if isinstance(store, LocalStore) else None


def _may_be_run(url: str) -> bool:
    """Return False for a local folder that has no member of a run directly in it.

    Listing such a folder as a run would walk everything below it, which may be a whole disk.
    """
    path = _local_path(url)
    return path is None or (os.path.isdir(path) and any(map(_is_run_member, os.listdir(path))))


def _is_run_member(name: str) -> bool:
    parsers = (
        names.parse_version,
        names.parse_branch,
        names.parse_pin,
        names.parse_notice,
        names.parse_lasting_pin,
    )
    known = name in (names.WRITER_LOCK, names.SAVE_REQUEST, names.SPREAD)
    known = known or name.endswith(".partial") or names.is_spread_folder(name)
    return known or any(parse(name) is not None for parse in parsers)


def _not_found_error(url: str, wanted: str) -> NotFound:
    """Return the error that states what is at ``url`` instead of a run or a snapshot."""
    path, found, todo = _local_path(url), "nothing", ADDRESS_FORMS if wanted == "snapshot" else None
    if path is not None:
        found, todo = _describe_path(path, wanted)
    return NotFound(
        f"There is no {wanted} at {_normalize_path(url)}",
        expected="a folder of versions" if wanted == "run" else f"a folder with {names.MANIFEST}",
        found=found,
        todo=todo,
        key=url,
    )


def _describe_path(path: str, wanted: str) -> tuple[str, str | None]:
    """Return a description of what is at a path, and advice."""
    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.lexists(path):
        if not os.path.isdir(folder):
            return f"nothing, and {folder} is not a folder", "Check the path"
        versions = sorted(v for v in map(names.parse_version, os.listdir(folder)) if v is not None)
        if wanted == "snapshot" and versions:
            found = f"{format_count(len(versions), 'version')} in the same folder"
            return found, f"The newest is {versions[-1]}. {ADDRESS_FORMS}"
        run_path = path.rpartition("@")[0]
        if wanted == "snapshot" and os.path.isdir(run_path):
            return "nothing", ADDRESS_FORMS
        similar = run_path if os.path.isdir(run_path) else suggest_similar_path(path)
        return "nothing", path_advice(similar)
    if not os.path.isdir(path):
        if name == names.MANIFEST or names.parse_attempt(name) is not None:
            return "a file of a snapshot", f"Use its folder: {os.path.dirname(path) or '.'}"
        return "a file", "Give a folder"
    inside = sorted(os.listdir(path))
    if not inside:
        return "an empty folder", None
    if any(names.parse_attempt(n) is not None for n in inside):
        return "files of a save that was never committed", "Use another version"
    runs = [n for n in inside if os.path.isdir(os.path.join(path, n)) and _holds_run(path, n)]
    if runs:
        examples = ", ".join(os.path.join(path, n) for n in runs[:3])
        return f"{format_count(len(runs), 'run')} in it", f"Use one of them: {examples}"
    return f"a folder with {', '.join(inside[:3])}{' ...' if len(inside) > 3 else ''}", None


def _holds_run(path: str, name: str) -> bool:
    try:
        return any(names.parse_version(n) for n in os.listdir(os.path.join(path, name)))
    except OSError:
        return False  # the result is only a suggestion


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Format a count and its noun: ``1 version``, ``2 versions``; ``1 leaf``, ``2 leaves``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


@contextmanager
def remove_folder_if_empty(store: Store) -> Iterator[None]:
    """On exit, remove the folder of a local store if it is empty and did not exist on entry."""
    path = _local_path(store)
    is_new = path is not None and not os.path.lexists(path)
    try:
        yield
    finally:
        if is_new and path is not None:
            with suppress(OSError):
                os.rmdir(path)
