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

Run = tuple[int, int]


class Cut(NamedTuple):
    """What one mesh dimension does to a tensor: it cuts the dimension ``dim``.

    With a ``factor`` above 1 (the ``split_factor`` of PyTorch's ``_StridedShard``) the dimension
    is cut into so many blocks first, then each block over the mesh dimension.
    """

    dim: int
    factor: int = 1


Cuts = tuple[Cut | None, ...]
"""One entry per mesh dimension; None where each rank of it has the same (``Replicate``)."""


class Local(NamedTuple):
    """A rank's part of a tensor: the shape of its local tensor, and the boxes in it, each with
    the slices of the local tensor that hold it. Boxes without elements are left out."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, tuple[slice, ...]], ...]


@lru_cache(4096)
def local_boxes(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    cuts: Cuts,
    order: tuple[int, ...] | None = None,
) -> Local:
    """The boxes of a tensor of ``shape`` that the rank at ``coordinate`` of the mesh has.

    ``order``: the mesh dimensions in the order in which they cut, with the factors of ``cuts``.
    Without it, factors say that order (``cutting_order``); where they do not, and where there are
    none, the mesh dimensions cut from the first to the last.
    """
    if order is None:
        order = cutting_order(mesh, cuts)
        if order is None:
            order = tuple(range(len(mesh)))
        else:
            cuts = tuple(cut and Cut(cut.dim) for cut in cuts)
    kept: list[list[Run]] = [[(0, n)] for n in shape]
    for m in order:
        cut = cuts[m]
        if cut is not None:
            kept[cut.dim] = _cut(kept[cut.dim], mesh[m], coordinate[m], cut.factor)
    boxes = []
    for runs in product(*(_placed(runs) for runs in kept)):
        sizes = tuple(where.stop - where.start for _, where in runs)
        box = Box(tuple(start for start, _ in runs), sizes)
        boxes.append((box, tuple(where for _, where in runs)))
    return Local(tuple(sum(n for _, n in runs) for runs in kept), tuple(boxes))


def cutting_order(mesh: tuple[int, ...], cuts: Cuts) -> tuple[int, ...] | None:
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
    for m in reversed(range(len(cuts))):
        cut = cuts[m]
        if cut is None:
            continue
        order = orders.setdefault(cut.dim, [])
        before, at = 1, 0
        while before != cut.factor:
            if at == len(order):
                return None
            before *= mesh[order[at]]
            at += 1
        order.insert(at, m)
    return tuple(m for order in orders.values() for m in order)


def _cut(runs: list[Run], count: int, index: int, factor: int) -> list[Run]:
    """The runs that rank ``index`` of ``count`` keeps. Both cuts are those of ``torch.chunk``:
    equal parts, rounded up, so that the last ones may be shorter or empty."""
    total = sum(length for _, length in runs)
    if not total:
        return runs
    block = -(-total // factor)
    last = total // block * block  # where the last block begins, if it is a shorter one
    first, stop = _chunk(block, count, index)
    if (first, stop) == (0, block):
        wanted = [(0, last)]
    else:
        wanted = [(at + first, at + stop) for at in range(0, last if first < stop else 0, block)]
    first, stop = _chunk(total - last, count, index)
    return _between(runs, [*wanted, (last + first, last + stop)])


def _chunk(length: int, count: int, index: int) -> Run:
    """Where part ``index`` of ``count`` of a length begins and where it ends."""
    part = -(-length // count)
    return min(index * part, length), min((index + 1) * part, length)


def _between(runs: list[Run], wanted: list[tuple[int, int]]) -> list[Run]:
    """What of the runs lies between each first and past-the-last local position, which rise."""
    taken: list[Run] = []
    i = at = 0
    for begin, stop in wanted:
        while begin < stop:
            start, length = runs[i]
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


def _placed(runs: list[Run]) -> list[tuple[int, slice]]:
    """The start of each run that has elements, and its place in the local tensor."""
    placed, at = [], 0
    for start, length in runs:
        if length:
            placed.append((start, slice(at, at + length)))
        at += length
    return placed
