"""Stream whole leaves out of a snapshot as checked byte ranges, in bounded memory and in any order.

Most stored boxes are contiguous in their leaf (a whole leaf, or rows of it). Their bytes are passed
on directly from the buffer that a chunk was read into. Leaves that are stored in other boxes (such
as columns) are assembled in memory, one window at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from limpet.buffers import Buffer
from limpet.format.index import ShardIndex
from limpet.layout.boxes import contiguous_boxes
from limpet.layout.read_plan import ReadItem, ReadRequest, make_read_plan
from limpet.snapshot.read import (
    Target,
    check_header,
    execute_read_plan,
    group_items,
    read_group,
)
from limpet.snapshot.reader import SnapshotReader
from limpet.threads import Workers
from limpet.types import BLOCK_SIZE, DTYPES, MIB, Box

WINDOW = 64 * MIB
"""Maximum bytes that are assembled in memory. A chunk that crosses the border of two windows is
read twice, so a larger window reads less."""

IndexesByKey = dict[str, list[ShardIndex]]

WriteLeafBytes = Callable[[int, int, memoryview], None]
"""Called as ``write(n, offset, data)`` with row-major bytes of the n-th leaf, from byte ``offset``.

``data`` is valid only during the call. Several threads call it, in about the order of the leaves
and their offsets, and pass each byte exactly once.
"""


def stream_leaves(snapshot: SnapshotReader, keys: Sequence[str], write: WriteLeafBytes) -> None:
    """Pass every byte of the leaves ``keys`` to ``write``. A key may occur more than once.

    Uses at most ``WINDOW`` bytes, plus one buffer per thread. Raises ``FormatError``,
    ``StoreError`` (``NotFound`` if the snapshot was deleted), and any exception of ``write``.
    """
    indexes = snapshot.indexes()
    location, workers = snapshot.location, Workers.create()
    requests = [ReadRequest(k, Box.whole(snapshot.leaves[k][1])) for k in keys]
    plan = make_read_plan(indexes, requests, snapshot.checked_headers)
    scattered = {slab.request_id for item in plan.items for slab in item.strided_copies}

    def rows(item: ReadItem) -> list[list[int]]:
        return [row for row in item.linear_copies.tolist() if row[0] not in scattered]

    def write_contiguous(group: Sequence[ReadItem]) -> None:
        index = indexes[group[0].shard]
        if group[0].end_chunk == 1:
            check_header(location, index, workers)
            return
        with read_group(location, index, group, workers) as verified:
            for item, buffer, start in verified:
                for number, offset, at, size in rows(item):
                    write(number, at, buffer.view[offset - start : offset - start + size])

    items = [
        item if rows(item) else replace(item, end_chunk=1, stop=indexes[item.shard].header)
        for item in plan.items
        if rows(item) or item.first_chunk == 0
    ]
    with snapshot.not_found_if_deleted():
        groups = group_items(location, indexes, items, workers)
        workers.each(sorted(groups, key=lambda g: min(map(_first_byte, g))), write_contiguous)
        snapshot.checked_headers.update(plan.headers)
        if scattered:
            _stream_by_window(snapshot, keys, sorted(scattered), write)


def _first_byte(item: ReadItem) -> tuple[int, int]:
    """Return the first leaf whose bytes an item has, and the least offset in it."""
    if not len(item.linear_copies):
        return (-1, 0)
    leaf_numbers, offsets = item.linear_copies[:, 0], item.linear_copies[:, 2]
    first = int(leaf_numbers.min())
    return first, int(offsets[leaf_numbers == first].min())


class ContiguousBox(NamedTuple):
    """A box of the n-th leaf that is contiguous in it: ``nbytes`` bytes from byte ``offset``."""

    leaf_number: int
    box: Box
    offset: int
    nbytes: int


def _stream_by_window(
    snapshot: SnapshotReader,
    keys: Sequence[str],
    leaf_numbers: Sequence[int],
    write: WriteLeafBytes,
) -> None:
    """Assemble leaves one window at a time, and pass each window to ``write``."""
    indexes = indexes_with(snapshot, {keys[n] for n in leaf_numbers})
    sizes = [
        prod(shape) * DTYPES[d].itemsize
        for d, shape in (snapshot.leaves[keys[n]] for n in leaf_numbers)
    ]
    window = Buffer(min(sum(sizes), WINDOW))
    for boxes in plan_windows(snapshot, keys, leaf_numbers, WINDOW):
        read_window(snapshot, keys, boxes, indexes, window)
        write_window(boxes, window.view, write)


def indexes_with(snapshot: SnapshotReader, keys: Collection[str]) -> IndexesByKey:
    """Return the indexes of the shards that have a part of a leaf, for each of the leaves."""
    stored: IndexesByKey = {key: [] for key in keys}
    for index in snapshot.indexes():
        for key in stored.keys() & index.leaves.schema.keys:
            stored[key].append(index)
    return stored


def plan_windows(
    snapshot: SnapshotReader, keys: Sequence[str], leaf_numbers: Sequence[int], window: int
) -> Iterator[list[ContiguousBox]]:
    """Split the leaves into boxes, and yield as many at a time as fit into ``window`` bytes."""
    boxes: list[ContiguousBox] = []
    used = 0
    for n in leaf_numbers:
        dtype, shape = snapshot.leaves[keys[n]]
        for box in _split_leaf(n, DTYPES[dtype].itemsize, shape, window):
            if used + box.nbytes > window:
                yield boxes
                boxes, used = [], 0
            boxes.append(box)
            used += box.nbytes
    yield boxes


def _split_leaf(
    leaf_number: int, itemsize: int, shape: tuple[int, ...], window: int
) -> Iterator[ContiguousBox]:
    """Split a leaf into boxes of at most ``window`` bytes.

    A box is a range of whole rows of the outermost dimension whose rows fit into a window.
    """
    max_elements, row = window // itemsize, 1
    for n in reversed(shape):
        if row * n > max_elements:
            break
        row *= n
    step, total = max_elements // row * row, prod(shape)
    offset = 0
    for start in range(0, total, step):
        for box in contiguous_boxes(shape, start, min(start + step, total)):
            nbytes = box.numel * itemsize
            yield ContiguousBox(leaf_number, box, offset, nbytes)
            offset += nbytes


def read_window(
    snapshot: SnapshotReader,
    keys: Sequence[str],
    boxes: Sequence[ContiguousBox],
    indexes_by_key: IndexesByKey,
    window: Buffer,
) -> None:
    """Read the boxes into the window, one after another."""
    indexes = [*{i.shard: i for b in boxes for i in indexes_by_key[keys[b.leaf_number]]}.values()]
    targets, at = [], 0
    for b in boxes:
        # opaque elements of the same size, so that no bit pattern of any dtype changes
        opaque = f"V{b.nbytes // b.box.numel}"
        into: np.ndarray[tuple[int, ...], np.dtype[np.void]]
        into = np.ndarray(b.box.sizes, opaque, window.view, at)
        targets.append(Target(opaque, b.box.sizes, into, window.address + at))
        at += b.nbytes
    plan = make_read_plan(indexes, [ReadRequest(keys[b.leaf_number], b.box) for b in boxes])
    execute_read_plan(snapshot.location, plan, indexes, targets, Workers.create())


def write_window(boxes: Sequence[ContiguousBox], view: memoryview, write: WriteLeafBytes) -> None:
    """Pass the bytes of the window to ``write``, in several threads."""
    blocks, at = [], 0
    for box in boxes:
        for start in range(0, box.nbytes, BLOCK_SIZE):
            stop = min(start + BLOCK_SIZE, box.nbytes)
            blocks.append((box.leaf_number, box.offset + start, at + start, at + stop))
        at += box.nbytes
    Workers.create().each(blocks, lambda b: write(b[0], b[1], view[b[2] : b[3]]))
