"""Compute which boxes of a tensor a rank has under the placements of a device mesh. No torch.

Of each dimension, a rank has a list of extents: a start and a length in the global tensor, in the
order of the local tensor. Each mesh dimension that shards it selects some of them. The cost grows
with the number of extents, not with the length of a dimension.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

from limpet.types import Box

Extent = tuple[int, int]


class ShardPlacement(NamedTuple):
    """A mesh dimension shards dimension ``dim``, split into ``split_factor`` blocks, of which each
    is sharded over the mesh dimension (PyTorch's ``_StridedShard``)."""

    dim: int
    split_factor: int = 1


Placements = tuple[ShardPlacement | None, ...]
"""One entry per mesh dimension; None if all its ranks have the same data (``Replicate``)."""


class LocalLayout(NamedTuple):
    """The shape of a rank's local tensor, and its boxes, each with the slices of the local tensor
    that contain it, without those that have no elements."""

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
    """Return the boxes of a tensor of ``shape`` that the rank at ``coordinate`` of the mesh has.
    ``shard_order``: by default ``infer_shard_order``, otherwise from first to last."""
    if shard_order is None:
        shard_order = infer_shard_order(mesh_shape, placements)
        if shard_order is not None:
            placements = tuple(p and ShardPlacement(p.dim) for p in placements)
    extents: list[list[Extent]] = [[(0, n)] for n in shape]
    for m in range(len(mesh_shape)) if shard_order is None else shard_order:
        placement = placements[m]
        if placement is not None:
            extents[placement.dim] = _shard_extents(
                extents[placement.dim], mesh_shape[m], coordinate[m], placement.split_factor
            )
    boxes = tuple(
        (
            Box(tuple(start for start, _ in parts), tuple(s.stop - s.start for _, s in parts)),
            tuple(local_slice for _, local_slice in parts),
        )
        for parts in product(*map(_local_slices, extents))
    )
    return LocalLayout(tuple(sum(n for _, n in e) for e in extents), boxes)


def infer_shard_order(
    mesh_shape: tuple[int, ...], placements: Placements
) -> tuple[int, ...] | None:
    """Infer from the split factors the order in which the mesh dimensions shard a tensor, as torch
    2.13 does (``DTensorSpec._maybe_convert_StridedShard_to_shard_order``), or None.

    FSDP2 shards what tensor parallelism over a later mesh dimension has sharded into t parts:
    ``[_StridedShard(0, split_factor=t), Shard(0)]``. If the parts are unequal, this differs from
    strided sharding from left to right: of 38 rows over 4 x 4 ranks, the rank (3, 2) has row 29,
    not 37.
    """
    orders: dict[int, list[int]] = {}
    for m, placement in reversed([*enumerate(placements)]):
        if placement is None:
            continue
        order = orders.setdefault(placement.dim, [])
        parts_before, position = 1, 0
        while parts_before != placement.split_factor:
            if position == len(order):
                return None
            parts_before *= mesh_shape[order[position]]
            position += 1
        order.insert(position, m)
    return tuple(m for order in orders.values() for m in order)


def _shard_extents(
    extents: list[Extent], num_parts: int, index: int, split_factor: int
) -> list[Extent]:
    """Return the extents that rank ``index`` of ``num_parts`` keeps. As with ``torch.chunk``, the
    parts have equal lengths, rounded up, so the last ones may be shorter or empty."""
    total = sum(length for _, length in extents)
    if not total:
        return extents
    block_length = -(-total // split_factor)
    last_begin = total // block_length * block_length  # of the last block if it is shorter
    first, stop = _torch_chunk_bounds(block_length, num_parts, index)
    local_ranges = (
        [(0, last_begin)]
        if (first, stop) == (0, block_length)
        else [
            (at + first, at + stop)
            for at in range(0, last_begin if first < stop else 0, block_length)
        ]
    )
    first, stop = _torch_chunk_bounds(total - last_begin, num_parts, index)
    return _select_extents(extents, [*local_ranges, (last_begin + first, last_begin + stop)])


def _torch_chunk_bounds(length: int, num_parts: int, index: int) -> Extent:
    """Return the start and end of part ``index`` of ``num_parts`` of a length."""
    part = -(-length // num_parts)
    return min(index * part, length), min((index + 1) * part, length)


def _select_extents(extents: list[Extent], local_ranges: list[tuple[int, int]]) -> list[Extent]:
    """Return the parts of the extents in ranges of local positions, half-open and increasing."""
    selected: list[Extent] = []
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
            if selected and sum(selected[-1]) == start:
                start, n = selected[-1][0], selected[-1][1] + n
                selected.pop()
            selected.append((start, n))
    return selected


def _local_slices(extents: list[Extent]) -> list[tuple[int, slice]]:
    """Return the start of each nonempty extent and its slice of the local tensor."""
    stops = accumulate(length for _, length in extents)
    return [
        (start, slice(stop - length, stop))
        for (start, length), stop in zip(extents, stops, strict=True)
        if length
    ]
