"""The versions of one run: which there are, which count, the newest intact, what to delete.

Everything is computed from what lies in the store; there is no pointer file to lie.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from holdfast import events
from holdfast.engine import pin
from holdfast.engine.location import Location, Url
from holdfast.engine.snapshot import Snapshot, open_at
from holdfast.errors import (
    AlreadyExists,
    Denied,
    FormatError,
    FormatTooNew,
    HoldfastError,
    ManifestInvalid,
    NoSnapshot,
    NotFound,
    StoreError,
    Unavailable,
)
from holdfast.format import names
from holdfast.format.names import Version
from holdfast.format.records import Branch, decode_branch, decode_pin, encode_branch
from holdfast.storage.open import open_store
from holdfast.storage.store import Stat

GRACE = 24 * 3600.0
"""Seconds that a file which no manifest names is left alone."""

FOREIGN_PIN = 7 * GRACE
"""Seconds after which a pin of another machine, whose life cannot be seen, counts no more."""

_SMALL = 1 << 20
_ATTEMPT = re.compile(r"\.([0-9a-f]{12})\.(?:safetensors|index\.json)")


@dataclass(frozen=True, slots=True)
class Listing:
    """One look at a run's store: objects by version folder, and the numbers of branches."""

    folders: dict[Version, list[Stat]]
    branches: list[int]
    pins: list[Stat]

    @property
    def versions(self) -> list[Version]:
        """Versions with a manifest, that is: all that exist; oldest first."""
        return sorted(
            v
            for v, files in self.folders.items()
            if any(f.key.endswith("/" + names.MANIFEST) for f in files)
        )


@dataclass(frozen=True, slots=True)
class Swept:
    """What ``sweep`` removed (or would): keys and bytes; and what it left alone, with why."""

    removed: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    nbytes: int = 0


class Run:
    """A place that holds the snapshots of one training, and its branches.

    Nothing is read when it is made; every call looks at the store afresh.
    """

    def __init__(self, url: Url) -> None:
        self.store = open_store(url)

    def __repr__(self) -> str:
        return f"<Run {self.url}>"

    @property
    def url(self) -> str:
        return self.store.url

    def place(self, version: Version) -> Location:
        return Location(self.store, str(version))

    def open(self, version: Version) -> Snapshot:
        """One version. Raises ``NotFound`` or ``FormatError``, also for a version that lies in the
        folder of another."""
        snapshot = open_at(self.place(version))
        _ = snapshot.version
        return snapshot

    def listing(self) -> Listing:
        folders: dict[Version, list[Stat]] = defaultdict(list)
        branches, pins = [], []
        for stat in self.store.list(""):
            folder, slash, rest = stat.key.partition("/")
            version = names.parse_version(folder)
            if slash and version is not None and "/" not in rest:
                folders[version].append(stat)
            elif (number := names.parse_branch(stat.key)) is not None:
                branches.append(number)
            elif names.parse_pin(stat.key) is not None:
                pins.append(stat)
        return Listing(dict(folders), sorted(branches), pins)

    def snapshots(self) -> list[Snapshot]:
        """The versions on the line that training is on, oldest first; damaged ones left out
        (``holdfast ls`` shows them too)."""
        found = []
        for version in self.line():
            try:
                found.append(self.open(version))
            except (FormatError, NotFound) as e:
                events.emit("skipped", version=str(version), error=e)
        return found

    def latest(self) -> Snapshot | None:
        """The newest version whose manifest is sound and whose files are there in full length;
        their bytes are checked when they are read. None on an empty or absent run.

        Raises ``NoSnapshot`` if there are versions, but none such.
        """
        return self.newest(lambda snapshot: snapshot.check_files())[0]

    def newest(
        self, use: Callable[[Snapshot], object], at: int | None = None
    ) -> tuple[Snapshot | None, list[tuple[Version, HoldfastError]]]:
        """The newest version that ``use`` accepts, and those that were skipped, with reasons.

        ``use`` refuses a damaged version by raising ``FormatError`` or ``StoreError``. A store
        that refuses us or does not answer is no damage, nor is a version of a later format: going
        back a version for that would lose steps silently, so it is raised. ``at``: only versions
        of that step. Raises ``NoSnapshot``.
        """
        versions = [v for v in self.line() if at is None or v.step == at]
        skipped: list[tuple[Version, HoldfastError]] = []
        for version in reversed(versions):
            try:
                snapshot = self.open(version)
                use(snapshot)
            except (FormatTooNew, Denied, Unavailable):
                raise
            except (FormatError, StoreError) as e:
                events.emit("skipped", version=str(version), error=e)
                skipped.append((version, e))
            else:
                return snapshot, skipped
        if skipped or at is not None:
            raise _none_left(self.url, at, skipped) from (skipped[0][1] if skipped else None)
        return None, []

    # -- branches ------------------------------------------------------------------------------

    def line(self, listing: Listing | None = None) -> list[Version]:
        """The versions that count, oldest first: those of the newest branch, and before it those
        of the branches that it came from, up to where it left each."""
        listing = self.listing() if listing is None else listing
        versions = listing.versions
        line: list[Version] = []
        number, limit = self.branch(listing), None
        while True:
            own = [v for v in versions if v.branch == number and (limit is None or v.step <= limit)]
            line = own + line
            if number == 0:
                return line
            left = self._left_from(number, versions)
            if left is None:
                return line
            number, limit = left.branch, left.step

    def branch(self, listing: Listing | None = None) -> int:
        """The number of the branch that training is on; 0 is the first."""
        listing = self.listing() if listing is None else listing
        known = {*listing.branches, *(v.branch for v in listing.versions)}
        for number in sorted(known, reverse=True):
            if number == 0 or self._left_from(number, listing.versions) is not None:
                return number
        return 0

    def _left_from(self, number: int, versions: Iterable[Version]) -> Version | None:
        """The version that a branch left from: by its record, or, should that be damaged, by the
        parent of its first version. None if neither tells: such a branch holds nothing."""
        file = names.branch_name(number)
        try:
            version = names.parse_version(self.read_branch(number).from_version)
        except (FormatError, NotFound) as e:
            events.emit("skipped", version=file, error=e)
            version = self._first_parent(number, versions)
        if version is not None and version.branch >= number:
            raise ManifestInvalid(
                f"{file} of {self.url} breaks the format",
                expected=f"a branch that left from one before {number}",
                found=str(version),
                file=file,
            )
        return version

    def _first_parent(self, number: int, versions: Iterable[Version]) -> Version | None:
        for version in sorted(v for v in versions if v.branch == number):
            try:
                parent = self.open(version).manifest.parent
            except (FormatError, NotFound):
                continue
            found = names.parse_version(parent.version) if parent is not None else None
            if found is not None and found.branch < number:
                return found
        return None

    def read_branch(self, number: int) -> Branch:
        """The record of a branch. Raises ``NotFound`` or ``FormatError``."""
        file = names.branch_name(number)
        return decode_branch(self.store.get(file, _SMALL), file)

    def leave_from(self, snapshot: Snapshot, version: Version, reason: str) -> int:
        """Start a branch at a version, durably, and return its number."""
        while True:
            listing = self.listing()
            taken = [0, *listing.branches, *(v.branch for v in listing.versions)]
            number = max(taken) + 1
            record = Branch(number, str(version), snapshot.digest, pin.now(), reason)
            try:
                self.store.put_if_absent(names.branch_name(number), encode_branch(record))
            except AlreadyExists:
                continue  # another process left at the same moment; the next number is ours
            return number

    # -- deleting ------------------------------------------------------------------------------

    def delete(self, version: Version) -> int:
        """Delete a version, manifest first, and return the bytes that this freed."""
        files = list(self.store.list(str(version)))
        self.store.delete(self.place(version).key(names.MANIFEST))
        for stat in files:
            self.store.delete(stat.key)
        events.emit("deleted", version=str(version))
        return sum(s.length for s in files)

    def retain(self, keep: Callable[[list[Version]], Iterable[Version]]) -> list[Version]:
        """Delete what ``keep`` does not keep of the intact versions on the line.

        The newest intact one always stays; damaged versions and other branches are not touched.
        """
        intact = []
        for version in self.line():
            try:
                self.open(version).check_files()
                intact.append(version)
            except (FormatError, NotFound):
                continue
        kept = {*keep(intact), *intact[-1:]}
        gone = [v for v in intact if v not in kept]
        for version in gone:
            self.delete(version)
        return gone

    def sweep(
        self,
        *,
        grace: float = GRACE,
        abandoned: bool = False,
        dry_run: bool = False,
        now: float | None = None,
    ) -> Swept:
        """Remove what no manifest names: leftovers of saves that were never committed.

        Nothing younger than ``grace`` seconds, nothing of an attempt whose process lives, and
        nothing beside a manifest that cannot be read. ``abandoned``: also delete the versions
        on branches that training has left. ``dry_run``: only tell.
        """
        now = time.time() if now is None else now
        listing, partials = self.listing(), list(self.store.partials(""))
        # Pins last: a save that has begun since has none of the files that were listed, and one
        # that has ended since has its manifest, which is read after this.
        swept = _Sweep(self, now, grace, dry_run, *self._pinned(self.listing(), now))
        for key in swept.dead_pins:
            swept.remove(Stat(key, 0, 0.0))
        for version, files in listing.folders.items():
            swept.folder(version, files)
        for stat in partials:
            match = _ATTEMPT.search(stat.key)
            swept.offer(stat, match[1] if match else None)
        if abandoned:
            line = set(self.line(listing))
            for version in listing.versions:
                if version not in line:
                    swept.version(version, listing.folders[version])
        return swept.result()

    def _pinned(self, listing: Listing, now: float) -> tuple[set[str], list[str]]:
        """Attempts that are under way, and the keys of pins that count no more."""
        pinned: set[str] = set()
        dead: list[str] = []
        for stat in listing.pins:
            try:
                record = decode_pin(self.store.get(stat.key, _SMALL), stat.key)
            except (FormatError, NotFound):
                continue
            lives = pin.alive(record)
            if lives or (lives is None and now - stat.modified < FOREIGN_PIN):
                pinned.add(record.attempt)
            else:
                dead.append(stat.key)
        return pinned, dead


@dataclass(slots=True)
class _Sweep:
    """One sweep under way."""

    run: Run
    now: float
    grace: float
    dry_run: bool
    pinned: set[str]
    dead_pins: list[str]
    removed: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    nbytes: int = 0

    def folder(self, version: Version, files: list[Stat]) -> None:
        """Offer the files of a version's folder that its manifest does not name."""
        try:
            snapshot = self.run.open(version)
            named = {f for s in snapshot.manifest.shards for f in (s.name, s.index.name)}
        except NotFound:
            named = set()
        except FormatError:
            self.kept += [(s.key, "beside a manifest that cannot be read") for s in files]
            return
        for stat in files:
            name = stat.key.rpartition("/")[2]
            attempt = names.attempt_of(name)
            if attempt is not None and name not in named:
                self.offer(stat, attempt)

    def offer(self, stat: Stat, attempt: str | None) -> None:
        """Remove an orphan, unless something speaks for it. What names no attempt (a manifest on
        its way) may be of any that is under way."""
        if attempt in self.pinned or (attempt is None and self.pinned):
            self.kept.append((stat.key, "a save is under way"))
        elif self.now - stat.modified < self.grace:
            self.kept.append((stat.key, f"younger than {self.grace:.0f} s"))
        else:
            self.remove(stat)

    def version(self, version: Version, files: list[Stat]) -> None:
        if not self.dry_run:
            self.run.delete(version)
        self.removed += [s.key for s in files]
        self.nbytes += sum(s.length for s in files)

    def remove(self, stat: Stat) -> None:
        if not self.dry_run:
            self.run.store.delete(stat.key)
        self.removed.append(stat.key)
        self.nbytes += stat.length

    def result(self) -> Swept:
        return Swept(self.removed, self.kept, self.nbytes)


def _none_left(
    url: str, at: int | None, skipped: list[tuple[Version, HoldfastError]]
) -> NoSnapshot:
    wanted = "version" if at is None else f"version of step {at}"
    reasons = "; ".join(f"{v}: {e.what}" for v, e in skipped)
    return NoSnapshot(
        f"{url} has no intact {wanted}",
        expected=f"an intact {wanted}",
        found=reasons or "none of that step on the line that training is on",
        todo="`holdfast verify RUN` names what is damaged; copy an intact version back, or begin"
        " anew in another folder",
        skipped=tuple(str(v) for v, _ in skipped),
    )
