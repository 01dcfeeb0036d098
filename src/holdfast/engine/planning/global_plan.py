"""Who writes what: the offers of all ranks in, a plan by which every box is written once out."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from holdfast.engine.planning.local_plan import Hashes, LocalPlan, describe_type, splitmix64
from holdfast.errors import DTypeMismatch, PlanError, ShapeMismatch
from holdfast.ragged import Ints
from holdfast.text import format_ranks

MAX_SHOWN = 20
"""Most leaves that one error message names."""


@dataclass(frozen=True, slots=True, eq=False)
class GlobalPlan:
    """Which of its boxes each rank writes: every distinct box is written once.

    ``structures``: the digests that the plan was made for, one per rank; ``writes``: for all boxes
    of all ranks, those of rank r from ``bounds[r]`` to ``bounds[r + 1]``; ``loads``: bytes that
    each rank writes; ``leaves``: hashes of keys, and of their types.
    """

    digests: tuple[bytes, ...]
    rank_bounds: Ints
    write_flags: NDArray[np.bool_]
    bytes_per_rank: Ints
    leaf_types: Mapping[int, int]

    def write_mask(self, rank: int) -> NDArray[np.bool_]:
        """For each holding of the rank, in the order of its offer, whether it writes it."""
        return self.write_flags[self.rank_bounds[rank] : self.rank_bounds[rank + 1]]

    def mismatched_leaves(self, leaves: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
        """The keys among ``leaves`` (dtype and shape) that the plan has not, or has as another
        type; and how many only the plan has."""
        found = {xxh3_64_intdigest(key.encode()): key for key in leaves}
        wrong = [
            key
            for number, key in found.items()
            if self.leaf_types.get(number)
            != xxh3_64_intdigest(describe_type(*leaves[key]).encode())
        ]
        more = len(self.leaf_types.keys() - found.keys())
        return wrong + ([f"{more} leaves that are not in the tree"] if more else [])


def can_reuse_plan(digests: Sequence[bytes], previous: GlobalPlan | None) -> bool:
    """Whether ``previous`` still is the plan for ranks with these digests of their holdings."""
    return previous is not None and tuple(digests) == previous.digests


def make_global_plan(local_plans: Sequence[LocalPlan]) -> GlobalPlan:
    """Deal the boxes out to the ranks (``offers[r]`` is rank r's).

    A box that one rank holds is written by it; one that several hold by the one that has least
    to write so far, larger boxes first, unless the first of them is to write it.

    Raises ``PlanError`` (``ShapeMismatch`` or ``DTypeMismatch`` if that is all) which names every
    leaf that ranks describe differently, and every leaf that its boxes do not tile.
    """
    counts = [len(o.box_weight) for o in local_plans]
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    rank = np.repeat(np.arange(len(local_plans), dtype=np.int32), counts)
    nbytes = _concat([o.box_bytes for o in local_plans], np.int64)
    # All boxes without elements weigh nothing, so a leaf's are told apart by its key alone.
    ids = _concat(
        [np.where(o.box_bytes > 0, o.box_weight, o.leaf_key[o.box_leaf]) for o in local_plans],
        np.uint64,
    )
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(ids)), bool), ids[1:] != ids[:-1]]))
    del ids
    first = order[starts]
    _check_consistency(local_plans, first)
    writes = np.zeros(len(rank), bool)
    holders = np.diff(starts, append=len(order))
    firsts = _concat([o.box_from_first for o in local_plans], np.uint8)[first] > 0
    holders[firsts] = 1  # whatever the others have
    alone = first[holders == 1]
    writes[alone] = True
    loads = np.zeros(len(local_plans), np.int64)
    np.add.at(loads, rank[alone], nbytes[alone])
    if len(alone) < len(first):
        _assign_writers(_DistinctBoxes(order, starts, holders, rank, nbytes), writes, loads)
    leaves: dict[int, int] = {}
    for offer in {id(o): o for o in local_plans}.values():
        leaves.update(zip(offer.leaf_key.tolist(), offer.leaf_type.tolist(), strict=True))
    return GlobalPlan(tuple(o.digest for o in local_plans), bounds, writes, loads, leaves)


def _concat(columns: Sequence[NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *columns])


@dataclass(frozen=True, slots=True, eq=False)
class _DistinctBoxes:
    """Distinct boxes: box i is held by records ``order[starts[i] : starts[i] + holders[i]]``.

    A record is one rank's holding of one box; ``rank`` and ``nbytes`` are columns over records.
    The records of a box come in the order of their ranks.
    """

    order: NDArray[np.intp]
    starts: NDArray[np.intp]
    holder_counts: NDArray[np.intp]
    rank: NDArray[np.int32]
    nbytes: Ints


def _assign_writers(
    all_boxes: _DistinctBoxes, write_flags: NDArray[np.bool_], bytes_per_rank: Ints
) -> None:
    """Choose a holder for each box with several, and mark it in ``writes`` and ``loads``."""
    order, rank = all_boxes.order, all_boxes.rank
    # Boxes with the same holders form a group, known by a sum over the ranks. Were two groups
    # confused, a box would still be dealt to one of its own holders.
    sums = np.add.reduceat(splitmix64(rank.astype(np.uint64))[order], all_boxes.starts)
    several = np.flatnonzero(all_boxes.holder_counts > 1)
    starts, counts, sums = (
        all_boxes.starts[several],
        all_boxes.holder_counts[several],
        sums[several],
    )
    nbytes = all_boxes.nbytes[order[starts]]
    # Groups with fewer holders first: they have less choice.
    by_group = np.lexsort((-nbytes, sums, counts))
    sums, counts = sums[by_group], counts[by_group]
    edges = np.flatnonzero((sums[1:] != sums[:-1]) | (counts[1:] != counts[:-1])) + 1
    limits = [0, *edges.tolist(), len(by_group)]
    load = bytes_per_rank.tolist()
    for a, b in pairwise(limits):
        boxes = by_group[a:b]
        begin, count = int(starts[boxes[0]]), int(counts[a])
        members = rank[order[begin : begin + count]].tolist()
        heap = [(load[r], k) for k, r in enumerate(members)]
        heapq.heapify(heap)
        chosen = []
        for at, size in zip(starts[boxes].tolist(), nbytes[boxes].tolist()):
            least, k = heap[0]
            heapq.heapreplace(heap, (least + size, k))
            load[members[k]] += size
            chosen.append(at + k)
        write_flags[order[chosen]] = True
    bytes_per_rank[:] = load


def _check_consistency(local_plans: Sequence[LocalPlan], first_records: NDArray[np.intp]) -> None:
    """Raise for leaves that ranks describe differently or whose boxes (``first``) do not tile."""
    keys, index, inverse = np.unique(
        _concat([o.leaf_key for o in local_plans], np.uint64),
        return_index=True,
        return_inverse=True,
    )
    types = _concat([o.leaf_type for o in local_plans], np.uint64)
    mixed = np.unique(inverse[types != types[index][inverse]])
    del inverse, types
    key = _concat([o.leaf_key[o.box_leaf] for o in local_plans], np.uint64)[first_records]
    weight = _concat([o.box_weight for o in local_plans], np.uint64)[first_records]
    found = np.zeros(len(keys), np.uint64)
    np.add.at(found, np.searchsorted(keys, key), weight)
    torn = np.flatnonzero(found != _concat([o.leaf_weight for o in local_plans], np.uint64)[index])
    torn = np.setdiff1d(torn, mixed)
    if len(mixed) or len(torn):
        nbytes = _concat([o.box_bytes for o in local_plans], np.int64)[first_records]
        tiled = {int(k): int(nbytes[key == k].sum()) for k in keys[torn[:MAX_SHOWN]]}
        raise _consistency_error(local_plans, keys[mixed], keys[torn], tiled)


def _consistency_error(
    local_plans: Sequence[LocalPlan],
    mistyped: Hashes,
    untiled: Hashes,
    covered_bytes: dict[int, int],
) -> PlanError:
    """The error for all of it, in words; only the names of the ranks concerned are opened."""
    lines: list[str] = []
    names: list[str] = []
    kinds: set[type[PlanError]] = {PlanError} if len(untiled) else set()
    told = [*mistyped.tolist()[:MAX_SHOWN], *untiled.tolist()[:MAX_SHOWN]]
    says: dict[int, dict[tuple[str, str, tuple[int, ...]], list[int]]] = {h: {} for h in told}
    total: dict[int, int] = {}
    for r, offer in enumerate(local_plans):
        here = np.flatnonzero(np.isin(offer.leaf_key, np.array(told, np.uint64)))
        rows = offer.unpack_leaf_types() if len(here) else {}
        for i in here.tolist():
            leaf = int(offer.leaf_key[i])
            says[leaf].setdefault(rows[leaf], []).append(r)
            total[leaf] = int(offer.leaf_bytes[i])
    for leaf in told:
        sides = says[leaf]
        key = next(iter(sides))[0]
        names.append(key)
        if len(sides) > 1:
            parts = [
                f"{describe_type(d, s)} on {format_ranks(r)}" for (_, d, s), r in sides.items()
            ]
            lines.append(f"{key}: {', '.join(parts)}")
            kinds.add(_error_class([d for _, d, _ in sides], [s for _, _, s in sides]))
        else:
            lines.append(f"{key}: {_describe_tiling(covered_bytes[leaf], total[leaf])}")
    more = len(mistyped) + len(untiled) - len(told)
    kind = kinds.pop() if len(kinds) == 1 else PlanError
    return kind(
        f"The ranks' parts do not make up the state, in {len(mistyped) + len(untiled)} leaves",
        expected="one dtype and shape per leaf on all ranks, and boxes that tile it",
        found="; ".join(lines) + (f"; and {more} more" if more else ""),
        todo="Give every rank the same global tensors; wrap what differs by rank in PerRank",
        leaves=tuple(names),
    )


def _error_class(dtypes: list[str], shapes: list[tuple[int, ...]]) -> type[PlanError]:
    if len(set(dtypes)) == 1:
        return ShapeMismatch
    return DTypeMismatch if len(set(shapes)) == 1 else PlanError


def _describe_tiling(covered: int, total: int) -> str:
    overlap, gaps = covered >= total, covered <= total
    verb = "overlap and leave gaps" if overlap and gaps else "overlap" if overlap else "leave gaps"
    return f"its boxes {verb} ({covered} of {total} bytes)"
