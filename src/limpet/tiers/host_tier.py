"""What a training keeps on its hosts: a folder per host, which all tiers use in the same way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import chain
from math import inf
from threading import main_thread
from typing import Any, NamedTuple

from limpet.errors import Denied, LimpetError, StoreError
from limpet.format.names import MANIFEST, Version, index_name, parse_version, shard_name
from limpet.machine import full_path
from limpet.ranks.collective import Collective, await_all
from limpet.ranks.group import Group
from limpet.ranks.kv import KVClient
from limpet.saving.staging import shard_bytes
from limpet.settings import status_folder
from limpet.snapshot.location import Location
from limpet.state.flatten import flatten
from limpet.storage.local.store import LocalStore
from limpet.storage.local.tmpfs import TmpfsStore
from limpet.storage.store import Store
from limpet.tiers import inventory
from limpet.tiers.flush import MemoryRecord, record_memory
from limpet.tiers.hosts import Hosts, RankFacts
from limpet.tiers.memory_check import TierCost
from limpet.tiers.peers.addresses import PeerAddress, choose_address, job_secret, look_up, publish
from limpet.tiers.peers.client import PeerConnection
from limpet.tiers.peers.server import PeerLimits, PeerServer
from limpet.tiers.recovery_store import Peers, RecoveryStore
from limpet.tiers.run_id import local_folder, read_or_create_run_id
from limpet.tiers.settings import LocalTier, MemoryTier
from limpet.types import MIB

KEPT_SNAPSHOTS = 2
"""The snapshots that stay on a host."""

COPY_SECONDS = 120.0
"""The longest time for an answer of a peer and each 256 MiB of a file, for asking busy peers again,
and for copies in progress at the end of the training."""

FETCH_SECONDS = 30.0
"""The longest time for bytes from one peer, at most a few MiB. Then, another one is asked."""

_COMMIT_SECONDS = 2.0
"""After a notice, the ranks soon stop to wait for one another. Copies end so much earlier, so that
the snapshot to which they belong can still complete."""


class HostSnapshot(NamedTuple):
    """A snapshot on this host. ``keys``: the files besides the manifest that this rank deletes."""

    version: Version
    keys: Sequence[str]

    @classmethod
    def of_files(cls, version: Version, keys: Sequence[str]) -> HostSnapshot:
        """Return a state of which this rank deletes all files."""
        return cls(version, [key for key in keys if not key.endswith(f"/{MANIFEST}")])


class HostTier:
    """The newest two snapshots of one training in a folder of each host.

    All ranks call ``open`` and ``find`` together. A subclass says which store it is, and its cost.
    """

    def __init__(
        self,
        name: inventory.TierName,
        settings: MemoryTier | LocalTier,
        group: Group,
        copies: int = 1,
        domain: str | None = None,
    ) -> None:
        self.name = name
        self.is_open = False
        self._settings = settings
        self.group = group
        self._copies = copies
        self._domain = domain
        self._snapshots: list[HostSnapshot] = []
        self._unpromoted, self._uncopied = set[Version](), set[Version]()
        self._closing = ExitStack()
        self._prefix = self._secret = ""
        self._server: PeerServer | None = None
        self._addresses: dict[int, PeerAddress] = {}
        self._nbytes = 0
        """The bytes of one state of this rank, once ``open`` or ``measure`` has returned."""

        self._copies_end = inf
        """The time on ``time.monotonic`` by which the copies in progress end."""

    _most_snapshots = KEPT_SNAPSHOTS + 1
    """The states that are on a host at the same time, with the one that is being written."""

    store: LocalStore | TmpfsStore
    """The store in the folder of this host, once ``open`` has returned."""

    # -- what a subclass defines -------------------------------------------------------------------

    def _make_store(self, folder: str) -> LocalStore | TmpfsStore:
        raise NotImplementedError

    def _remove_leftovers(self) -> None:
        """Delete the unfinished files of processes that have ended."""

    def _check_space(self, folder: str, cost: TierCost) -> None:
        """Raise ``NoSpace`` if this host is too small."""
        raise NotImplementedError

    # -- the beginning -------------------------------------------------------------------------

    def open(self, run_store: Store, state: Any) -> None:
        """Check the space on all hosts, and serve the files of this one. A second call does
        nothing. Raises ``NoSpace``, or ``LimpetError`` for an unfit folder, on all ranks."""
        group, settings = self.group, self._settings
        if self.is_open:
            return
        collective = group.collective(f"the start of the {self.name} tier")
        with closing(collective), collective:
            first = read_or_create_run_id(run_store) if collective.rank == 0 else None
            run_id = collective.broadcast(first, str)
            folder = self._make_folder(full_path(settings.path), run_id, run_store.url)
            self._nbytes = state_bytes(state, group)
            facts = RankFacts.of_this_rank(folder, self._domain, self._nbytes)
            gathered = collective.gather(facts, RankFacts)
            all_facts = collective.broadcast(gathered, list[RankFacts])
            self._hosts = Hosts(all_facts, collective.rank, self._copies)
            self.store = self._make_store(folder)
            self.store.folder_mode = 0o700  # also if somebody deletes the folder meanwhile
            if self._hosts.is_first:
                self._remove_leftovers()
                present = sum(stat.length for stat in self.store.list(""))
                self._check_host(present)
                if (status := status_folder()) is not None:
                    url = local_folder(run_store) or run_store.url  # also from another folder
                    record = MemoryRecord(folder, url, self.name == "local")
                    record_memory(status, record, self.name)
            self._serve(settings)
            await_all(collective)
        if group.rank == 0 and self._prefix and group.kv is not None:
            group.kv.delete([f"{self._prefix}/peer-secret"])  # all ranks have it now
        self.is_open = True

    def measure(self, count_bytes: Callable[[], int]) -> None:
        """Check the space on all ranks for the state as it is now: an optimizer had no slots when
        ``open`` was called. ``count_bytes``: of this rank. Raises ``NoSpace`` on all ranks."""
        if not self.is_open:
            return
        collective = self.group.collective(f"the size of the {self.name} tier")
        with closing(collective), collective:
            self._nbytes = count_bytes()
            gathered = collective.gather(self._nbytes, int)
            self._hosts = self._hosts.resize(collective.broadcast(gathered, list[int]))
            if self._hosts.is_first:
                stats = chain(self.store.list(""), self.store.partials(""))
                self._check_host(sum(stat.length for stat in stats))
            if self._server is not None:
                self._server.limits = self._peer_limits()
            await_all(collective)  # also before a peer sends a file

    def _check_host(self, present_bytes: int) -> None:
        """Raise ``NoSpace`` if this host is too small. ``present_bytes``: those of the tier."""
        cost = TierCost(self._hosts.held_bytes, self._most_snapshots - 1, present_bytes)
        self._check_space(self.store.url, cost)

    def _make_folder(self, path: str, run_id: str, run_url: str) -> str:
        """Return the folder of a run on this host, which only this user can read. Raises
        ``StoreError``, such as ``Denied``: anybody may create a folder in ``/dev/shm``."""
        own = os.path.join(path, f"limpet-{os.getuid()}")
        folder = os.path.join(own, run_id)
        try:
            os.makedirs(own, mode=0o700, exist_ok=True)
            status = os.lstat(own)
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise Denied(
                    f"The folder {own} of the {self.name} tier is not private",
                    expected=f"a folder of user {os.getuid()} with mode 0700",
                    found=f"user {status.st_uid}, mode {status.st_mode & 0o7777:o}",
                    todo=f"Delete it, or use another path= of the {self.name} tier",
                )
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as e:
            raise StoreError(
                f"The {self.name} tier cannot use the folder {folder}",
                expected=f"a folder {path} in which this user may create folders",
                found=e.strerror or str(e),
                todo=f"Create it, or use another path= of the {self.name} tier",
                store=path,
            ) from e
        return folder

    def _serve(self, settings: MemoryTier | LocalTier) -> None:
        """Let other hosts copy files to and from this one."""
        group, hosts = self.group, self._hosts
        if group.kv is None or hosts.count == 1:
            return
        kv = group.kv
        prefix = f"{group.next_sequence_number()}/tiers"
        self._secret, self._prefix = job_secret(kv, prefix), prefix
        is_one_host = hosts.is_one_machine
        address = choose_address(kv.store_host, settings.interface, is_one_host=is_one_host)
        server = PeerServer(self.store, address, self._secret, self._peer_limits())
        self._server = self._closing.enter_context(server)
        keys = publish(kv, prefix, PeerAddress(group.rank, server.address, server.port))
        self._closing.callback(_unpublish, kv, keys)

    def _peer_limits(self) -> PeerLimits:
        """Return what peers may store here: their shards, and 64 MiB for what is not counted."""
        longest = max([*self._hosts.held_by_rank, 0]) + 64 * MIB
        return PeerLimits(
            file_bytes=longest,
            total_bytes=(KEPT_SNAPSHOTS + 2) * longest * max(1, len(self._hosts.held)),
        )

    def _connect(self, rank: int, seconds: float = COPY_SECONDS) -> PeerConnection:
        group = self.group
        if group.kv is None:
            raise LimpetError("One process has no peers")
        if rank not in self._addresses:  # it is the same until the tier is closed
            address = look_up(group.kv, self._prefix, rank)
            if address is None:
                raise LimpetError(f"Rank {rank} does not serve copies anymore")
            self._addresses[rank] = address
        kv, purpose = group.kv, f"the copy to or from rank {rank}"

        def seconds_left() -> float:
            if not main_thread().is_alive():  # the process exits without ``close``, and waits
                self._copies_end = min(self._copies_end, time.monotonic() + COPY_SECONDS)
            until_notice = kv.give_up_at - kv.clock() - _COMMIT_SECONDS
            return min(self._copies_end - time.monotonic(), until_notice)

        return PeerConnection(
            self._addresses[rank], self._secret, group.rank, seconds, purpose, seconds_left
        )

    # -- what is there -------------------------------------------------------------------------

    def _keys_of(self, version: Version, attempt: str) -> list[str]:
        """Return the files besides the manifest that this rank deletes."""
        size = self.group.size
        return [
            f"{version}/{name(rank, size, attempt)}"
            for rank in (self.group.rank, *self._hosts.held)
            for name in (shard_name, index_name)
        ]

    def _keep(self, snapshot: HostSnapshot) -> None:
        """Count a complete state. Keep one before it, the newest of which all copies exist, if
        there is one, and those that are still to be promoted. Delete the others."""
        earlier = self._snapshots
        copied = [g for g in earlier if g.version not in self._uncopied]
        kept = [*(copied or earlier)[-1:], *(g for g in earlier if g.version in self._unpromoted)]
        self._snapshots = [*(g for g in earlier if g in kept), snapshot]
        for old in earlier:
            if old not in kept:
                self._delete(old)

    def _delete(self, snapshot: HostSnapshot) -> None:
        self._uncopied.discard(snapshot.version)
        # the manifest first: each rank of a host does the same
        self.store.delete(f"{snapshot.version}/{MANIFEST}")
        for key in snapshot.keys:
            self.store.delete(key)

    # -- resuming ----------------------------------------------------------------------------------

    def find(self, collective: Collective) -> list[inventory.TierSnapshot]:
        """Return the states on the hosts, newest first, on rank 0; none on the others. All ranks
        call this. With thousands of hosts, each sends a few numbers per state, not its manifest."""
        if not self.is_open:
            return []
        own = inventory.take_inventory(self.store, self.group.rank) if self._hosts.is_first else []
        gathered = collective.gather(own, list[inventory.HostFiles])
        return inventory.find_snapshots(chain.from_iterable(gathered or ()), self.name)

    def locate(self, folder: str, sources: inventory.Sources) -> Location:
        """Return the location from which this rank loads a state. Any rank of a host serves its
        files, so they are reachable while one of them answers."""
        peers = Peers(
            self.group.rank,
            self._hosts.ranks_beside,
            lambda rank: self._connect(rank, FETCH_SECONDS),
        )
        store: Store = RecoveryStore(self.store, folder, sources, peers, COPY_SECONDS)
        return Location(store, folder, is_per_host=True)

    def keep_only(self, kept: Version | None, unpromoted: Collection[Version] = ()) -> None:
        """Delete all states but ``kept``, the newest one before it, and those that are still to be
        promoted. None: all others."""
        self._snapshots.clear()
        self._unpromoted, self._uncopied = {*unpromoted}, set()
        if not self.is_open or not self._hosts.is_first:
            return
        files: dict[Version, list[str]] = {}
        for stat in self.store.list(""):
            version = parse_version(stat.key.partition("/")[0])
            if version is not None:
                files.setdefault(version, []).append(stat.key)
        for version in sorted(files):
            snapshot = HostSnapshot.of_files(version, files[version])
            if kept is not None and (version == kept or version.step < kept.step):
                self._keep(snapshot)
            elif version not in self._unpromoted:
                self._delete(snapshot)

    # -- the end -----------------------------------------------------------------------------------

    def close(self, is_complete: bool) -> None:
        """Stop serving. ``is_complete``: the training has ended, and its last step is in the
        durable store. Then, all states are deleted. Otherwise, they stay for the next start."""
        if not self.is_open:
            return
        self.is_open = False
        self._wait_at_end()
        self._closing.close()
        if is_complete:
            for snapshot in self._snapshots:
                self._delete(snapshot)
            self._snapshots.clear()
        self._release()
        with suppress(OSError):  # it is not empty, or another rank has removed it
            os.rmdir(self.store.url)

    def _wait_at_end(self) -> None:
        """Wait for what uses the store."""

    def _release(self) -> None:
        """Release what holds no state."""


def state_bytes(state: Any, group: Group) -> int:
    """Return how many bytes this rank writes of a state."""
    return shard_bytes(flatten(state, group.rank), group)


def _unpublish(kv: KVClient, keys: Sequence[str]) -> None:
    """Delete this rank's address. Without the job's store, which ends with the process that hosts
    it, nobody can look it up either: this training has ended as it should, and must say so."""
    with suppress(LimpetError):
        kv.delete(keys)
