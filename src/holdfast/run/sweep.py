"""What deletes: versions, retention, and the sweep of what nothing names.

A version is deleted so that a reader, or a save that is to refer to it, is safe at every moment:

1. It is not touched if a pin names it or a manifest refers to it. 2. Its manifest is deleted.
3. The pins are looked at again, then the manifests: what a pin or a manifest has come to speak for
since is left alone. 4. The other files are deleted.

The other side pins first and then looks whether the manifest is there
(``engine/snapshot/pins.py``), and commits its own manifest before it takes the pin away. So pins
are always looked at before manifests: whoever has neither a pin at the first look nor a manifest
at the second one looks for the deleted manifest only after it is gone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from holdfast import events
from holdfast.engine.snapshot import pins as pin
from holdfast.errors import FormatError, HoldfastError, NotFound
from holdfast.format import names
from holdfast.format.names import Version
from holdfast.run.catalog import Known, Listing, manifest_in, orphans
from holdfast.run.lineage import unknown_origins
from holdfast.run.policy import KeepPolicy
from holdfast.storage.store import Stat

if TYPE_CHECKING:
    from holdfast.run.run import Run

GRACE = 24 * 3600.0
"""Seconds that a file which no manifest names is left alone."""

MOMENT = 60.0
"""Seconds that a small file may take on its way; nothing speaks for one, such as a pin."""

FOREIGN_PIN = 7 * GRACE
"""Seconds after which a pin of another machine, whose life cannot be seen, counts no more, nor one
that cannot be read."""

ABANDONED = "all abandoned versions"
"""What stands for them among what was kept, where it cannot be told which they are."""

_ATTEMPT = re.compile(r"\.([0-9a-f]{12})\.(?:safetensors|index\.json)")


@dataclass(frozen=True, slots=True)
class Claims:
    """What speaks for versions and files, by one look at a run.

    ``pinned``: versions that may not go, with why. ``attempts``: those under way. ``dead``: pins
    that count no more. ``blind``: why nothing at all may go. ``files``: keys that a manifest names
    or refers to.
    """

    pinned: dict[Version, str]
    attempts: set[str]
    dead: list[Stat]
    blind: str | None
    listing: Listing
    known: dict[Version, Known]
    files: set[str]

    def may_go(self, wanted: Collection[Version]) -> tuple[set[Version], dict[Version, str]]:
        """Which of the wanted versions can be deleted together, and why the others cannot."""
        if self.blind is not None:
            return set(), dict.fromkeys(wanted, self.blind)
        gone = {v for v in wanted if v not in self.pinned}
        stay = {v: self.pinned[v] for v in wanted if v not in gone}
        left = [v for v in self.known if v not in gone]
        while left:
            version = left.pop()
            for base in self.known[version].bases & gone:
                gone.remove(base)
                stay[base] = f"{version} refers to it"
                left.append(base)
        return gone, stay

    def speak_for(self, version: Version, stat: Stat) -> str | None:
        """Why a file that no manifest of its own version names is to be left alone."""
        if version in self.pinned and version not in self.known:
            return self.pinned[version]
        if stat.key in self.files:
            return "an incremental version refers to it"
        if any(not k.digest and version in k.bases for k in self.known.values()):
            return "a manifest that cannot be read may refer to it"
        if names.attempt_of(stat.key.rpartition("/")[2]) in self.attempts:
            return "a save is under way"
        return self.blind


def look(run: Run, now: float | None = None) -> Claims:
    """Look at the pins of a run, and then at its manifests."""
    now = time.time() if now is None else now
    pins = takewhile(lambda stat: stat.key < "pin.", run.store.list(""))
    pinned: dict[Version, str] = {}
    attempts: set[str] = set()
    dead: list[Stat] = []
    blind = None
    for stat, record in pin.of_processes(run.store, list(pins)):
        lives = None if isinstance(record, FormatError) else pin.alive(record)
        if lives is False or (lives is None and now - stat.modified >= FOREIGN_PIN):
            dead.append(stat)
        elif isinstance(record, FormatError):
            events.emit("skipped", version=stat.key, error=record)
            blind = f"{stat.key} cannot be read, and may be for anything"
        else:
            attempts.add(record.attempt)
            version = names.parse_version(record.version or "")
            if version is not None:
                pinned[version] = "a process is using it"
    listing = run.listing()
    # what has no manifest is no version: a lasting pin keeps nothing of it
    lasting = listing.lasting.keys() & {*listing.versions}
    pinned.update(dict.fromkeys(lasting, "it is pinned"))
    known = run.ledger.versions(listing)
    files = {key for k in known.values() for key in k.files}
    return Claims(pinned, attempts, dead, blind, listing, known, files)


# -- deleting ------------------------------------------------------------------------------------


def delete(run: Run, version: Version) -> int:
    """See ``Run.delete``."""
    claims = look(run)
    if version not in claims.listing.versions:
        raise NotFound(
            f"There is no {version} in {run.url}",
            key=run.place(version).key(names.MANIFEST),
            store=run.url,
        )
    gone, stay = claims.may_go([version])
    if not gone:
        raise HoldfastError(
            f"{version} of {run.url} is not deleted: {stay[version]}",
            todo="Delete what refers to it first; `holdfast pin RUN STEP --remove` unpins it",
            version=str(version),
        )
    return sum(s.length for s in _delete(run, gone, claims.listing))


def retain(run: Run, policy: KeepPolicy) -> list[Version]:
    """See ``Run.retain``."""
    if type(policy) is KeepPolicy and not run.half_deleted:
        return []
    claims = look(run)
    if run.half_deleted:
        _finish(run, claims)
    records = run.ledger.records(run.line(claims.listing), claims.listing, claims.known)
    kept = {*policy.keep(records), *(r.version for r in records[-1:])}
    gone, _ = claims.may_go([r.version for r in records if r.version not in kept])
    if gone:
        _delete(run, gone, claims.listing)
    return sorted(gone)


def _delete(run: Run, versions: Iterable[Version], listing: Listing) -> list[Stat]:
    """Steps 2 to 4, of versions that may go. Newest first, so that whenever this ends no manifest
    refers to a version that is gone."""
    removed = []
    for version in sorted(versions, reverse=True):
        files = listing.folders[version]
        manifest = manifest_in(files)
        run.half_deleted[version] = [s for s in files if s is not manifest]
        if manifest is not None:
            run.store.delete(manifest.key)
            removed.append(manifest)
        events.emit("deleted", version=str(version))
    return removed + _finish(run, look(run))


def _finish(run: Run, claims: Claims) -> list[Stat]:
    """Steps 3 and 4. What is spoken for, or could not be deleted, is tried again when retention
    runs the next time; after a restart it is an orphan for ``sweep``."""
    removed = []
    for version, files in list(run.half_deleted.items()):
        if version in claims.listing.versions:  # not deleted after all, or saved anew
            del run.half_deleted[version]
            continue
        left = [s for s in files if claims.speak_for(version, s) is not None]
        for stat in files:
            if stat not in left:
                run.store.delete(stat.key)
                removed.append(stat)
        if left:
            run.half_deleted[version] = left
        else:
            del run.half_deleted[version]
    return removed


# -- sweep ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Swept:
    """What ``sweep`` removed (or would): keys and bytes; and what it left alone, files by key and
    versions by name, with why."""

    removed: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """What a sweep was asked for."""

    grace: float
    abandoned: bool
    dry_run: bool
    now: float


def sweep(run: Run, asked: Asked) -> Swept:
    """See ``Run.sweep``."""
    listing, partials = run.listing(), list(run.store.partials(""))
    # Looked at last: a save that has begun since has none of the files that were listed, and one
    # that has ended since has its manifest.
    claims = look(run, asked.now)
    work = _Sweep(run, asked, claims)
    for stat in claims.dead:
        work.remove(Stat(stat.key, 0, 0.0))
    for version, known in claims.known.items():
        if not known.digest:
            why = "beside a manifest that cannot be read"
            work.kept += [(s.key, why) for s in listing.folders.get(version, ())]
    for version, stat in orphans(listing, claims.known):
        work.offer(stat, claims.speak_for(version, stat))
    for version, stat in listing.lasting.items():
        if version not in claims.known:
            work.offer(stat, None)
    for stat in partials:
        match = _ATTEMPT.search(stat.key)
        attempt = match[1] if match else None
        # what names no attempt (a manifest on its way) may be of any that is under way
        under_way = attempt in claims.attempts or (attempt is None and claims.attempts)
        grace = asked.grace if attempt else max(asked.grace, MOMENT)
        work.offer(stat, "a save is under way" if under_way else None, grace)
    if asked.abandoned:
        work.abandoned()
    return Swept(work.removed, work.kept, work.nbytes)


@dataclass(slots=True)
class _Sweep:
    """One sweep under way."""

    run: Run
    asked: Asked
    claims: Claims
    removed: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    nbytes: int = 0

    def abandoned(self) -> None:
        """Delete the versions that are not on the line."""
        listing = self.claims.listing
        unknown = unknown_origins(self.run, listing)
        if unknown:
            why = f"{names.branch_name(unknown[-1])} cannot be read, and no version tells the same"
            self.kept.append((ABANDONED, why))
            return
        line = set(self.run.line(listing))
        gone, stay = self.claims.may_go([v for v in listing.versions if v not in line])
        self.kept += [(str(v), why) for v, why in sorted(stay.items())]
        if self.asked.dry_run:
            stats = [s for v in sorted(gone) for s in listing.folders[v]]
        else:
            stats = _delete(self.run, gone, listing)
        self.removed += [s.key for s in stats]
        self.nbytes += sum(s.length for s in stats)

    def offer(self, stat: Stat, why: str | None, grace: float | None = None) -> None:
        """Remove an orphan, unless something speaks for it."""
        why = why or self.claims.blind
        grace = self.asked.grace if grace is None else grace
        if why is not None:
            self.kept.append((stat.key, why))
        elif self.asked.now - stat.modified < grace:
            self.kept.append((stat.key, f"younger than {grace:.0f} s"))
        else:
            self.remove(stat)

    def remove(self, stat: Stat) -> None:
        if not self.asked.dry_run:
            self.run.store.delete(stat.key)
        self.removed.append(stat.key)
        self.nbytes += stat.length
