"""Whether a resume was exact: the next batch, always, and on request all of the live state."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import msgspec
import numpy as np

from limpet import events
from limpet.buffers import Buffer
from limpet.data.sampler import ElasticSampler, find_next_batch
from limpet.errors import RankFailed
from limpet.format.digest import digest
from limpet.format.tree import walk
from limpet.layout.boxes import contiguous_boxes
from limpet.layout.read_plan import ReadRequest
from limpet.ranks.group import Group
from limpet.run.catalog import read_training_metadata
from limpet.saving.image import copy_bytes
from limpet.snapshot.read import Target
from limpet.snapshot.reader import SnapshotReader
from limpet.state.flatten import FlatState, LocalLeaf, flatten
from limpet.state.walk import find_named_instances
from limpet.types import DTYPES, Box

RECORD = "next_batches"
"""The name in the training metadata under which a version records the next batches."""


def record_next_batches(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a version records: the next batch of each sampler in the state, by its path."""
    recorded = {}
    for path, sampler in find_named_instances(state, ElasticSampler):
        epoch, samples, left, ids = find_next_batch(sampler)
        position = {"epoch": epoch, "samples": samples, "left": left}
        recorded[path] = {**position, "digest": digest(ids)}
    return {RECORD: recorded} if recorded else {}


def compare_next_batches(snapshot: SnapshotReader, state: dict[str, Any]) -> dict[str, bool]:
    """Return whether the next batch of each sampler is the recorded one, by its path."""
    saved = read_training_metadata(snapshot).get(RECORD)
    live = record_next_batches(state).get(RECORD, {})
    return {p: saved[p] == live[p] for p in live if p in saved} if isinstance(saved, dict) else {}


# -- all of the state ----------------------------------------------------------------------------

_BATCH = 64 << 20
"""The bytes that are read at once, and compared."""

_MAX_NAMED = 100


class _Found(msgspec.Struct):
    """What a rank has found. ``lacking``: keys of the version that its state lacks."""

    differing: list[str]
    lacking: list[str]
    nbytes: int


def check_whole_state(
    run: str, snapshot: SnapshotReader, state: dict[str, Any], group: Group
) -> None:
    """Compare the live state with ``snapshot``, which was just loaded, on all ranks.

    Each rank reads what it has loaded again. Emits ``resume_checked`` on rank 0 if all is equal,
    and ``resume_differs`` otherwise, also with an error of the comparison: the resume is complete.
    """
    began = time.perf_counter()
    with closing(group.collective(f"the check of the resume of {run}")) as ranks, ranks:
        try:
            own = _compare(snapshot, flatten(state, group.rank), group.rank, ranks.advance)
        except RankFailed:
            raise
        except Exception as e:  # noqa: BLE001  (such as that of a state_dict(), or of the store)
            what = f"the state of rank {group.rank}, which cannot be compared:"
            own = _Found([f"{what} {type(e).__name__}: {e}"[:500]], [], 0)
        found = ranks.gather(own, _Found)
    if found is not None:
        # each stage of a pipeline has other keys
        differing = set.intersection(*(set(f.lacking) for f in found))
        differing.update(*(f.differing for f in found))
        fields = {"run": run, "url": snapshot.url, "seconds": time.perf_counter() - began}
        if differing:
            events.emit("resume_differs", **fields, differing=sorted(differing)[:_MAX_NAMED])
        else:
            events.emit("resume_checked", **fields, bytes=sum(f.nbytes for f in found))


def _compare(snapshot: SnapshotReader, flat: FlatState, rank: int, advance: Any) -> _Found:
    saved, live = snapshot.nodes(), dict(_live_nodes(flat, rank))
    differing = {k for k, node in live.items() if not _are_equal(saved.get(k, node), node)}
    per_rank = tuple(f"{key}/" for key in flat.per_rank)
    lacking = [k for k in saved if k not in live and not k.startswith(per_rank)]
    leaves = [leaf for leaf in flat.leaves if leaf.key in saved and leaf.key not in differing]
    nbytes = 0
    for batch in _batches(leaves):
        copies = [np.empty(stop - start, np.uint8) for _, start, stop in batch]
        reads = [read for part in zip(batch, copies, strict=True) for read in _reads(*part)]
        snapshot.read([request for request, _ in reads], [target for _, target in reads], advance)
        for (leaf, start, stop), copy in zip(batch, copies, strict=True):
            own = Buffer(stop - start)
            copy_bytes(leaf.source, start, stop, own, 0)
            if own.view[: stop - start] != copy.data:
                differing.add(leaf.key)
            nbytes += stop - start
    return _Found(sorted(differing), lacking, nbytes)


def _live_nodes(flat: FlatState, rank: int) -> Iterator[tuple[str, Any]]:
    parts = [("", flat.tree), *flat.from_first.items()]
    parts += [(f"{key}/{rank}", node) for key, node in flat.per_rank.items()]
    for at, tree in parts:
        for key, node in walk(tree, at):
            # otherwise, the value is in another one of the parts
            if type(node) is not dict or node.keys().isdisjoint(("own", "first")):
                yield key, node


def _are_equal(saved: Any, live: Any) -> bool:
    # as text: NaN does not equal itself, and 1 equals True, 1.0, and -0.0 equals 0.0
    return repr(saved) == repr(live) or (type(saved) is dict and bool(saved == live))


def _batches(leaves: Sequence[LocalLeaf]) -> Iterator[list[tuple[LocalLeaf, int, int]]]:
    """Split the leaves into parts, by their bytes, and yield as many as may be read at once."""
    batch, left = [], _BATCH
    for leaf in leaves:
        length = leaf.box.numel * DTYPES[leaf.dtype].itemsize
        for start in range(0, length, _BATCH):
            batch.append((leaf, start, min(length, start + _BATCH)))
            left -= min(length, start + _BATCH) - start
            if left <= 0:
                yield batch
                batch, left = [], _BATCH
    yield batch


def _reads(part: tuple[LocalLeaf, int, int], copy: Any) -> Iterator[tuple[ReadRequest, Target]]:
    """Yield what to read for a part of a leaf, into ``copy``."""
    (leaf, start, stop), done = part, 0
    size = DTYPES[leaf.dtype].itemsize
    for box in contiguous_boxes(leaf.box.sizes, start // size, stop // size):
        into = copy[done : done + box.numel * size].view(f"V{size}").reshape(box.sizes)
        offsets = tuple(a + b for a, b in zip(leaf.box.offsets, box.offsets, strict=True))
        address = into.__array_interface__["data"][0]
        yield (
            ReadRequest(leaf.key, Box(offsets, box.sizes)),
            Target(leaf.dtype, box.sizes, into, address),
        )
        done += into.nbytes
