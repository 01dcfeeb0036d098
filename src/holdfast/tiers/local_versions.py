"""Versions on a fast local disk of each host, which are promoted to the run in the background."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from holdfast import events
from holdfast.deadline import Deadline
from holdfast.engine.distributed.collective import Collective
from holdfast.engine.distributed.group import Group
from holdfast.engine.saving.commit import (
    Receipt,
    before_commit,
    check_receipts,
    commit_collectively,
    pinned_base,
    put_manifest,
)
from holdfast.engine.saving.job import SaveJob
from holdfast.engine.saving.pending import Pending
from holdfast.engine.saving.save import finish_save
from holdfast.engine.saving.staging import shard_bytes
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.state.flatten import flatten
from holdfast.engine.transform.copy import copy_shards
from holdfast.errors import FormatError, HoldfastError, NoSpace
from holdfast.format.manifest import IncrementalShard
from holdfast.format.names import Version, shard_name
from holdfast.run.run import Run
from holdfast.settings import read_settings
from holdfast.storage.local.store import LocalStore
from holdfast.storage.store import Store
from holdfast.threads import Latch, no_op
from holdfast.tiers.flush import find_newest, flush_newest
from holdfast.tiers.host_tier import Generation, HostTier
from holdfast.tiers.hosts import Hosts
from holdfast.tiers.local_tier import LocalTier
from holdfast.tiers.memory_check import GIB, TierCost

LEFTOVER_SECONDS = 3600.0
"""The longest time for the promotion of what an earlier training has left."""


class LocalVersions(HostTier):
    """The newest versions of one training on the local disks of its hosts.

    A save writes to ``location`` first. Then its ``Promotion`` copies the files of each rank to the
    run, and rank 0 commits the same manifest there. Without a ``tier``, there is nothing.
    """

    store: LocalStore

    def __init__(self, tier: LocalTier | None, group: Group) -> None:
        super().__init__("local", tier, group)

    def open(self, run_store: Store, state: Any) -> None:
        if self._settings is not None and "://" not in run_store.url:
            path, run = os.path.realpath(self._settings.path), os.path.realpath(run_store.url)
            if os.path.commonpath([path, run]) == run:
                raise HoldfastError(
                    "The LocalTier is in the folder of the run",
                    expected="a folder on the local disk, and a run in a durable store",
                    found=f"path={path}, run={run}",
                    todo="Save to the local disk without a LocalTier, or use another folder",
                )
        super().open(run_store, state)

    def _measure(self, state: Any) -> int:
        return shard_bytes(flatten(state, self.group.rank), self.group)

    def _make_store(self, folder: str, hosts: Hosts) -> LocalStore:
        return LocalStore(folder, direct=read_settings().direct)

    def _check_space(self, folder: str, cost: TierCost) -> None:
        size = os.statvfs(folder)
        available = size.f_bavail * size.f_frsize + cost.present_bytes
        if available < cost.total:
            raise NoSpace(
                f"The local tier in {folder} does not fit on its disk",
                expected=f"{cost} of free space",
                found=f"{available / GIB:.1f} GiB",
                todo="Free space there, use another LocalTier(path), or no LocalTier",
                store=folder,
                needed=cost.total,
                available=available,
            )

    # -- the start of the training ---------------------------------------------------------------

    def promote_leftovers(self, run: Run) -> Pending | None:
        """Promote what an earlier training has left, in the background. The first rank of each host
        does this, once the training is the writer of the run. None: there is nothing to do.

        The result is the version of the run, or, if the local one is damaged, that one: a training
        that has resumed from a newer state can do without it.
        """
        if not self.is_open or not self._hosts.is_first:
            return None
        for stat in self.store.partials(""):
            self.store.delete(stat.key)
        folder = self.store.url
        captured = find_newest(folder, run)
        if captured is None:
            return None
        deadline = Deadline.after(LEFTOVER_SECONDS, f"the promotion of {captured.url}")

        def promote() -> Snapshot:
            try:
                # None: another host was faster
                return flush_newest(folder, run, deadline, is_writer=True) or captured
            except FormatError as e:
                events.emit("skipped", version=str(captured.version), error=e)
                return captured

        pending = Pending(promote, run.url, no_op, None)
        pending.start()
        return pending

    # -- during the training -----------------------------------------------------------------------

    def location(self, version: Version, deadline: Deadline | None) -> Location:
        """Return where a version is saved first."""
        return Location(self.store, str(version), is_per_host=True).limit("save", None, deadline)

    def begin_promotion(self, location: Location, previous: Pending | None) -> Promotion:
        """Prepare the promotion of a save to ``location``. All ranks call this in the training
        thread. ``previous``: the save that is committed first."""
        collective = self.group.collective(
            f"the promotion of {location.folder}", deadline=location.deadline
        )
        return Promotion(self, location, collective, previous)

    def keep_captured(self, version: Version, attempt: str) -> None:
        """Count a version that is complete on this host, and delete those before the newest two.
        They have been promoted, or a call has raised why not."""
        self._keep(Generation(version, self._keys_of(version, attempt)))


class Promotion:
    """The second half of a save to a local disk: complete it there, then commit it to the run.

    ``has_begun`` is set once the version is complete on the local disk and the one before it is
    committed, and also when the save fails. Then the next save may begin.
    """

    def __init__(
        self,
        tier: LocalVersions,
        location: Location,
        collective: Collective,
        previous: Pending | None,
    ) -> None:
        self._tier = tier
        self._location = location
        self.collective = collective
        self._previous = previous
        self.has_begun = Latch()

    def finish(
        self,
        job: SaveJob,
        check_state: Callable[[Sequence[Receipt]], object],
        check_writer: Callable[[Store], object],
    ) -> Snapshot:
        """Finish a save, and return the version of the run. All ranks call this.

        Rank 0 calls ``check_state`` before the version counts on the local disk, and
        ``check_writer`` with the run's store before the commit. Raises the errors of
        ``finish_save``, and ``FormatError`` if the local copy is damaged.
        """
        try:
            with closing(self.collective), self.collective:
                captured = finish_save(job, check_state)
                version, attempt = captured.version, job.partition.attempt
                self._tier.keep_captured(version, attempt)
                if self._previous is not None:
                    self._previous.wait_ended()
                self.has_begun.set()
                return self._promote(captured, check_writer)
        finally:
            self.has_begun.set()

    def _promote(self, captured: Snapshot, check_writer: Callable[[Store], object]) -> Snapshot:
        """Copy the files of this rank, of which every byte is checked. Rank 0 commits."""
        manifest, location, collective = captured.manifest, self._location, self.collective
        own = shard_name(collective.rank, collective.size, manifest.attempt)
        shards = [shard for shard in manifest.shards if shard.name == own]
        with pinned_base(location, manifest.attempt, None, collective):
            with before_commit():
                copy_shards(captured.location, location, shards, lambda n: collective.advance())
            copied = [IncrementalShard(s.name, s.length, s.index, []) for s in shards]
            receipt = Receipt(collective.rank, copied[0] if copied else None)

            def commit(receipts: list[Receipt]) -> Snapshot:
                with before_commit():
                    check_receipts(location, receipts, collective.size)
                    check_writer(location.store)
                collective.advance()  # raises if the deadline has passed
                collective.begin_commit()  # raises if another rank failed before
                return put_manifest(location, manifest)

            promoted, result = commit_collectively(
                location, manifest.attempt, collective, receipt, commit
            )
        promoted.location = location.without_limit()
        events.emit("promoted", url=location.url, bytes=result.nbytes)
        return promoted
