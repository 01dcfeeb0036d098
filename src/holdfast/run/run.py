"""The versions of one run: which there are, which count, the newest intact, the best, what is
pinned. ``run/sweep.py`` deletes.

Everything is computed from what lies in the store; there is no pointer file to lie.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from holdfast import events, machine
from holdfast.engine.snapshot import pins
from holdfast.engine.snapshot.location import Location, Url
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import AlreadyExists, FormatError, HoldfastError, NotFound
from holdfast.format import names
from holdfast.format.names import Version
from holdfast.format.records import (
    Branch,
    LastingPin,
    encode_branch,
    encode_evaluation,
    encode_lasting_pin,
)
from holdfast.run import lineage, sweep
from holdfast.run.catalog import Catalog, Listing, VersionRecord, new_evaluation
from holdfast.run.policy import KeepPolicy, Mode, Record, best_first
from holdfast.run.sweep import GRACE, SweepOptions, SweepResult
from holdfast.storage.open import open_store
from holdfast.storage.store import Stat


class Run:
    """A place that holds the snapshots of one training, and its branches.

    Nothing is read when it is made, and every call looks at the store afresh; but manifests and
    evaluations, which never change, are read once.
    """

    def __init__(self, url: Url) -> None:
        self.store = open_store(url)
        self.catalog = Catalog(self.store)

    def __repr__(self) -> str:
        return f"<Run {self.url}>"

    @property
    def url(self) -> str:
        return self.store.url

    def location(self, version: Version) -> Location:
        return self.catalog.location(version)

    def open(self, version: Version) -> Snapshot:
        """Open one version. Raises ``NotFound``, or ``FormatError``, also for a manifest that names
        another version than its folder."""
        return self.catalog.open(version)

    def listing(self) -> Listing:
        """List the store once."""
        return self.catalog.listing()

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
        self,
        use: Callable[[Snapshot], object],
        at: int | None = None,
        branch: int | None = None,
    ) -> tuple[Snapshot | None, list[tuple[Version, HoldfastError]]]:
        """The newest version that ``use`` accepts, and those that were skipped, with reasons.

        ``use`` refuses a damaged version by raising ``FormatError`` or ``StoreError``. A store
        that refuses us or does not answer is no damage, nor is a version of a later format: going
        back a version for that would lose steps silently, so it is raised. ``at``: only versions
        of that step. ``branch``: along its line, not that which training is on. Raises
        ``NoSnapshot``, and ``NotFound`` for a branch that is not there.
        """
        return lineage.find_newest(self.catalog, use, at, branch)

    def find(self, step: int, branch: int | None = None) -> Version:
        """The version of that step on the line that training is on, or on that of ``branch``.
        Raises ``NotFound``."""
        step = _to_int(step, "a step, a whole number")
        branch = None if branch is None else _to_int(branch, "a branch, a whole number")
        listing = self.listing()
        line = self.line(listing, branch)
        found = [v for v in line if v.step == step]
        if not found:
            where = "the line that training is on" if branch is None else f"branch {branch}"
            there, todo = lineage.alternatives(step, line, listing.versions)
            raise NotFound(
                f"{self.url} has no version of step {step} on {where}",
                expected=f"a version of step {step}",
                found=there,
                todo=todo,
                key=str(Version(step, branch or 0)),
                store=self.url,
            )
        return found[-1]

    # -- branches ------------------------------------------------------------------------------

    def line(self, listing: Listing | None = None, branch: int | None = None) -> list[Version]:
        """The versions that count, oldest first: those of the newest branch, and before it those
        of the branches that it came from, up to where it left each.

        ``branch``: those of that branch instead. Raises ``NotFound`` if there is none such.
        """
        listing = self.listing() if listing is None else listing
        return lineage.current_lineage(self.catalog, listing, branch)

    def branch(self, listing: Listing | None = None) -> int:
        """The number of the branch that training is on; 0 is the first."""
        listing = self.listing() if listing is None else listing
        return lineage.newest_branch(self.catalog, listing)

    def read_branch(self, number: int) -> Branch:
        """The record of a branch. Raises ``NotFound`` or ``FormatError``."""
        return self.catalog.read_branch(number)

    def leave_from(self, snapshot: Snapshot, version: Version, reason: str) -> int:
        """Start a branch at a version, durably, and return its number."""
        while True:
            listing = self.listing()
            taken = [0, *listing.branches, *(v.branch for v in listing.versions)]
            number = max(taken) + 1
            record = Branch(number, str(version), snapshot.digest, machine.utc_now(), reason)
            try:
                self.store.put_if_absent(names.branch_name(number), encode_branch(record))
            except AlreadyExists:
                continue  # another process left at the same moment; the next number is ours
            return number

    # -- metrics -------------------------------------------------------------------------------

    def metrics(self, at: Snapshot | Version | int) -> dict[str, float]:
        """The metrics of a snapshot, version or step: those of the save, overridden by
        evaluations'.

        Of a metric that several have the newest counts. Raises ``NotFound`` or ``FormatError``.
        """
        version = self._resolve_version(at)
        return self.catalog.metrics(version, *self._read_version(version))

    def add_metrics(
        self, at: Snapshot | Version | int, metrics: Mapping[str, Any], name: str = "evaluation"
    ) -> None:
        """Write down what an evaluation of a snapshot, version or step found: numbers by name.

        What is written is never changed: to correct a metric add it once more. ``name``: that
        of the file, for people. Raises ``NotFound`` if the version is gone, and ``FormatError`` if
        ``at`` is a snapshot and another one has taken its place.
        """
        version = self._resolve_version(at)
        known, files = self._read_version(version)
        if isinstance(at, Snapshot) and at.digest != known.digest:
            raise FormatError(
                f"{version} of {self.url} is not the snapshot that was evaluated",
                expected=f"a manifest of digest {at.digest}",
                found=known.digest,
                todo="Evaluate the one that is there now",
                file=self.location(version).key(names.MANIFEST),
            )
        earlier = self.catalog.evaluations(version, known.digest, files)
        record = new_evaluation(name, version, known.digest, metrics, earlier)
        file = names.evaluation_name(name, record.attempt)
        self.store.put_if_absent(self.location(version).key(file), encode_evaluation(record))

    def records(self) -> list[Record]:
        """The intact versions on the line that training is on, oldest first, with their metrics:
        what keep policies look at."""
        return self._records(self.listing())

    def _records(self, listing: Listing) -> list[Record]:
        known = self.catalog.read_versions(listing)
        return self.catalog.intact_records(self.line(listing), listing, known)

    def best(self, metric: str, mode: Mode = "min") -> Snapshot | None:
        """The intact version on the line with the smallest (``mode="max"``: largest) ``metric``;
        of equal ones the newest; None if no version has it. NaN is never the best."""
        if mode not in ("min", "max"):
            raise HoldfastError("No best can be told", expected='mode "min" or "max"', found=mode)
        while True:
            listing = lineage.stable_listing(self.catalog)
            found = None
            for version in best_first(self._records(listing), metric, mode):
                with suppress(NotFound):
                    found = self.open(version)
                    break
            # else one may have been deleted in favor of a better one
            if not lineage.is_stale(self.catalog, listing):
                return found

    def _resolve_version(self, at: Snapshot | Version | int) -> Version:
        if isinstance(at, Version):
            return at
        if isinstance(at, Snapshot):
            return at.version
        return self.find(_to_int(at, "a Snapshot, a Version, or a step, a whole number"))

    def _read_version(self, version: Version) -> tuple[VersionRecord, Sequence[Stat]]:
        """What is known of a version whose manifest is sound, and the files of its folder."""
        files = list(self.store.list(str(version)))
        known = self.catalog.read_version(version, files)
        if known is None or not known.digest:
            self.open(version)  # raises what is wrong with it
            raise NotFound(f"There is no {version} in {self.url}", store=self.url)
        return known, files

    # -- pins ----------------------------------------------------------------------------------

    def pin(self, step: int, branch: int | None = None) -> Version:
        """Keep a version from retention and ``sweep`` until it is unpinned. Pinned already:
        nothing happens. Raises ``NotFound``."""
        version = self.find(step, branch)
        place = self.location(version)
        key = place.run_key(names.pin_name(str(version)))
        try:
            self.store.put_if_absent(
                key, encode_lasting_pin(LastingPin(str(version), machine.utc_now()))
            )
        except AlreadyExists:
            return version
        try:
            pins.require_manifest(place)
        except NotFound:
            self.store.delete(key)
            raise
        return version

    def unpin(self, step: int, branch: int | None = None) -> Version:
        """Take a lasting pin away: of the version on the line that training is on (or on that of
        ``branch``), or, if that has none of ``step``, of the only one that is pinned elsewhere.
        Raises ``NotFound`` if it is not pinned."""
        pinned = self.pins()
        try:
            version = self.find(step, branch)
        except NotFound:
            others = [v for v in pinned if v.step == step]
            if branch is not None or len(others) != 1:
                raise
            version = others[0]
        if version not in pinned:
            raise NotFound(
                f"{version} of {self.url} is not pinned",
                todo=f"Pinned are: {', '.join(map(str, pinned)) or 'none at all'}",
                key=names.pin_name(str(version)),
                store=self.url,
            )
        self.store.delete(names.pin_name(str(version)))
        return version

    def pins(self) -> list[Version]:
        """The versions with a lasting pin, oldest first."""
        return sorted(self.listing().lasting_pins)

    # -- deleting ------------------------------------------------------------------------------

    def delete(self, version: Version) -> int:
        """Delete a version, manifest first, and return the bytes that this freed.

        Raises ``NotFound``, and ``HoldfastError`` if it is pinned, being read, or another version
        refers to it.
        """
        return sweep.delete(self.catalog, version)

    def retain(self, policy: KeepPolicy) -> list[Version]:
        """Delete what ``policy`` does not keep of the intact versions on the line; those deleted.

        The newest intact one always stays, and so does what is pinned, being read, or referred to
        by a version that stays; damaged versions and other branches are not touched. Raises
        ``StoreError``; what it left undone is done by the next call.
        """
        return sweep.retain(self.catalog, policy)

    def sweep(
        self,
        *,
        grace: float = GRACE,
        abandoned: bool = False,
        dry_run: bool = False,
        now: float | None = None,
    ) -> SweepResult:
        """Remove what no manifest names: leftovers of saves that were never committed.

        Nothing younger than ``grace`` seconds, nothing of an attempt whose process lives, nothing
        that a manifest refers to, and nothing beside a manifest that cannot be read.
        ``abandoned``: also delete the versions on branches that training has left, but for those
        that are pinned or referred to. ``dry_run``: only tell.
        """
        now = time.time() if now is None else now
        return sweep.sweep(self.catalog, SweepOptions(grace, abandoned, dry_run, now))


def _to_int(number: Any, expected: str) -> int:
    """A whole number of whatever type, NumPy's too. Raises ``HoldfastError``."""
    if not isinstance(number, bool):
        with suppress(TypeError):
            return operator.index(number)
    raise HoldfastError("There is no such version", expected=expected, found=repr(number)[:80])
