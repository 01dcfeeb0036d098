"""What a listing of a run shows: names in its folder, and files in the folder of a version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from holdfast.format.names import Version
from holdfast.storage.store import Stat


@dataclass(frozen=True)
class Listing:
    """The names in the folder of a run, at one time.

    ``folders`` holds the versions that have a folder, oldest first. Such a version exists only if
    ``exists`` is True: its folder has a manifest. ``linked`` holds those whose folder is a symbolic
    link. ``branches`` holds the numbers of the recorded branches in ascending order,
    ``process_pins`` the keys of the pins of processes, and ``lasting_pins`` the versions that have
    a lasting pin.
    """

    folders: Sequence[Version]
    linked: frozenset[Version]
    branches: Sequence[int]
    process_pins: Sequence[str]
    lasting_pins: frozenset[Version]
    exists: Callable[[Version], bool]

    @cached_property
    def versions(self) -> list[Version]:
        """The versions that exist, oldest first. The store is asked about each one, once."""
        return [v for v in self.folders if self.exists(v)]


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """The objects directly in the folder of a version, and which of the names are symbolic links.

    A link that leads to nothing is in ``links`` only. If the folder itself is a link, ``links``
    holds its name.
    """

    stats: Sequence[Stat] = ()
    links: Sequence[str] = ()
