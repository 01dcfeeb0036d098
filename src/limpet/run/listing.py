"""What a listing of a run shows: names in its folder, and files in the folder of a version."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from limpet.errors import BrokenLink, LimpetError, NotFound
from limpet.format.names import Version, is_spreadable, parse_version
from limpet.snapshot.spread import SpreadStore
from limpet.storage.store import Entry, Stat, list_level
from limpet.text import to_repr

STEP, BRANCH = "a step, a whole number", "a branch, a whole number"
"""What ``to_int`` expects."""


@dataclass(frozen=True)
class Listing:
    """The names in the folder of a run, at one time.

    ``folders`` holds the versions that have a folder, oldest first. Such a version exists only if
    ``exists`` is True: its folder has a manifest. ``linked`` holds those whose folder is a symbolic
    link. ``branches`` holds the numbers of the recorded branches in ascending order,
    ``process_pins`` the keys of the pins of processes, ``lasting_pins`` the versions that have a
    lasting pin, and ``leases`` the keys of the leases of evaluations.
    """

    folders: Sequence[Version]
    linked: frozenset[Version]
    branches: Sequence[int]
    process_pins: Sequence[str]
    lasting_pins: frozenset[Version]
    leases: Sequence[str]
    exists: Callable[[Version], bool]

    @cached_property
    def versions(self) -> list[Version]:
        """The versions that exist, oldest first. The store is asked about each one, once."""
        return [v for v in self.folders if self.exists(v)]

    def has_version(self) -> bool:
        """Return True if there is a version. The store is asked about the newest ones, until one
        exists: ``versions`` costs a request for each version."""
        return any(map(self.exists, reversed(self.folders)))


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """The objects directly in the folder of a version, and which of the names are symbolic links.

    A link that leads to nothing is in ``links`` only. If the folder itself is a link, ``links``
    holds its name.
    """

    stats: Sequence[Stat] = ()
    links: Sequence[str] = ()


def list_entries(store: SpreadStore, version: Version, prefix: str = "") -> Iterable[Entry]:
    """Return what is directly in the folder of a version and has a name with ``prefix``.

    Shards and indexes that are spread are only included if the store has links, so that the links
    among them are found. Elsewhere, each folder over which they are spread costs a request.
    """
    try:
        if hasattr(store, "link_target"):
            return list_level(store, str(version), prefix)
        return store.list_unspread(str(version), prefix)
    except BrokenLink:
        return ()


def list_files(
    store: SpreadStore, version: Version, listing: Listing, named: Mapping[str, int]
) -> FolderFiles:
    """List the folder of a version. ``named``: see ``VersionRecord.files``."""
    stats, entries = dict[str, Stat](), [*list_entries(store, version)]
    if named and store.spread is not None:
        own = (key for key in named if key.startswith(f"{version}/"))
        stats = {key: Stat(key, named[key], 0.0) for key in own}
    for entry in entries:
        if entry.kind != "folder":
            key = f"{version}/{entry.name}"
            with suppress(NotFound, BrokenLink):  # deleted meanwhile, or a broken link
                stats[key] = entry.stat or store.stat(key)
    links = find_links(store, version, listing, entries)
    return FolderFiles(sorted(stats.values(), key=attrgetter("key")), links)


def list_all_files(store: SpreadStore, listing: Listing) -> dict[Version, FolderFiles]:
    """List the folders of all versions, and the folders over which the run spreads its files.

    A version has no folder of its own if its save ended before it wrote the manifest.
    """
    spread: dict[Version, dict[str, Stat]] = {}
    for stat in store.list_spread():
        version = parse_version(stat.key.partition("/")[0])
        if version is not None and is_spreadable(stat.key):
            spread.setdefault(version, {})[stat.key] = stat
    found = {}
    for version in sorted({*listing.folders, *spread}):
        folder = list_files(store, version, listing, {})
        stats = {**spread.get(version, {}), **{stat.key: stat for stat in folder.stats}}
        found[version] = FolderFiles(sorted(stats.values(), key=attrgetter("key")), folder.links)
    return found


def find_links(
    store: SpreadStore,
    version: Version,
    listing: Listing,
    entries: Iterable[Entry] | None = None,
) -> list[str]:
    """Return the keys of the symbolic links that a version consists of.

    ``entries``: those of its folder, if they are known.
    """
    if not hasattr(store, "link_target"):  # most stores have no links
        return []
    entries = list_entries(store, version) if entries is None else entries
    inner = (f"{version}/{e.name}" for e in entries if e.kind == "link")
    outer = [str(version)] if version in listing.linked else []
    return [*inner, *outer, *_find_linked_folders(store, version)]


def _find_linked_folders(store: SpreadStore, version: Version) -> list[str]:
    """Return the keys of the folders with files of a version that are spread and that are links."""
    if (spread := store.spread) is None:
        return []
    found = [e.name for e in list_level(store.unspread, "", "spread-") if e.kind == "link"]
    for folder in spread.folders:
        for entry in list_level(store.unspread, folder, str(version)):
            if entry.kind == "link" and entry.name == str(version):
                found.append(f"{folder}/{version}")
    return found


def to_int(number: Any, expected: str) -> int:
    """Return a whole number of any integer type, such as NumPy's, as an int.

    Raises ``LimpetError`` for any other value.
    """
    if not isinstance(number, bool):
        with suppress(TypeError):
            index = operator.index(number)
            if index.bit_length() <= 64:
                return index
    raise LimpetError(
        "The argument does not identify a version", expected=expected, found=to_repr(number)[:80]
    )
