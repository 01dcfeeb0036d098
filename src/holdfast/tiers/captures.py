"""Captures the state of a training in memory every few steps, with copies on other hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from threading import Thread
from typing import Any, NamedTuple

from holdfast import events
from holdfast.buffers import BufferPool
from holdfast.deadline import Deadline
from holdfast.engine.distributed.collective import Collective
from holdfast.engine.distributed.group import Group, StoreGroup, broadcast_from_first
from holdfast.engine.distributed.kv import KVClient
from holdfast.engine.saving.commit import Receipt
from holdfast.engine.saving.job import SaveJob, VersionMetadata
from holdfast.engine.saving.pending import Pending
from holdfast.engine.saving.save import begin_save, finish_in_background, finish_save
from holdfast.engine.saving.staging import shard_bytes
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import AlreadyExists, Denied, HoldfastError, NoSpace
from holdfast.format.names import MANIFEST, Version, index_name, parse_version, shard_name
from holdfast.run.policy import PolicyInput
from holdfast.settings import status_folder
from holdfast.storage.store import Store
from holdfast.storage.tmpfs.store import TmpfsStore
from holdfast.text import warn_user
from holdfast.threads import start_thread
from holdfast.tiers.flush import MemoryRecord, record_memory
from holdfast.tiers.hosts import Hosts, RankFacts
from holdfast.tiers.inventory import Candidate, HostInventory, find_candidates, take_inventory
from holdfast.tiers.memory_check import MemoryCost, check_memory
from holdfast.tiers.memory_tier import MemoryTier
from holdfast.tiers.peers.accounts import PeerLimits
from holdfast.tiers.peers.addresses import PeerAddress, choose_address, job_secret, look_up, publish
from holdfast.tiers.peers.client import PeerConnection
from holdfast.tiers.peers.server import PeerServer
from holdfast.tiers.recovery_store import RecoveryStore
from holdfast.tiers.run_id import read_or_create_run_id
from holdfast.types import MIB

GENERATIONS = 2
"""The captured states that stay in memory."""

COPY_SECONDS = 120.0
"""The longest time for the copy of a rank's files to one peer."""


class Generation(NamedTuple):
    """A captured state. ``keys``: the files besides the manifest that this rank deletes."""

    version: Version
    keys: Sequence[str]


class Captures:
    """The states of one training in memory, and the copies of other ranks that this one holds.

    All ranks call ``open``, ``find``, ``is_due``, and ``capture`` together. The newest two states
    stay; older ones are deleted once a newer one is complete. Without a ``tier``, nothing is
    captured.
    """

    def __init__(self, tier: MemoryTier | None, group: Group) -> None:
        self._tier = tier
        self._group = group
        self._pool = BufferPool(1 << 50)
        self._last = PolicyInput(0, 0.0, 0, 0, 0.0, 0)
        self._generations: list[Generation] = []
        self._pending: Pending | None = None
        self._closing = ExitStack()
        self._prefix = self._secret = ""
        self._unallocated = 0
        self.is_open = False

    # -- the beginning -------------------------------------------------------------------------

    def open(self, run_store: Store, state: Any) -> None:
        """Check the memory of all hosts, and serve the files of this one. A second call does
        nothing.

        Raises ``NoSpace`` if the memory of a host is too small for ``state``, and ``HoldfastError``
        if the folder is not in memory; then, all ranks raise.
        """
        group, tier = self._group, self._tier
        if self.is_open or tier is None:
            return
        nbytes = shard_bytes(state, group)
        with closing(group.collective("the start of the memory tier")) as collective, collective:
            first = read_or_create_run_id(run_store) if collective.rank == 0 else None
            run_id = collective.broadcast(first, str)
            folder = _make_folder(os.fspath(tier.path), run_id)
            facts = RankFacts.of_this_rank(folder, tier.domain, nbytes)
            gathered = collective.gather(facts, RankFacts)
            all_facts = collective.broadcast(gathered, list[RankFacts])
            self._hosts = hosts = Hosts(all_facts, collective.rank, tier.copies)
            spares = (GENERATIONS + 1) * (1 + len(hosts.held))
            self.store = TmpfsStore(folder, spare_files=spares)
            if hosts.is_first:
                self._check_memory(folder)
                if (status := status_folder()) is not None:
                    url = run_store.url
                    run = url if "://" in url else os.path.abspath(url)
                    record_memory(status, MemoryRecord(folder, run))
            self._serve(tier)
            all_started = collective.gather(True, bool)  # an error of one rank reaches all
            collective.broadcast(None if all_started is None else True, bool)
        if group.rank == 0 and self._prefix and isinstance(group, StoreGroup):
            group.kv.delete([f"{self._prefix}/peer-secret"])  # all ranks have it now
        self._unallocated, self.is_open = nbytes, True

    def _check_memory(self, folder: str) -> None:
        self.store.remove_leftovers()
        present = sum(stat.length for stat in self.store.list(""))
        check_memory(folder, MemoryCost(self._hosts.held_bytes, GENERATIONS, present))
        placement = self._hosts.placement
        if self._group.rank == 0 and placement.domains < placement.copies:
            found = f"{self._hosts.count} host{'s' if self._hosts.count > 1 else ''}"
            warn_user(
                f"MemoryTier(copies={placement.copies}) keeps fewer copies, because the job runs on"
                f" {found}: what is lost with a host may then be only in the durable store",
                UserWarning,
            )

    def _serve(self, tier: MemoryTier) -> None:
        """Let other hosts copy files to and from the memory of this one."""
        group, hosts = self._group, self._hosts
        if not isinstance(group, StoreGroup) or hosts.count == 1:
            return
        kv = group.kv
        prefix = f"{group.next_sequence_number()}/tiers"
        self._secret, self._prefix = job_secret(kv, prefix), prefix
        is_one_host = hosts.is_one_machine
        address = choose_address(kv.store_host, tier.interface, is_one_host=is_one_host)
        longest = max([*hosts.held_by_rank, 0]) + 64 * MIB
        limits = PeerLimits(
            file_bytes=longest,
            peer_bytes=(GENERATIONS + 2) * longest,
            total_bytes=(GENERATIONS + 2) * longest * max(1, len(hosts.held)),
        )
        server = self._closing.enter_context(PeerServer(self.store, address, self._secret, limits))
        keys = publish(kv, prefix, PeerAddress(group.rank, server.address, server.port))
        self._closing.callback(_unpublish, kv, keys)

    def _preallocate(self) -> None:
        """Allocate the first files on a thread, once: new memory takes ten times as long as a copy.
        Not before the first step, because a resume needs the processors."""
        nbytes, self._unallocated = self._unallocated, 0

        def allocate() -> None:
            with suppress(NoSpace):  # the capture that needs the memory raises
                for _ in range(GENERATIONS + 1):
                    self.store.preallocate(nbytes)

        if nbytes:
            start_thread(Thread(target=allocate, name="holdfast-buffers", daemon=True))

    # -- during the training ---------------------------------------------------------------------

    def is_due(self, step: int, epochs: int) -> bool:
        """Return True if the state after a step must be captured. All ranks get the same result."""
        last = self._last
        now = PolicyInput(step, 0.0, epochs, last.step, 0.0, last.epochs)
        if self._tier is None or not self._tier.every.due(now):
            self._preallocate()
            return False
        self._last = now
        return not broadcast_from_first(
            self._group, "the decision to skip a capture", self._is_busy, bool
        )

    def _is_busy(self) -> bool:
        is_busy = self._pending is not None and not self._pending.done
        if is_busy:
            events.emit("capture_skipped", folder=self.store.url)
        return is_busy

    def restart(self, step: int, epochs: int) -> None:
        """Count from now on: training resumes at a step."""
        self._last = PolicyInput(step, 0.0, epochs, 0, 0.0, 0)

    def capture(self, state: Any, version: Version, metadata: VersionMetadata) -> None:
        """Copy the state into memory. The copies go to the other hosts in the background.

        The state may change when this returns. Raises the error of the capture before, ``NoSpace``,
        or ``RankFailed``.
        """
        self.wait()
        location = Location(self.store, str(version), is_per_host=True)
        try:
            job = begin_save(
                location, state, metadata, self._pool, group=self._group, stage_now=True
            )
        except AlreadyExists:
            return  # the training went back, and is at this step again
        job.copy_to_peers = lambda receipt: self._copy(version, receipt)

        def register(pending: Pending | None) -> None:
            self._pending = pending

        finish_in_background(job, lambda job: self._finish(job, version), register=register)

    def wait(self) -> None:
        """Wait for the capture in progress. Raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _finish(self, job: SaveJob, version: Version) -> Snapshot:
        attempt, size = job.partition.attempt, self._group.size
        keys = [
            f"{version}/{name(rank, size, attempt)}"
            for rank in (self._group.rank, *self._hosts.held)
            for name in (shard_name, index_name)
        ]
        try:
            snapshot = finish_save(job)
        except BaseException:
            with suppress(HoldfastError):  # what is left is deleted when the next training starts
                self._delete(Generation(version, keys))
            raise
        self._generations.append(Generation(version, keys))
        while len(self._generations) > GENERATIONS:
            self._delete(self._generations.pop(0))
        return snapshot

    def _delete(self, generation: Generation) -> None:
        # the manifest first: each rank of a host does the same
        self.store.delete(f"{generation.version}/{MANIFEST}")
        for key in generation.keys:
            self.store.delete(key)

    def _copy(self, version: Version, receipt: Receipt) -> None:
        """Copy the files of this rank to its peers. A peer that fails is reported by an event: the
        state is still in the memory of this host."""
        if receipt.shard is None:
            return
        for rank in self._hosts.peers:
            try:
                with self._connect(rank) as connection:
                    for name in (receipt.shard.index.name, receipt.shard.name):
                        connection.send_file(self.store, f"{version}/{name}")
            except HoldfastError as e:
                events.emit("copy_failed", key=str(version), rank=rank, error=e)

    def _connect(self, rank: int) -> PeerConnection:
        group = self._group
        if not isinstance(group, StoreGroup):
            raise HoldfastError("One process has no peers")
        (address,) = look_up(group.kv, self._prefix, [rank])
        if address is None:
            raise HoldfastError(f"Rank {rank} does not serve copies anymore")
        deadline = Deadline.after(COPY_SECONDS, f"the copy to or from rank {rank}")
        return PeerConnection(address, self._secret, group.rank, deadline)

    # -- resuming ----------------------------------------------------------------------------------

    def find(self, collective: Collective) -> list[Candidate]:
        """Return the states in memory, newest first, on rank 0. All ranks call this. On the other
        ranks, the list is empty."""
        if not self.is_open:
            return []
        inventory = HostInventory(self._group.rank)
        if self._hosts.is_first:
            inventory = take_inventory(self.store, self._group.rank)
        gathered = collective.gather(inventory, HostInventory)
        return [] if gathered is None else find_candidates(gathered)

    def locate(self, folder: str, sources: dict[str, list[int]]) -> Location:
        """Return the location from which this rank loads a state."""

        def fetch(rank: int, key: str, max_length: int) -> None:
            with self._connect(rank) as connection:
                connection.fetch_file(self.store, key, max_length)

        store: Store = RecoveryStore(self.store, sources, fetch)
        return Location(store, folder, is_per_host=True)

    def keep_only(self, folder: str | None) -> None:
        """Delete all states but the one that was loaded, and the newest one before it.

        ``folder``: that of the state, or None if none was loaded from memory.
        """
        self._generations.clear()
        if not self.is_open or not self._hosts.is_first:
            return
        files: dict[Version, list[str]] = {}
        for stat in self.store.list(""):
            version = parse_version(stat.key.partition("/")[0])
            if version is not None:
                files.setdefault(version, []).append(stat.key)
        kept = None if folder is None else parse_version(folder)
        for version in sorted(files):
            keys = [key for key in files[version] if not key.endswith(f"/{MANIFEST}")]
            generation = Generation(version, keys)
            if kept is not None and (version == kept or version.step < kept.step):
                self._generations.append(generation)
            else:
                self._delete(generation)
        while len(self._generations) > GENERATIONS:
            self._delete(self._generations.pop(0))

    # -- the end -----------------------------------------------------------------------------------

    def close(self, is_complete: bool) -> None:
        """Stop serving, and release the memory that holds no state.

        ``is_complete``: the training has ended, and its last step is in the durable store. Then,
        all states are deleted. Otherwise, they stay for the next start.
        """
        if not self.is_open:
            return
        self.is_open = False
        with suppress(HoldfastError):  # ``capture`` or ``wait`` has raised it, or the training ends
            self.wait()
        self._closing.close()
        if is_complete:
            for generation in self._generations:
                self._delete(generation)
            self._generations.clear()
        self.store.release_memory()
        self._pool.close()
        with suppress(OSError):  # it is not empty, or another rank has removed it
            os.rmdir(self.store.url)


def _unpublish(kv: KVClient, keys: Sequence[str]) -> None:
    """Delete this rank's address. Without the job's store, which ends with the process that hosts
    it, nobody can look it up either: this training has ended as it should, and must say so."""
    with suppress(HoldfastError):
        kv.delete(keys)


def _make_folder(path: str, run_id: str) -> str:
    """Return the folder of a run in memory, which only this user can read.

    Raises ``Denied`` if the folder of this user belongs to another one: anybody may create a folder
    in ``/dev/shm``.
    """
    own = os.path.join(path, f"holdfast-{os.getuid()}")
    folder = os.path.join(own, run_id)
    os.makedirs(own, mode=0o700, exist_ok=True)
    status = os.lstat(own)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise Denied(
            f"The folder {own} of the memory tier is not private",
            expected=f"a folder of user {os.getuid()} with mode 0700",
            found=f"user {status.st_uid}, mode {status.st_mode & 0o7777:o}",
            todo="Delete it, or use MemoryTier(path=...)",
        )
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder
