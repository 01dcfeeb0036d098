"""Pass bytes from one rank to the other ranks of its host through shared memory.

Each rank has a memory segment that the others map: a control page with the progress of the rank,
and two windows. The ranks proceed in lockstep. While each rank fills one of its windows with the
data that it was assigned to read, all ranks consume data from the other windows of all ranks.

The memory has no name (``memfd_create``); other ranks open it through the process that created it.
However a process ends, nothing is left.
"""

from __future__ import annotations

import heapq
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple

import msgspec

from holdfast import events, machine
from holdfast.buffers import address_of
from holdfast.engine.distributed.collective import Collective
from holdfast.errors import HoldfastError
from holdfast.threads import Workers, in_parallel
from holdfast.types import ALIGNMENT, MIB

WINDOW_BUDGET = 256 * MIB
"""The total size of all windows of a host in bytes."""

MAX_PEERS = 64
"""The maximum number of ranks that share memory; more ranks on a host form several sets."""

PAGE_SIZE = mmap.ALLOCATIONGRANULARITY


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


class WindowSlice(NamedTuple):
    """A part of a window: a flat view, and its address in memory."""

    view: memoryview
    address: int


class ReadAssignment(NamedTuple):
    """An item that a reader reads in one round, to ``window_offset`` of its window."""

    item_number: int
    reader: int
    window_offset: int
    size: int


class SharedSegment:
    """The shared memory of one rank, mapped into this process.

    ``fd``: its descriptor, which this object closes; ``token``: the token of the rank that created
    it, or None for new memory, which gets a token. ``control_words``: the token, and the number of
    phases that the rank has completed. The methods raise ``OSError``.
    """

    def __init__(self, fd: int, token: int | None = None) -> None:
        self.fd = fd
        self._mapped_windows = WindowSlice(memoryview(b""), 0)
        try:
            if token is None:
                os.posix_fallocate(fd, 0, PAGE_SIZE)
            self.control_words = memoryview(_map_memory(fd, PAGE_SIZE, 0)).cast("q")
            if token is None:
                self.control_words[0] = secrets.randbits(62)
            elif self.control_words[0] != token:
                raise OSError("the memory belongs to another process")
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls) -> SharedSegment:
        return cls(os.memfd_create("holdfast"))

    @classmethod
    def open_peer(cls, peer: Peer) -> SharedSegment:
        path = f"/proc/{peer.pid}/fd/{peer.fd}"
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), peer.token)

    def resize(self, size: int) -> None:
        """Resize the memory after the control page to ``size`` bytes.

        Raises ``HoldfastError`` if the memory cannot be allocated.
        """
        try:
            os.ftruncate(self.fd, PAGE_SIZE + size)
            os.posix_fallocate(self.fd, 0, PAGE_SIZE + size)  # otherwise an access may raise SIGBUS
        except OSError as e:
            raise HoldfastError(
                "The shared memory windows of the ranks on this host cannot be allocated",
                expected=f"{size} bytes of shared memory for each rank",
                found=str(e),
                todo="Load without share=True, or give the job more memory",
            ) from e

    def window(self, offset: int, size: int) -> WindowSlice:
        """Return bytes after the control page; the first request for them maps the memory."""
        if len(self._mapped_windows.view) < offset + size:
            length = os.fstat(self.fd).st_size - PAGE_SIZE
            view = memoryview(_map_memory(self.fd, length, PAGE_SIZE))
            self._mapped_windows = WindowSlice(view, address_of(view))
        return WindowSlice(
            self._mapped_windows.view[offset : offset + size], self._mapped_windows.address + offset
        )

    def close(self) -> None:
        """Close the descriptor. Mapped memory is released with its last view."""
        os.close(self.fd)


def _map_memory(fd: int, length: int, offset: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, length, offset=offset)
    mapping.madvise(mmap.MADV_DONTFORK)  # otherwise a data loader's worker would keep the memory
    return mapping


@contextmanager
def connect_host_peers(collective: Collective, url: str) -> Iterator[HostPeers | None]:
    """Connect the ranks of this host and yield them.

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
        yield None if reason or len(peers) == 1 else HostPeers(collective, peers, segments)
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
        fd, token = segments[0].fd, segments[0].control_words[0]
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


def assign_reads(sizes: Sequence[int], peer_count: int) -> list[list[ReadAssignment]]:
    """Assign items to readers and rounds.

    Items are assigned in order, each to the reader with the fewest bytes in the round so far. The
    windows of all ranks together stay within ``WINDOW_BUDGET``, so if items are long, not all ranks
    read.
    """
    padded_sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    readers = max(1, min(peer_count, WINDOW_BUDGET // (2 * max(padded_sizes, default=1) or 1)))
    capacity = WINDOW_BUDGET // (2 * readers)
    rounds: list[list[ReadAssignment]] = []
    heap: list[tuple[int, int]] = []
    for number, size in enumerate(padded_sizes):
        if not heap or heap[0][0] + size > capacity:
            rounds.append([])
            heap = [(0, reader) for reader in range(readers)]
        offset, reader = heap[0]
        heapq.heapreplace(heap, (offset + size, reader))
        rounds[-1].append(ReadAssignment(number, reader, offset, size))
    return rounds


class HostPeers:
    """The ranks of one host in a collective.

    All of them make the same calls. The collective reports errors. ``peer_index``: the position of
    this rank among them in rank order.
    """

    def __init__(
        self, collective: Collective, peers: Sequence[Peer], segments: Sequence[SharedSegment]
    ) -> None:
        self.collective = collective
        self.ranks = [peer.rank for peer in peers]
        self.peer_index = self.ranks.index(collective.rank)
        self._segments = [
            *segments[1 : self.peer_index + 1],
            segments[0],
            *segments[self.peer_index + 1 :],
        ]
        self._phase = 0

    def exchange(
        self,
        rounds: Sequence[Sequence[ReadAssignment]],
        fill: Callable[[int, WindowSlice], None],
        consume: Callable[[int, WindowSlice], None],
    ) -> None:
        """Run the rounds.

        For each assignment, ``fill`` is called on the rank that reads it, and then ``consume`` on
        all ranks. The arguments are the item number and the window slice. Several threads make the
        calls.
        """
        ends = [
            (assignment.reader, assignment.window_offset + assignment.size)
            for assignments in rounds
            for assignment in assignments
        ]
        window_size = max((end for _, end in ends), default=0)
        for phase, (previous, current) in enumerate(pairwise([[], *rounds, []])):
            self._barrier()
            if phase == 0:  # no rank reads the previous contents of the windows
                is_reader = any(reader == self.peer_index for reader, _ in ends)
                self._segments[self.peer_index].resize(2 * window_size if is_reader else 0)
            own = [a for a in current if a.reader == self.peer_index]
            jobs = [
                [
                    partial(
                        callback,
                        a.item_number,
                        self._segments[a.reader].window(window + a.window_offset, a.size),
                    )
                    for a in assignments
                ]
                for callback, assignments, window in (
                    (fill, own, window_size * (phase % 2)),
                    (consume, previous, window_size * ((phase - 1) % 2)),
                )
            ]
            in_parallel(jobs, self._run_jobs, 2)  # only ``fill`` waits for the store

    def _run_jobs(self, jobs: Sequence[Callable[[], None]]) -> None:
        Workers.create(advance=self.collective.advance).each(jobs, lambda job: job())

    def _barrier(self) -> None:
        """Wait until all ranks have completed the phases that this rank has completed.

        The threads that wrote the bytes have ended before the number is set, so on every processor
        the bytes are visible before the number.
        """
        self._phase += 1
        self._segments[self.peer_index].control_words[1] = self._phase
        self.collective.wait_for_ranks(self._lagging_ranks, self._phase)

    def _lagging_ranks(self) -> list[int]:
        return [
            rank
            for rank, segment in zip(self.ranks, self._segments, strict=True)
            if segment.control_words[1] < self._phase
        ]
