"""How the placements of a device mesh cut a tensor: which boxes of it a rank has, and where they
lie in its local tensor.

Arithmetic only: nothing here knows torch. The part of one dimension that a rank has is a list of
runs, each a start and a length in the global tensor, in the order in which they lie in the local
one. Every mesh dimension that cuts it takes some of the runs; runs that touch become one. The
cost grows with the number of runs, never with the length of a dimension.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

from holdfast.types import Box

Extent = tuple[int, int]


class ShardPlacement(NamedTuple):
    """What one mesh dimension does to a tensor: it cuts the dimension ``dim``.

    With a ``factor`` above 1 (the ``split_factor`` of PyTorch's ``_StridedShard``) the dimension
    is cut into so many blocks first, then each block over the mesh dimension.
    """

    dim: int
    split_factor: int = 1


Placements = tuple[ShardPlacement | None, ...]
"""One entry per mesh dimension; None where each rank of it has the same (``Replicate``)."""


class LocalLayout(NamedTuple):
    """A rank's part of a tensor: the shape of its local tensor, and the boxes in it, each with
    the slices of the local tensor that hold it. Boxes without elements are left out."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, tuple[slice, ...]], ...]


@lru_cache(4096)
def local_boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: Placements,
    shard_order: tuple[int, ...] | None = None,
) -> LocalLayout:
    """The boxes of a tensor of ``shape`` that the rank at ``coordinate`` of the mesh has.

    ``order``: the mesh dimensions in the order in which they cut, with the factors of ``cuts``.
    Without it, factors say that order (``cutting_order``); where they do not, and where there are
    none, the mesh dimensions cut from the first to the last.
    """
    if shard_order is None:
        shard_order = infer_shard_order(mesh_shape, placements)
        if shard_order is None:
            shard_order = tuple(range(len(mesh_shape)))
        else:
            placements = tuple(cut and ShardPlacement(cut.dim) for cut in placements)
    kept: list[list[Extent]] = [[(0, n)] for n in shape]
    for m in shard_order:
        cut = placements[m]
        if cut is not None:
            kept[cut.dim] = _shard_extents(
                kept[cut.dim], mesh_shape[m], coordinate[m], cut.split_factor
            )
    boxes = []
    for runs in product(*(_local_slices(runs) for runs in kept)):
        sizes = tuple(where.stop - where.start for _, where in runs)
        box = Box(tuple(start for start, _ in runs), sizes)
        boxes.append((box, tuple(where for _, where in runs)))
    return LocalLayout(tuple(sum(n for _, n in runs) for runs in kept), tuple(boxes))


def infer_shard_order(
    mesh_shape: tuple[int, ...], placements: Placements
) -> tuple[int, ...] | None:
    """The mesh dimensions in the order in which they really cut, where factors tell it.

    FSDP2 cuts what tensor parallelism has cut already, over a mesh dimension that stands before.
    PyTorch writes that as ``[_StridedShard(0, split_factor=t), Shard(0)]``, t the parts that
    were there before. Where all parts are even this is equal to cutting from left to right in
    strides. Where they are not, it is not: of 38 rows over 4 x 4 ranks, FSDP2 gives the rank
    (3, 2) row 29, cutting from left to right row 37. So the factors are read as what they were
    made from, which is how ``redistribute`` and ``full_tensor`` read them too (torch 2.13,
    ``DTensorSpec._maybe_convert_StridedShard_to_shard_order``).

    None where no order gives these factors (a view of a tensor may make such).
    """
    orders: dict[int, list[int]] = {}
    for m in reversed(range(len(placements))):
        cut = placements[m]
        if cut is None:
            continue
        order = orders.setdefault(cut.dim, [])
        before, at = 1, 0
        while before != cut.split_factor:
            if at == len(order):
                return None
            before *= mesh_shape[order[at]]
            at += 1
        order.insert(at, m)
    return tuple(m for order in orders.values() for m in order)


def _shard_extents(
    extents: list[Extent], num_parts: int, index: int, split_factor: int
) -> list[Extent]:
    """The runs that rank ``index`` of ``count`` keeps. Both cuts are those of ``torch.chunk``:
    equal parts, rounded up, so that the last ones may be shorter or empty."""
    total = sum(length for _, length in extents)
    if not total:
        return extents
    block = -(-total // split_factor)
    last = total // block * block  # where the last block begins, if it is a shorter one
    first, stop = _torch_chunk_bounds(block, num_parts, index)
    if (first, stop) == (0, block):
        wanted = [(0, last)]
    else:
        wanted = [(at + first, at + stop) for at in range(0, last if first < stop else 0, block)]
    first, stop = _torch_chunk_bounds(total - last, num_parts, index)
    return _select_extents(extents, [*wanted, (last + first, last + stop)])


def _torch_chunk_bounds(length: int, num_parts: int, index: int) -> Extent:
    """Where part ``index`` of ``count`` of a length begins and where it ends."""
    part = -(-length // num_parts)
    return min(index * part, length), min((index + 1) * part, length)


def _select_extents(extents: list[Extent], local_ranges: list[tuple[int, int]]) -> list[Extent]:
    """What of the runs lies between each first and past-the-last local position, which rise."""
    taken: list[Extent] = []
    i = at = 0
    for begin, stop in local_ranges:
        while begin < stop:
            start, length = extents[i]
            if begin >= at + length:
                i, at = i + 1, at + length
                continue
            n = min(stop, at + length) - begin
            start += begin - at
            begin += n
            if taken and sum(taken[-1]) == start:
                start, n = taken[-1][0], taken[-1][1] + n
                taken.pop()
            taken.append((start, n))
    return taken


def _local_slices(extents: list[Extent]) -> list[tuple[int, slice]]:
    """The start of each run that has elements, and its place in the local tensor."""
    placed, at = [], 0
    for start, length in extents:
        if length:
            placed.append((start, slice(at, at + length)))
        at += length
    return placed
