"""Whether a resume was exact: on request, all of the live state is compared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from limpet import events
from limpet.buffers import Buffer
from limpet.errors import RankFailed
from limpet.format.tree import walk
from limpet.layout.boxes import contiguous_boxes
from limpet.layout.read_plan import ReadRequest
from limpet.ranks.group import Group
from limpet.saving.image import copy_bytes
from limpet.saving.partition import nodes_equal
from limpet.snapshot.chunks import Target
from limpet.snapshot.reader import SnapshotReader
from limpet.state.flatten import FlatState, LocalLeaf, flatten
from limpet.types import DTYPES, Box

_BATCH = 64 << 20
"""The bytes that are compared at once; a batch of reads has at most twice as many."""

_Found = tuple[list[str], list[str], int]
"""The keys that differ on a rank, those of the version that it lacks, and the bytes compared."""


def check_whole_state(
    run: str,
    snapshot: SnapshotReader,
    state: dict[str, Any],
    group: Group,
    changes: Sequence[str] = (),
) -> None:
    """Read again on each rank what it has loaded, and compare it with the live state. Emits
    ``resume_checked``, or ``resume_differs``, also after an error: the resume is complete."""
    began = time.perf_counter()
    with closing(group.collective(f"the check of the resume of {run}")) as ranks, ranks:
        try:
            own = _compare(snapshot, flatten(state, group.rank), group.rank, ranks.advance)
        except RankFailed:
            raise
        except Exception as e:  # noqa: BLE001  (such as that of a state_dict(), or of the store)
            what = f"the state of rank {group.rank}, which cannot be compared:"
            own = [f"{what} {type(e).__name__}: {e}"[:500]], [], 0
        found = ranks.gather(own, tuple[list[str], list[str], int])
    if found is not None:
        # each stage of a pipeline has other keys
        differing = set.intersection(*(set(lacking) for _, lacking, _ in found))
        differing.update(*(keys for keys, _, _ in found))
        url, seconds = snapshot.url, time.perf_counter() - began
        nbytes = sum(nbytes for _, _, nbytes in found)
        if differing:
            events.emit("resume_differs", run=run, url=url, differing=sorted(differing)[:100])
        else:
            events.emit(
                "resume_checked",
                run=run,
                url=url,
                bytes=nbytes,
                seconds=seconds,
                changes=[*changes],
            )


def _compare(snapshot: SnapshotReader, flat: FlatState, rank: int, advance: Any) -> _Found:
    saved = {k: n for k, n in snapshot.nodes().items() if not k.startswith(flat.streamed)}
    nbytes = 0
    own = ((f"{key}/{rank}", node) for key, node in flat.per_rank.items())
    trees = ("", flat.tree), *flat.from_first.items(), *own
    nodes = (item for at, tree in trees for item in walk(tree, at))
    # a node {"own": key} or {"first": key} stands for another tree
    live = {k: n for k, n in nodes if type(n) is not dict or n.keys().isdisjoint(("own", "first"))}
    differing = {k for k, node in live.items() if not nodes_equal(saved.get(k, node), node)}
    per_rank = tuple(f"{key}/" for key in flat.per_rank)
    lacking = [k for k in saved if k not in live and not k.startswith(per_rank)]
    parts = [
        (leaf, start, min(start + _BATCH, length))
        for leaf in flat.leaves
        if leaf.key in saved and leaf.key not in differing
        for length in [leaf.box.numel * DTYPES[leaf.dtype].itemsize]
        for start in range(0, length, _BATCH)
    ]
    ends = accumulate(stop - start for _, start, stop in parts)
    for _, numbered in groupby(zip(ends, parts, strict=True), lambda p: p[0] // _BATCH):
        batch = [(*part, np.empty(part[2] - part[1], np.uint8)) for _, part in numbered]
        reads = [read for part in batch for read in _reads(*part)]
        snapshot.read([request for request, _ in reads], [target for _, target in reads], advance)
        for leaf, start, stop, copy in batch:
            buffer = Buffer(stop - start)
            copy_bytes(leaf.source, start, stop, buffer)
            if buffer.view[: stop - start] != copy.data:
                differing.add(leaf.key)
            nbytes += stop - start
    return sorted(differing), lacking, nbytes


def _reads(
    leaf: LocalLeaf, start: int, stop: int, copy: Any
) -> Iterator[tuple[ReadRequest, Target]]:
    """Yield what to read for the bytes of a leaf between two offsets, into ``copy``."""
    size, done = DTYPES[leaf.dtype].itemsize, 0
    for box in contiguous_boxes(leaf.box.sizes, start // size, stop // size):
        into = copy[done : done + box.numel * size].view(f"V{size}").reshape(box.sizes)
        offsets = tuple(a + b for a, b in zip(leaf.box.offsets, box.offsets, strict=True))
        target = Target(leaf.dtype, box.sizes, into, into.__array_interface__["data"][0])
        yield ReadRequest(leaf.key, Box(offsets, box.sizes)), target
        done += into.nbytes
