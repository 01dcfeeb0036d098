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
from holdfast.engine.distributed.collective import Meeting
from holdfast.engine.distributed.host_memory import Neighbours, Piece, Span, deal, neighbours
from holdfast.engine.planning.read_plan import ReadItem, ReadPlan, Want, plan_read, whole_file
from holdfast.engine.snapshot.index_files import check_index
from holdfast.engine.snapshot.read import Target, announce, copy_out, fetch, run_reads
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.format.index import ShardIndex
from holdfast.format.index_columns import Alike
from holdfast.settings import read_settings
from holdfast.threads import uncollected
from holdfast.types import ALIGNMENT, UNIT

Ranks = npt.NDArray[np.uint64]
"""Sets of ranks: bit r for the r-th of a host."""


@contextmanager
def sharing(snapshot: Snapshot, meeting: Meeting) -> Iterator[Snapshot | Sharing]:
    """The snapshot, as the ranks of this host read it together; itself where there is no other
    rank, or none that can share."""
    with neighbours(meeting, snapshot.url) as near:
        yield snapshot if near is None else Sharing(snapshot, near)


class Sharing:
    """A snapshot, read by several ranks of one host together; all of them make the same calls."""

    def __init__(self, snapshot: Snapshot, near: Neighbours) -> None:
        self._snapshot = snapshot
        self._near = near

    def indexes(self) -> list[ShardIndex]:
        """As ``Snapshot.indexes``; each file is read by one of the ranks."""
        near, snapshot, shards = self._near, self._snapshot, self._snapshot.manifest.shards
        parts = [
            (i, at, min(UNIT, shard.index.length - at))
            for i, shard in enumerate(shards)
            for at in range(0, max(1, shard.index.length), UNIT)
        ]
        missing = Counter(i for i, _, _ in parts)
        came: list[dict[int, bytes]] = [{} for _ in shards]
        made: dict[int, ShardIndex] = {}
        lock, alike = Lock(), Alike()

        def fill(number: int, into: Span) -> None:
            i, at, size = parts[number]
            key = snapshot.place.key(shards[i].index.name)
            snapshot.place.store.get_range(key, at, size, into.view)

        def take(number: int, span: Span) -> None:
            i, at, size = parts[number]
            with lock:
                came[i][at] = bytes(span.view[:size])
                missing[i] -= 1
                last = not missing[i]
            if last:
                raw = b"".join(part for _, part in sorted(came[i].items()))
                came[i].clear()
                made[i] = check_index(snapshot.place, shards[i], raw, alike)

        with snapshot.told_if_deleted(), uncollected():
            snapshot.check_lengths(shards[near.place :: len(near.ranks)])
            near.pass_on(deal([size for _, _, size in parts], len(near.ranks)), fill, take)
            snapshot.keep_indexes([made[i] for i in range(len(shards))])
        return snapshot.indexes()

    def read(
        self,
        wants: Sequence[Want],
        targets: Sequence[Target],
        advance: Callable[[], object] = bool,
    ) -> None:
        """As ``Snapshot.read``; a chunk that several ranks want is read by one of them."""
        place, indexes = self._snapshot.place, self._snapshot.indexes()
        with uncollected():
            plan = plan_read(indexes, wants)
        keys = [(item.shard, item.first) for item in plan.items]

        def fill(number: int, into: Span) -> None:
            run = runs[number]
            before = min(leads[number], _at(indexes, run) % place.store.traits.alignment)
            fetch(place, indexes[run.shard], run, before, into.view[leads[number] - before :])

        def take(number: int, span: Span) -> None:
            run = runs[number]
            i = bisect_right(keys, (run.shard, run.first)) - 1
            if i >= 0 and plan.items[i].shard == run.shard:
                copies = _narrowed(plan.items[i], run)
                copy_out(copies, targets, span, run.start - leads[number])

        with self._snapshot.told_if_deleted():
            runs, alone = _several(plan, indexes, self._wanted(plan, indexes))
            # in a window they lie as in their file, so that any rank can read them past its cache
            leads = [_at(indexes, run) % ALIGNMENT for run in runs]
            sizes = [n + run.stop - run.start for n, run in zip(leads, runs, strict=True)]
            announce(targets)
            self._near.pass_on(deal(sizes, len(self._near.ranks)), fill, take)
            rest = ReadPlan(plan.shards, tuple(alone), sum(i.stop - i.start for i in alone))
            threads = read_settings().threads
            run_reads(place, rest, indexes, targets, shared_pool(), threads, advance)

    def _wanted(self, plan: ReadPlan, indexes: Sequence[ShardIndex]) -> list[Ranks]:
        """For each shard, who wants each of its chunks."""
        begins = np.cumsum([0, *(len(index.cuts) for index in indexes)])
        mine = np.zeros(begins[-1], bool)
        for item in plan.items:
            mine[begins[item.shard] + item.first : begins[item.shard] + item.last] = True
        packed = np.packbits(mine).tobytes()
        of_each = [np.zeros(0, np.uint64)] * len(self._near.ranks)

        def fill(number: int, into: Span) -> None:
            into.view[: len(packed)] = packed

        def take(number: int, span: Span) -> None:
            bits = np.frombuffer(span.view, np.uint8, len(packed))
            of_each[number] = np.unpackbits(bits, count=len(mine)).astype(np.uint64)

        self._near.pass_on([[Piece(r, r, 0, len(packed)) for r in range(len(of_each))]], fill, take)
        wanted = np.zeros(len(mine), np.uint64)
        for number, bits in enumerate(of_each):
            wanted |= bits << np.uint64(number)
        return np.split(wanted, begins[1:-1])


def _at(indexes: Sequence[ShardIndex], item: ReadItem) -> int:
    """Where the item's bytes begin in their file."""
    return indexes[item.shard].where(item.first)[1]


def _several(
    plan: ReadPlan, indexes: Sequence[ShardIndex], wanted: Sequence[Ranks]
) -> tuple[list[ReadItem], list[ReadItem]]:
    """The chunks that several ranks want, in runs of which each of them wants all or nothing; and
    of the plan what this rank alone wants."""
    several = [who & (who - np.uint64(1)) != 0 for who in wanted]
    runs: list[ReadItem] = []
    for shard, (index, who, shared) in enumerate(zip(indexes, wanted, several, strict=True)):
        found: list[ReadItem] = []
        for ranks in np.unique(who[shared]):
            chunks = np.flatnonzero(who == ranks)
            found += whole_file(shard, index.cuts, index.places, chunks)
        runs += sorted(found, key=lambda run: run.first)
    alone: list[ReadItem] = []
    for item in plan.items:
        chunks = item.first + np.flatnonzero(~several[item.shard][item.first : item.last])
        if len(chunks) == item.last - item.first:
            alone.append(item)
        elif len(chunks):
            index = indexes[item.shard]
            parts = whole_file(item.shard, index.cuts, index.places, chunks)
            alone += [_narrowed(item, part) for part in parts]
    return runs, alone


def _narrowed(item: ReadItem, part: ReadItem) -> ReadItem:
    """A part of the item's chunks, with the copies that are made from these."""
    want, offset, at, size = item.linear.T
    begin, end = np.maximum(offset, part.start), np.minimum(offset + size, part.stop)
    rows = np.column_stack([want, begin, at + begin - offset, end - begin])[end > begin]
    slabs = tuple(s for s in item.slabs if part.start <= s.file_offset < part.stop)
    return replace(part, linear=rows, slabs=slabs)
