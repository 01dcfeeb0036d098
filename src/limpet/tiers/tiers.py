"""The tiers of one training, the fastest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from operator import attrgetter
from typing import Any

from limpet import events
from limpet.deadline import Deadline
from limpet.errors import LimpetError
from limpet.format.names import Version
from limpet.ranks.collective import Collective
from limpet.ranks.group import Group, broadcast_from_first
from limpet.run.lineage import newest_version
from limpet.run.run import Run
from limpet.saving.pending import Pending
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import Store
from limpet.tiers.flush import MemoryRecord, flush_states
from limpet.tiers.host_tier import HostTier, state_bytes
from limpet.tiers.inventory import Sources, TierName, TierSnapshot
from limpet.tiers.local_snapshots import LocalSnapshots, Promotion
from limpet.tiers.memory_snapshots import MemorySnapshots
from limpet.tiers.settings import LocalTier, MemoryTier

Tier = MemoryTier | LocalTier
"""The settings of a tier."""


class Tiers:
    """What a training keeps in memory and on the local disks of its hosts. All ranks call ``open``
    and ``find`` together. A tier without settings is None."""

    def __init__(self, settings: Sequence[Tier], group: Group) -> None:
        self.memory: MemorySnapshots | None = None
        self.local: LocalSnapshots | None = None
        for tier in settings:
            if isinstance(tier, MemoryTier):
                self.memory = MemorySnapshots(tier, group)
            else:
                self.local = LocalSnapshots(tier, group)
        self._all: list[HostTier] = [t for t in (self.memory, self.local) if t is not None]
        self.group = group
        self.can_flush = bool(settings)
        """True if there is a tier, so that there may be states that ``flush`` saves."""

        self._resumed: tuple[TierName | None, Version | None] = None, None
        self._leftovers: Sequence[TierSnapshot] = ()

    def open(self, run_store: Store, state: Any, *, is_resumed: bool) -> None:
        """Open the tiers (see ``HostTier``). A second call only waits for the save in progress.
        Without a resume, raises ``LimpetError`` on all ranks unless they are empty."""
        if self.memory is not None:
            self.memory.wait_ended()  # its files would be deleted while it completes the state
        for tier in self._all:
            tier.open(run_store, state)
        if is_resumed or not any(tier.is_open for tier in self._all):
            return
        collective = self.group.collective("the check that the tiers are empty")
        with closing(collective), collective:
            found = self.find(collective)
            if found:
                raise LimpetError(
                    f"The {found[0].tier} tier has states of an earlier training of this run",
                    expected="a call of resume() before the first step, or empty tiers",
                    found=found[0].folder,
                    todo="Call ckpt.resume(). To begin again, use another folder for the run",
                )
            collective.broadcast(True if collective.rank == 0 else None, bool)

    def find(self, collective: Collective) -> list[TierSnapshot]:
        """Return the snapshots, newest first, on rank 0; of two of one step, the save on a
        local disk first: that in memory may be older. On the other ranks, the list is empty."""
        found = [c for tier in reversed(self._all) for c in tier.find(collective)]
        return sorted(found, key=attrgetter("version"), reverse=True)  # it is stable

    def locate(self, tier: TierName, folder: str, sources: Sources) -> Location:
        """Return the location from which this rank loads a state of a tier."""
        (found,) = (t for t in self._all if t.name == tier)
        return found.locate(folder, sources)

    def resume_from(
        self, tier: TierName | None, kept: Version | None, leftovers: Sequence[TierSnapshot]
    ) -> None:
        """Note what was loaded from which ``tier`` (None: the run), and the ``leftovers`` on local
        disks that are still to be promoted. Nothing is deleted before ``start``."""
        self._resumed = tier, kept
        self._leftovers = leftovers

    def start(self, state: Any) -> None:
        """Once the training is the writer, check the space for its state, and delete what it does
        not continue from. All ranks call this, and all raise; ``NoSpace`` deletes nothing."""
        count_bytes = cache(lambda: state_bytes(state, self.group))  # it looks at every leaf
        for tier in self._all:
            tier.measure(count_bytes)
        if any(tier.is_open for tier in self._all):
            operation = "the start of the tiers"
            broadcast_from_first(self.group, operation, lambda: True, bool, self._delete_others)

    def _delete_others(self) -> None:
        tier, kept = self._resumed
        if self.memory is not None:
            self.memory.keep_only(kept if tier == self.memory.name else None)
        if self.local is not None:
            self.local.start(None if tier is None else kept, self._leftovers)

    def promote_leftovers(
        self, run: Run, check_writer: Callable[[Store], object]
    ) -> tuple[Pending, Promotion] | None:
        """Promote what an earlier training has left (see ``LocalSnapshots``)."""
        if self.local is None:
            return None
        return self.local.promote_leftovers(run, self._leftovers, self._resumed[1], check_writer)

    def flush(
        self, run: Run, deadline: Deadline, check_writer: Callable[[Store], object]
    ) -> SnapshotReader | None:
        """Save the newer snapshots of this host (``flush_states``), and return the newest version
        then, of any rank. Raises the error of the newest state if none was saved."""
        records = [
            MemoryRecord(tier.store.url, run.url, tier.name == "local")
            for tier in self._all
            if tier.is_open
        ]
        results = [*flush_states(records, run, deadline, check_writer)]
        errors = [r for r in results if not isinstance(r, SnapshotReader)]
        flushed = next((r for r in reversed(results) if isinstance(r, SnapshotReader)), None)
        last = errors.pop() if flushed is None and errors else None  # the caller reports this one
        for error in errors:
            events.emit("flush_failed", error=error)
        if last is not None:
            raise last
        if flushed is None and records:
            newest = newest_version(run.catalog, run.listing())
            flushed = None if newest is None else run.catalog.open(newest)
        return flushed

    def close(self, is_complete: bool) -> None:
        """Stop serving. ``is_complete``: the last step is in the run, so nothing has to stay."""
        for tier in self._all:
            tier.close(is_complete)
