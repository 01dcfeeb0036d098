"""Pass bytes from one rank to the other ranks of its host through shared memory.

Each rank has a memory segment that the others map: control words with the progress of the rank, and
a window of slots, which the rank fills in turn. The slots are few, so that little memory must be
allocated, and most copies are from the cache of the processor.

The memory has no name (``memfd_create``); other ranks open it through the process that created it.
However a process ends, nothing is left.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, groupby
from typing import NamedTuple

import msgspec

from limpet import events, machine
from limpet.buffers import address_of
from limpet.ranks.collective import Collective
from limpet.types import ALIGNMENT, MIB

WINDOW_BUDGET = 64 * MIB
"""The total size of all windows of a host in bytes."""

MAX_READERS = 8
"""The maximum number of ranks that read for the others, so that each has a few slots."""

MAX_SLOTS = 16
"""The maximum number of slots of a window."""

MAX_PEERS = 64
"""The maximum number of ranks that share memory; more ranks on a host form several sets."""

TOKEN, PHASE, WINDOW_STATE, FILLED = range(4)
"""The numbers of the control words: the token, the number of phases that the rank has completed,
whether its window is allocated (1: yes, -1: no), and the first of ``MAX_SLOTS`` words with the
turn that filled each slot, and the item. The words from ``CONSUMED`` on have, for each rank and
each of its slots, the last turn that this rank has consumed."""
CONSUMED = FILLED + MAX_SLOTS

_CONTROL_BYTES = 8 * (CONSUMED + MAX_PEERS * MAX_SLOTS)
CONTROL_SIZE = -(-_CONTROL_BYTES // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class Peer(msgspec.Struct, frozen=True):
    """A rank with its host, its process, and its shared memory.

    ``fd``: the file descriptor of the memory in that process; ``token``: the number at the start of
    the memory.
    """

    rank: int
    host: tuple[str, str]
    pid: int
    fd: int
    token: int


class MemorySlice(NamedTuple):
    """Bytes in memory: a flat view, and its address."""

    view: memoryview
    address: int


class SharedSegment:
    """The shared memory of one rank, mapped into this process.

    ``fd``: its descriptor, which this object closes; ``token``: the token of the rank that created
    it, or None for new memory, which gets a token. The methods raise ``OSError``.
    """

    def __init__(self, fd: int, token: int | None = None) -> None:
        self.fd = fd
        self._mapped_windows = MemorySlice(memoryview(b""), 0)
        try:
            if token is None:
                os.posix_fallocate(fd, 0, CONTROL_SIZE)
            self.control_words = memoryview(_map_memory(fd, CONTROL_SIZE, 0)).cast("q")
            if token is None:
                self.control_words[TOKEN] = secrets.randbits(62)
            elif self.control_words[TOKEN] != token:
                raise OSError("the memory belongs to another process")
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls) -> SharedSegment:
        if not hasattr(os, "memfd_create"):
            raise OSError("only Linux has memory that other processes can open by a descriptor")
        return cls(os.memfd_create("limpet"))

    @classmethod
    def open_peer(cls, peer: Peer) -> SharedSegment:
        path = f"/proc/{peer.pid}/fd/{peer.fd}"
        return cls(os.open(path, os.O_RDWR | machine.OPEN_FLAGS), peer.token)

    def resize(self, size: int) -> None:
        """Resize the memory after the control words to ``size`` bytes."""
        os.ftruncate(self.fd, CONTROL_SIZE + size)
        os.posix_fallocate(self.fd, 0, CONTROL_SIZE + size)  # otherwise an access may raise SIGBUS

    def window(self, offset: int, size: int) -> MemorySlice:
        """Return bytes after the control words; the first request for them maps the memory."""
        if len(self._mapped_windows.view) < offset + size:
            length = os.fstat(self.fd).st_size - CONTROL_SIZE
            view = memoryview(_map_memory(self.fd, length, CONTROL_SIZE))
            self._mapped_windows = MemorySlice(view, address_of(view))
        return MemorySlice(
            self._mapped_windows.view[offset : offset + size], self._mapped_windows.address + offset
        )

    def close(self) -> None:
        """Close the descriptor. Mapped memory is released with its last view."""
        os.close(self.fd)


def _map_memory(fd: int, length: int, offset: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, length, offset=offset)
    mapping.madvise(mmap.MADV_DONTFORK)  # otherwise a data loader's worker would keep the memory
    return mapping


class HostMemory(NamedTuple):
    """The segments of the ranks of one host, in rank order. ``own``: the position of this rank."""

    url: str
    ranks: list[int]
    own: int
    segments: list[SharedSegment]


@contextmanager
def connect_host_peers(collective: Collective, url: str) -> Iterator[HostMemory | None]:
    """Connect the ranks of this host and yield their memory.

    Yields None for the only rank of a host, or if the ranks cannot map each other's memory; the
    event ``read_alone`` then reports the reason. All ranks of the collective must enter.
    """
    segments: list[SharedSegment] = []
    try:
        peers = _gather_peers(collective, segments)
        reason = ""
        try:
            segments += [
                SharedSegment.open_peer(peer) for peer in peers if peer.rank != collective.rank
            ]
        except OSError as e:
            reason = f"rank {collective.rank} cannot map the memory of another rank: {e}"
        reason = _share_reason(collective, peers[0].rank, reason)
        if reason:
            events.emit("read_alone", url=url, reason=reason)
        if reason or len(peers) == 1:
            yield None
        else:
            ranks = [peer.rank for peer in peers]
            own = ranks.index(collective.rank)
            segments.insert(own, segments.pop(0))
            yield HostMemory(url, ranks, own, segments)
    finally:
        for segment in segments:
            segment.close()


def _gather_peers(collective: Collective, segments: list[SharedSegment]) -> list[Peer]:
    """Return the ranks that share memory with this one, in rank order.

    Creates the memory of this rank and adds it to ``segments``.
    """
    fd = token = -1
    with suppress(OSError):  # the ranks that cannot open the memory report it
        segments.append(SharedSegment.create())
        fd, token = segments[0].fd, segments[0].control_words[TOKEN]
    host, boot, _ = machine.process_identity()
    all_peers = collective.gather(Peer(collective.rank, (host, boot), os.getpid(), fd, token), Peer)
    peers_of_rank: dict[int, list[Peer]] = {}
    for _, host_peers in groupby(
        sorted(all_peers or (), key=lambda s: (s.host, s.rank)), lambda s: s.host
    ):
        peers = list(host_peers)
        for i, peer in enumerate(peers):
            peers_of_rank[peer.rank] = peers[i // MAX_PEERS * MAX_PEERS :][:MAX_PEERS]
    return collective.scatter(
        [peers_of_rank[rank] for rank in range(collective.size)] if all_peers else None, list[Peer]
    )


def _share_reason(collective: Collective, first_rank: int, reason: str) -> str:
    """Return the reason why a rank of this set cannot share memory, or an empty string.

    ``first_rank`` identifies the set; ``reason`` is the reason of this rank.
    """
    reports = collective.gather((first_rank, reason), tuple[int, str])
    reason_by_leader: dict[int, str] = {}
    for leader, rank_reason in reports or ():
        reason_by_leader[leader] = reason_by_leader.get(leader) or rank_reason
    return collective.scatter(
        None if reports is None else [reason_by_leader[leader] for leader, _ in reports], str
    )


def assign_readers(sizes: Sequence[int], peer_count: int) -> list[int]:
    """Assign each item to a reader: consecutive items with an equal part of the bytes to each, so
    that one request can read several items."""
    readers, total = min(peer_count, MAX_READERS), sum(sizes) or 1
    begins = accumulate(sizes, initial=0)
    middles = (2 * begin + size for begin, size in zip(begins, sizes, strict=False))
    return [min(readers - 1, readers * middle // (2 * total)) for middle in middles]


def max_item_size(peer_count: int) -> int:
    """Return the maximum size in bytes of an item that fits into a window."""
    return WINDOW_BUDGET // min(peer_count, MAX_READERS) // ALIGNMENT * ALIGNMENT


def slot_layout(sizes: Sequence[int], readers: Sequence[int]) -> tuple[int, int]:
    """Return the size of a slot, and the number of slots of each window, so that all windows stay
    within the budget if the items do."""
    slot_size = max(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    turns = max(readers.count(reader) for reader in set(readers))
    slots = WINDOW_BUDGET // (len(set(readers)) * slot_size or 1)
    return slot_size, max(1, min(slots, turns, MAX_SLOTS))
