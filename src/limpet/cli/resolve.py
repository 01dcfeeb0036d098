"""Resolve an argument to a run or a snapshot, or report what is there instead."""

from __future__ import annotations

import os
from itertools import islice

import click

from limpet.cli.console import progress_bar
from limpet.errors import AlreadyExists, FormatError, NoSnapshot, NotFound
from limpet.format import names
from limpet.machine import full_path
from limpet.run.address import ADDRESS_FORMS, is_bucket, open_reader, resolve_address
from limpet.run.lineage import find_latest
from limpet.run.listing import Listing
from limpet.run.overview import RunSummary, summarize_runs
from limpet.run.run import Run
from limpet.snapshot.location import Location, Url, is_snapshot, locate, versions_in
from limpet.snapshot.reader import SnapshotReader, open_snapshot
from limpet.storage.local.store import LocalStore
from limpet.storage.open import check_url, open_store
from limpet.storage.store import Store, list_level
from limpet.text import format_count

_MAX_NAMES = 1000
"""The number of names in a folder of a server that are looked at: what S3 lists by one request."""

_FILES = (
    *(names.WRITER_LOCK, names.SAVE_REQUEST, names.RUN_ID),
    *(names.NOTICES, names.METRICS_LOG),
)
"""The files and folders of a run whose names are fixed."""


def resolve_snapshot(url: str) -> SnapshotReader:
    """Return the snapshot at a location or an address. ``NotFound`` says what is there instead."""
    if _is_address(url):
        resolve_run(resolve_address(url)[0])  # raises an error that states what is there instead
        return open_reader(url)
    url = _normalize_path(url)
    try:
        return open_snapshot(url)
    except NotFound as e:
        if "versions" in e.fields:
            raise
    raise _not_found_error(url, "snapshot")


def find_problem(snapshot: SnapshotReader) -> FormatError | None:
    """Return what is known of damage in a snapshot, without a read of its bytes, or None."""
    try:
        if names.parse_version(snapshot.location.folder) is None:
            snapshot.check_files()
        else:
            Run(snapshot.location.store).catalog.check(snapshot)
    except FormatError as e:
        return e
    return None


def resolve_newest(url: str, *, quiet: bool) -> SnapshotReader:
    """Do the same, but return the newest version of a run, and say so unless ``quiet``."""
    try:
        return resolve_snapshot(url)
    except NotFound as e:
        if "versions" not in e.fields:
            raise
    run, _ = resolve_run(url)
    newest = find_latest(run.catalog)
    if newest is None:
        raise _not_found_error(url, "snapshot")
    if not quiet:
        note = f"{url} is a run; this is its newest intact version, {newest.version}"
        click.echo(f"limpet: {note}", err=True)
    return newest


def resolve_run(url: str, *, require_version: bool = True) -> tuple[Run, Listing]:
    """Return the run at ``url`` and its listing. ``require_version``: may raise ``NoSnapshot``."""
    if not _is_bucket_address(url) and not (_version_name(url) and _is_snapshot(url)):
        run, has_files = Run(url), _has_run_files(url)
        if has_files or (not require_version and _has_partials(run.store)):
            listing = run.listing()
            if not require_version or listing.has_version():
                return run, listing
            raise NoSnapshot(
                f"{url} has no version",
                found=f"{format_count(len(listing.folders), 'folder')} without a manifest",
                todo="A save may be in progress. `limpet sweep` removes only files of such saves",
            )
    if _is_address(url):
        run_url, _ = resolve_address(url)
        resolve_run(run_url, require_version=require_version)  # raises an error if there is no run
        raise NotFound(f"{url} is one version, not a run", todo=f"Use the run: {run_url}")
    if _is_snapshot(url):
        raise NotFound(
            f"{url} is one snapshot, not a run",
            todo=f"Use the run that contains it: {_parent(url)}"
            if _version_name(url)
            else f"Its name is not that of a version. To show it: limpet show {url}",
        )
    raise _not_found_error(url, "run")


def resolve_runs(
    url: str, *, quiet: bool, require_version: bool = True
) -> tuple[Run, Listing] | list[RunSummary]:
    """Return the run at ``url``, or else the runs that are directly in that folder, with a progress
    bar unless ``quiet``. Raises ``NotFound`` and ``NoSnapshot``."""
    try:
        return resolve_run(url, require_version=require_version)
    except (NotFound, NoSnapshot):
        if _is_address(url):
            raise
        store = open_store(url)
        with progress_bar("reading runs", None, quiet=quiet, unit="runs") as advance:
            if summaries := summarize_runs(store, advance=advance):
                return summaries
        raise


def split_version(url: str) -> tuple[str, str] | None:
    """Split an address or the folder of a version, which need not exist, into the run and what
    follows ``@``. Anything else, such as a run in a folder with the name of a version, is None."""
    if _is_address(url):
        run, version = resolve_address(url)
        return run, version or ""
    name = _version_name(url)
    if name is None or (not _is_snapshot(url) and _has_run_files(url)):
        return None
    return _parent(url), f"{name.step}.{name.branch}"


def resolve_run_or_snapshot(url: str) -> tuple[Run, Listing] | SnapshotReader:
    """Return the run or the snapshot at ``url``: the run, if both are there."""
    is_run = not _is_address(url) and (
        not _is_snapshot(url) or versions_in(locate(_normalize_path(url)))
    )
    return resolve_run(url) if is_run else resolve_snapshot(url)


def check_version_name(snapshot: SnapshotReader, location: Location) -> None:
    """Raise ``AlreadyExists`` if a copy would have the name of another version, or an address."""
    refuse_address(location.url)
    manifest = snapshot.manifest
    version = names.parse_version(location.folder.rpartition("/")[2])
    if version is not None and (version.step, version.branch) != (manifest.step, manifest.branch):
        raise AlreadyExists(
            f"{snapshot.url} cannot become {version}",
            expected="the snapshot's own step and branch, or a name that is not a version",
            found=f"step {manifest.step}, branch {manifest.branch}",
        )


def check_run_target(run: Run) -> None:
    """Raise ``AlreadyExists`` if the location is a snapshot, or has the name of a version."""
    refuse_address(run.url)
    if _version_name(run.url) or _is_snapshot(run.store):
        raise AlreadyExists(
            f"{run.url} is the location of a snapshot, not of a run; nothing was changed",
            todo="Give a folder for the whole run",
        )


def refuse_address(url: str) -> None:
    """Raise ``AlreadyExists`` for a location to write to such as ``RUN@120``, if ``RUN`` is a run
    and nothing is at the literal location: a folder of that name would hide the version."""
    run, version = resolve_address(url)
    if version is not None and _is_address(url) and versions_in(locate(run)) and not _names_in(url):
        raise AlreadyExists(
            f"{url} is the address of a version, not of a folder; nothing was changed",
            todo=f"Give the run, {run}, or a folder in it: {os.path.join(run, 'version_N')}",
        )


def _is_address(url: str) -> bool:
    """Return True if ``url`` is an address within a run, and no existing path has that name."""
    if _is_bucket_address(url):
        return True
    if resolve_address(url)[1] is None or _is_snapshot(url):
        return False
    path = _local_path(url)
    return _names_in(url) is None if path is None else not os.path.lexists(path)


def _is_bucket_address(url: str) -> bool:
    run, version = resolve_address(url)
    return version is not None and is_bucket(run)


def _version_name(url: str) -> names.Version | None:
    return names.parse_version(os.path.basename(_normalize_path(url).rstrip("/")))


def _parent(url: str) -> str:
    return _normalize_path(url).rstrip("/").rpartition("/")[0] or "."


def _is_snapshot(url: Url) -> bool:
    """Return True if there is a manifest, damaged or not."""
    return is_snapshot(Location(open_store(url), ""))


def _normalize_path(url: str) -> str:
    """Return a path whose last level is a name, so that it has a parent folder."""
    is_named = "://" in url or os.path.basename(url.rstrip("/")) not in ("", ".", "..")
    return url if is_named or not url else full_path(check_url(url))


def _local_path(url: Url) -> str | None:
    """Return the path of a location in a local store; None for other stores."""
    store = open_store(url)
    return store.url if isinstance(store, LocalStore) else None


def _names_in(url: Url) -> list[str] | None:
    """Return (the first) names directly in a folder, or None if there is no such folder."""
    path = _local_path(url)
    if path is not None:
        return sorted(os.listdir(path)) if os.path.isdir(path) else None
    entries = list_level(open_store(url), "")
    return sorted(entry.name for entry in islice(entries, _MAX_NAMES)) or None


def _has_run_files(url: Url) -> bool:
    """Return True if a file or folder of a run is directly in a folder."""
    found = _names_in(url) or []
    if len(found) >= _MAX_NAMES and _local_path(url) is None:
        store = open_store(url)
        for prefix in ("version_", "branch-", "pin-", "spread-", *_FILES):
            found += (entry.name for entry in islice(list_level(store, "", prefix), _MAX_NAMES))
    parsers = (names.parse_version, names.parse_branch, names.is_pin_name, names.parse_lasting_pin)
    tests = (_FILES.__contains__, names.is_spread_folder, names.is_restart_name, *parsers)
    return any(test(name) for name in found for test in tests)


def _has_partials(store: Store) -> bool:
    """Return True if there are unfinished uploads: in a local folder, directly in it, because what
    is below it may be a whole disk."""
    path = _local_path(store)
    if path is not None:
        return any(name.endswith(".partial") for name in _names_in(store) or ())
    return next(iter(store.partials("")), None) is not None


def _not_found_error(url: str, wanted: str) -> NotFound:
    """Return the error that states what is at ``url`` instead of a run or a snapshot."""
    place, inside = _local_path(url), _names_in(url)
    todo = "Check the path"
    if wanted == "snapshot":
        todo = f"{todo}. {ADDRESS_FORMS}"
    if inside is None:
        found = "a file" if place is not None and os.path.lexists(place) else "nothing"
    elif any(names.parse_attempt(name) is not None for name in inside):
        found, todo = "files of a save that was never committed", "Use another version"
    elif inside:
        found = f"a folder with {', '.join(inside[:3])}{' ...' if len(inside) > 3 else ''}"
    else:
        found = "an empty folder"
    return NotFound(
        f"There is no {wanted} at {_normalize_path(url)}",
        expected="a folder of versions" if wanted == "run" else f"a folder with {names.MANIFEST}",
        found=found,
        todo=todo,
        key=url,
    )
