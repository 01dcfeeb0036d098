"""Executes a read plan: several threads read chunks from a store, check them, and copy them.

Nothing is copied from a chunk whose digest does not match the index.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import numpy as np

from limpet import events
from limpet.buffers import Buffer
from limpet.errors import DigestMismatch, StoreError
from limpet.format.digest import digest, digest_parts
from limpet.format.index import ShardIndex
from limpet.format.names import parse_reference
from limpet.layout.boxes import contiguous_boxes
from limpet.layout.read_plan import ReadItem, ReadPlan, StridedCopy
from limpet.machine import count_processors
from limpet.snapshot.location import Location
from limpet.state.arrays import part_library
from limpet.text import VERIFY_ADVICE, format_list
from limpet.threads import Workers, no_op
from limpet.types import BLOCK_SIZE, DTYPES


class MemoryRegion(Protocol):
    """Bytes in memory, and the address of the first byte."""

    @property
    def view(self) -> memoryview: ...
    @property
    def address(self) -> int: ...


@dataclass(slots=True)
class Target:
    """The destination of a part of a leaf: the part of an array of ``sizes``. ``address``: where
    bytes can be copied directly, as in row-major memory of the stored dtype, or 0."""

    dtype: str
    sizes: tuple[int, ...]
    into: Any
    address: int

    @classmethod
    def from_tensor(cls, dtype: str, sizes: tuple[int, ...], into: Any) -> Target:
        """Return a target; elements of ``dtype`` are cast if ``into`` has another dtype."""
        return cls(dtype, sizes, into, part_library(type(into)).target_address(into, dtype))


def read_workers(
    location: Location, advance: Callable[[], object] = no_op, processes: int = 1
) -> Workers:
    """Return the threads of a load by one of ``processes`` that load on this machine at once."""
    workers = Workers.create(None, advance, location.check_time)
    if location.store.traits.in_memory:  # a copy within memory keeps a processor busy
        processors = count_processors() // processes
        workers = replace(workers, threads=max(1, min(workers.threads, processors)))
    return workers


def execute_read_plan(
    location: Location,
    plan: ReadPlan,
    indexes: Sequence[ShardIndex],
    targets: Sequence[Target],
    workers: Workers,
) -> None:
    """Execute a plan whose requests belong to ``targets``, and count the changes of these.

    Raises ``DigestMismatch`` or ``StoreError``, which name the file, the offset, and the leaves.
    Then, targets may be partially written, but never with bytes that failed their check.
    """

    def read(batch: Sequence[ReadItem]) -> None:
        index = indexes[batch[0].shard]
        if batch[0].end_chunk == 1:
            check_header(location, index, workers)
            return
        with read_items(location, index, batch, workers) as verified:
            for item, buffer, start in verified:
                copy_to_targets(item, targets, buffer, start)

    count_writes(targets)
    workers.each(merge_items(location, indexes, plan.items, workers), read)


def count_writes(targets: Sequence[Target]) -> None:
    """Count the changes that a library does not see, because they are writes through an address.
    Call it before the write, because a load that fails has changed targets, too."""
    for target in targets:
        if target.address and (count := part_library(type(target.into)).count_change):
            count(target.into)


def copy_to_targets(
    item: ReadItem, targets: Sequence[Target], memory: MemoryRegion, buffer_start: int
) -> None:
    """Make the item's copies from memory that starts at offset ``buffer_start`` of the shard."""
    columns = item.linear_copies.T.tolist()  # a list per row would last as long as the loop
    for request_id, file_offset, target_offset, size in zip(*columns, strict=True):
        _copy_span(targets[request_id], target_offset, memory, file_offset - buffer_start, size)
    for slab in item.strided_copies:
        _copy_slab(targets[slab.request_id], slab, memory.view[slab.file_offset - buffer_start :])


def merge_items(
    location: Location,
    indexes: Sequence[ShardIndex],
    items: Sequence[ReadItem],
    workers: Workers,
    total: int = 0,
) -> list[list[ReadItem]]:
    """Return batches of items, consecutive bytes of one file of at most ``read_size``, that one
    request reads. Several processes that divide ``total`` items send no more requests than one."""
    pool, read_size = workers.pool, location.store.traits.read_size
    most = min(read_size // BLOCK_SIZE, (total or len(items)) // workers.threads)
    if total:
        most = min(most, pool.budget // pool.buffer_size // workers.threads)
    if most < 2:
        return [[item] for item in items]
    # by file: an incremental snapshot takes the chunks of its image from several files in turn
    places = [(i.shard, *indexes[i.shard].locate_chunk(i.first_chunk)) for i in items]
    batches: list[list[ReadItem]] = []
    next_place = None
    for n in sorted(range(len(items)), key=places.__getitem__):
        item, (shard, path, offset) = items[n], places[n]
        size = item.stop - item.start
        # those that do not fit into a buffer, and headers, are read differently
        is_alone = size > pool.buffer_size or item.end_chunk == 1
        if is_alone or places[n] != next_place or len(batches[-1]) == most:
            batches.append([])
        batches[-1].append(item)
        next_place = None if is_alone else (shard, path, offset + size)
    return batches


@contextmanager
def read_items(
    location: Location,
    index: ShardIndex,
    batch: Sequence[ReadItem],
    workers: Workers,
    *,
    kept: bool = False,
) -> Iterator[Iterator[tuple[ReadItem, Buffer, int]]]:
    """Read a batch of items. Yield an iterator, which checks each, and returns it with a buffer and
    the buffer's start offset in the shard, or in the image of an incremental shard.

    The next item may use the same buffer, unless they are ``kept`` until the context ends. Raises
    ``DigestMismatch`` or ``StoreError``, which name the file, the offset, and the leaves.
    """
    first, pool = batch[0], workers.pool
    # start the read before the chunk, aligned in its file, if that fits into a buffer
    leading_bytes = index.locate_chunk(first.first_chunk)[1] % location.store.traits.alignment
    length = first.stop - first.start
    if length <= pool.buffer_size < leading_bytes + length:
        leading_bytes = 0
    start = first.start - leading_bytes
    # the chunks of Limpet's writer fit into a pooled buffer; those of another writer may not
    is_pooled = leading_bytes + length <= pool.buffer_size
    count = len(batch) if kept else 1
    buffers = workers.acquire(count) if is_pooled else [Buffer(leading_bytes + length)]
    buffer = buffers[0]

    def check_item() -> Iterator[tuple[ReadItem, Buffer, int]]:
        _check_item(location, index, first, buffer.view, start)
        yield first, buffer, start

    try:
        if len(batch) > 1:
            one_each = buffers if kept else buffers * len(batch)
            with closing(_read_items(location, index, batch, one_each)) as verified:
                yield verified
        else:
            _read_range(location, index, first.first_chunk, start, first.stop, buffer.view)
            yield check_item()
    finally:
        for each in buffers if is_pooled else ():
            pool.release(each)


def _read_items(
    location: Location, index: ShardIndex, batch: Sequence[ReadItem], buffers: Sequence[Buffer]
) -> Generator[tuple[ReadItem, Buffer, int]]:
    """Read the items one after the other, with one request, each into its buffer. Check each."""
    ranges = [(item.start, item.stop) for item in batch]
    length = sum(stop - start for start, stop in ranges)
    with ExitStack() as stack:
        with _naming_leaves(location, index, batch[0].first_chunk, ranges) as (key, offset):
            reader = location.store.open_range(key, offset, length)  # type: ignore[attr-defined]
            stack.enter_context(reader)
        for item, buffer in zip(batch, buffers, strict=True):
            view = buffer.view[: item.stop - item.start]
            with _naming_leaves(location, index, batch[0].first_chunk, ranges):
                reader.read_into(view)
            _check_item(location, index, item, view, item.start)
            yield item, buffer, item.start


def check_header(location: Location, index: ShardIndex, workers: Workers) -> None:
    """Check the digest of a header, which may be longer than a buffer. Raises as ``read_items``."""
    with workers.buffer() as buffer:

        def parts() -> Iterator[memoryview]:
            for start in range(0, index.header, buffer.size):
                length = min(buffer.size, index.header - start)
                _read_range(location, index, 0, start, start + length, buffer.view)
                yield buffer.view[:length]

        def find_damage() -> tuple[int, str] | None:
            actual = digest_parts(parts())
            return None if actual == index.chunk_digest(0) else (0, actual)

        _check_twice(location, index, find_damage, no_op)


def _check_item(
    location: Location, index: ShardIndex, item: ReadItem, view: memoryview, start: int
) -> None:
    """Check the item's chunks in a view that begins at offset ``start`` of the shard."""

    def find_damage() -> tuple[int, str] | None:
        stop = item.start
        for c in range(item.first_chunk, item.end_chunk):
            begin, stop = stop, int(index.cuts[c])
            actual = digest(view[begin - start : stop - start])
            if actual != index.chunk_digest(c):
                return c, actual
        return None

    def read_again() -> None:
        _read_range(location, index, item.first_chunk, start, item.stop, view)

    _check_twice(location, index, find_damage, read_again)


def _check_twice(
    location: Location,
    index: ShardIndex,
    find_damage: Callable[[], tuple[int, str] | None],
    read_again: Callable[[], object],
) -> None:
    """Call ``find_damage``, which returns the first damaged chunk with its digest. If there is one,
    read again, and call it again: bytes can change on their way, and be right in the store."""
    if (damage := find_damage()) is None:
        return
    error = make_damage_error(location, index, *damage)
    read_again()
    if (damage := find_damage()) is not None:
        raise make_damage_error(location, index, *damage)
    events.emit("read_again", store=location.store.url, error=error)


def _read_range(
    location: Location, index: ShardIndex, chunk: int, start: int, stop: int, view: memoryview
) -> None:
    """Read bytes of a shard, in which a chunk begins. Raises ``StoreError``."""
    with _naming_leaves(location, index, chunk, [(start, stop)]) as (key, offset):
        location.store.get_range(key, offset, stop - start, view)


@contextmanager
def _naming_leaves(
    location: Location, index: ShardIndex, chunk: int, ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, int]]:
    """Yield where ranges of a shard begin, which are consecutive in the file of a chunk: the key of
    the file, and an offset. The chunk begins in the first range. An error names the leaves."""
    path, offset = index.locate_chunk(chunk)
    key, chunk_start = location.file_key(path), int(index.cuts[chunk - 1]) if chunk else 0
    try:
        yield key, offset + ranges[0][0] - chunk_start
    except StoreError as e:
        found = [leaves_between(index, start, stop) for start, stop in ranges]
        leaves = [*dict.fromkeys(leaf for part in found for leaf in part)]
        raise e.with_advice(
            f"The bytes belong to {', '.join(leaves[:5]) or 'the header'}",
            file=key,
            offset=offset,
            leaf=leaves[0] if leaves else None,
        ) from e


def make_damage_error(
    location: Location, index: ShardIndex, chunk: int, found: str
) -> DigestMismatch:
    """Return the error for a chunk whose bytes have the digest ``found``."""
    start, stop = int(index.cuts[chunk - 1]) if chunk else 0, int(index.cuts[chunk])
    path, offset = index.locate_chunk(chunk)
    leaves = leaves_between(index, start, stop)
    names = format_list(leaves, 5) or "its header"
    where = f"between bytes {offset} and {offset + stop - start} ({names})"
    reference = None if path == index.path else parse_reference(path)
    return DigestMismatch(
        f"{location.url}/{path} is damaged {where}"
        if reference is None
        else f"{location.url} refers to {path}, which is damaged {where}",
        expected=f"digest {index.chunk_digest(chunk)}",
        found=found,
        todo=VERIFY_ADVICE,
        file=location.file_key(path),
        offset=offset,
        leaf=leaves[0] if leaves else None,
        leaves=tuple(leaves),
        base=None if reference is None else str(reference[0]),
    )


def leaves_between(index: ShardIndex, start: int, stop: int) -> list[str]:
    """Return the keys of the leaves with bytes between two offsets of a shard."""
    return [
        leaf.key
        for leaf in index.leaves
        if any(
            box.at < stop and box.at + DTYPES[leaf.dtype].itemsize * prod(box.sizes) > start
            for box in leaf.boxes
        )
    ]


def _copy_span(
    target: Target, target_offset: int, buffer: MemoryRegion, buffer_offset: int, size: int
) -> None:
    """Copy ``size`` bytes of the buffer to byte ``target_offset`` of the row-major target."""
    if target.address:
        ctypes.memmove(target.address + target_offset, buffer.address + buffer_offset, size)
        return
    itemsize = DTYPES[target.dtype].itemsize
    first, end = target_offset // itemsize, (target_offset + size) // itemsize
    for box in contiguous_boxes(target.sizes, first, end):
        part = _view_elements(target, box.sizes, buffer.view, buffer_offset)
        target.into[box.slices((0,) * len(target.sizes))] = part
        buffer_offset += box.numel * itemsize


def _copy_slab(target: Target, slab: StridedCopy, view: memoryview) -> None:
    if target.address:  # as opaque elements, because torch cannot copy every dtype elementwise
        opaque = f"V{slab.itemsize}"
        nbytes = prod(target.sizes) * slab.itemsize
        raw: Any = (ctypes.c_char * nbytes).from_address(target.address)
        whole = np.ndarray(target.sizes, opaque, raw)
        whole[slab.target] = np.ndarray(slab.shape, opaque, view)[slab.source]
    else:
        target.into[slab.target] = _view_elements(target, slab.shape, view, 0)[slab.source]


def _view_elements(target: Target, shape: tuple[int, ...], view: memoryview, offset: int) -> Any:
    """Return stored elements in a buffer as a tensor or array like the target, without a copy."""
    return part_library(type(target.into)).elements(target.dtype, shape, view, offset)
