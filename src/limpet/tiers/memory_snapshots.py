"""Snapshots of the state of a training in memory, every few steps, with copies on other hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from math import inf
from threading import Thread
from typing import Any

from limpet import events
from limpet.buffers import BufferPool
from limpet.errors import AlreadyExists, LimpetError
from limpet.format.names import Version, parse_version
from limpet.ranks.collective import Collective, await_all
from limpet.ranks.group import Group
from limpet.run.policy import PolicyInput
from limpet.saving.commit import Receipt, SaveJob, VersionMetadata
from limpet.saving.pending import Pending
from limpet.saving.save import begin_save, finish_in_background, finish_save
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.local.tmpfs import MIN_SPARE_BYTES, TmpfsStore
from limpet.threads import start_thread
from limpet.tiers.host_tier import COPY_SECONDS, KEPT_SNAPSHOTS, HostSnapshot, HostTier, state_bytes
from limpet.tiers.memory_check import TierCost, check_memory
from limpet.tiers.settings import MemoryTier

_COMPLETE, _UNCOPIED, _FAILED, _BUSY = range(4)
"""How a save in memory has ended on a rank. Of those of all ranks, the largest counts."""


class MemorySnapshots(HostTier):
    """The states of one training in memory, and the copies of other ranks that this one holds. All
    ranks call ``open``, ``find``, ``is_due``, and ``save`` together."""

    store: TmpfsStore

    def __init__(self, tier: MemoryTier, group: Group) -> None:
        super().__init__("memory", tier, group, tier.copies, tier.domain)
        self._tier = tier
        self._pool = BufferPool(1 << 50)
        self._last = PolicyInput(0, 0.0, 0, 0, 0.0, 0)
        self._pending: Pending | None = None
        self._newest: Version | None = None
        self._allocation: Thread | None = None
        self._has_enough = True
        self._must_stop = False
        self._has_saved = False
        self._copy_failure = ""
        self._has_reported = False
        self._failure: Exception | None = None

    # -- the beginning -------------------------------------------------------------------------

    def measure(self, count_bytes: Callable[[], int]) -> None:
        super().measure(count_bytes)
        self._has_enough = self._nbytes < MIN_SPARE_BYTES

    def _make_store(self, folder: str) -> TmpfsStore:
        return TmpfsStore(folder, spare_files=(KEPT_SNAPSHOTS + 1) * (1 + len(self._hosts.held)))

    def _remove_leftovers(self) -> None:
        self.store.remove_leftovers()

    def _check_space(self, folder: str, cost: TierCost) -> None:
        check_memory(folder, cost)
        placement = self._hosts.placement
        if self.group.rank or self.is_open:
            return  # ``open`` reports it once
        if placement.domains < placement.copies:
            events.emit("fewer_copies", copies=placement.copies, hosts=self._hosts.count)

    def _preallocate(self) -> None:
        """Allocate files for the next snapshots on a thread: new memory takes ten times as long as
        a copy. Not before the first step, because a resume needs the processors."""
        is_running = self._allocation is not None and self._allocation.is_alive()
        if not self._has_enough and not is_running:
            self._has_enough, self._must_stop = True, False
            thread = Thread(target=self._allocate, name="limpet-buffers", daemon=True)
            if start_thread(thread):
                self._allocation = thread

    def _allocate(self) -> None:
        nbytes = self._nbytes
        with suppress(LimpetError):  # the save that needs the memory raises
            for _ in range(KEPT_SNAPSHOTS + 1):
                if self.is_open and not self._must_stop and self._count_states() <= KEPT_SNAPSHOTS:
                    self.store.preallocate(nbytes)

    def _count_states(self) -> int:
        """Return how many states of this rank the memory in use is for: those on this host, also of
        an earlier training, the one that is being written, and spare files."""
        names = {stat.key.partition("/")[0] for stat in self.store.list("")}
        if self._pending is not None and not self._pending.done:
            names.add(str(self._newest))
        spare = round(self.store.spare_bytes / self._nbytes)
        return spare + sum(parse_version(name) is not None for name in names)

    def _end_allocation(self) -> None:
        """Wait for the file that is being allocated. A save that did not wait would allocate one
        more, and the sum would exceed what ``check_memory`` allows."""
        thread, self._allocation = self._allocation, None
        if thread is not None:
            self._must_stop = True
            thread.join()

    # -- during the training ---------------------------------------------------------------------

    def is_due(self, step: int, epochs: int) -> bool:
        """Return True, on all ranks alike, if the state after a step must be saved, or if the save
        before has failed on a rank: then ``save`` raises on all."""
        last = self._last
        now = PolicyInput(step, 0.0, epochs, last.step, 0.0, last.epochs)
        is_new = step != last.step  # ``end_epoch`` may follow a step whose state is saved
        if not is_new:
            self._last = now
        if not is_new or not self._tier.every.due(now):
            self._preallocate()
            return False
        self._last = now
        return not self._must_skip()

    def _must_skip(self) -> bool:
        """Return True if the save before has not ended on all ranks. If it has failed on one, all
        note the error: the others would wait for this rank in the next save."""
        collective = self.group.collective("the decision to skip a save in memory")
        with closing(collective):
            with collective:
                if self._copy_failure and not self._has_reported:
                    self._has_reported = True
                    events.emit("uncopied", error=self._copy_failure)
                ends = collective.gather(self._last_end(), int)
                end = collective.broadcast(None if ends is None else max(ends), int)
            if end == _FAILED:
                try:
                    with collective:
                        self.wait()
                        await_all(collective)
                except Exception as e:  # noqa: BLE001  (``save`` raises it)
                    self._failure = e
            if end == _UNCOPIED and self._newest is not None:
                self._uncopied.add(self._newest)
        if end == _BUSY and self.group.rank == 0:
            events.emit("memory_save_skipped", folder=self.store.url)
        return end == _BUSY

    def _last_end(self) -> int:
        pending = self._pending
        if pending is None or (pending.done and pending.error is None):
            return _UNCOPIED if self._copy_failure else _COMPLETE
        return _FAILED if pending.done else _BUSY

    def restart(self, step: int, epochs: int) -> None:
        """Count from now on: training resumes at a step."""
        self._last, self._newest = PolicyInput(step, 0.0, epochs, 0, 0.0, 0), None

    def save(self, state: Any, version: Version, metadata: VersionMetadata) -> None:
        """Copy the state into memory; the copies for other hosts follow in the background. Raises
        the error of the save before on all ranks, ``NoSpace``, or ``RankFailed``."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self.wait()
        self._end_allocation()
        if not self._has_saved:  # the training may have started before the first step
            self.measure(lambda: state_bytes(state, self.group))
        location = Location(self.store, str(version), is_per_host=True)
        try:
            job = begin_save(
                location, state, metadata, self._pool, group=self.group, stage_now=True
            )
        except AlreadyExists:
            return  # the training went back, and is at this step again
        self._measure_first(job)
        job.copy_to_peers = lambda receipt: self._copy(version, receipt, job.collective)

        def register(pending: Pending | None) -> None:
            self._pending, self._newest = pending, version

        finish_in_background(job, lambda job: self._finish(job, version), register=register)

    def _measure_first(self, job: SaveJob) -> None:
        """Check the space for what each rank really writes of the first state. That differs from
        what ``measure`` expects if some values exist only on some ranks."""
        if not self._has_saved:
            try:
                self.measure(lambda: job.image.length)
            except BaseException:
                with job, job.collective:
                    raise
            self._has_saved = True

    def wait(self) -> None:
        """Wait for the save in progress. Raises its error."""
        pending = self._pending
        if pending is not None:
            try:
                pending.wait()
            finally:  # after an interrupt, it is still in progress
                self._pending = None if pending.done else pending

    def wait_ended(self) -> None:
        """Wait for the save in progress, whether it fails or not. Its copies get 120 s."""
        self._copies_end = time.monotonic() + COPY_SECONDS
        try:
            with suppress(Exception):  # ``save`` or ``wait`` has raised it, or it is irrelevant
                self.wait()
        finally:
            self._copies_end = inf

    def _finish(self, job: SaveJob, version: Version) -> SnapshotReader:
        own = HostSnapshot(version, self._keys_of(version, job.partition.attempt))
        try:
            snapshot = finish_save(job)
        except BaseException:
            with suppress(LimpetError):  # what is left is deleted when the next training starts
                self._delete(own)
            raise
        self._keep(own)
        self._has_enough = self._nbytes < MIN_SPARE_BYTES  # the files of old states are not reused
        return snapshot

    def _copy(self, version: Version, receipt: Receipt, collective: Collective) -> None:
        """Copy the files of this rank to its peers. A peer that fails is reported by an event, and
        once by ``uncopied``: the state is still in the memory of this host."""
        self._copy_failure = ""
        if receipt.shard is None:
            return

        def advance() -> None:
            collective.advance()  # otherwise, a long copy would seem to be stuck
            collective.raise_if_aborted()

        for rank in self._hosts.peers:
            try:
                with self._connect(rank) as connection:
                    for name in (receipt.shard.index.name, receipt.shard.name):
                        connection.send_file(self.store, f"{version}/{name}", advance)
            except LimpetError as e:
                events.emit("copy_failed", key=str(version), rank=rank, error=e)
                self._copy_failure = f"the copy of {version} to rank {rank} failed ({e})"

    # -- the end -----------------------------------------------------------------------------------

    def _wait_at_end(self) -> None:
        self.wait_ended()
        self._end_allocation()  # what it has allocated is released next

    def _release(self) -> None:
        self.store.release_memory()
        self._pool.close()
