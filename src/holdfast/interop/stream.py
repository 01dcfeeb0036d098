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
from holdfast.engine.planning.boxes import rectangles
from holdfast.engine.planning.read_plan import ReadItem, Want, plan_read
from holdfast.engine.snapshot.read import Target, checked, run_reads
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.format.index import ShardIndex
from holdfast.settings import read_settings
from holdfast.threads import in_parallel
from holdfast.types import DTYPES, MIB, UNIT, Box

WINDOW = 64 * MIB
"""Most bytes that are put together in memory. A chunk on the border of two windows is read twice,
so a larger window reads less."""

Write = Callable[[int, int, memoryview], None]
"""Takes bytes of the n-th leaf from its byte ``at`` on, row-major. They are lost when it returns.
Called by several threads, in any order, for every byte once."""


def pour(snapshot: Snapshot, keys: Sequence[str], write: Write) -> None:
    """Hand every byte of the leaves ``keys`` to ``write``. A key may stand there twice.

    Uses ``WINDOW`` bytes and a buffer for each thread. Raises ``FormatError`` or ``StoreError``
    (``NotFound`` if it has been deleted), and what ``write`` raises.
    """
    indexes = snapshot.indexes()
    threads, pool = read_settings().threads, shared_pool()
    plan = plan_read(indexes, [Want(k, Box.whole(snapshot.leaves[k][1])) for k in keys])
    scattered = {slab.want for item in plan.items for slab in item.slabs}

    def hand_on(item: ReadItem) -> None:
        rows = [row for row in item.linear.tolist() if row[0] not in scattered]
        if rows:
            with checked(snapshot.place, indexes[item.shard], item, pool) as (buffer, base):
                for number, offset, at, size in rows:
                    write(number, at, buffer.view[offset - base : offset - base + size])

    with snapshot.told_if_deleted():
        in_parallel(plan.items, hand_on, min(threads, len(plan.items)))
        if scattered:
            _gather(snapshot, keys, sorted(scattered), write)


class _Part(NamedTuple):
    """A rectangle of the n-th leaf that is one run of bytes in it, from byte ``at`` on."""

    number: int
    box: Box
    at: int
    nbytes: int


def _gather(snapshot: Snapshot, keys: Sequence[str], numbers: Sequence[int], write: Write) -> None:
    """Put leaves together, window by window, and hand these on."""
    stored: dict[str, list[ShardIndex]] = {keys[n]: [] for n in numbers}
    for index in snapshot.indexes():
        for key in stored.keys() & index.leaves.kinds.keys:
            stored[key].append(index)
    sizes = [
        prod(shape) * DTYPES[d].itemsize for d, shape in (snapshot.leaves[keys[n]] for n in numbers)
    ]
    window = Buffer(min(sum(sizes), WINDOW))
    for parts in _windows(snapshot, keys, numbers):
        concerned = {i.shard: i for p in parts for i in stored[keys[p.number]]}
        _fill(snapshot, keys, parts, list(concerned.values()), window)
        _hand_on(parts, window.view, write)


def _windows(
    snapshot: Snapshot, keys: Sequence[str], numbers: Sequence[int]
) -> Iterator[list[_Part]]:
    """All of the leaves in parts, as many at a time as fit into a window."""
    parts: list[_Part] = []
    used = 0
    for n in numbers:
        dtype, shape = snapshot.leaves[keys[n]]
        for part in _parts(n, DTYPES[dtype].itemsize, shape):
            if used + part.nbytes > WINDOW:
                yield parts
                parts, used = [], 0
            parts.append(part)
            used += part.nbytes
    yield parts


def _parts(number: int, size: int, shape: tuple[int, ...]) -> Iterator[_Part]:
    """A leaf in parts of at most a window: whole rows, of the outermost dimension that fits."""
    most, row = WINDOW // size, 1
    for n in reversed(shape):
        if row * n > most:
            break
        row *= n
    step, whole = most // row * row, prod(shape)
    at = 0
    for start in range(0, whole, step):
        for box in rectangles(shape, start, min(start + step, whole)):
            nbytes = box.elements * size
            yield _Part(number, box, at, nbytes)
            at += nbytes


def _fill(
    snapshot: Snapshot,
    keys: Sequence[str],
    parts: Sequence[_Part],
    indexes: Sequence[ShardIndex],
    window: Buffer,
) -> None:
    """Read the parts into the window, one behind the other."""
    wants = [Want(keys[p.number], p.box) for p in parts]
    targets, at = [], 0
    for part in parts:
        # as opaque elements of one size: every bit pattern of every dtype passes unchanged
        opaque = f"V{part.nbytes // part.box.elements}"
        into: np.ndarray[tuple[int, ...], np.dtype[np.void]]
        into = np.ndarray(part.box.sizes, opaque, window.view, at)
        targets.append(Target(opaque, part.box.sizes, into, window.address + at))
        at += part.nbytes
    plan = plan_read(indexes, wants)
    run_reads(snapshot.place, plan, indexes, targets, shared_pool(), read_settings().threads)


def _hand_on(parts: Sequence[_Part], view: memoryview, write: Write) -> None:
    """Hand the window's bytes on, by several threads."""
    runs, at = [], 0
    for part in parts:
        for a in range(0, part.nbytes, UNIT):
            b = min(a + UNIT, part.nbytes)
            runs.append((part.number, part.at + a, at + a, at + b))
        at += part.nbytes
    threads = min(read_settings().threads, len(runs))
    in_parallel(runs, lambda run: write(run[0], run[1], view[run[2] : run[3]]), threads)
