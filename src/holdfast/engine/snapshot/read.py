"""Chunks out of a store into their targets: read by several threads, checked, copied.

Nothing is copied out of a chunk whose digest is not the one that the index holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from holdfast.buffers import Buffer, BufferPool
from holdfast.engine.planning.boxes import contiguous_boxes
from holdfast.engine.planning.read_plan import ReadItem, ReadPlan, StridedCopy
from holdfast.engine.snapshot.index_files import file_key
from holdfast.engine.snapshot.location import Location
from holdfast.errors import DigestMismatch, StoreError
from holdfast.format.digest import digest
from holdfast.format.index import ShardIndex
from holdfast.format.names import parse_reference
from holdfast.lazy_torch import dtype_name
from holdfast.threads import in_parallel
from holdfast.types import DTYPES


class MemoryRegion(Protocol):
    """Bytes, and where in memory they begin."""

    @property
    def view(self) -> memoryview: ...
    @property
    def address(self) -> int: ...


@dataclass(slots=True)
class Target:
    """Room for a part of a leaf: ``sizes`` elements of the stored ``dtype``.

    ``into`` is a torch tensor or NumPy array of that shape. Where its memory is on the CPU,
    row-major and of the stored dtype, bytes go there directly (``address``; else 0).
    """

    dtype: str
    sizes: tuple[int, ...]
    into: Any
    address: int

    @classmethod
    def from_tensor(cls, dtype: str, sizes: tuple[int, ...], into: Any) -> Target:
        """A target for ``sizes`` elements of ``dtype``; another dtype of ``into`` is cast to."""
        address = 0
        if isinstance(into, np.ndarray):
            direct = into.flags.c_contiguous and into.flags.writeable
            if direct and into.dtype == np.dtype(dtype) and into.size:
                address = into.__array_interface__["data"][0]
        elif into.is_cpu and into.is_contiguous() and dtype_name(into.dtype) == dtype:
            address = 0 if into.is_neg() or into.is_conj() else into.data_ptr()
        return cls(dtype, sizes, into, address)


def execute_read_plan(
    location: Location,
    plan: ReadPlan,
    indexes: Sequence[ShardIndex],
    targets: Sequence[Target],
    pool: BufferPool,
    threads: int,
    advance: Callable[[], object] = bool,
) -> None:
    """Carry out a plan whose wants are ``targets``, in their order; ``advance`` is called after
    each of its items.

    Raises ``DigestMismatch`` or ``StoreError`` naming file, offset and leaves; targets may then
    have been written in part, but never with bytes that failed their check. Either way PyTorch's
    counts of changes of the tensors (``_version``) have gone up.
    """

    def work(item: ReadItem) -> None:
        with read_verified_chunks(location, indexes[item.shard], item, pool) as (buffer, base):
            copy_to_targets(item, targets, buffer, base)

    increment_tensor_versions(targets)
    in_parallel(plan.items, work, min(threads, len(plan.items)), advance)


def increment_tensor_versions(targets: Sequence[Target]) -> None:
    """Have PyTorch count the change of what is about to be written behind its back, so that a
    backward pass that needs the old values is refused. Before it is written: a load that fails
    half-way has changed it too."""
    tensors = [t.into for t in targets if t.address and not isinstance(t.into, np.ndarray)]
    if tensors:
        import torch

        for tensor in tensors:  # torch 2.6 takes one at a time
            torch.autograd.graph.increment_version(tensor)


def copy_to_targets(
    item: ReadItem, targets: Sequence[Target], memory: MemoryRegion, buffer_start: int
) -> None:
    """Make the item's copies, from memory that begins at offset ``base`` of the shard."""
    for number, offset, at, size in item.linear_copies.tolist():
        _copy_span(targets[number], at, memory, offset - buffer_start, size)
    for slab in item.strided_copies:
        _copy_slab(targets[slab.request_id], slab, memory.view[slab.file_offset - buffer_start :])


@contextmanager
def read_verified_chunks(
    location: Location, index: ShardIndex, item: ReadItem, pool: BufferPool
) -> Iterator[tuple[Buffer, int]]:
    """The item's chunks, read and checked: a buffer, and which offset of the shard it begins at.

    For an incremental shard, offsets are those in the whole that it is a part of. Raises
    ``DigestMismatch`` or ``StoreError`` naming file, offset and leaves.
    """
    # so much before the chunk that the read is aligned in its file, if it fits into a buffer
    before = index.locate_chunk(item.first_chunk)[1] % location.store.traits.alignment
    length = item.stop - item.start
    if length <= pool.buffer_size < before + length:
        before = 0
    # our own chunks never need more than a pool's buffer; another writer's may
    pooled = before + length <= pool.buffer_size
    buffer = pool.acquire() if pooled else Buffer(before + length)
    try:
        read_chunks_into(location, index, item, before, buffer.view)
        yield buffer, item.start - before
    finally:
        if pooled:
            pool.release(buffer)


def read_chunks_into(
    location: Location, index: ShardIndex, item: ReadItem, leading_bytes: int, view: memoryview
) -> None:
    """Read the item's chunks, from ``before`` bytes before them on, and check them. Raises as
    ``checked``."""
    path, at = index.locate_chunk(item.first_chunk)
    key = file_key(location, path)
    try:
        location.store.get_range(
            key, at - leading_bytes, leading_bytes + item.stop - item.start, view
        )
    except StoreError as e:
        leaves = leaves_between(index, item.start, item.stop)
        told = f"Needed for {', '.join(leaves[:5])}"
        raise e.with_advice(told, file=key, offset=at, leaf=leaves[0] if leaves else None) from e
    _verify_digests(location, index, item, item.start - leading_bytes, view)


def _verify_digests(
    location: Location, index: ShardIndex, item: ReadItem, buffer_start: int, view: memoryview
) -> None:
    start = item.start
    for c in range(item.first_chunk, item.end_chunk):
        stop = int(index.cuts[c])
        found = digest(view[start - buffer_start : stop - buffer_start])
        if found != index.chunk_digest(c):
            raise make_damage_error(location, index, c, found)
        start = stop


def make_damage_error(
    location: Location, index: ShardIndex, chunk: int, found: str
) -> DigestMismatch:
    """The error for a chunk whose bytes are not those that were written."""
    start, stop = int(index.cuts[chunk - 1]) if chunk else 0, int(index.cuts[chunk])
    path, at = index.locate_chunk(chunk)
    leaves = leaves_between(index, start, stop)
    names = ", ".join(leaves[:5]) + (f" and {len(leaves) - 5} more" if len(leaves) > 5 else "")
    where = f"between bytes {at} and {at + stop - start} ({names or 'its header'})"
    reference = parse_reference(path)
    return DigestMismatch(
        f"{location.url}/{path} is damaged {where}"
        if reference is None
        else f"{location.url} refers to {path}, which is damaged {where}",
        expected=f"digest {index.chunk_digest(chunk)}",
        found=found,
        todo="Take another version; `holdfast verify` shows which are intact",
        file=file_key(location, path),
        offset=at,
        leaf=leaves[0] if leaves else None,
        leaves=tuple(leaves),
        base=None if reference is None else str(reference[0]),
    )


def leaves_between(index: ShardIndex, start: int, stop: int) -> list[str]:
    """The leaves with bytes between two offsets of a shard."""
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
    """``size`` bytes of the buffer to byte ``at`` of the row-major target."""
    if target.address:
        ctypes.memmove(target.address + target_offset, buffer.address + buffer_offset, size)
        return
    item = DTYPES[target.dtype].itemsize
    done = buffer_offset
    for box in contiguous_boxes(
        target.sizes, target_offset // item, (target_offset + size) // item
    ):
        part = _view_elements(target, box.sizes, buffer.view, done)
        target.into[box.slices((0,) * len(target.sizes))] = part
        done += box.numel * item


def _copy_slab(target: Target, slab: StridedCopy, view: memoryview) -> None:
    part = _view_elements(target, slab.shape, view, 0)[slab.source]
    into = target.into
    if target.address and not isinstance(into, np.ndarray):
        # dtypes that torch itself may not copy elementwise: as opaque elements of one size
        raw = (ctypes.c_char * into.nbytes).from_address(target.address)
        whole = np.ndarray(target.sizes, f"V{slab.itemsize}", raw)
        whole[slab.target] = np.ndarray(slab.shape, f"V{slab.itemsize}", view)[slab.source]
    else:
        into[slab.target] = part


def _view_elements(target: Target, shape: tuple[int, ...], view: memoryview, offset: int) -> Any:
    """Stored elements in a buffer as an array of the target's kind, without a copy."""
    if isinstance(target.into, np.ndarray):
        return np.ndarray(shape, target.dtype, view, offset)
    import torch

    dtype = getattr(torch, target.dtype)
    return torch.frombuffer(view, dtype=dtype, count=prod(shape), offset=offset).view(shape)
