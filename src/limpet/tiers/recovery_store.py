"""The store from which a snapshot of a tier is loaded: of this host, and those of its peers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from threading import Lock
from typing import TypeVar

from limpet import events
from limpet.buffers import as_byte_view
from limpet.deadline import Deadline
from limpet.errors import LimpetError, NotFound, StoreError, Unavailable
from limpet.format.manifest import MAX_MANIFEST, decode_manifest
from limpet.format.names import MANIFEST
from limpet.storage.store import Stat, Store, Traits, Upload, check_range, too_long_error
from limpet.tiers.inventory import Sources, files_of
from limpet.tiers.peers.client import PeerConnection

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""The seconds before the peers are asked again, which double each time."""


@dataclass(frozen=True, slots=True)
class Peers:
    """How the other ranks of the job are reached. All ``ranks_beside`` a rank serve its files.
    ``connect`` raises ``LimpetError``."""

    rank: int
    ranks_beside: Callable[[int], Sequence[int]]
    connect: Callable[[int], AbstractContextManager[PeerConnection]]


class RecoveryStore:
    """Reads files of the state in ``folder`` from this host, and what it lacks from its peers.

    Peers that may be busy are asked again for ``seconds`` per call. Every failure is a
    ``NotFound``, after which the training resumes from an older state. Nothing can be written.
    """

    def __init__(
        self,
        own: Store,
        folder: str,
        sources: Sources,
        peers: Peers,
        seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._own = own
        self._folder, self._sources = folder, sources
        self._peers = peers
        self._seconds, self._clock, self._sleep = seconds, clock, sleep
        self._failed: set[int] = set()
        self._manifest = b""
        self._files: dict[str, tuple[int, Sequence[int]]] = {}
        self._files_lock = Lock()

    @property
    def traits(self) -> Traits:
        return self._own.traits

    @property
    def url(self) -> str:
        return self._own.url

    def stat(self, key: str) -> Stat:
        self._check_key(key)
        try:
            return self._own.stat(key)
        except NotFound:
            return Stat(key, self._find(key)[0], modified=0.0)

    def get(self, key: str, limit: int) -> bytes:
        self._check_key(key)
        with suppress(NotFound):
            return self._own.get(key, limit)
        if key == self._manifest_key:
            ranks = self._sources.ranks
            self._manifest = self._manifest or self._ask(
                key, ranks, lambda peer: peer.fetch_file(key, limit)
            )
            return self._manifest
        length, _ = self._find(key)
        if length > limit:
            raise too_long_error(key, self.url, limit, length)
        data = bytearray(length)
        self.get_range(key, 0, length, memoryview(data))
        return bytes(data)

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        self._check_key(key)
        with suppress(NotFound):
            self._own.get_range(key, offset, length, into)
            return
        view = as_byte_view(into)[:length]
        check_range(key, self.url, offset, length, len(view))
        total, ranks = self._find(key)
        self._ask(key, ranks, lambda peer: peer.fetch_range(key, total, offset, view))

    def list(self, prefix: str) -> Iterator[Stat]:
        start = f"{prefix}/" if prefix else ""
        return (self.stat(key) for key in sorted(self._read_files()) if key.startswith(start))

    @property
    def _manifest_key(self) -> str:
        return f"{self._folder}/{MANIFEST}"

    def _check_key(self, key: str) -> None:
        if key.rpartition("/")[0] != self._folder:
            raise _missing(key, self.url, "it is not a file of this state")

    def _find(self, key: str) -> tuple[int, Sequence[int]]:
        """Return the length of a file by the manifest, and the ranks that serve it."""
        found = self._read_files().get(key)
        if found is None:
            raise _missing(key, self.url, "it is not a file of this state")
        return found

    def _read_files(self) -> dict[str, tuple[int, Sequence[int]]]:
        """Return what ``_find`` returns, for all files by key."""
        with self._files_lock:
            if not self._files:
                key = self._manifest_key
                raw = self.get(key, MAX_MANIFEST)
                lengths = files_of(decode_manifest(raw, key)[0])
                ranks = self._sources.by_file()
                self._files = {
                    f"{self._folder}/{name}": (length, ranks[number])
                    for number, (name, length) in enumerate(lengths.items())
                }
                self._files[key] = len(raw), self._sources.ranks
                self._manifest = b""  # it may be large
            return self._files

    def _ask(self, key: str, hosts: Sequence[int], request: Callable[[PeerConnection], T]) -> T:
        """Ask all ranks of these hosts, until one answers, none could, or time is over."""
        deadline = Deadline.after(self._seconds, f"the copy of {key}", self._clock)
        left = [*self._order(hosts)]
        reasons, pause = dict[int, str](), _FIRST_PAUSE
        while True:
            for rank in list(left):
                if reasons and not deadline.seconds_left:
                    break
                try:
                    with self._peers.connect(rank) as peer:
                        answer = request(peer)
                    self._failed.discard(rank)
                    return answer
                except LimpetError as e:
                    if rank not in self._failed:
                        events.emit("copy_failed", key=key, rank=rank, error=e)
                    reasons[rank] = f"rank {rank}: {e}"
                    self._failed.add(rank)
                    if not _may_be_busy(e):
                        left.remove(rank)
            if not left or not deadline.seconds_left:
                break
            # at random times: many hosts may wait for the same peer
            self._sleep(min(pause * random.uniform(0.5, 1.0), deadline.seconds_left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise _missing(key, self.url, "; ".join(reasons.values()) or "no peer has it")

    def _order(self, hosts: Sequence[int]) -> Sequence[int]:
        """Return all ranks of hosts in the order in which this rank asks them: one of each host
        first, because a host that is gone takes time; those that have failed before last."""
        own = self._peers.rank
        number = own // max(1, len(hosts))
        beside = [_rotate(self._peers.ranks_beside(host), number) for host in _rotate(hosts, own)]
        ranks = [rank for nth in zip_longest(*beside) for rank in nth if rank is not None]
        return sorted(ranks, key=self._failed.__contains__)

    # -- what only a store that can be written does ----------------------------------------------

    def put(self, key: str, length: int, head: int = 0) -> Upload:
        raise _read_only(key, self.url)

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        raise _read_only(key, self.url)

    def delete(self, key: str) -> None:
        raise _read_only(key, self.url)

    def partials(self, prefix: str) -> Iterator[Stat]:
        return iter(())


def _rotate(ranks: Sequence[int], count: int) -> Sequence[int]:
    """Return the same ranks, beginning with another one."""
    first = count % max(1, len(ranks))
    return [*ranks[first:], *ranks[:first]]


def _may_be_busy(error: LimpetError) -> bool:
    """Return True if a peer may send a file later. It resets connections when it has too many.
    Nobody listens at an address that refuses them: its process has ended."""
    is_refused = isinstance(error.__cause__, ConnectionRefusedError)
    return isinstance(error, Unavailable) and not is_refused


def _missing(key: str, url: str, found: str) -> NotFound:
    return NotFound(
        f"{key} is on no host that answers",
        found=found,
        todo="Resume from an older version",
        key=key,
        store=url,
    )


def _read_only(key: str, url: str) -> StoreError:
    return StoreError(f"{key} cannot be written: {url} is only read to resume", key=key, store=url)
