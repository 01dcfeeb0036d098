"""Exchange items through the shared memory of a host: one rank reads each, all ranks consume it.

Each rank has a segment that the others map: control words with its progress, which order the ranks,
and a few slots that it fills in turn, so that most copies are from the processor's cache. Threads
take the next task that is ready: read items into private memory (direct I/O into shared memory,
without huge pages, is slower), publish one in a slot, or consume a slot of another rank. The memory
has no name (``memfd_create``): however a process ends, nothing is left.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import accumulate, groupby
from threading import Lock
from typing import NamedTuple

import msgspec

from limpet import events, machine
from limpet.buffers import address_of, shared_pool
from limpet.ranks.collective import Collective
from limpet.settings import read_settings
from limpet.threads import in_parallel
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
    """A rank and its memory: ``fd``, in its process, and ``token``, the number at the beginning."""

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
    """The shared memory of one rank, mapped here. This object closes ``fd``; ``token``: of the rank
    that created it, or None for new memory, which gets one. The methods raise ``OSError``."""

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


@contextmanager
def connect_host_peers(collective: Collective, url: str) -> Iterator[HostPeers | None]:
    """Connect the ranks of this host, which read the snapshot at ``url`` together; all ranks must
    enter. Yields None for the only rank of a host, or after ``read_alone``, which says why."""
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
            yield HostPeers(collective, url, ranks, own, segments)
    finally:
        for segment in segments:
            segment.close()


def _gather_peers(collective: Collective, segments: list[SharedSegment]) -> list[Peer]:
    """Return the ranks that share memory with this one, which adds its own to ``segments``."""
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
    """Return why a rank of the set that begins with ``first_rank`` cannot share memory, or ""."""
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


# -- the exchange ----------------------------------------------------------------------------------

Read = Callable[[Sequence[int]], AbstractContextManager[Iterable[MemorySlice]]]
"""Reads the items with these numbers into memory that is valid in the context."""

Consume = Callable[[int, MemorySlice], None]
"""Called with the number of an item and its bytes."""

_POLL_SECONDS = 0.0002

_ITEM_BITS = 31
_ITEM_MASK = (1 << _ITEM_BITS) - 1


class HostPeers:
    """A host's ranks in a collective, which reports errors. All of them make the same calls."""

    def __init__(
        self,
        collective: Collective,
        url: str,
        ranks: list[int],
        peer_index: int,
        segments: list[SharedSegment],
    ) -> None:
        self.collective = collective
        self.ranks = ranks
        self.peer_index = peer_index
        self.segments = segments
        self.phase = 0
        self._url = url
        self._is_usable = True

    def own_items(self, readers: Sequence[int]) -> list[int]:
        """Return the numbers of the items that this rank reads."""
        return [item for item, reader in enumerate(readers) if reader == self.peer_index]

    def exchange(
        self,
        sizes: Sequence[int],
        readers: Sequence[int],
        groups: Sequence[Sequence[int]],
        read: Read,
        consume: Consume,
    ) -> bool:
        """Read each item on the rank that ``readers`` says, in several threads, and ``consume`` it
        on all. ``groups``: this rank's own items, as it calls ``read`` with them. Returns False on
        all ranks, without any call, if one cannot allocate its window."""
        if not sizes or not self._is_usable:
            return self._is_usable
        slot_size, slots = slot_layout(sizes, readers)
        turns = [readers.count(peer) for peer in range(len(self.ranks))]
        self.barrier()  # no rank reads the previous contents
        own = self.segments[self.peer_index]
        own.control_words[FILLED:] = memoryview(bytes(own.control_words[FILLED:].nbytes)).cast("q")
        reason = ""
        try:
            own.resize(slot_size * min(slots, turns[self.peer_index]))
        except OSError as e:
            reason = f": {e}"
        own.control_words[WINDOW_STATE] = -1 if reason else 1
        self.barrier()
        failed = [
            rank
            for rank, segment in zip(self.ranks, self.segments, strict=True)
            if segment.control_words[WINDOW_STATE] != 1
        ]
        if failed:
            self._is_usable = False
            reason = f"rank {failed[0]} cannot allocate shared memory{reason}"
            events.emit("read_alone", url=self._url, reason=reason)
            return False
        _Exchange(self, _Layout(sizes, turns, slot_size, slots), groups, read, consume).run()
        self.phase += 2 * max(turns)
        return True

    def barrier(self) -> None:
        """Wait until all ranks have completed the phases that this rank has completed."""
        self.phase += 1
        self.segments[self.peer_index].control_words[PHASE] = self.phase
        self.collective.wait_for_ranks(self._lagging_ranks, self.phase)

    def _lagging_ranks(self) -> list[int]:
        return [
            rank
            for rank, segment in zip(self.ranks, self.segments, strict=True)
            if segment.control_words[PHASE] < self.phase
        ]


class _Layout(NamedTuple):
    """The sizes of all items, how many each rank reads, and the slots of each window."""

    sizes: Sequence[int]
    turns: Sequence[int]
    slot_size: int
    slots: int


class _Held:
    """Items that this rank has read at once. ``unpublished``: those that no thread publishes yet;
    ``in_use``: how many still need the memory, which ``release`` returns."""

    def __init__(self, items: list[tuple[int, MemorySlice]], release: Callable[[], None]) -> None:
        self.unpublished, self.in_use, self.release = items, len(items), release


Task = Callable[[], None]


class _Exchange:
    """One exchange, as seen by one rank. Its n-th item, from 1, has *turn* n, and the slots take
    turns. ``_consuming[r]``: the last turn of rank r that this rank has begun to consume."""

    def __init__(
        self,
        peers: HostPeers,
        layout: _Layout,
        groups: Sequence[Sequence[int]],
        read: Read,
        consume: Consume,
    ) -> None:
        self._peers = peers
        self._own = peers.peer_index
        self._words = [segment.control_words for segment in peers.segments]
        self._layout = layout
        self._read, self._consume = read, consume
        self._unread = iter(groups)
        self._reading: set[int] = set()
        self._held: list[_Held] = []
        self._published = 0
        self._consuming = [0] * len(layout.turns)
        self._running: set[Task] = set()
        self._failures: list[BaseException] = []
        self._lock = Lock()
        self._threads = read_settings().threads
        # A thread that reads waits for the store, so at least one must be left to copy. A read must
        # not wait for a buffer of this exchange either: only a rank none of whose tasks runs
        # notices that another rank, which should take the bytes of the buffer, has died.
        pool = shared_pool()
        buffers = pool.budget // pool.buffer_size // max(map(len, groups), default=1)
        self._max_reads = max(1, min(self._threads - 2, buffers))

    def run(self) -> None:
        """Exchange all items. Raises the first error of a callback or of another rank."""
        advance = self._peers.collective.advance
        try:
            in_parallel(self._iter_tasks(), self._run_task, self._threads, advance, self._failures)
        finally:
            for held in self._held:  # after an error
                held.release()

    def _iter_tasks(self) -> Iterator[Task]:
        """Yield each task of this rank as soon as it is ready."""
        while not self._failures and (self._running or self._pending()):
            task = self._next_task()
            if task is not None:
                self._running.add(task)
                yield task
            elif self._running:
                time.sleep(_POLL_SECONDS)
            else:
                number = self._peers.phase + min(number for number, _ in self._pending())
                self._peers.collective.wait_for_ranks(self._awaited_ranks, number)

    def _run_task(self, task: Task) -> None:
        try:
            task()
        finally:
            self._running.discard(task)

    def _next_task(self) -> Task | None:
        if len(self._reading) + len(self._held) < self._max_reads:
            group = next(self._unread, None)
            if group is not None:
                self._reading.add(group[0])
                return partial(self._run_read, group)
        if (held := self._next_held()) is not None and not self._occupants():
            self._published += 1
            item, span = held.unpublished.pop(0)
            return partial(self._run_publish, self._published, item, span, held)
        for reader in self._consumable_readers():
            turn = self._consuming[reader] + 1
            if item := self._published_item(reader, turn):
                self._consuming[reader] = turn
                return partial(self._run_consume, reader, turn, item - 1)
        return None

    def _run_read(self, group: Sequence[int]) -> None:
        with ExitStack() as stack:
            items = []
            for item, span in zip(group, stack.enter_context(self._read(group)), strict=True):
                self._consume(item, span)
                items.append((item, span))
            self._held.append(_Held(items, stack.pop_all().close))
            self._reading.discard(group[0])

    def _run_publish(self, turn: int, item: int, span: MemorySlice, held: _Held) -> None:
        slot = self._slot(self._own, turn, item)
        ctypes.memmove(slot.address, span.address, self._layout.sizes[item])
        self._fence()
        word = FILLED + (turn - 1) % self._layout.slots
        self._words[self._own][word] = turn << _ITEM_BITS | item + 1
        with self._lock:
            held.in_use -= 1
            is_last = not held.in_use
        if is_last:
            self._held.remove(held)
            held.release()

    def _run_consume(self, reader: int, turn: int, item: int) -> None:
        self._fence()
        self._consume(item, self._slot(reader, turn, item))
        self._fence()
        word = CONSUMED + reader * MAX_SLOTS + (turn - 1) % self._layout.slots
        self._words[self._own][word] = turn

    def _next_held(self) -> _Held | None:
        """Return the items with the next one to publish, if this rank has read it."""
        return next((held for held in self._held if held.unpublished), None)

    def _slot(self, reader: int, turn: int, item: int) -> MemorySlice:
        offset = (turn - 1) % self._layout.slots * self._layout.slot_size
        return self._peers.segments[reader].window(offset, self._layout.sizes[item])

    def _consumable_readers(self) -> list[int]:
        """Return the other ranks that this rank has not consumed all items of."""
        return [
            reader
            for reader, turns in enumerate(self._layout.turns)
            if reader != self._own and self._consuming[reader] < turns
        ]

    def _published_item(self, reader: int, turn: int) -> int:
        """Return the number of the item, plus 1, that a rank has published; 0 if it has not."""
        word = self._words[reader][FILLED + (turn - 1) % self._layout.slots]
        return word & _ITEM_MASK if word >> _ITEM_BITS == turn else 0

    def _occupants(self) -> list[int]:
        """Return the ranks that have not consumed what is in the slot of the next own turn."""
        turn, slots = self._published + 1, self._layout.slots
        word = CONSUMED + self._own * MAX_SLOTS + (turn - 1) % slots
        return [
            rank
            for i, (rank, words) in enumerate(zip(self._peers.ranks, self._words, strict=True))
            if i != self._own and words[word] < turn - slots
        ]

    def _pending(self) -> list[tuple[int, list[int]]]:
        """Return what is left to do: the number of a wait, and the ranks to wait for. A turn is
        published after an earlier one was consumed: a rank that is awaited waits at a lower one."""
        found = []
        if self._published < self._layout.turns[self._own]:
            ranks = self._occupants() if self._next_held() else []
            found.append((2 * self._published, ranks))
        for reader in self._consumable_readers():
            turn = self._consuming[reader] + 1
            is_ready = self._published_item(reader, turn)
            found.append((2 * turn - 1, [] if is_ready else [self._peers.ranks[reader]]))
        return found

    def _awaited_ranks(self) -> list[int]:
        """Return the ranks that this rank waits for, or none if it has something to do."""
        if self._failures:  # such as Ctrl-C in another thread
            return []
        awaited = [ranks for _, ranks in self._pending()]
        return sorted({rank for ranks in awaited for rank in ranks}) if all(awaited) else []

    def _fence(self) -> None:
        """Order the accesses to memory before and after, so that others see a slot's bytes before
        its word. To lock twice is a full barrier: nothing moves above the second lock."""
        for _ in range(2):
            with self._lock:
                pass
