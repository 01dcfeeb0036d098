"""From what a person wrote to a run or a snapshot; if there is none, why, and what was meant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.engine.snapshot.location import (
    Location,
    Url,
    is_snapshot,
    locate,
    suggest_similar_path,
    versions_in,
)
from holdfast.engine.snapshot.snapshot import Snapshot, open_snapshot
from holdfast.errors import AlreadyExists, NoSnapshot, NotFound
from holdfast.format import names
from holdfast.format.names import split_address
from holdfast.run.address import ADDRESS_FORMS, open_version
from holdfast.run.catalog import Listing
from holdfast.run.run import Run
from holdfast.storage.local import LocalStore
from holdfast.storage.open import open_store
from holdfast.storage.store import Store


def resolve_snapshot(url: str) -> Snapshot:
    """The snapshot at ``url``, which may be ``RUN@120``, ``RUN@120.1`` or ``RUN@latest``. Raises
    ``NotFound`` with what is there instead."""
    if _is_address(url):
        resolve_run(split_address(url)[0])  # or says what is there instead
        return open_version(url)
    url = _normalize_path(url)
    try:
        return open_snapshot(url)
    except NotFound as e:
        if "versions" in e.fields:
            raise
    raise _not_found_error(url, "snapshot")


def resolve_run(url: str, *, require_version: bool = True) -> tuple[Run, Listing]:
    """The run at ``url`` and what it holds. Raises ``NotFound`` if it is none, ``NoSnapshot`` if
    ``committed`` and it has no version."""
    if _may_be_run(url) and not _is_version(url):
        run = Run(url)
        listing = run.listing()
        if listing.versions:
            return run, listing
        if listing.folders or listing.branches or listing.process_pins:
            if not require_version:
                return run, listing
            raise NoSnapshot(
                f"{url} has no version",
                found=f"{format_count(len(listing.folders), 'save')} that no manifest commits",
                todo="One may be under way; `holdfast sweep` removes what was left behind",
            )
        if not require_version and next(iter(run.store.partials("")), None) is not None:
            return run, listing
    if _is_address(url):
        place, _ = split_address(url)
        resolve_run(place, require_version=require_version)  # or says what is there instead
        raise NotFound(f"{url} is one version, not a run", todo=f"Name the run: {place}")
    if _is_snapshot(url):
        whole = _normalize_path(url)
        raise NotFound(
            f"{url} is one snapshot, not a run",
            todo=f"Name the run that holds it: {whole.rstrip('/').rpartition('/')[0] or '.'}",
        )
    raise _not_found_error(url, "run")


def resolve_run_or_snapshot(url: str) -> tuple[Run, Listing] | Snapshot:
    """Whichever of the two is at ``url``; a run if it is both (see ``stray``). Raises as
    ``run_at`` does."""
    if _is_address(url) or (_is_snapshot(url) and not versions_in(locate(_normalize_path(url)))):
        return resolve_snapshot(url)
    return resolve_run(url)


def check_run_target(run: Run) -> None:
    """Raise ``AlreadyExists`` if a run is to be copied to where a snapshot is, or where a version
    of the run above would be."""
    if _has_version_name(run.url) or _is_snapshot(run.store):
        raise AlreadyExists(
            f"{run.url} is the place of a snapshot, not of a run; nothing was changed",
            todo="Name a folder for the whole run",
        )


def stray_snapshot_warning(run: Run) -> str | None:
    """What to say of a snapshot right in the run's folder, beside the versions; None if there is
    none. ``save`` refuses a run's folder, but the snapshot may have been there first."""
    if not _is_snapshot(run.store):
        return None
    return (
        f"{run.url} is a run, and a snapshot of its own besides: that one is no version and is not"
        f" looked at here. Delete {names.MANIFEST} in it, then its shard-* files, unless it is"
        " needed"
    )


def _is_address(url: str) -> bool:
    """Whether it is an address within a run; what exists under that very name goes first."""
    if split_address(url)[1] is None or _is_snapshot(url):
        return False
    path = _local_path(url)
    return path is None or not os.path.lexists(path)


def resolve_run_allow_empty(url: str) -> Run:
    """As ``run_at``, but the folder of a training that has not saved yet will do: there is nothing
    in it, or nothing that is not of a run."""
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


def _is_version(url: str) -> bool:
    """Whether it is a version of the run above it, whatever else lies in it."""
    return _has_version_name(url) and _is_snapshot(url)


def _has_version_name(url: str) -> bool:
    return names.parse_version(os.path.basename(_normalize_path(url).rstrip("/"))) is not None


def _is_snapshot(url: Url) -> bool:
    """Whether there is a manifest, damaged or not."""
    return is_snapshot(Location(open_store(url), ""))


def _normalize_path(url: str) -> str:
    """A path whose last level is a name, so that the level above it can be reached."""
    if "://" not in url and os.path.basename(url.rstrip("/")) in ("", ".", ".."):
        return os.path.abspath(url) if url else url
    return url


def _local_path(url: str) -> str | None:
    """The path of a local place; None for other stores."""
    store = open_store(url)
    return store.url if isinstance(store, LocalStore) else None


def _may_be_run(url: str) -> bool:
    """False for a local folder with nothing of a run right in it: the store would look through
    all that lies below, which may be a whole disk."""
    path = _local_path(url)
    if path is None:
        return True
    return os.path.isdir(path) and any(map(_is_run_member, os.listdir(path)))


def _is_run_member(name: str) -> bool:
    parsers = (names.parse_version, names.parse_branch, names.parse_pin, names.parse_lasting_pin)
    known = name in (names.WRITER_LOCK, names.SAVE_REQUEST) or name.endswith(".partial")
    return known or any(parse(name) is not None for parse in parsers)


def _not_found_error(url: str, wanted: str) -> NotFound:
    """The error that says what is at ``url``, where no run and no snapshot is."""
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
    """What is at a path, and what to do."""
    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.lexists(path):
        if not os.path.isdir(folder):
            return f"that {folder} is no folder either", "Check the path"
        beside = sorted(os.listdir(folder))
        versions = sorted(v for v in map(names.parse_version, beside) if v is not None)
        if wanted == "snapshot" and versions:
            found = f"{format_count(len(versions), 'version')} beside it"
            return found, f"The newest is {versions[-1]}. {ADDRESS_FORMS}"
        place = path.rpartition("@")[0]
        if wanted == "snapshot" and os.path.isdir(place):
            return "nothing", ADDRESS_FORMS
        close = place if os.path.isdir(place) else suggest_similar_path(path)
        return "nothing", "Check the path" if close is None else f"Perhaps {close} is meant"
    if not os.path.isdir(path):
        if name == names.MANIFEST or names.parse_attempt(name) is not None:
            return "a file of a snapshot", f"Name its folder: {os.path.dirname(path) or '.'}"
        return "a file", "Name a folder"
    inside = sorted(os.listdir(path))
    if not inside:
        return "an empty folder", None
    if any(names.parse_attempt(n) is not None for n in inside):
        return "files of a save that was never committed", "Take another version"
    runs = [n for n in inside if os.path.isdir(os.path.join(path, n)) and _holds_run(path, n)]
    if runs:
        several = ", ".join(os.path.join(path, n) for n in runs[:3])
        return f"{format_count(len(runs), 'run')} below it", f"Name one: {several}"
    return f"a folder with {', '.join(inside[:3])}{' ...' if len(inside) > 3 else ''}", None


def _holds_run(path: str, name: str) -> bool:
    try:
        return any(names.parse_version(n) for n in os.listdir(os.path.join(path, name)))
    except OSError:
        return False  # only a suggestion is lost


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 version``, ``2 versions``; ``1 leaf``, ``2 leaves``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


@contextmanager
def remove_folder_if_empty(store: Store) -> Iterator[None]:
    """Takes the folder of a store away again if it was not there before, and stays empty."""
    path = store.url if isinstance(store, LocalStore) else None
    new = path is not None and not os.path.lexists(path)
    try:
        yield
    finally:
        if new and path is not None:
            with suppress(OSError):
                os.rmdir(path)
