"""Bytes that one rank passes on to the others of its host, through memory that they share.

Each rank has shared memory that the others map: a page in which stands how far it has come, and two
windows. They go in step: while the ranks fill one window, each with what it was dealt, they take
what they want of the other windows of all.

The memory has no name (``memfd_create``) and is opened through the process that made it: however a
process ends, nothing is left.
"""

from __future__ import annotations

import heapq
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import NamedTuple

import msgspec

from holdfast import events, machine
from holdfast.buffers import address_of
from holdfast.engine.distributed.collective import Collective
from holdfast.errors import HoldfastError
from holdfast.settings import read_settings
from holdfast.threads import in_parallel
from holdfast.types import ALIGNMENT, MIB

WINDOW_BUDGET = 256 * MIB
"""Bytes of all windows of a host."""

MAX_PEERS = 64
"""Ranks that share; of more on one host, several times so many."""

PAGE_SIZE = mmap.ALLOCATIONGRANULARITY


class Peer(msgspec.Struct, frozen=True):
    """A rank: its host and process, the descriptor of its shared memory there, and the number that
    stands at the beginning of that."""

    rank: int
    host: tuple[str, str]
    pid: int
    fd: int
    token: int


class WindowSlice(NamedTuple):
    """A part of a window: flat, and where in memory it begins."""

    view: memoryview
    address: int


class ReadAssignment(NamedTuple):
    """What one reader reads in one round, to byte ``at`` of its window."""

    item_number: int
    reader: int
    window_offset: int
    size: int


class SharedSegment:
    """The shared memory of one rank, as this process maps it. ``numbers``: its mark, and the phases
    that it has gone through. Raises ``OSError``."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.control_words = memoryview(_map_memory(fd, PAGE_SIZE, 0)).cast("q")
        self._mapped_windows = WindowSlice(memoryview(b""), 0)

    @classmethod
    def create(cls) -> SharedSegment:
        fd = os.memfd_create("holdfast")
        try:
            os.posix_fallocate(fd, 0, PAGE_SIZE)
            shelf = cls(fd)
            shelf.control_words[0] = secrets.randbits(62)
        except BaseException:
            os.close(fd)
            raise
        return shelf

    @classmethod
    def open_peer(cls, peer: Peer) -> SharedSegment:
        fd = os.open(f"/proc/{peer.pid}/fd/{peer.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            shelf = cls(fd)
            if shelf.control_words[0] != peer.token:
                raise OSError("it is another's")
        except BaseException:
            os.close(fd)
            raise
        return shelf

    def resize(self, size: int) -> None:
        """Have so many bytes behind the page."""
        try:
            os.ftruncate(self.fd, PAGE_SIZE + size)
            os.posix_fallocate(self.fd, 0, PAGE_SIZE + size)  # else to touch them may be a SIGBUS
        except OSError as e:
            raise HoldfastError(
                "There is no memory for the windows by which the ranks of this host share",
                expected=f"{size} bytes of shared memory for each of its ranks",
                found=str(e),
                todo="Load without share=True, or give the job more memory",
            ) from e

    def window(self, offset: int, size: int) -> WindowSlice:
        """Bytes behind the page, mapped when they are first asked for."""
        if len(self._mapped_windows.view) < offset + size:
            length = os.fstat(self.fd).st_size - PAGE_SIZE
            view = memoryview(_map_memory(self.fd, length, PAGE_SIZE))
            self._mapped_windows = WindowSlice(view, address_of(view))
        return WindowSlice(
            self._mapped_windows.view[offset : offset + size], self._mapped_windows.address + offset
        )

    def close(self) -> None:
        """What is still mapped is given back with the last view of it."""
        os.close(self.fd)


def _map_memory(fd: int, length: int, offset: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, length, offset=offset)
    mapping.madvise(mmap.MADV_DONTFORK)  # a data loader's worker would keep it
    return mapping


@contextmanager
def connect_host_peers(collective: Collective, url: str) -> Iterator[HostPeers | None]:
    """The ranks of this host; None for a rank that is alone on it, or where they cannot map each
    other's memory, as the event ``read_alone`` tells. All ranks of the meeting enter."""
    shelves: list[SharedSegment] = []
    try:
        seats = _gather_peers(collective, shelves)
        reason = ""
        try:
            shelves += [
                SharedSegment.open_peer(seat) for seat in seats if seat.rank != collective.rank
            ]
        except OSError as e:
            reason = f"rank {collective.rank} cannot map another's memory: {e}"
        reason = _share_reason(collective, seats[0].rank, reason)
        if reason:
            events.emit("read_alone", url=url, reason=reason)
        yield None if reason or len(seats) == 1 else HostPeers(collective, seats, shelves)
    finally:
        for shelf in shelves:
            shelf.close()


def _gather_peers(collective: Collective, segments: list[SharedSegment]) -> list[Peer]:
    """The ranks that share with this one, in order; its own memory is put with the shelves."""
    fd = mark = -1
    with suppress(OSError):  # it is told by who cannot open it
        segments.append(SharedSegment.create())
        fd, mark = segments[0].fd, segments[0].control_words[0]
    host, boot, _ = machine.process_identity()
    told = collective.gather(Peer(collective.rank, (host, boot), os.getpid(), fd, mark), Peer)
    dealt: dict[int, list[Peer]] = {}
    for _, several in groupby(sorted(told or (), key=lambda s: (s.host, s.rank)), lambda s: s.host):
        seats = list(several)
        for i, seat in enumerate(seats):
            dealt[seat.rank] = seats[i // MAX_PEERS * MAX_PEERS :][:MAX_PEERS]
    of_all = [dealt[rank] for rank in range(collective.size)] if told else None
    return collective.scatter(of_all, list[Peer])


def _share_reason(collective: Collective, first_rank: int, reason: str) -> str:
    """Why one of those ranks of which ``first`` is the first cannot share, if one cannot."""
    told = collective.gather((first_rank, reason), tuple[int, str])
    found: dict[int, str] = {}
    for leader, why in told or ():
        found[leader] = found.get(leader) or why
    of_all = None if told is None else [found[leader] for leader, _ in told]
    return collective.scatter(of_all, str)


def assign_reads(sizes: Sequence[int], peer_count: int) -> list[list[ReadAssignment]]:
    """Who reads what in which round: pieces in order, each to a rank that has least so far. The
    windows of all stay within ``BUDGET``, so with long pieces not all ranks read."""
    rooms = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    readers = max(1, min(peer_count, WINDOW_BUDGET // (2 * max(rooms, default=1) or 1)))
    room = WINDOW_BUDGET // (2 * readers)
    rounds: list[list[ReadAssignment]] = []
    load: list[tuple[int, int]] = []
    for number, size in enumerate(rooms):
        if not load or load[0][0] + size > room:
            rounds.append([])
            load = [(0, reader) for reader in range(readers)]
        at, reader = load[0]
        heapq.heapreplace(load, (at + size, reader))
        rounds[-1].append(ReadAssignment(number, reader, at, size))
    return rounds


class HostPeers:
    """The ranks of one host in a meeting. All of them make the same calls; errors are the
    meeting's to tell. ``place``: of this rank among them, in order of ranks."""

    def __init__(
        self, collective: Collective, peers: Sequence[Peer], segments: Sequence[SharedSegment]
    ) -> None:
        self.collective = collective
        self.ranks = [seat.rank for seat in peers]
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
        """Go through the rounds: ``fill`` is called for a piece on the rank that reads it, then
        ``take`` on all, each with the piece's number and place, by several threads."""
        ends = [
            (piece.reader, piece.window_offset + piece.size)
            for pieces in rounds
            for piece in pieces
        ]
        room = max((end for _, end in ends), default=0)
        for phase in range(len(rounds) + 1):
            self._barrier()
            if phase == 0:  # nobody looks at what was in the windows before
                reads = any(reader == self.peer_index for reader, _ in ends)
                self._segments[self.peer_index].resize(2 * room if reads else 0)
            now, before = rounds[phase : phase + 1], rounds[max(0, phase - 1) : phase]
            mine = [p for pieces in now for p in pieces if p.reader == self.peer_index]
            there = [p for pieces in before for p in pieces]
            jobs = [
                [partial(do, p.item_number, self._window_slice(p, room * (n % 2))) for p in pieces]
                for do, pieces, n in ((fill, mine, phase), (consume, there, phase - 1))
            ]
            in_parallel(jobs, self._run_jobs, 2)  # the one waits for the store, the other not

    def _window_slice(self, assignment: ReadAssignment, window: int) -> WindowSlice:
        return self._segments[assignment.reader].window(
            window + assignment.window_offset, assignment.size
        )

    def _run_jobs(self, jobs: Sequence[Callable[[], None]]) -> None:
        threads = min(read_settings().threads, len(jobs))
        in_parallel(jobs, lambda job: job(), threads, self.collective.advance)

    def _barrier(self) -> None:
        """Wait until all have done what this rank has. By then the threads that did it have ended,
        so on every processor their bytes are there before the number is."""
        self._phase += 1
        self._segments[self.peer_index].control_words[1] = self._phase
        self.collective.wait_for_ranks(self._lagging_ranks, self._phase)

    def _lagging_ranks(self) -> list[int]:
        pairs = zip(self.ranks, self._segments, strict=True)
        return [rank for rank, shelf in pairs if shelf.control_words[1] < self._phase]
