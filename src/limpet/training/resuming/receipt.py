"""Compares the live state after a resume with the version, and the next batch with the record.

The bytes of the live objects are arranged as in the shards, so that their digests are comparable
with those of the indexes, which the load has in memory. Nothing is read from the store, unless a
digest differs: then the leaves of its chunk are read, to name those that differ.
"""

from __future__ import annotations

import ctypes
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock
from typing import Any

import msgspec
import numpy as np

from limpet import events
from limpet.buffers import Buffer
from limpet.data.next_batch import find_next_batch
from limpet.data.sampler import ElasticSampler
from limpet.errors import (
    FormatError,
    LimpetError,
    RankFailed,
    StoreError,
    UnconsumedSamples,
)
from limpet.format.digest import digest, digest_parts
from limpet.format.index import ShardIndex
from limpet.format.tree import walk
from limpet.layout.boxes import contiguous_boxes
from limpet.layout.read_plan import ReadRequest
from limpet.ranks.group import Group
from limpet.run.catalog import read_training_metadata
from limpet.run.run import Run
from limpet.saving.image import Image, contiguous_address
from limpet.snapshot.read import Target
from limpet.snapshot.reader import SnapshotReader
from limpet.state.flatten import FlatState, LocalLeaf, flatten
from limpet.state.walk import find_named_instances
from limpet.text import warn_user
from limpet.threads import Workers, gc_paused
from limpet.types import BLOCK_SIZE, DTYPES, Box

RECORD = "next_batches"
"""The name in the training metadata under which a version records the next batches."""

_MAX_DIFFERENCES = 100
_MAX_BOXES = 200_000
"""The bytes of a snapshot of more boxes are not compared: to arrange them takes 5 us for each."""
_MAX_PROBLEM = 500
"""The number of characters with which an error of a comparison is reported."""

_MAX_READ_CHUNKS = 16
"""The number of chunks that are read to find out which of their leaves differ."""


class RankReceipt(msgspec.Struct):
    """What one rank has compared. ``lacking``: keys of the version that its live state lacks.
    ``chunks``: by shard, ranges of the numbers of its chunks."""

    differing: list[str]
    lacking: list[str]
    chunks: dict[int, list[tuple[int, int]]]


def record_next_batches(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a version records: the next batch of each sampler in the state, by its path."""
    recorded = {}
    for path, sampler in find_named_instances(state, ElasticSampler):
        epoch, samples, left, ids = find_next_batch(sampler)
        position = {"epoch": epoch, "samples": samples, "left": left}
        recorded[path] = {**position, "digest": digest(ids)}
    return {RECORD: recorded} if recorded else {}


def check_resume(run: str, snapshot: SnapshotReader, state: dict[str, Any], group: Group) -> None:
    """Compare the live state with ``snapshot``, which was just loaded, on all ranks.

    Emits ``resume_checked`` on rank 0 if all is equal, and ``resume_differs`` otherwise. The resume
    is complete before, so an error of the comparison is reported as a difference.
    """
    began = time.perf_counter()
    collective = group.collective(f"the check of the resume of {run}")
    try:
        with collective:
            own = _try_to_compare(snapshot, state, group.rank, collective.advance)
            gathered = collective.gather(own, RankReceipt)
    finally:
        collective.close()
    if gathered is None:
        return
    differing = {key for receipt in gathered for key in receipt.differing}
    # each stage of a pipeline has other keys
    differing |= set.intersection(*(set(receipt.lacking) for receipt in gathered))
    batches = _compare_batches(_recorded(snapshot), state)
    compared, total = _count_bytes(snapshot.indexes(), gathered)
    names = [*sorted(differing)[:_MAX_DIFFERENCES], *batches]
    url, seconds = snapshot.url, time.perf_counter() - began
    if names:
        events.emit(
            "resume_differs",
            run=run,
            url=url,
            differing=names,
            bytes=compared,
            total=total,
            seconds=seconds,
        )
    else:
        events.emit(
            "resume_checked", run=run, url=url, bytes=compared, total=total, seconds=seconds
        )


def _recorded(snapshot: SnapshotReader) -> Mapping[str, Any]:
    recorded = read_training_metadata(snapshot).get(RECORD)
    return recorded if isinstance(recorded, dict) else {}


def _compare_batches(saved: Mapping[str, Any], state: dict[str, Any]) -> list[str]:
    """Describe the samplers whose next batch is not the recorded one."""
    live = record_next_batches(state).get(RECORD, {})
    return [f"the next batch of {p}" for p in live if p in saved and saved[p] != live[p]]


class Consumption:
    """Warns at the end of a training that took no step, although the version that it resumed has
    recorded samples that were left in its epoch."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._resumed: tuple[SnapshotReader, int] | None = None

    def restart(self, snapshot: SnapshotReader, step: int) -> None:
        self._resumed = snapshot, step

    def check(self, step: int) -> None:
        """Warn at the normal end after ``step``, unless an earlier training of the run ended there.

        The store is read only if there was no step.
        """
        resumed, self._resumed = self._resumed, None  # for a second close()
        if resumed is None or resumed[1] != step:
            return
        left = {p: b.get("left") for p, b in _recorded(resumed[0]).items() if b["samples"]}
        with suppress(LimpetError):
            if left and self._run.ended() is None:
                path, samples = next(iter(left.items()))
                warn_user(
                    f"The training ended at step {step}, where it resumed, although {samples}"
                    f" samples of the epoch of {path} were left. Check the condition of the loop,"
                    " if there was one",
                    UnconsumedSamples,
                )


def _count_bytes(indexes: Sequence[ShardIndex], receipts: Sequence[RankReceipt]) -> tuple[int, int]:
    """Return the bytes that any rank has compared, and those of all leaves."""
    compared = total = 0
    for number, index in enumerate(indexes):
        total += int(index.cuts[-1]) - index.header
        ranges = sorted(r for receipt in receipts for r in receipt.chunks.get(number, ()))
        done = 1  # the first chunk is the header
        for first, last in ranges:
            first = max(first, done)
            if last > first:
                compared += int(index.cuts[last - 1]) - int(index.cuts[first - 1])
                done = last
    return compared, total


# -- one rank --------------------------------------------------------------------------------------


def _try_to_compare(
    snapshot: SnapshotReader, state: dict[str, Any], rank: int, advance: Any
) -> RankReceipt:
    try:
        return _compare_on_this_rank(snapshot, state, rank, advance)
    except RankFailed:
        raise
    except Exception as e:  # noqa: BLE001  (such as that of a state_dict(), or of too little memory)
        what = f"the state of rank {rank}, which cannot be compared: {type(e).__name__}: {e}"
        return RankReceipt([what[:_MAX_PROBLEM]], [], {})


@gc_paused
def _compare_on_this_rank(
    snapshot: SnapshotReader, state: dict[str, Any], rank: int, advance: Any
) -> RankReceipt:
    flat = flatten(state, rank)
    receipt = _compare_values(snapshot.nodes(), flat, rank)
    leaves: dict[str, list[LocalLeaf]] = {}
    for leaf in flat.leaves:
        leaves.setdefault(leaf.key, []).append(leaf)
    workers, lock = Workers.create(advance=advance), Lock()
    found: list[tuple[_LiveShard, int]] = []
    indexes = snapshot.indexes()
    if sum(len(index.leaves.file_offsets) for index in indexes) > _MAX_BOXES:
        indexes = []
    for number, index in enumerate(indexes):
        shard = _LiveShard.arrange(index, leaves)
        chunks = shard.find_chunks()
        receipt.chunks[number] = _to_ranges(chunks)

        def compare(chunk: int, shard: _LiveShard = shard) -> None:
            if shard.digest_chunk(chunk, workers) != shard.index.chunk_digest(chunk):
                with lock:
                    found.append((shard, chunk))

        workers.each(chunks, compare, shard.image.length)
    keys: set[str] = set()
    for i, (shard, chunk) in enumerate(found):
        is_read = i < _MAX_READ_CHUNKS
        keys.update(shard.find_differing(chunk, snapshot) if is_read else shard.keys_in(chunk))
    receipt.differing += sorted(keys)
    return receipt


def _compare_values(saved: Mapping[str, Any], flat: FlatState, rank: int) -> RankReceipt:
    """Compare the live values, and the leaves by their dtype and shape."""
    parts = [("", flat.tree), *flat.from_first.items()]
    parts += [(f"{key}/{rank}", node) for key, node in flat.per_rank.items()]
    live = dict(item for key, node in parts for item in walk(node, key) if not _is_reference(item))
    differing = [key for key, node in live.items() if not _are_equal(saved.get(key, node), node)]
    of_ranks = tuple(f"{key}/" for key in flat.per_rank)
    lacking = [key for key in saved if key not in live and not key.startswith(of_ranks)]
    return RankReceipt(differing, lacking, {})


def _is_reference(item: tuple[str, Any]) -> bool:
    """Return True for the place of a value per rank, or from the first rank, in a live tree."""
    _, node = item
    return type(node) is dict and not node.keys().isdisjoint(("own", "first"))


def _are_equal(saved: Any, live: Any) -> bool:
    # as text: NaN does not equal itself, and 1 equals True, 1.0, and -0.0 equals 0.0
    return repr(saved) == repr(live) or (type(saved) is dict and bool(saved == live))


def _to_ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for n in numbers:
        if ranges and ranges[-1][1] == n:
            ranges[-1] = ranges[-1][0], n + 1
        else:
            ranges.append((n, n + 1))
    return ranges


@dataclass(slots=True)
class _LiveShard:
    """The live sources of the boxes of a shard, in the order of the file.

    ``live_counts[i]``: how many of the first ``i`` boxes this rank has.
    """

    index: ShardIndex
    image: Image
    keys: list[str]
    boxes: list[Box]
    live_counts: list[int]

    @classmethod
    def arrange(cls, index: ShardIndex, leaves: Mapping[str, Sequence[LocalLeaf]]) -> _LiveShard:
        """Find the sources of the boxes of a shard among the live leaves."""
        boxes = sorted(_boxes_with_sources(index, leaves), key=lambda box: box[0])
        starts, ends = [b[0] for b in boxes], [b[1] for b in boxes]
        sources = [b[4] for b in boxes]
        image = Image(b"", [], sources, starts, ends, index.cuts, int(index.cuts[-1]))
        counts = [0, *accumulate(source is not None for source in sources)]
        return cls(index, image, [b[2] for b in boxes], [b[3] for b in boxes], counts)

    def _boxes_in(self, chunk: int) -> tuple[int, int]:
        start, stop = self.index.cuts[chunk - 1], self.index.cuts[chunk]
        starts = self.image.box_starts
        return max(0, bisect_right(starts, start) - 1), bisect_left(starts, stop)

    def find_chunks(self) -> list[int]:
        """Return the numbers of the chunks all of whose bytes this rank has."""
        found = []
        for chunk in range(1, len(self.index.cuts)):
            first, last = self._boxes_in(chunk)
            if last > first and self.live_counts[last] - self.live_counts[first] == last - first:
                found.append(chunk)
        return found

    def keys_in(self, chunk: int) -> list[str]:
        first, last = self._boxes_in(chunk)
        return self.keys[first:last]

    def digest_chunk(self, chunk: int, workers: Workers) -> str:
        """Return the digest of the live bytes of a chunk."""
        start, stop = int(self.index.cuts[chunk - 1]), int(self.index.cuts[chunk])
        first, last = self._boxes_in(chunk)
        if last - first == 1 and (address := contiguous_address(self.image.sources[first])):
            address += start - self.image.box_starts[first]
            return digest((ctypes.c_char * (stop - start)).from_address(address))

        def blocks() -> Iterator[memoryview]:
            with workers.buffer() as buffer:
                for at in range(start, stop, BLOCK_SIZE):
                    end = min(stop, at + BLOCK_SIZE)
                    self.image.copy_range(at, end, buffer, 0)
                    yield buffer.view[: end - at]

        return digest_parts(blocks())

    def find_differing(self, chunk: int, snapshot: SnapshotReader) -> list[str]:
        """Return the keys of the leaves whose live bytes in a chunk differ from the saved ones. If
        these cannot be read, return those of all leaves in the chunk."""
        first, last = self._boxes_in(chunk)
        if last - first == 1:
            return self.keys_in(chunk)
        start, stop = int(self.index.cuts[chunk - 1]), int(self.index.cuts[chunk])
        spans = [
            (max(start, self.image.box_starts[i]), min(stop, self.image.box_ends[i]))
            for i in range(first, last)
        ]
        try:
            saved = [self._read(i, *span, snapshot) for i, span in enumerate(spans, first)]
        except (FormatError, StoreError):
            return self.keys_in(chunk)
        return [
            self.keys[i]
            for i, (a, b), raw in zip(range(first, last), spans, saved, strict=True)
            if raw != self._live_bytes(a, b)
        ]

    def _live_bytes(self, start: int, stop: int) -> bytes:
        buffer = Buffer(stop - start)
        self.image.copy_range(start, stop, buffer, 0)
        return bytes(buffer.view[: stop - start])

    def _read(self, i: int, start: int, stop: int, snapshot: SnapshotReader) -> bytes:
        """Read the saved bytes of box ``i`` between two file offsets."""
        key, box, at = self.keys[i], self.boxes[i], self.image.box_starts[i]
        dtype = snapshot.leaves[key][0]
        size = DTYPES[dtype].itemsize
        requests, targets, parts = [], [], []
        for part in contiguous_boxes(box.sizes, (start - at) // size, (stop - at) // size):
            offsets = tuple(a + b for a, b in zip(box.offsets, part.offsets, strict=True))
            into = np.empty(part.sizes, f"V{size}")
            requests.append(ReadRequest(key, Box(offsets, part.sizes)))
            address = into.__array_interface__["data"][0]
            targets.append(Target(dtype, part.sizes, into, address))
            parts.append(into)
        snapshot.read(requests, targets)
        return b"".join(part.tobytes() for part in parts)


def _boxes_with_sources(
    index: ShardIndex, leaves: Mapping[str, Sequence[LocalLeaf]]
) -> Iterator[tuple[int, int, str, Box, Any]]:
    """Yield the file offsets, the key, the box, and the live source of each box with bytes. The
    source is None if this rank does not have all of the box."""
    for leaf in index.leaves:
        leaf_type = leaf.dtype, tuple(leaf.shape)
        live = [x for x in leaves.get(leaf.key, ()) if (x.dtype, x.shape) == leaf_type]
        size = DTYPES[leaf.dtype].itemsize
        for index_box in leaf.boxes:
            box = Box(tuple(index_box.offsets), tuple(index_box.sizes))
            if nbytes := box.numel * size:
                at = index_box.at
                yield at, at + nbytes, leaf.key, box, _find_source(live, box)


def _find_source(leaves: Sequence[LocalLeaf], box: Box) -> Any:
    for leaf in leaves:
        if leaf.box == box:
            return leaf.source
        offsets = [a - b for a, b in zip(box.offsets, leaf.box.offsets, strict=True)]
        if Box(tuple(offsets), box.sizes).is_within(leaf.box.sizes):
            slices = tuple(slice(o, o + n) for o, n in zip(offsets, box.sizes, strict=True))
            return leaf.source[slices]
    return None
