"""The garbage-collection roots of a run: what protects its versions and files from deletion."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from limpet import events
from limpet.errors import FormatError
from limpet.format import names
from limpet.format.names import Version
from limpet.run import lease
from limpet.run.catalog import Catalog, VersionRecord
from limpet.run.listing import Listing
from limpet.snapshot import pins
from limpet.storage.store import Stat


@dataclass(frozen=True)
class Roots:
    """What protects the versions and files of a run: ``pinned`` versions, with the reasons, and
    ``active_attempts`` of saves. Because of a ``block_reason``, nothing may be deleted."""

    pinned: dict[Version, str]
    active_attempts: set[str]
    stale_pins: list[str]
    block_reason: str | None
    listing: Listing
    version_records: dict[Version, VersionRecord]

    @cached_property
    def _incremental(self) -> list[Version]:
        return [v for v, record in self.version_records.items() if record.bases]

    @cached_property
    def _referenced_files(self) -> frozenset[str]:
        """The keys of the files that incremental versions consist of."""
        return frozenset(k for v in self._incremental for k in self.version_records[v].files)

    @cached_property
    def _possible_bases(self) -> frozenset[Version]:
        """The versions to which an unreadable manifest may refer."""
        unreadable = (r.bases for r in self.version_records.values() if not r.digest)
        return frozenset().union(*unreadable)

    def select_deletable(
        self, candidates: Collection[Version]
    ) -> tuple[set[Version], dict[Version, str]]:
        """Return the candidates that can be deleted together, and why the others cannot."""
        if self.block_reason is not None:
            return set(), dict.fromkeys(candidates, self.block_reason)
        deletable = {v for v in candidates if v not in self.pinned}
        kept = {v: self.pinned[v] for v in candidates if v not in deletable}
        remaining = [v for v in self._incremental if v not in deletable]
        while remaining:
            version = remaining.pop()
            for base in self.version_records[version].bases & deletable:
                deletable.remove(base)
                kept[base] = f"{version} refers to it"
                if base in self.version_records:
                    remaining.append(base)
        return deletable, kept

    def reason_to_keep(self, version: Version, stat: Stat) -> str | None:
        """Return why a file must stay that its version's manifest does not name, or None."""
        if version in self.pinned and version not in self.version_records:
            return self.pinned[version]
        if stat.key in self._referenced_files:
            return "an incremental version refers to it"
        if version in self._possible_bases:
            return "an unreadable manifest may refer to it"
        if names.parse_attempt(stat.key.rpartition("/")[2]) in self.active_attempts:
            return "a save is in progress"
        return self.block_reason


def find_roots(
    catalog: Catalog,
    now: float | None = None,
    look_again_from: int = 0,
    listing: Listing | None = None,
) -> Roots:
    """Read the pins of a run, and then its manifests. With a ``listing``, its pins and versions
    count: enough to decide, but not to delete files, because a listing is not atomic."""
    now = time.time() if now is None else now
    pinned: dict[Version, str] = {}
    attempts: set[str] = set()
    stale: list[str] = []
    block_reason = None
    keys = pins.list_process_pins(catalog.store) if listing is None else listing.process_pins
    for key, record in pins.read_process_pins(catalog.store, keys):
        if pins.is_stale(catalog.store, key, record, now):
            stale.append(key)
        elif isinstance(record, FormatError):
            events.emit("skipped", version=key, error=record)
            block_reason = f"{key} is unreadable and may protect any version"
        else:
            attempts.add(record.attempt)
            version = names.parse_version(record.version or "")
            if version is not None:
                pinned[version] = "a process is using it"
    leases = lease.list_leases(catalog.store) if listing is None else listing.leases
    live = catalog.leases.live(leases)
    stale += [key for key in leases if key not in live]
    for key, held in live.items():
        using = f"the evaluation {held.name} is using it ({key})"
        pinned |= {v: using for v in map(names.parse_version, held.versions) if v is not None}
    listing = catalog.listing() if listing is None else listing
    version_records = catalog.read_versions(listing, look_again_from)
    # a folder without a manifest is not a version, so a lasting pin protects nothing in it
    lasting = (v for v in listing.lasting_pins if v in version_records)
    pinned |= dict.fromkeys(lasting, "it is pinned")
    listing = replace(listing, exists=version_records.__contains__)
    return Roots(pinned, attempts, stale, block_reason, listing, version_records)
