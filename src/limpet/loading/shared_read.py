"""Shared reads: one rank of a host reads each chunk that several ranks of the host need.

The rank that reads a chunk checks it, and shares the chunk's bytes with the other ranks, which may
need different parts of them. A rank reads a chunk that only it needs by itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby, islice
from threading import Lock

import numpy as np
import numpy.typing as npt

from limpet.buffers import address_of
from limpet.format.index import SchemaCache, ShardIndex
from limpet.layout import read_plan
from limpet.ranks.collective import Collective
from limpet.ranks.host_exchange import (
    HostPeers,
    MemorySlice,
    assign_readers,
    connect_host_peers,
    max_item_size,
)
from limpet.snapshot.chunks import (
    Target,
    copy_to_targets,
    count_writes,
    execute_read_plan,
    merge_items,
    read_items,
    read_workers,
)
from limpet.snapshot.index_files import parse_index
from limpet.snapshot.reader import SnapshotReader
from limpet.threads import gc_paused, no_op
from limpet.types import BLOCK_SIZE, MIB

MIN_SHARED_BYTES = 16 * MIB
"""Each rank reads a snapshot with fewer bytes by itself, which takes less time than to connect."""


@contextmanager
def open_shared_reader(
    snapshot: SnapshotReader, collective: Collective
) -> Iterator[SnapshotReader | SharedReader]:
    """Yield a reader with which the ranks of this host read the snapshot together. Yield the
    snapshot itself if it is small, if this host has no other rank, or if they cannot share memory.
    """
    nbytes = snapshot.nbytes + snapshot.referred_bytes
    if not collective.broadcast(collective.size > 1 and nbytes >= MIN_SHARED_BYTES, bool):
        yield snapshot
        return
    with connect_host_peers(collective, snapshot.url) as peers:
        yield snapshot if peers is None else SharedReader(snapshot, peers)


class SharedReader:
    """A snapshot that ranks of one host read together, by the same calls in the same order."""

    def __init__(self, snapshot: SnapshotReader, peers: HostPeers) -> None:
        self._snapshot = snapshot
        self._peers = peers

    @gc_paused
    def indexes(self) -> list[ShardIndex]:
        """Do the same as ``SnapshotReader.indexes``. One rank reads each block of an index file."""
        peers, snapshot, shards = self._peers, self._snapshot, self._snapshot.manifest.shards
        blocks = [
            (i, at, min(BLOCK_SIZE, shard.index.length - at))
            for i, shard in enumerate(shards)
            for at in range(0, max(1, shard.index.length), BLOCK_SIZE)
        ]
        block_counts = Counter(i for i, _, _ in blocks)
        received: list[dict[int, bytes]] = [{} for _ in shards]
        indexes: dict[int, ShardIndex] = {}
        lock, schema_cache = Lock(), SchemaCache()

        def read(group: Sequence[int]) -> AbstractContextManager[Iterable[MemorySlice]]:
            i, first, _ = blocks[group[0]]
            parts = [blocks[number] for number in group]
            raw = memoryview(bytearray(sum(size for _, _, size in parts)))
            key = snapshot.location.file_key(shards[i].index_path)
            snapshot.location.store.get_range(key, first, len(raw), raw)
            views = [raw[at - first : at - first + size] for _, at, size in parts]
            return nullcontext([MemorySlice(view, address_of(view)) for view in views])

        def consume(number: int, span: MemorySlice) -> None:
            i, at, size = blocks[number]
            with lock:
                received[i][at] = bytes(span.view[:size])
                is_last = len(received[i]) == block_counts[i]
            if is_last:
                raw = b"".join(block for _, block in sorted(received[i].items()))
                received[i].clear()
                indexes[i] = parse_index(snapshot.location, shards[i], raw, schema_cache)

        with snapshot.not_found_if_deleted():
            snapshot.check_lengths(shards[peers.peer_index :: len(peers.ranks)])
            sizes = [size for _, _, size in blocks]
            readers = assign_readers(sizes, len(peers.ranks))
            groups = [
                list(group)
                for _, group in groupby(peers.own_items(readers), lambda number: blocks[number][0])
            ]
            if peers.exchange(sizes, readers, groups, read, consume):
                snapshot.set_indexes([indexes[i] for i in range(len(shards))])
        return snapshot.indexes()

    def read(
        self,
        requests: Sequence[read_plan.ReadRequest],
        targets: Sequence[Target],
        advance: Callable[[], object] = no_op,
    ) -> None:
        """Read the requests into the targets, as ``SnapshotReader.read`` does. One rank reads
        each chunk that several ranks request."""
        location, indexes = self._snapshot.location, self._snapshot.indexes()
        checked_headers = self._snapshot.checked_headers
        plan = gc_paused(read_plan.make_read_plan)(indexes, requests, checked_headers)
        ends = [(item.shard, item.end_chunk) for item in plan.items]

        @contextmanager
        def read(group: Sequence[int]) -> Iterator[Iterable[MemorySlice]]:
            items = [shared_items[number] for number in group]
            index = indexes[items[0].shard]
            with read_items(location, index, items, workers, kept=True) as verified:
                yield (
                    MemorySlice(
                        buffer.view[item.start - base : item.stop - base],
                        buffer.address + item.start - base,
                    )
                    for item, buffer, base in verified
                )

        def consume(number: int, span: MemorySlice) -> None:
            item = shared_items[number]
            first = bisect_left(ends, (item.shard, item.first_chunk + 1))
            for own in islice(plan.items, first, None):
                if (own.shard, own.first_chunk) >= (item.shard, item.end_chunk):
                    break
                copy_to_targets(_narrow(own, item), targets, span, item.start)

        workers = read_workers(location, advance, len(self._peers.ranks))
        with self._snapshot.not_found_if_deleted():
            counts = self._count_requesters(plan, indexes)
            max_length = max_item_size(len(self._peers.ranks))
            shared_items, unshared = _split_shared(plan, indexes, counts, max_length)
            sizes = [item.stop - item.start for item in shared_items]
            readers = assign_readers(sizes, len(self._peers.ranks))
            numbers = {shared_items[i]: i for i in self._peers.own_items(readers)}
            batches = merge_items(location, indexes, [*numbers], workers, len(shared_items))
            groups = [[numbers[item] for item in batch] for batch in batches]
            count_writes(targets)
            is_shared = self._peers.exchange(sizes, readers, groups, read, consume)
            own_plan = read_plan.ReadPlan(tuple(unshared)) if is_shared else plan
            execute_read_plan(location, own_plan, indexes, targets, workers)
        self._snapshot.checked_headers.update(plan.headers)

    def _count_requesters(
        self, plan: read_plan.ReadPlan, indexes: Sequence[ShardIndex]
    ) -> list[npt.NDArray[np.uint8]]:
        """Return, for each shard, how many ranks need each of its chunks."""
        starts = np.cumsum([0, *(len(index.cuts) for index in indexes)])
        own_chunks = np.zeros(starts[-1], bool)
        for item in plan.items:
            start = starts[item.shard]
            own_chunks[start + item.first_chunk : start + item.end_chunk] = True
        packed = np.packbits(own_chunks).tobytes()
        counts, lock = np.zeros(len(own_chunks), np.uint8), Lock()

        def read(group: Sequence[int]) -> AbstractContextManager[Iterable[MemorySlice]]:
            return nullcontext([MemorySlice(memoryview(packed), address_of(memoryview(packed)))])

        def consume(number: int, span: MemorySlice) -> None:
            bits = np.frombuffer(span.view, np.uint8, len(packed))
            with lock:
                np.add(counts, np.unpackbits(bits, count=len(counts)), out=counts)

        every_rank = range(len(self._peers.ranks))
        sizes, groups = [len(packed)] * len(every_rank), [[self._peers.peer_index]]
        self._peers.exchange(sizes, every_rank, groups, read, consume)
        return np.split(counts, starts[1:-1])


def _split_shared(
    plan: read_plan.ReadPlan,
    indexes: Sequence[ShardIndex],
    counts: Sequence[npt.NDArray[np.uint8]],
    max_length: int,
) -> tuple[list[read_plan.ReadItem], list[read_plan.ReadItem]]:
    """Return the chunks that several ranks need (``counts``: how many need each), and the part of
    the plan that only this rank needs. A chunk of more than ``max_length`` bytes is not shared."""
    is_shared = [
        (count > 1) & (np.diff(index.cuts, prepend=0) <= max_length)
        for index, count in zip(indexes, counts, strict=True)
    ]
    shared_items = [
        item
        for shard, index in enumerate(indexes)
        for item in read_plan.chunk_read_items(
            shard, index.cuts, index.chunk_refs, np.flatnonzero(is_shared[shard])
        )
    ]
    unshared: list[read_plan.ReadItem] = []
    for item in plan.items:
        chunks = item.first_chunk + np.flatnonzero(
            ~is_shared[item.shard][item.first_chunk : item.end_chunk]
        )
        if len(chunks) == item.end_chunk - item.first_chunk:
            unshared.append(item)
        elif len(chunks):
            index = indexes[item.shard]
            parts = read_plan.chunk_read_items(item.shard, index.cuts, index.chunk_refs, chunks)
            unshared += [_narrow(item, part) for part in parts]
    return shared_items, unshared


def _narrow(item: read_plan.ReadItem, part: read_plan.ReadItem) -> read_plan.ReadItem:
    """Return ``part``, a range of chunks, with the item's copies from these chunks."""
    request_id, offset, at, size = item.linear_copies.T
    start, stop = np.maximum(offset, part.start), np.minimum(offset + size, part.stop)
    rows = np.column_stack([request_id, start, at + start - offset, stop - start])[stop > start]
    strided = tuple(s for s in item.strided_copies if part.start <= s.file_offset < part.stop)
    return replace(part, linear_copies=rows, strided_copies=strided)
