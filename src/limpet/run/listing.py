"""What a listing of a run shows: names in its folder, and files in the folder of a version.

One level deep: a recursive listing of 10,000 versions takes over a second, for each save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from limpet.arguments import check_whole
from limpet.errors import BrokenLink, NotFound
from limpet.format.names import Version, is_spread_folder, parse_attempt, version_of_key
from limpet.storage.store import Entry, Stat, Store, list_level

STEP, BRANCH = "a step, a whole number", "a branch, a whole number"
"""What ``to_int`` expects."""


@dataclass(frozen=True)
class Listing:
    """The names in the folder of a run, at one time. A version in ``folders``, which are in order,
    exists only if ``exists`` says so; the folders in ``linked`` are symbolic links."""

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
    """The objects of a version, and those of its names that are symbolic links: the folder itself,
    too. A link that leads to nothing is in ``links`` only."""

    stats: Sequence[Stat] = ()
    links: Sequence[str] = ()


def list_entries(store: Store, version: Version, prefix: str = "") -> Iterable[Entry]:
    """Return what is directly in the folder of a version and has a name with ``prefix``."""
    try:
        return list_level(store, str(version), prefix)
    except BrokenLink:
        return ()


def list_spread_folders(store: Store) -> list[str]:
    """Return the folders of a run, other than those of its versions, that have shards."""
    found = (e.name for e in list_level(store, "", "spread-") if e.kind != "object")
    return sorted(filter(is_spread_folder, found))


def list_files(
    store: Store, version: Version, listing: Listing, named: Mapping[str, int]
) -> FolderFiles:
    """List the folder of a version. ``named``: see ``VersionRecord.files``; those of them that are
    in other folders are part of the result."""
    folder, entries = str(version), [*list_entries(store, version)]
    stats = {
        key: Stat(key, length, 0.0)
        for key, length in named.items()
        if version_of_key(key) == version and not key.startswith(f"{folder}/")
    }
    for entry in entries:
        if entry.kind != "folder":
            key = f"{folder}/{entry.name}"
            with suppress(NotFound, BrokenLink):  # deleted meanwhile, or a broken link
                stats[key] = entry.stat or store.stat(key)
    links = find_links(store, version, listing, named, entries)
    return FolderFiles(sorted(stats.values(), key=attrgetter("key")), links)


def list_all_files(store: Store, listing: Listing) -> dict[Version, FolderFiles]:
    """List the folders of all versions, and those over which shards are spread: a save that ended
    before its manifest may have left files only there."""
    spread: dict[Version, dict[str, int]] = {}
    stats: dict[str, Stat] = {}
    for folder in list_spread_folders(store):
        for stat in store.list(folder):
            version = version_of_key(stat.key)
            if version is not None and parse_attempt(stat.key.rpartition("/")[2]) is not None:
                spread.setdefault(version, {})[stat.key] = stat.length
                stats[stat.key] = stat
    found = {}
    for version in sorted({*listing.folders, *spread}):
        files = list_files(store, version, listing, spread.get(version, {}))
        found[version] = replace(files, stats=[stats.get(s.key, s) for s in files.stats])
    return found


def find_links(
    store: Store,
    version: Version,
    listing: Listing,
    named: Mapping[str, int],
    entries: Iterable[Entry] | None = None,
) -> list[str]:
    """Return the keys of the symbolic links that a version consists of. ``named``: see
    ``VersionRecord.files``. ``entries``: those of its folder, if they are known."""
    if not hasattr(store, "link_target"):  # most stores have no links
        return []
    entries = list_entries(store, version) if entries is None else entries
    links = [f"{version}/{e.name}" for e in entries if e.kind == "link"]
    links += [str(version)] if version in listing.linked else []
    folders = {key.rpartition("/")[0] for key in named if version_of_key(key) == version}
    for folder in sorted(folders - {str(version)}):  # spread-0e/version_1
        above, _, name = folder.partition("/")
        if Entry(above, "link") in list_level(store, "", above):
            links.append(above)
        with suppress(BrokenLink):
            if Entry(name, "link") in list_level(store, above, name):
                links.append(folder)
            links += [f"{folder}/{e.name}" for e in list_level(store, folder) if e.kind == "link"]
    return links


def find_link_targets(store: Any, links: Iterable[str]) -> set[Version | None]:
    """Return the versions to whose files links lead, and None for what is not in the run."""
    return {version_of_key(store.link_target(link) or "") for link in links}


def to_int(number: Any, expected: str) -> int:
    """Return a whole number of any type as an int. Raises ``LimpetError`` for any other value."""
    return check_whole("The argument", number, expected, -(1 << 64), 1 << 64)
