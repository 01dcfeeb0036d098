"""Where a snapshot is: a store and a folder in it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import NotFound, StoreError
from holdfast.format.names import MANIFEST, Version, parse_version
from holdfast.storage.local import LocalStore
from holdfast.storage.open import expand_home, open_store
from holdfast.storage.store import Store

Url = str | os.PathLike[str] | Store


@dataclass(frozen=True, slots=True)
class Location:
    """A snapshot's folder within a store; ``""`` where the store's root is the snapshot."""

    store: Store
    folder: str

    def key(self, name: str) -> str:
        """The key of a file of the snapshot."""
        return f"{self.folder}/{name}" if self.folder else name

    def run_key(self, name: str) -> str:
        """The key of a file of the run, beside the snapshot's folder."""
        return "/".join([*self.folder.split("/")[:-1], name])

    @property
    def url(self) -> str:
        return f"{self.store.url.rstrip('/')}/{self.folder}" if self.folder else self.store.url


def locate(url: Url) -> Location:
    """The location of one snapshot. The last level of a URL is its folder, what is before it is
    the run's place, so that files beside the snapshot can be reached."""
    if not isinstance(url, str | os.PathLike):
        return Location(open_store(url), "")
    text = expand_home(os.fspath(url)).rstrip("/")
    scheme, mark, path = text.rpartition("://")
    root, _, folder = path.rpartition("/")
    if scheme == "memory" and not root:
        return Location(open_store(text), "")
    if folder in ("", ".", ".."):
        raise StoreError(f"{os.fspath(url)!r} names no snapshot", expected="RUN/version_120")
    if not scheme:
        root = root or ("/" if text.startswith("/") else ".")
    return Location(open_store(f"{scheme}{mark}{root}"), folder)


def versions_in(location: Location) -> list[Version]:
    """The versions that lie right in a place, oldest first: it is a run's folder if there are any.

    A place that is called like a version holds none. Of a local folder only that one is listed,
    since what lies below it may be a whole disk.
    """
    if parse_version(location.folder.rpartition("/")[2]) is not None:
        return []
    if isinstance(location.store, LocalStore):
        return _versions_in_folder(location.store, location)
    found = []
    for stat in location.store.list(location.folder):
        folder, _, name = stat.key.removeprefix(location.key("")).partition("/")
        version = parse_version(folder)
        if version is not None and name == MANIFEST:
            found.append(version)
    return sorted(found)


def _versions_in_folder(store: LocalStore, location: Location) -> list[Version]:
    path = os.path.dirname(store.path(location.key(MANIFEST)))
    try:
        with store.translate_errors("list", location.folder or "."):
            entries = store.fs.scandir(path)
    except NotFound:
        return []
    versions = [parse_version(name) for name, is_folder in entries if is_folder]
    return sorted(
        v
        for v in versions
        if v is not None and is_snapshot(Location(location.store, location.key(str(v))))
    )


def is_snapshot(location: Location) -> bool:
    """Whether there is a manifest, damaged or not."""
    try:
        location.store.stat(location.key(MANIFEST))
    except NotFound:
        return False
    return True


def suggest_similar_path(path: str) -> str | None:
    """What is beside a local path that is not there, and called almost like it."""
    folder, name = os.path.split(os.path.abspath(path))
    if os.path.lexists(path) or not os.path.isdir(folder):
        return None
    close = difflib.get_close_matches(name, sorted(os.listdir(folder)), n=1)
    return os.path.join(os.path.dirname(path), close[0]) if close else None


def describe_run(versions: Sequence[Version]) -> str:
    """What a place with these versions is, in words."""
    return f"a run of {len(versions):,} version{'' if len(versions) == 1 else 's'}"
