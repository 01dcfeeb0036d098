"""Versions on a fast local disk of each host, which are promoted to the run in the background."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field

from limpet import errors, events
from limpet.convert.copy import copy_shards
from limpet.deadline import Deadline
from limpet.format import names
from limpet.format.manifest import Manifest, Shard
from limpet.format.names import Version, shard_name
from limpet.loading.snapshot import Snapshot
from limpet.ranks.collective import Collective
from limpet.ranks.group import Group
from limpet.run.run import Run
from limpet.saving.commit import (
    Receipt,
    SaveJob,
    before_commit,
    check_receipts,
    commit_collectively,
    pinned_attempt,
    put_manifest,
)
from limpet.saving.pending import Pending
from limpet.saving.save import finish_save
from limpet.settings import read_settings
from limpet.snapshot import pins
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader, open_location
from limpet.storage.local.store import LocalStore
from limpet.storage.store import Store
from limpet.text import format_size
from limpet.threads import Latch, no_op
from limpet.tiers.host_tier import KEPT_SNAPSHOTS, HostSnapshot, HostTier
from limpet.tiers.inventory import TierSnapshot
from limpet.tiers.memory_check import TierCost
from limpet.tiers.settings import LocalTier

LEFTOVER_SECONDS = 3600.0
"""The longest time for the promotion of what an earlier training has left."""


class LocalSnapshots(HostTier):
    """The newest versions of one training on the local disks of its hosts. A ``Promotion`` then
    copies the files of each rank to the run, and rank 0 commits the same manifest."""

    store: LocalStore
    _most_snapshots = KEPT_SNAPSHOTS + 2  # one more may wait for its promotion after a restart

    def __init__(self, tier: LocalTier, group: Group) -> None:
        super().__init__("local", tier, group)

    def _make_folder(self, path: str, run_id: str, run_url: str) -> str:
        if "://" not in run_url:
            tier, run = os.path.realpath(path), os.path.realpath(run_url)
            if os.path.commonpath([tier, run]) == run:
                raise errors.LimpetError(
                    "The LocalTier is in the folder of the run",
                    expected="a folder on the local disk, and a run in a durable store",
                    found=f"path={tier}, run={run}",
                    todo="Save to the local disk without a LocalTier, or use another folder",
                )
        return super()._make_folder(path, run_id, run_url)

    def _make_store(self, folder: str) -> LocalStore:
        return LocalStore(folder, direct=read_settings().direct)

    def _check_space(self, folder: str, cost: TierCost) -> None:
        with LocalStore(folder).translate_errors("look up the space of", "."):
            size = os.statvfs(folder)
        available = size.f_bavail * size.f_frsize + cost.present_bytes
        if available < cost.total:
            raise errors.NoSpace(
                f"The local tier in {folder} does not fit on its disk",
                expected=f"{cost} of free space",
                found=format_size(available),
                todo="Free space there, use another LocalTier(path), or no LocalTier",
                store=folder,
                needed=cost.total,
                available=available,
            )

    # -- the start of the training ---------------------------------------------------------------

    def start(self, kept: Version | None, leftovers: Sequence[TierSnapshot]) -> None:
        """Delete what the training does not need, once it is the writer of the run."""
        if self.is_open:
            self.keep_only(kept, [leftover.version for leftover in leftovers])
            for stat in self.store.partials("") if self._hosts.is_first else ():
                self.store.delete(stat.key)

    def promote_leftovers(
        self,
        run: Run,
        leftovers: Sequence[TierSnapshot],
        kept: Version | None,
        check_writer: Callable[[Store], object],
    ) -> tuple[Pending, Promotion] | None:
        """Promote what an earlier training has left, oldest first, in the background; None:
        nothing. The result is the newest one up to ``kept``, or else a snapshot of the tier."""
        if not leftovers:
            return None
        promotions = []
        for leftover in leftovers:
            deadline = Deadline.after(LEFTOVER_SECONDS, f"the promotion of {leftover.folder}")
            location = run.location(leftover.version).limit("promotion", None, deadline)
            promotions.append(self.begin_promotion(location, None))
            promotions[-1].is_local.set()
            promotions[-1].has_begun.set()

        def promote() -> SnapshotReader:
            newest = None
            with ExitStack() as closing_all:
                for promotion in promotions:
                    closing_all.callback(promotion.collective.close)
                for leftover, promotion in zip(leftovers, promotions, strict=True):
                    promoted = promotion.finish_leftover(leftover, check_writer)
                    self._unpromoted.discard(leftover.version)
                    is_kept = kept is not None and leftover.version.step <= kept.step
                    if promoted is not None and is_kept:
                        newest = promoted
                    elif not is_kept and self._hosts.is_first:
                        keys = [stat.key for stat in self.store.list(leftover.folder)]
                        self._delete(HostSnapshot.of_files(leftover.version, keys))
            last = leftovers[-1]
            return newest or SnapshotReader(
                self.locate(last.folder, last.sources), None, last.digest
            )

        pending = Pending(lambda: Snapshot(promote()), run.url, no_op, None)
        pending.start()
        return pending, promotions[-1]

    # -- during the training -----------------------------------------------------------------------

    def location(self, durable: Location) -> Location:
        """Return where a version is saved first. ``durable``: where it is promoted to."""
        spread = durable.store.traits.spread  # the manifest is that of the promoted version
        first = Location(self.store, durable.folder, is_per_host=True, spread=spread)
        return first.limit("save", None, durable.deadline)

    def begin_promotion(self, location: Location, previous: Pending | None) -> Promotion:
        """Prepare the promotion of a save to ``location``. All ranks call this in the training
        thread. ``previous``: the save that is committed first."""
        collective = self.group.collective(
            f"the promotion of {location.folder}", deadline=location.deadline
        )
        return Promotion(self, location, collective, previous)

    def keep(self, version: Version, attempt: str) -> None:
        """Count a version that is complete on this host, and delete those before the newest two.
        They have been promoted, or a call has raised why not."""
        self._keep(HostSnapshot(version, self._keys_of(version, attempt)))

    def discard(self, version: Version, attempt: str) -> None:
        """Delete what a save that failed has left."""
        self._delete(HostSnapshot(version, self._keys_of(version, attempt)))


@dataclass(frozen=True, eq=False)
class Promotion:
    """The second half of a save to a local disk. ``is_local`` is set once it is complete there, and
    ``has_begun`` once the one before is committed, too; both when the save fails."""

    _tier: LocalSnapshots
    _location: Location
    collective: Collective
    _previous: Pending | None
    is_local: Latch = field(default_factory=Latch)
    has_begun: Latch = field(default_factory=Latch)

    def finish(self, job: SaveJob, check_writer: Callable[[Store], object]) -> SnapshotReader:
        """Finish a save on all ranks, and return the version of the run. Rank 0 calls
        ``check_writer`` before the commit. Raises as ``finish_save`` and ``FormatError``."""
        try:
            with closing(self.collective), self.collective:
                local = self._finish_local(job)
                self.is_local.set()
                while self._previous is not None and not self._previous.wait_ended(1.0):
                    self.collective.advance()  # raises if the deadline has passed
                self.has_begun.set()
                rank, size = self.collective.rank, self.collective.size
                own = shard_name(rank, size, local.manifest.attempt)
                shards = [shard for shard in local.manifest.shards if shard.name == own]
                return self._promote(local, shards, check_writer)
        finally:
            self.is_local.set()
            self.has_begun.set()

    def _finish_local(self, job: SaveJob) -> SnapshotReader:
        version = names.parse_version(job.location.folder)
        if version is None:
            raise ValueError(f"{job.location.folder} is not a version")
        try:
            local = finish_save(job)
        except BaseException:
            with suppress(errors.LimpetError):  # the error of the save counts
                self._tier.discard(version, job.partition.attempt)
            raise
        self._tier.keep(version, job.partition.attempt)
        return local

    def finish_leftover(
        self, leftover: TierSnapshot, check_writer: Callable[[Store], object]
    ) -> SnapshotReader | None:
        """Promote a version that an earlier training has left. None: it is damaged or gone, or the
        run has other files of its name. All ranks call this."""
        rank = self.collective.rank
        source = self._tier.locate(leftover.folder, leftover.sources)
        local = SnapshotReader(source, None, leftover.digest)
        try:
            with closing(self.collective), self.collective:
                ranks = leftover.sources.by_file()[::2]  # of the shards, without their indexes
                shards = [
                    shard
                    for shard, having in zip(local.manifest.shards, ranks, strict=True)
                    if having[0] == rank
                ]
                return self._promote(local, shards, check_writer, is_leftover=True)
        except errors.LimpetError as e:
            cause = e.__cause__ if isinstance(e, errors.RankFailed) else e
            if not isinstance(cause, errors.FormatError | errors.AlreadyExists | errors.NotFound):
                raise
            events.emit("skipped", version=leftover.folder, error=e)
            return None

    def _promote(
        self,
        local: SnapshotReader,
        shards: Sequence[Shard],
        check_writer: Callable[[Store], object],
        *,
        is_leftover: bool = False,
    ) -> SnapshotReader:
        """Copy shards on this rank, of which every byte is checked. Rank 0 commits."""
        manifest, location, collective = local.manifest, self._location, self.collective
        with pinned_attempt(location, manifest.attempt, None, collective):
            with before_commit():
                if is_leftover and not collective.rank:  # an earlier promotion may have left files
                    pins.require_no_deletion(location, local.version, of_files=True)
                copy_shards(local.location, location, shards, lambda n: collective.advance())
            is_own = bool(shards) and not is_leftover
            receipt = Receipt(collective.rank, shards[0] if is_own else None)

            def commit(receipts: list[Receipt]) -> SnapshotReader:
                with before_commit():
                    if is_leftover:  # a rank may have copied shards of several others
                        SnapshotReader(location, manifest, local.digest).read_indexes()
                    else:
                        check_receipts(location, receipts, collective.size)
                    check_writer(location.store)
                collective.advance()  # raises if the deadline has passed
                collective.begin_commit()  # raises if another rank failed before
                return _put_manifest(location, manifest, local.digest)

            promoted, result = commit_collectively(
                location, manifest.attempt, collective, receipt, commit
            )
        promoted.location = location.without_limit()
        events.emit("promoted", url=location.url, bytes=result.nbytes)
        return promoted


def _put_manifest(location: Location, manifest: Manifest, digest: str) -> SnapshotReader:
    """Commit the manifest, unless ``limpet run`` was faster."""
    try:
        return put_manifest(location, manifest)
    except errors.CommitError as e:
        if isinstance(e.__cause__, errors.AlreadyExists):
            existing = open_location(location)
            if existing.digest == digest:
                return existing
        raise
