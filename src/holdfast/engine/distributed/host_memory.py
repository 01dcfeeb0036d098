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
from holdfast.engine.distributed.collective import Meeting
from holdfast.errors import HoldfastError
from holdfast.settings import read_settings
from holdfast.threads import in_parallel
from holdfast.types import ALIGNMENT, MIB

BUDGET = 256 * MIB
"""Bytes of all windows of a host."""

MOST = 64
"""Ranks that share; of more on one host, several times so many."""

PAGE = mmap.ALLOCATIONGRANULARITY


class Seat(msgspec.Struct, frozen=True):
    """A rank: its host and process, the descriptor of its shared memory there, and the number that
    stands at the beginning of that."""

    rank: int
    host: tuple[str, str]
    process: int
    fd: int
    mark: int


class Span(NamedTuple):
    """A part of a window: flat, and where in memory it begins."""

    view: memoryview
    address: int


class Piece(NamedTuple):
    """What one reader reads in one round, to byte ``at`` of its window."""

    number: int
    reader: int
    at: int
    size: int


class Shelf:
    """The shared memory of one rank, as this process maps it. ``numbers``: its mark, and the phases
    that it has gone through. Raises ``OSError``."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.numbers = memoryview(_mapped(fd, PAGE, 0)).cast("q")
        self._windows = Span(memoryview(b""), 0)

    @classmethod
    def made(cls) -> Shelf:
        fd = os.memfd_create("holdfast")
        try:
            os.posix_fallocate(fd, 0, PAGE)
            shelf = cls(fd)
            shelf.numbers[0] = secrets.randbits(62)
        except BaseException:
            os.close(fd)
            raise
        return shelf

    @classmethod
    def of(cls, seat: Seat) -> Shelf:
        fd = os.open(f"/proc/{seat.process}/fd/{seat.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            shelf = cls(fd)
            if shelf.numbers[0] != seat.mark:
                raise OSError("it is another's")
        except BaseException:
            os.close(fd)
            raise
        return shelf

    def resize(self, size: int) -> None:
        """Have so many bytes behind the page."""
        try:
            os.ftruncate(self.fd, PAGE + size)
            os.posix_fallocate(self.fd, 0, PAGE + size)  # else to touch them may be a SIGBUS
        except OSError as e:
            raise HoldfastError(
                "There is no memory for the windows by which the ranks of this host share",
                expected=f"{size} bytes of shared memory for each of its ranks",
                found=str(e),
                todo="Load without share=True, or give the job more memory",
            ) from e

    def window(self, at: int, size: int) -> Span:
        """Bytes behind the page, mapped when they are first asked for."""
        if len(self._windows.view) < at + size:
            length = os.fstat(self.fd).st_size - PAGE
            view = memoryview(_mapped(self.fd, length, PAGE))
            self._windows = Span(view, address_of(view))
        return Span(self._windows.view[at : at + size], self._windows.address + at)

    def close(self) -> None:
        """What is still mapped is given back with the last view of it."""
        os.close(self.fd)


def _mapped(fd: int, length: int, offset: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, length, offset=offset)
    mapping.madvise(mmap.MADV_DONTFORK)  # a data loader's worker would keep it
    return mapping


@contextmanager
def neighbours(meeting: Meeting, what: str) -> Iterator[Neighbours | None]:
    """The ranks of this host; None for a rank that is alone on it, or where they cannot map each
    other's memory, as the event ``read_alone`` tells. All ranks of the meeting enter."""
    shelves: list[Shelf] = []
    try:
        seats = _take_seats(meeting, shelves)
        reason = ""
        try:
            shelves += [Shelf.of(seat) for seat in seats if seat.rank != meeting.rank]
        except OSError as e:
            reason = f"rank {meeting.rank} cannot map another's memory: {e}"
        reason = _any_reason(meeting, seats[0].rank, reason)
        if reason:
            events.emit("read_alone", url=what, reason=reason)
        yield None if reason or len(seats) == 1 else Neighbours(meeting, seats, shelves)
    finally:
        for shelf in shelves:
            shelf.close()


def _take_seats(meeting: Meeting, shelves: list[Shelf]) -> list[Seat]:
    """The ranks that share with this one, in order; its own memory is put with the shelves."""
    fd = mark = -1
    with suppress(OSError):  # it is told by who cannot open it
        shelves.append(Shelf.made())
        fd, mark = shelves[0].fd, shelves[0].numbers[0]
    host, boot, _ = machine.identity()
    told = meeting.gather(Seat(meeting.rank, (host, boot), os.getpid(), fd, mark), Seat)
    dealt: dict[int, list[Seat]] = {}
    for _, several in groupby(sorted(told or (), key=lambda s: (s.host, s.rank)), lambda s: s.host):
        seats = list(several)
        for i, seat in enumerate(seats):
            dealt[seat.rank] = seats[i // MOST * MOST :][:MOST]
    of_all = [dealt[rank] for rank in range(meeting.size)] if told else None
    return meeting.scatter(of_all, list[Seat])


def _any_reason(meeting: Meeting, first: int, reason: str) -> str:
    """Why one of those ranks of which ``first`` is the first cannot share, if one cannot."""
    told = meeting.gather((first, reason), tuple[int, str])
    found: dict[int, str] = {}
    for leader, why in told or ():
        found[leader] = found.get(leader) or why
    of_all = None if told is None else [found[leader] for leader, _ in told]
    return meeting.scatter(of_all, str)


def deal(sizes: Sequence[int], ranks: int) -> list[list[Piece]]:
    """Who reads what in which round: pieces in order, each to a rank that has least so far. The
    windows of all stay within ``BUDGET``, so with long pieces not all ranks read."""
    rooms = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    readers = max(1, min(ranks, BUDGET // (2 * max(rooms, default=1) or 1)))
    room = BUDGET // (2 * readers)
    rounds: list[list[Piece]] = []
    load: list[tuple[int, int]] = []
    for number, size in enumerate(rooms):
        if not load or load[0][0] + size > room:
            rounds.append([])
            load = [(0, reader) for reader in range(readers)]
        at, reader = load[0]
        heapq.heapreplace(load, (at + size, reader))
        rounds[-1].append(Piece(number, reader, at, size))
    return rounds


class Neighbours:
    """The ranks of one host in a meeting. All of them make the same calls; errors are the
    meeting's to tell. ``place``: of this rank among them, in order of ranks."""

    def __init__(self, meeting: Meeting, seats: Sequence[Seat], shelves: Sequence[Shelf]) -> None:
        self.meeting = meeting
        self.ranks = [seat.rank for seat in seats]
        self.place = self.ranks.index(meeting.rank)
        self._shelves = [*shelves[1 : self.place + 1], shelves[0], *shelves[self.place + 1 :]]
        self._phase = 0

    def pass_on(
        self,
        rounds: Sequence[Sequence[Piece]],
        fill: Callable[[int, Span], None],
        take: Callable[[int, Span], None],
    ) -> None:
        """Go through the rounds: ``fill`` is called for a piece on the rank that reads it, then
        ``take`` on all, each with the piece's number and place, by several threads."""
        ends = [(piece.reader, piece.at + piece.size) for pieces in rounds for piece in pieces]
        room = max((end for _, end in ends), default=0)
        for phase in range(len(rounds) + 1):
            self._keep_step()
            if phase == 0:  # nobody looks at what was in the windows before
                reads = any(reader == self.place for reader, _ in ends)
                self._shelves[self.place].resize(2 * room if reads else 0)
            now, before = rounds[phase : phase + 1], rounds[max(0, phase - 1) : phase]
            mine = [p for pieces in now for p in pieces if p.reader == self.place]
            there = [p for pieces in before for p in pieces]
            jobs = [
                [partial(do, p.number, self._span(p, room * (n % 2))) for p in pieces]
                for do, pieces, n in ((fill, mine, phase), (take, there, phase - 1))
            ]
            in_parallel(jobs, self._do, 2)  # the one waits for the store, the other not

    def _span(self, piece: Piece, window: int) -> Span:
        return self._shelves[piece.reader].window(window + piece.at, piece.size)

    def _do(self, jobs: Sequence[Callable[[], None]]) -> None:
        threads = min(read_settings().threads, len(jobs))
        in_parallel(jobs, lambda job: job(), threads, self.meeting.advance)

    def _keep_step(self) -> None:
        """Wait until all have done what this rank has. By then the threads that did it have ended,
        so on every processor their bytes are there before the number is."""
        self._phase += 1
        self._shelves[self.place].numbers[1] = self._phase
        self.meeting.until(self._behind, self._phase)

    def _behind(self) -> list[int]:
        pairs = zip(self.ranks, self._shelves, strict=True)
        return [rank for rank, shelf in pairs if shelf.numbers[1] < self._phase]
