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

from holdfast.buffers import Buffer, Pool
from holdfast.engine.planning.boxes import rectangles
from holdfast.engine.planning.read_plan import ReadItem, ReadPlan, Slab
from holdfast.engine.snapshot.index_files import key_of
from holdfast.engine.snapshot.location import Location
from holdfast.errors import DigestMismatch, StoreError
from holdfast.format.digest import digest
from holdfast.format.index import ShardIndex
from holdfast.format.names import parse_reference
from holdfast.lazy_torch import dtype_name
from holdfast.threads import in_parallel
from holdfast.types import DTYPES


class Memory(Protocol):
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
    def of(cls, dtype: str, sizes: tuple[int, ...], into: Any) -> Target:
        """A target for ``sizes`` elements of ``dtype``; another dtype of ``into`` is cast to."""
        address = 0
        if isinstance(into, np.ndarray):
            direct = into.flags.c_contiguous and into.flags.writeable
            if direct and into.dtype == np.dtype(dtype) and into.size:
                address = into.__array_interface__["data"][0]
        elif into.is_cpu and into.is_contiguous() and dtype_name(into.dtype) == dtype:
            address = 0 if into.is_neg() or into.is_conj() else into.data_ptr()
        return cls(dtype, sizes, into, address)


def run_reads(
    place: Location,
    plan: ReadPlan,
    indexes: Sequence[ShardIndex],
    targets: Sequence[Target],
    pool: Pool,
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
        with checked(place, indexes[item.shard], item, pool) as (buffer, base):
            copy_out(item, targets, buffer, base)

    announce(targets)
    in_parallel(plan.items, work, min(threads, len(plan.items)), advance)


def announce(targets: Sequence[Target]) -> None:
    """Have PyTorch count the change of what is about to be written behind its back, so that a
    backward pass that needs the old values is refused. Before it is written: a load that fails
    half-way has changed it too."""
    tensors = [t.into for t in targets if t.address and not isinstance(t.into, np.ndarray)]
    if tensors:
        import torch

        for tensor in tensors:  # torch 2.6 takes one at a time
            torch.autograd.graph.increment_version(tensor)


def copy_out(item: ReadItem, targets: Sequence[Target], memory: Memory, base: int) -> None:
    """Make the item's copies, from memory that begins at offset ``base`` of the shard."""
    for number, offset, at, size in item.linear.tolist():
        _copy_run(targets[number], at, memory, offset - base, size)
    for slab in item.slabs:
        _copy_slab(targets[slab.want], slab, memory.view[slab.file_offset - base :])


@contextmanager
def checked(
    place: Location, index: ShardIndex, item: ReadItem, pool: Pool
) -> Iterator[tuple[Buffer, int]]:
    """The item's chunks, read and checked: a buffer, and which offset of the shard it begins at.

    For an incremental shard, offsets are those in the whole that it is a part of. Raises
    ``DigestMismatch`` or ``StoreError`` naming file, offset and leaves.
    """
    # so much before the chunk that the read is aligned in its file, if it fits into a buffer
    before = index.where(item.first)[1] % place.store.traits.alignment
    length = item.stop - item.start
    if length <= pool.unit < before + length:
        before = 0
    # our own chunks never need more than a pool's buffer; another writer's may
    pooled = before + length <= pool.unit
    buffer = pool.acquire() if pooled else Buffer(before + length)
    try:
        fetch(place, index, item, before, buffer.view)
        yield buffer, item.start - before
    finally:
        if pooled:
            pool.release(buffer)


def fetch(
    place: Location, index: ShardIndex, item: ReadItem, before: int, view: memoryview
) -> None:
    """Read the item's chunks, from ``before`` bytes before them on, and check them. Raises as
    ``checked``."""
    path, at = index.where(item.first)
    key = key_of(place, path)
    try:
        place.store.get_range(key, at - before, before + item.stop - item.start, view)
    except StoreError as e:
        leaves = leaves_between(index, item.start, item.stop)
        told = f"Needed for {', '.join(leaves[:5])}"
        raise e.told(told, file=key, offset=at, leaf=leaves[0] if leaves else None) from e
    _check(place, index, item, item.start - before, view)


def _check(place: Location, index: ShardIndex, item: ReadItem, base: int, view: memoryview) -> None:
    start = item.start
    for c in range(item.first, item.last):
        stop = int(index.cuts[c])
        found = digest(view[start - base : stop - base])
        if found != index.digest(c):
            raise damaged(place, index, c, found)
        start = stop


def damaged(place: Location, index: ShardIndex, chunk: int, found: str) -> DigestMismatch:
    """The error for a chunk whose bytes are not those that were written."""
    start, stop = int(index.cuts[chunk - 1]) if chunk else 0, int(index.cuts[chunk])
    path, at = index.where(chunk)
    leaves = leaves_between(index, start, stop)
    names = ", ".join(leaves[:5]) + (f" and {len(leaves) - 5} more" if len(leaves) > 5 else "")
    where = f"between bytes {at} and {at + stop - start} ({names or 'its header'})"
    reference = parse_reference(path)
    return DigestMismatch(
        f"{place.url}/{path} is damaged {where}"
        if reference is None
        else f"{place.url} refers to {path}, which is damaged {where}",
        expected=f"digest {index.digest(chunk)}",
        found=found,
        todo="Take another version; `holdfast verify` shows which are intact",
        file=key_of(place, path),
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


def _copy_run(target: Target, at: int, buffer: Memory, offset: int, size: int) -> None:
    """``size`` bytes of the buffer to byte ``at`` of the row-major target."""
    if target.address:
        ctypes.memmove(target.address + at, buffer.address + offset, size)
        return
    item = DTYPES[target.dtype].itemsize
    done = offset
    for box in rectangles(target.sizes, at // item, (at + size) // item):
        part = _elements(target, box.sizes, buffer.view, done)
        target.into[box.slices((0,) * len(target.sizes))] = part
        done += box.elements * item


def _copy_slab(target: Target, slab: Slab, view: memoryview) -> None:
    part = _elements(target, slab.shape, view, 0)[slab.source]
    into = target.into
    if target.address and not isinstance(into, np.ndarray):
        # dtypes that torch itself may not copy elementwise: as opaque elements of one size
        raw = (ctypes.c_char * into.nbytes).from_address(target.address)
        whole = np.ndarray(target.sizes, f"V{slab.itemsize}", raw)
        whole[slab.target] = np.ndarray(slab.shape, f"V{slab.itemsize}", view)[slab.source]
    else:
        into[slab.target] = part


def _elements(target: Target, shape: tuple[int, ...], view: memoryview, offset: int) -> Any:
    """Stored elements in a buffer as an array of the target's kind, without a copy."""
    if isinstance(target.into, np.ndarray):
        return np.ndarray(shape, target.dtype, view, offset)
    import torch

    dtype = getattr(torch, target.dtype)
    return torch.frombuffer(view, dtype=dtype, count=prod(shape), offset=offset).view(shape)
