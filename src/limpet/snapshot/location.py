"""The location of a snapshot: a store and a folder in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from limpet.deadline import Deadline
from limpet.errors import BrokenLink, ManifestInvalid, NotFound, StoreError
from limpet.format.names import MANIFEST, Version, parse_version, spread_path
from limpet.machine import full_path
from limpet.storage.local.store import LocalStore
from limpet.storage.open import check_url, open_store
from limpet.storage.store import Store, list_level, within
from limpet.text import format_count

Url = str | os.PathLike[str] | Store


@dataclass(frozen=True, slots=True)
class Location:
    """A snapshot's folder in a store. The folder is ``""`` if the store's root is the snapshot."""

    store: Store
    folder: str
    deadline: Deadline | None = None  # by which the calls of the store end
    unlimited: Store | None = None  # the store without it
    # Each host has a store of its own here, such as its memory, which other hosts do not see. All
    # files are then in the snapshot's folder, wherever the manifest has them in a shared store.
    is_per_host: bool = False
    # the folders over which the shards of a save here are spread; None: as the store says
    spread: int | None = None

    def limit(
        self, operation: str, timeout: float | None, deadline: Deadline | None = None
    ) -> Location:
        """Return the location for an operation ("save") of ``timeout`` seconds, or until a
        ``deadline``, or without a limit. Raises ``LimpetError`` unless the timeout is positive."""
        if deadline is None:
            if timeout is None:
                return self
            deadline = Deadline.after(timeout, f"the {operation} of {self.url}: {timeout} s")
        limited = within(self.store, deadline)
        return replace(self, store=limited, deadline=deadline, unlimited=self.store)

    def without_limit(self) -> Location:
        """Return the same location without the deadline."""
        if self.unlimited is None:
            return self
        return replace(self, store=self.unlimited, deadline=None, unlimited=None)

    def for_cleanup(self) -> Location:
        """Return the same location for the removal of what an operation has left, which gets
        ``cleanup_seconds`` after the deadline."""
        deadline, store = self.deadline, self.unlimited
        if deadline is None or store is None or deadline.seconds_left:
            return self
        cleanup = deadline.for_cleanup()
        if not cleanup.seconds_left:  # this rank may have waited for another one for longer
            cleanup = replace(cleanup, at=cleanup.clock() + cleanup.cleanup_seconds)
        return replace(self, store=within(store, cleanup), deadline=cleanup)

    def check_time(self) -> None:
        """Raise ``Unavailable`` once the deadline has passed."""
        if self.deadline is not None:
            self.deadline.check()

    def key(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name

    def shard_path(self, name: str) -> str:
        """Return the path, from the snapshot's folder, of a shard or an index that is saved here:
        its name, or the path to a folder over which the run spreads its files."""
        folder = self.folder.rpartition("/")[2]
        spread = self.store.traits.spread if self.spread is None else self.spread
        return spread_path(folder, name, spread) if spread and parse_version(folder) else name

    def file_key(self, path: str) -> str:
        """Return the key of a file whose path is relative to the snapshot's folder."""
        if self.is_per_host:
            path = path.rpartition("/")[2]
        return self.run_key(path[3:]) if path.startswith("../") else self.key(path)

    def run_key(self, name: str) -> str:
        """Return the key of a file in the run's folder, which contains the snapshot's folder."""
        return "/".join([*self.folder.split("/")[:-1], name])

    @property
    def name(self) -> str:
        """What all ranks call the snapshot: its URL, unless each host has another one."""
        return f"{self.folder} on each host" if self.is_per_host else self.url

    @property
    def url(self) -> str:
        return f"{self.store.url.rstrip('/')}/{self.folder}" if self.folder else self.store.url


def locate(url: Url) -> Location:
    """Return the location of one snapshot. The levels before its folder are the store's root, so
    that files of the run are accessible. Raises ``StoreError`` for a URL without a folder."""
    if not isinstance(url, str | os.PathLike):
        return Location(open_store(url), "")
    text = check_url(url)
    scheme, separator, path = text.rpartition("://")
    if scheme in ("", "file"):
        path = full_path(text) if not scheme else open_store(text).url  # decodes it
        scheme = separator = ""
        name = path.rpartition("/")[2]
        if parse_version(name) is None and os.path.islink(path):
            # "latest", with references to files next to its target, which is read only
            path = os.path.realpath(path) if os.path.isfile(f"{path}/{MANIFEST}") else path
    path = path.rstrip("/")  # not the whole text: of "s3://", "s3:" would remain, a local folder
    root, _, folder = path.rpartition("/")
    if scheme and not root:  # a whole bucket: the first level is a folder only in a local path
        return Location(open_store(f"{scheme}{separator}{path}"), "")
    if folder in ("", ".", ".."):
        raise StoreError(f"{text!r} is not the URL of a snapshot", expected="RUN/version_120")
    root = root if scheme else root or "/"
    return Location(open_store(f"{scheme}{separator}{root}"), folder)


def get_bounded(store: Store, key: str, limit: int) -> bytes:
    """Return an object that its format limits to ``limit`` bytes. Raises ``ManifestInvalid`` for a
    longer one: it is damaged."""
    try:
        return store.get(key, limit)
    except NotFound:
        raise
    except StoreError as e:
        length = 0
        with suppress(StoreError):
            length = store.stat(key).length
        if length <= limit:
            raise
        raise ManifestInvalid(
            f"{key} in {store.url} is longer than the format allows",
            expected=f"at most {limit} bytes",
            found=f"{length} bytes",
            file=key,
        ) from e


def versions_in(location: Location) -> list[Version]:
    """Return the versions whose folders are directly in a folder, oldest first. If there are any,
    it is a run. Only one level is listed: the subfolders may contain a whole disk."""
    if parse_version(location.folder.rpartition("/")[2]) is not None:
        return []
    versions: list[Version] = []
    for entry in list_level(location.store, location.folder, "version_"):
        version = None if entry.kind == "object" else parse_version(entry.name)
        if version is not None and is_snapshot(Location(location.store, location.key(entry.name))):
            versions.append(version)
    return sorted(versions)


def is_snapshot(location: Location) -> bool:
    """Return True if there is a manifest, which may be damaged."""
    try:
        with suppress(BrokenLink):
            location.store.stat(location.key(MANIFEST))
    except NotFound:
        return False
    return True


def describe_missing(location: Location) -> tuple[str, str]:
    """Return ``found`` and ``todo`` for the error that there is no manifest at a location."""
    url, found = location.url, "none"
    if isinstance(location.store, LocalStore) and not os.path.isdir(url):
        if not os.path.lexists(url):
            return "no such file or folder", "Check the path"
        found = "a file"
    return (
        found,
        "`limpet ls RUN` lists the versions of a run. A folder without a manifest is from a save"
        " that was never committed. To load a checkpoint of another library, import it first:"
        " limpet.import_checkpoint(PATH, SNAPSHOT)",
    )


def describe_run(versions: Sequence[Version]) -> str:
    """Describe a run that has these versions, for error messages."""
    return f"a run of {format_count(len(versions), 'version')}"
