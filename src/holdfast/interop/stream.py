"""Whole leaves out of a snapshot, as runs of bytes: checked, in bounded memory, in any order.

Most stored boxes are one run of bytes in their leaf (a whole leaf, rows of it): what is in a chunk
is handed on right out of the buffer that it was read into. Of leaves that were cut otherwise
(columns, say) a window at a time is put together in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from holdfast.buffers import Buffer, shared_pool
from holdfast.engine.planning.boxes import contiguous_boxes
from holdfast.engine.planning.read_plan import ReadItem, ReadRequest, make_read_plan
from holdfast.engine.snapshot.read import Target, execute_read_plan, read_verified_chunks
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.format.index import ShardIndex
from holdfast.settings import read_settings
from holdfast.threads import in_parallel
from holdfast.types import BLOCK_SIZE, DTYPES, MIB, Box

WINDOW = 64 * MIB
"""Most bytes that are put together in memory. A chunk on the border of two windows is read twice,
so a larger window reads less."""

WriteLeafBytes = Callable[[int, int, memoryview], None]
"""Takes bytes of the n-th leaf from its byte ``at`` on, row-major. They are lost when it returns.
Called by several threads, in any order, for every byte once."""


def stream_leaves(snapshot: Snapshot, keys: Sequence[str], write: WriteLeafBytes) -> None:
    """Hand every byte of the leaves ``keys`` to ``write``. A key may stand there twice.

    Uses ``WINDOW`` bytes and a buffer for each thread. Raises ``FormatError`` or ``StoreError``
    (``NotFound`` if it has been deleted), and what ``write`` raises.
    """
    indexes = snapshot.indexes()
    threads, pool = read_settings().threads, shared_pool()
    plan = make_read_plan(indexes, [ReadRequest(k, Box.whole(snapshot.leaves[k][1])) for k in keys])
    scattered = {slab.request_id for item in plan.items for slab in item.strided_copies}

    def hand_on(item: ReadItem) -> None:
        rows = [row for row in item.linear_copies.tolist() if row[0] not in scattered]
        if rows:
            with read_verified_chunks(snapshot.location, indexes[item.shard], item, pool) as (
                buffer,
                base,
            ):
                for number, offset, at, size in rows:
                    write(number, at, buffer.view[offset - base : offset - base + size])

    with snapshot.not_found_if_deleted():
        in_parallel(plan.items, hand_on, min(threads, len(plan.items)))
        if scattered:
            _stream_by_window(snapshot, keys, sorted(scattered), write)


class _ContiguousBox(NamedTuple):
    """A rectangle of the n-th leaf that is one run of bytes in it, from byte ``at`` on."""

    leaf_number: int
    box: Box
    offset: int
    nbytes: int


def _stream_by_window(
    snapshot: Snapshot, keys: Sequence[str], leaf_numbers: Sequence[int], write: WriteLeafBytes
) -> None:
    """Put leaves together, window by window, and hand these on."""
    stored: dict[str, list[ShardIndex]] = {keys[n]: [] for n in leaf_numbers}
    for index in snapshot.indexes():
        for key in stored.keys() & index.leaves.schema.keys:
            stored[key].append(index)
    sizes = [
        prod(shape) * DTYPES[d].itemsize
        for d, shape in (snapshot.leaves[keys[n]] for n in leaf_numbers)
    ]
    window = Buffer(min(sum(sizes), WINDOW))
    for parts in _plan_windows(snapshot, keys, leaf_numbers):
        concerned = {i.shard: i for p in parts for i in stored[keys[p.leaf_number]]}
        _read_window(snapshot, keys, parts, list(concerned.values()), window)
        _write_window(parts, window.view, write)


def _plan_windows(
    snapshot: Snapshot, keys: Sequence[str], leaf_numbers: Sequence[int]
) -> Iterator[list[_ContiguousBox]]:
    """All of the leaves in parts, as many at a time as fit into a window."""
    parts: list[_ContiguousBox] = []
    used = 0
    for n in leaf_numbers:
        dtype, shape = snapshot.leaves[keys[n]]
        for part in _split_leaf(n, DTYPES[dtype].itemsize, shape):
            if used + part.nbytes > WINDOW:
                yield parts
                parts, used = [], 0
            parts.append(part)
            used += part.nbytes
    yield parts


def _split_leaf(
    leaf_number: int, itemsize: int, shape: tuple[int, ...]
) -> Iterator[_ContiguousBox]:
    """A leaf in parts of at most a window: whole rows, of the outermost dimension that fits."""
    most, row = WINDOW // itemsize, 1
    for n in reversed(shape):
        if row * n > most:
            break
        row *= n
    step, whole = most // row * row, prod(shape)
    at = 0
    for start in range(0, whole, step):
        for box in contiguous_boxes(shape, start, min(start + step, whole)):
            nbytes = box.numel * itemsize
            yield _ContiguousBox(leaf_number, box, at, nbytes)
            at += nbytes


def _read_window(
    snapshot: Snapshot,
    keys: Sequence[str],
    boxes: Sequence[_ContiguousBox],
    indexes: Sequence[ShardIndex],
    window: Buffer,
) -> None:
    """Read the parts into the window, one behind the other."""
    wants = [ReadRequest(keys[p.leaf_number], p.box) for p in boxes]
    targets, at = [], 0
    for part in boxes:
        # as opaque elements of one size: every bit pattern of every dtype passes unchanged
        opaque = f"V{part.nbytes // part.box.numel}"
        into: np.ndarray[tuple[int, ...], np.dtype[np.void]]
        into = np.ndarray(part.box.sizes, opaque, window.view, at)
        targets.append(Target(opaque, part.box.sizes, into, window.address + at))
        at += part.nbytes
    plan = make_read_plan(indexes, wants)
    execute_read_plan(
        snapshot.location, plan, indexes, targets, shared_pool(), read_settings().threads
    )


def _write_window(boxes: Sequence[_ContiguousBox], view: memoryview, write: WriteLeafBytes) -> None:
    """Hand the window's bytes on, by several threads."""
    runs, at = [], 0
    for part in boxes:
        for a in range(0, part.nbytes, BLOCK_SIZE):
            b = min(a + BLOCK_SIZE, part.nbytes)
            runs.append((part.leaf_number, part.offset + a, at + a, at + b))
        at += part.nbytes
    threads = min(read_settings().threads, len(runs))
    in_parallel(runs, lambda run: write(run[0], run[1], view[run[2] : run[3]]), threads)
