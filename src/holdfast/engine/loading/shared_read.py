"""What several ranks of one host want of a snapshot is read once, by one of them, and passed on.

Whoever reads a chunk checks it. What is passed on are the chunks' bytes, so the ranks may want
different parts of them; what only one rank wants it reads itself, as ever.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock

import numpy as np
import numpy.typing as npt

from holdfast.buffers import shared_pool
from holdfast.engine.distributed.collective import Collective
from holdfast.engine.distributed.host_memory import (
    HostPeers,
    ReadAssignment,
    WindowSlice,
    assign_reads,
    connect_host_peers,
)
from holdfast.engine.planning.read_plan import (
    ReadItem,
    ReadPlan,
    ReadRequest,
    chunk_read_items,
    make_read_plan,
)
from holdfast.engine.snapshot.index_files import parse_index
from holdfast.engine.snapshot.read import (
    Target,
    copy_to_targets,
    execute_read_plan,
    increment_tensor_versions,
    read_chunks_into,
)
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.format.index import ShardIndex
from holdfast.format.index_columns import SchemaCache
from holdfast.settings import read_settings
from holdfast.threads import gc_paused
from holdfast.types import ALIGNMENT, BLOCK_SIZE

RankMasks = npt.NDArray[np.uint64]
"""Sets of ranks: bit r for the r-th of a host."""


@contextmanager
def open_shared_reader(
    snapshot: Snapshot, collective: Collective
) -> Iterator[Snapshot | SharedReader]:
    """The snapshot, as the ranks of this host read it together; itself where there is no other
    rank, or none that can share."""
    with connect_host_peers(collective, snapshot.url) as near:
        yield snapshot if near is None else SharedReader(snapshot, near)


class SharedReader:
    """A snapshot, read by several ranks of one host together; all of them make the same calls."""

    def __init__(self, snapshot: Snapshot, peers: HostPeers) -> None:
        self._snapshot = snapshot
        self._peers = peers

    def indexes(self) -> list[ShardIndex]:
        """As ``Snapshot.indexes``; each file is read by one of the ranks."""
        near, snapshot, shards = self._peers, self._snapshot, self._snapshot.manifest.shards
        parts = [
            (i, at, min(BLOCK_SIZE, shard.index.length - at))
            for i, shard in enumerate(shards)
            for at in range(0, max(1, shard.index.length), BLOCK_SIZE)
        ]
        missing = Counter(i for i, _, _ in parts)
        came: list[dict[int, bytes]] = [{} for _ in shards]
        made: dict[int, ShardIndex] = {}
        lock, alike = Lock(), SchemaCache()

        def fill(number: int, into: WindowSlice) -> None:
            i, at, size = parts[number]
            key = snapshot.location.key(shards[i].index.name)
            snapshot.location.store.get_range(key, at, size, into.view)

        def take(number: int, span: WindowSlice) -> None:
            i, at, size = parts[number]
            with lock:
                came[i][at] = bytes(span.view[:size])
                missing[i] -= 1
                last = not missing[i]
            if last:
                raw = b"".join(part for _, part in sorted(came[i].items()))
                came[i].clear()
                made[i] = parse_index(snapshot.location, shards[i], raw, alike)

        with snapshot.not_found_if_deleted(), gc_paused():
            snapshot.check_lengths(shards[near.peer_index :: len(near.ranks)])
            near.exchange(assign_reads([size for _, _, size in parts], len(near.ranks)), fill, take)
            snapshot.set_indexes([made[i] for i in range(len(shards))])
        return snapshot.indexes()

    def read(
        self,
        requests: Sequence[ReadRequest],
        targets: Sequence[Target],
        advance: Callable[[], object] = bool,
    ) -> None:
        """As ``Snapshot.read``; a chunk that several ranks want is read by one of them."""
        place, indexes = self._snapshot.location, self._snapshot.indexes()
        with gc_paused():
            plan = make_read_plan(indexes, requests)
        keys = [(item.shard, item.first_chunk) for item in plan.items]

        def fill(number: int, into: WindowSlice) -> None:
            run = runs[number]
            before = min(leads[number], _file_offset(indexes, run) % place.store.traits.alignment)
            read_chunks_into(
                place, indexes[run.shard], run, before, into.view[leads[number] - before :]
            )

        def take(number: int, span: WindowSlice) -> None:
            run = runs[number]
            i = bisect_right(keys, (run.shard, run.first_chunk)) - 1
            if i >= 0 and plan.items[i].shard == run.shard:
                copies = _narrow(plan.items[i], run)
                copy_to_targets(copies, targets, span, run.start - leads[number])

        with self._snapshot.not_found_if_deleted():
            runs, alone = _split_shared(plan, indexes, self._wanting_ranks(plan, indexes))
            # in a window they lie as in their file, so that any rank can read them past its cache
            leads = [_file_offset(indexes, run) % ALIGNMENT for run in runs]
            sizes = [n + run.stop - run.start for n, run in zip(leads, runs, strict=True)]
            increment_tensor_versions(targets)
            self._peers.exchange(assign_reads(sizes, len(self._peers.ranks)), fill, take)
            rest = ReadPlan(plan.shards, tuple(alone), sum(i.stop - i.start for i in alone))
            threads = read_settings().threads
            execute_read_plan(place, rest, indexes, targets, shared_pool(), threads, advance)

    def _wanting_ranks(self, plan: ReadPlan, indexes: Sequence[ShardIndex]) -> list[RankMasks]:
        """For each shard, who wants each of its chunks."""
        begins = np.cumsum([0, *(len(index.cuts) for index in indexes)])
        mine = np.zeros(begins[-1], bool)
        for item in plan.items:
            mine[begins[item.shard] + item.first_chunk : begins[item.shard] + item.end_chunk] = True
        packed = np.packbits(mine).tobytes()
        of_each = [np.zeros(0, np.uint64)] * len(self._peers.ranks)

        def fill(number: int, into: WindowSlice) -> None:
            into.view[: len(packed)] = packed

        def take(number: int, span: WindowSlice) -> None:
            bits = np.frombuffer(span.view, np.uint8, len(packed))
            of_each[number] = np.unpackbits(bits, count=len(mine)).astype(np.uint64)

        self._peers.exchange(
            [[ReadAssignment(r, r, 0, len(packed)) for r in range(len(of_each))]], fill, take
        )
        wanted = np.zeros(len(mine), np.uint64)
        for number, bits in enumerate(of_each):
            wanted |= bits << np.uint64(number)
        return np.split(wanted, begins[1:-1])


def _file_offset(indexes: Sequence[ShardIndex], item: ReadItem) -> int:
    """Where the item's bytes begin in their file."""
    return indexes[item.shard].locate_chunk(item.first_chunk)[1]


def _split_shared(
    plan: ReadPlan, indexes: Sequence[ShardIndex], wanting_ranks: Sequence[RankMasks]
) -> tuple[list[ReadItem], list[ReadItem]]:
    """The chunks that several ranks want, in runs of which each of them wants all or nothing; and
    of the plan what this rank alone wants."""
    several = [who & (who - np.uint64(1)) != 0 for who in wanting_ranks]
    runs: list[ReadItem] = []
    for shard, (index, who, shared) in enumerate(zip(indexes, wanting_ranks, several, strict=True)):
        found: list[ReadItem] = []
        for ranks in np.unique(who[shared]):
            chunks = np.flatnonzero(who == ranks)
            found += chunk_read_items(shard, index.cuts, index.chunk_refs, chunks)
        runs += sorted(found, key=lambda run: run.first_chunk)
    alone: list[ReadItem] = []
    for item in plan.items:
        chunks = item.first_chunk + np.flatnonzero(
            ~several[item.shard][item.first_chunk : item.end_chunk]
        )
        if len(chunks) == item.end_chunk - item.first_chunk:
            alone.append(item)
        elif len(chunks):
            index = indexes[item.shard]
            parts = chunk_read_items(item.shard, index.cuts, index.chunk_refs, chunks)
            alone += [_narrow(item, part) for part in parts]
    return runs, alone


def _narrow(item: ReadItem, part: ReadItem) -> ReadItem:
    """A part of the item's chunks, with the copies that are made from these."""
    want, offset, at, size = item.linear_copies.T
    begin, end = np.maximum(offset, part.start), np.minimum(offset + size, part.stop)
    rows = np.column_stack([want, begin, at + begin - offset, end - begin])[end > begin]
    slabs = tuple(s for s in item.strided_copies if part.start <= s.file_offset < part.stop)
    return replace(part, linear_copies=rows, strided_copies=slabs)
