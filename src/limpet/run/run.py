"""``Run``: lists, selects, pins, evaluates, and deletes the versions of one run.

Every answer comes from what the store holds; there is no pointer file that could be wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from limpet import events, machine
from limpet.arguments import check_seconds, require
from limpet.errors import AlreadyExists, DigestMismatch, FormatError, LimpetError, NotFound
from limpet.format import names
from limpet.format.names import Version
from limpet.format.records import (
    MAX_TEXT,
    AboutVersion,
    Branch,
    Evaluation,
    LastingPin,
    Verified,
    encode_record,
)
from limpet.loading.snapshot import Snapshot, reader_of, snapshot_of
from limpet.ranks.group import GroupSpec, saving_group
from limpet.run import lineage, retention, sweep
from limpet.run.catalog import Catalog, VersionRecord
from limpet.run.listing import BRANCH, STEP, Listing, list_spread_folders, to_int
from limpet.run.metrics import ADDED_METRICS, check_metrics, to_numbers
from limpet.run.policy import KeepPolicy, Mode, Record, check_metric
from limpet.run.records import EvaluationStatus, find_statuses, put_about_version
from limpet.run.sweep import GRACE, SweepResult
from limpet.run.writer import VersionWriter, check_incremental
from limpet.snapshot import pins
from limpet.snapshot.location import Location, Url
from limpet.snapshot.verify import Report
from limpet.storage.open import open_store
from limpet.text import format_list, to_printable
from limpet.threads import gc_paused


class Run:
    """A location that holds the snapshots of one training, and its branches.

    The constructor reads nothing. Every call lists the folder of the run again, and nothing below
    it. Manifests and evaluations never change, and each is read only once. The *current lineage*
    is the lineage of the newest branch, which is the one that training is on.
    """

    def __init__(self, url: Url) -> None:
        self.store = open_store(url)
        self.url: str = self.store.url
        self.catalog = Catalog(self.store)

    def __repr__(self) -> str:
        return f"<Run {to_printable(self.url)}>"

    def location(self, version: Version) -> Location:
        return Location(self.store, str(version))

    def open(self, version: Version) -> Snapshot:
        """Open one version. Raises ``NotFound``, or ``FormatError`` if the manifest is damaged or
        names a version other than that of its folder."""
        return Snapshot(self.catalog.open(version))

    def listing(self) -> Listing:
        """List the store once."""
        return self.catalog.listing()

    @gc_paused
    def snapshots(self) -> list[Snapshot]:
        """Return the versions on the current lineage, oldest first, without those whose manifest is
        damaged. (``limpet ls`` shows them too.)"""
        snapshots = []
        for version in self.line():
            try:
                snapshots.append(self.open(version))
            except (FormatError, NotFound) as e:
                events.emit("skipped", version=str(version), error=e)
        return snapshots

    def latest(self) -> Snapshot | None:
        """Return the newest intact version, or None if the run is empty or absent.

        A version is intact if its manifest is valid and all of its files exist with their full
        length, and `limpet verify` has found no wrong bytes, which are checked when they are read.
        Raises ``NoSnapshot`` if there are versions but none qualifies.
        """
        return snapshot_of(lineage.find_latest(self.catalog))

    def newest(
        self, use: Callable[[Snapshot], object], at: int | None = None, branch: int | None = None
    ) -> tuple[Snapshot | None, list[tuple[Version, LimpetError]]]:
        """Return the newest version that ``use`` accepts, and the skipped versions with reasons.

        ``use`` rejects a damaged version by raising ``FormatError`` or ``StoreError``. ``at``:
        search only versions of that step. ``branch``: search the lineage of that branch instead of
        the current one. On an empty or absent run the version is None, unless ``at`` is given.

        ``Denied``, ``Unavailable``, and ``FormatTooNew`` are no damage, and are raised: to fall
        back to an older version would silently lose steps. Raises ``NoSnapshot`` if no version
        qualifies, and ``NotFound`` if there is no such branch.
        """
        found, skipped = lineage.find_newest(
            self.catalog, lambda reader: use(Snapshot(reader)), at, branch
        )
        return snapshot_of(found), skipped

    def find(self, step: int, branch: int | None = None) -> Version:
        """Return the version of a step on the current lineage, or on that of ``branch``. Raises
        ``NotFound``, and ``LimpetError`` if ``step`` or ``branch`` is not a whole number."""
        step = to_int(step, STEP)
        branch = None if branch is None else to_int(branch, BRANCH)
        listing = self.listing()
        folders = lineage.lineage_folders(self.catalog, listing, branch)
        matches = [v for v in folders if v.step == step and listing.exists(v)]
        if not matches:
            versions = self.line(listing, branch)
            where = "the current lineage" if branch is None else f"the lineage of branch {branch}"
            raise NotFound(
                f"{self.url} has no version of step {step} on {where}",
                expected=f"a version of step {step}",
                found=lineage.describe_versions(versions, listing.versions),
                todo=lineage.OTHER_BRANCHES,
                key=str(Version(step, branch or 0)),
                store=self.url,
            )
        return matches[-1]

    # -- branches ------------------------------------------------------------------------------

    def line(self, listing: Listing | None = None, branch: int | None = None) -> list[Version]:
        """Return the current lineage, or the lineage of ``branch``, oldest first: the versions of
        the branch and, before them, those of each ancestor up to where its descendant started.

        ``listing``: use this one instead of a new one. Raises ``NotFound`` if there is no such
        branch.
        """
        return lineage.lineage_of(self.catalog, listing or self.listing(), branch)

    def branch(self, listing: Listing | None = None) -> int:
        """Return the number of the branch that training is on. The first branch is 0."""
        return lineage.newest_branch(self.catalog, listing or self.listing())

    def read_branch(self, number: int) -> Branch:
        """Read the record of a branch. Raises ``NotFound`` or ``FormatError``."""
        return self.catalog.read_branch(number)

    # -- writing -------------------------------------------------------------------------------

    def writer(
        self,
        *,
        keep: KeepPolicy | None = None,
        incremental: bool | int = False,
        group: GroupSpec = None,
        timeout: float | None = None,
    ) -> VersionWriter:
        """Return a writer of versions, for a program that has no training loop.

        In a ``with`` block, it holds the writer lock of the run, and continues from the newest
        intact version, which is its ``latest``. ``save(state, step=...)`` saves a version, and
        deletes the versions that ``keep`` does not keep (None: keeps all).

        ``incremental``: as for a ``Checkpointer``. ``group``: as for ``limpet.save``; all ranks
        make the same calls. ``timeout``: the seconds after which a save fails. Raises
        ``LimpetError`` for an invalid argument.
        """
        check_incremental(incremental)
        is_valid = isinstance(keep, KeepPolicy | None)
        require("keep=", is_valid, "a keep policy such as KeepLast(3)", keep)
        if timeout is not None:
            timeout = check_seconds("timeout=", timeout, may_be_infinite=True)
        return VersionWriter(
            self.catalog,
            saving_group(group),
            KeepPolicy() if keep is None else keep,
            incremental=incremental,
            timeout=timeout,
        )

    # -- metrics -------------------------------------------------------------------------------

    def metrics(self, at: Snapshot | Version | int) -> dict[str, float]:
        """Return the metrics of a snapshot, version, or step: those of the save, overridden by
        those of evaluations, of which the newest counts. Raises ``NotFound`` or ``FormatError``."""
        version, record = self._read_version(at)
        evaluations = self.catalog.evaluations.read(version, record.digest)
        return {**record.metrics, **evaluations.metrics()}

    def add_metrics(
        self, at: Snapshot | Version | int, metrics: Mapping[str, Any], name: str = ADDED_METRICS
    ) -> None:
        """Store the results of an evaluation of a snapshot, version, or step.

        ``metrics`` maps names to numbers. ``name`` becomes a part of the file's name; an
        ``Evaluation`` of that name takes the version for evaluated. A stored evaluation never
        changes. To correct a metric, add it again.

        Raises ``NotFound`` if the version is or was deleted, ``FormatError`` if ``at`` is a
        snapshot and another snapshot has replaced it, ``PlanError`` if a metric is not a number,
        and ``LimpetError`` if ``name`` is invalid.
        """
        checked = check_metrics(metrics)
        self.put_record(Evaluation, name, at, metrics=to_numbers(checked))

    def evaluations(self, at: Snapshot | Version | int) -> dict[str, EvaluationStatus]:
        """Return the state of each evaluation of a version, by its name: ``DONE``, ``INEXACT``,
        ``FAILED``, or ``PENDING``."""
        version, record = self._read_version(at)
        records = self.catalog.evaluations.read(version, record.digest)
        return find_statuses(version, records, self.catalog.leases.live().values())

    def ended(self) -> str | None:
        """Return why the training ended, ``"finished"`` or ``"stopped by"`` and the policy, or None
        if it has not ended normally with the newest version of the current lineage."""
        return lineage.find_end(self.catalog)

    def put_record(
        self, kind: type[AboutVersion], name: str, at: Snapshot | Version | int, **content: Any
    ) -> None:
        """Store a record of another kind about a version. Raises as ``add_metrics`` does."""
        version, record = self._read_version(at)
        earlier = self.catalog.evaluations.read(version, record.digest).records
        with pins.protected(self.location(version), version):
            put_about_version(kind, name, (version, record.digest), self.store, earlier, **content)

    def record_verification(self, snapshot: Snapshot, report: Report) -> None:
        """Record that ``snapshot.verify()`` has found wrong bytes, so that the version does not
        count as intact; or, after such a record, that it is intact again. (Missing bytes are always
        seen.) Raises as ``add_metrics`` does."""
        reader = reader_of(snapshot)
        wrong = [p.error.brief for p in report.problems if isinstance(p.error, DigestMismatch)]
        known = self.catalog.evaluations.read(reader.version, reader.digest).damage()
        if bool(wrong) != bool(known) and (wrong or report.ok):
            damage = format_list(wrong, 3, " ")[:MAX_TEXT]
            self.put_record(Verified, "verify", snapshot, damage=damage)

    def records(self) -> list[Record]:
        """Return the intact versions on the current lineage with their metrics, oldest first, as
        the input of keep policies."""
        return lineage.find_records(self.catalog, self.listing())

    def best(self, metric: str, mode: Mode | None = None) -> Snapshot | None:
        """Return the intact version on the current lineage with the best value of ``metric``.

        The best value is the smallest with ``mode="min"``, the default, and the largest with
        ``mode="max"``. NaN is never the best. Of versions with equal values, the newest is
        returned. The result is None if no version has the metric.
        Raises ``LimpetError`` for another ``mode``, and without one for a metric like
        ``val_accuracy``.
        """
        mode = check_metric("Run.best", metric, mode)
        return snapshot_of(lineage.find_best(self.catalog, metric, mode))

    def _resolve_version(self, at: Snapshot | Version | int) -> Version:
        if isinstance(at, Version):
            return at
        if isinstance(at, Snapshot):
            return self._read_version(at)[0]
        return self.find(to_int(at, "a Snapshot, a Version, or a step, a whole number"))

    def _read_version(self, at: Snapshot | Version | int) -> tuple[Version, VersionRecord]:
        """Return a version and its record. Raises ``NotFound``, or ``FormatError`` if it is damaged
        or if another snapshot has replaced the one at hand."""
        version = at.version if isinstance(at, Snapshot) else self._resolve_version(at)
        record = self.catalog.read_version(version, self.listing())
        if record is None or not record.digest:
            self.catalog.open(version)  # raises the error in the manifest
            raise NotFound(f"There is no {version} in {self.url}", store=self.url)
        if isinstance(at, Snapshot) and (digest := reader_of(at).digest) != record.digest:
            raise FormatError(
                f"{version} of {self.url} is not this snapshot any more",
                expected=f"a manifest with digest {digest}",
                found=record.digest,
                todo="Open the snapshot that is there now",
                file=self.location(version).key(names.MANIFEST),
            )
        return version, record

    # -- pins ----------------------------------------------------------------------------------

    def pin(self, step: int, branch: int | None = None) -> Version:
        """Protect a version from retention and ``sweep`` until it is unpinned. If it is pinned
        already, nothing changes. Raises ``NotFound``, also while it is being deleted."""
        version = self.find(step, branch)
        pin = encode_record(LastingPin(str(version), machine.utc_now()))
        with pins.protected(self.location(version), version), suppress(AlreadyExists):
            self.store.put_if_absent(names.pin_name(str(version)), pin)
        return version

    def unpin(self, step: int, branch: int | None = None) -> Version:
        """Remove the lasting pin of a version. Raises ``NotFound`` if either does not exist."""
        version = self.find(step, branch)
        key = names.pin_name(str(version))
        try:
            self.store.stat(key)
        except NotFound as e:
            raise NotFound(
                f"{version} of {self.url} is not pinned",
                found=e.found and f"{e.found} with the name {key}",
                todo=f"Pinned versions: {', '.join(map(str, self.pins())) or 'none'}",
                key=key,
                store=self.url,
            ) from e
        self.store.delete(key)
        return version

    def pins(self) -> list[Version]:
        """Return the versions that have a lasting pin, oldest first."""
        return sorted(self.listing().lasting_pins)

    # -- folders of shards ---------------------------------------------------------------------

    def spread_folders(self) -> list[str]:
        """Return the URLs of the folders over which the shards of the run are spread: those that
        exist, and those of the store's option ``spread``. There are none if it is not spread."""
        planned = map(names.spread_folder, range(self.store.traits.spread))
        folders = {*planned, *list_spread_folders(self.store)}
        return [f"{self.url}/{folder}" for folder in sorted(folders)]

    # -- deleting ------------------------------------------------------------------------------

    def delete(self, *versions: Snapshot | Version | int) -> int:
        """Delete versions, manifests first, and return the number of bytes that this freed.

        A version is also given by its step on the current lineage. Raises ``NotFound``, and
        ``LimpetError`` if one is pinned, a process is reading it, another version refers to it,
        or a training would continue from it (see ``retain``). Nothing is deleted then.
        """
        return retention.delete(self.catalog, [self._resolve_version(v) for v in versions])

    def retain(self, policy: KeepPolicy) -> list[Version]:
        """Delete the versions that ``policy`` does not keep, and return them, oldest first.

        Only intact versions on the current lineage are deleted. The newest intact version is never
        deleted, and neither is a version that is pinned, that a process is reading, or that a
        remaining version refers to. Damaged versions and other branches do not change. Raises
        ``StoreError``; the next call then completes the deletion.
        """
        require("policy", isinstance(policy, KeepPolicy), "a policy such as KeepLast(3)", policy)
        return retention.retain(self.catalog, policy)

    def sweep(
        self,
        *,
        grace: float = GRACE,
        abandoned: bool = False,
        dry_run: bool = False,
        now: float | None = None,
    ) -> SweepResult:
        """Remove orphans: files of saves that were never committed.

        Four kinds of files are not removed: files younger than ``grace`` seconds, files of an
        attempt whose process is alive, files that a manifest refers to, and files in a folder
        whose manifest is unreadable.

        ``abandoned=True`` also deletes the versions that are not on the current lineage, except
        those that are pinned or that another version refers to. ``dry_run=True`` only reports what
        would be removed. ``now`` replaces the current time, in seconds since the epoch.
        """
        age = check_seconds("grace=", grace, may_be_zero=True, may_be_infinite=True)
        now = time.time() if now is None else now
        return sweep.sweep(self.catalog, grace=age, abandoned=abandoned, dry_run=dry_run, now=now)
