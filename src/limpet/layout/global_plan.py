"""Combine the local plans of all ranks into a global plan that writes every box exactly once."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from limpet.errors import DTypeMismatch, PlanError, ShapeMismatch
from limpet.layout.local_plan import Hashes, LocalPlan, describe_type, splitmix64
from limpet.ragged import Ints, sorted_unique
from limpet.text import MAX_SHOWN, format_list, format_ranks


@dataclass(frozen=True, slots=True, eq=False)
class GlobalPlan:
    """The boxes that each rank writes. Every distinct box is written exactly once."""

    digests: tuple[bytes, ...]  # of the local plans, one per rank
    rank_bounds: Ints  # where the boxes of each rank begin in ``write_flags``
    write_flags: NDArray[np.bool_]  # for all boxes of all ranks
    bytes_per_rank: Ints
    leaf_types: Mapping[int, int]  # by the hash of a key, that of dtype and shape

    def write_mask(self, rank: int) -> NDArray[np.bool_]:
        """For each box of a rank, in the order of its local plan, whether the rank writes it."""
        return self.write_flags[self.rank_bounds[rank] : self.rank_bounds[rank + 1]]

    def mismatched_leaves(self, leaves: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
        """Return the keys of ``leaves`` (dtypes and shapes by key) that the plan lacks or has with
        another type. If the plan has other leaves, the last item says how many."""
        keys_by_hash = {xxh3_64_intdigest(key.encode()): key for key in leaves}
        mismatched = [
            key
            for key_hash, key in keys_by_hash.items()
            if self.leaf_types.get(key_hash)
            != xxh3_64_intdigest(describe_type(*leaves[key]).encode())
        ]
        extra = len(self.leaf_types.keys() - keys_by_hash.keys())
        return mismatched + ([f"{extra} leaves that are not in the tree"] if extra else [])


def can_reuse_plan(digests: Sequence[bytes], previous: GlobalPlan | None) -> bool:
    """Return True if ``previous`` is valid for ranks with these digests of their leaf boxes."""
    return previous is not None and tuple(digests) == previous.digests


def make_global_plan(local_plans: Sequence[LocalPlan]) -> GlobalPlan:
    """Choose the rank that writes each box; ``local_plans[r]`` is the plan of rank r.

    Of the ranks that have a box, the one with the fewest bytes so far writes it, larger boxes
    first; a box in ``box_from_first`` is written by the first rank. Raises ``PlanError``,
    ``ShapeMismatch``, or ``DTypeMismatch`` with every leaf that ranks describe differently or whose
    boxes do not tile it.
    """
    counts = [len(plan.box_weight) for plan in local_plans]
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    rank = np.repeat(np.arange(len(local_plans), dtype=np.int32), counts)
    nbytes = _concat([plan.box_bytes for plan in local_plans], np.int64)
    # The weight of every box without elements is 0, so such boxes are identified by leaf key.
    ids = _concat(
        [
            np.where(plan.box_bytes > 0, plan.box_weight, plan.leaf_key[plan.box_leaf])
            for plan in local_plans
        ],
        np.uint64,
    )
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(ids)), bool), ids[1:] != ids[:-1]]))
    del ids
    first_records = order[starts]
    _check_consistency(local_plans, first_records)
    write_flags = np.zeros(len(rank), bool)
    holder_counts = np.diff(starts, append=len(order))
    from_first = _concat([plan.box_from_first for plan in local_plans], np.uint8)[first_records] > 0
    holder_counts[from_first] = 1  # the first rank writes these, whatever the others have
    single_records = first_records[holder_counts == 1]
    write_flags[single_records] = True
    bytes_per_rank = np.zeros(len(local_plans), np.int64)
    np.add.at(bytes_per_rank, rank[single_records], nbytes[single_records])
    if len(single_records) < len(first_records):
        _assign_writers(
            _DistinctBoxes(order, starts, holder_counts, rank, nbytes), write_flags, bytes_per_rank
        )
    leaf_types: dict[int, int] = {}
    for plan in {id(plan): plan for plan in local_plans}.values():
        leaf_types.update(zip(plan.leaf_key.tolist(), plan.leaf_type.tolist(), strict=True))
    return GlobalPlan(
        tuple(plan.digest for plan in local_plans), bounds, write_flags, bytes_per_rank, leaf_types
    )


def _concat(columns: Sequence[NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *columns])


@dataclass(frozen=True, slots=True, eq=False)
class _DistinctBoxes:
    """The distinct boxes of all ranks. ``rank`` and ``nbytes`` have one row per holder of a box;
    box i has the rows ``order[starts[i] : starts[i] + holder_counts[i]]``, in rank order."""

    order: NDArray[np.intp]
    starts: NDArray[np.intp]
    holder_counts: NDArray[np.intp]
    rank: NDArray[np.int32]
    nbytes: Ints


def _assign_writers(
    all_boxes: _DistinctBoxes, write_flags: NDArray[np.bool_], bytes_per_rank: Ints
) -> None:
    """Choose a writer for each box with several holders; update both output arrays."""
    order, rank = all_boxes.order, all_boxes.rank
    # Boxes with the same holders form a group, identified by a sum of hashes of the ranks. If two
    # groups collide, each box is still assigned to one of its own holders.
    sums = np.add.reduceat(splitmix64(rank.astype(np.uint64))[order], all_boxes.starts)
    shared = np.flatnonzero(all_boxes.holder_counts > 1)
    starts, counts, sums = (all_boxes.starts[shared], all_boxes.holder_counts[shared], sums[shared])
    nbytes = all_boxes.nbytes[order[starts]]
    # Groups with fewer holders come first because they have fewer choices.
    by_group = np.lexsort((-nbytes, sums, counts))
    sums, counts = sums[by_group], counts[by_group]
    edges = np.flatnonzero((sums[1:] != sums[:-1]) | (counts[1:] != counts[:-1])) + 1
    group_bounds = [0, *edges.tolist(), len(by_group)]
    loads = bytes_per_rank.tolist()
    for a, b in pairwise(group_bounds):
        boxes = by_group[a:b]
        begin, count = int(starts[boxes[0]]), int(counts[a])
        members = rank[order[begin : begin + count]].tolist()
        heap = [(loads[r], k) for k, r in enumerate(members)]
        heapq.heapify(heap)
        chosen = []
        for at, size in zip(starts[boxes].tolist(), nbytes[boxes].tolist()):
            least_load, k = heap[0]
            heapq.heapreplace(heap, (least_load + size, k))
            loads[members[k]] += size
            chosen.append(at + k)
        write_flags[order[chosen]] = True
    bytes_per_rank[:] = loads


def _check_consistency(local_plans: Sequence[LocalPlan], first_records: NDArray[np.intp]) -> None:
    """Raise an error for leaves whose type differs between ranks or whose boxes do not tile them.
    ``first_records`` has one record of each distinct box."""
    keys, index, inverse = np.unique(
        _concat([plan.leaf_key for plan in local_plans], np.uint64),
        return_index=True,
        return_inverse=True,
    )
    types = _concat([plan.leaf_type for plan in local_plans], np.uint64)
    mistyped = sorted_unique(inverse[types != types[index][inverse]])
    del inverse, types
    key = _concat([plan.leaf_key[plan.box_leaf] for plan in local_plans], np.uint64)[first_records]
    weight = _concat([plan.box_weight for plan in local_plans], np.uint64)[first_records]
    weight_sums = np.zeros(len(keys), np.uint64)
    np.add.at(weight_sums, np.searchsorted(keys, key), weight)
    leaf_weight = _concat([plan.leaf_weight for plan in local_plans], np.uint64)[index]
    untiled = np.setdiff1d(np.flatnonzero(weight_sums != leaf_weight), mistyped)
    if len(mistyped) or len(untiled):
        nbytes = _concat([plan.box_bytes for plan in local_plans], np.int64)[first_records]
        covered_bytes = {int(k): int(nbytes[key == k].sum()) for k in keys[untiled[:MAX_SHOWN]]}
        raise _consistency_error(local_plans, keys[mistyped], keys[untiled], covered_bytes)


def _consistency_error(
    local_plans: Sequence[LocalPlan],
    mistyped: Hashes,
    untiled: Hashes,
    covered_bytes: dict[int, int],
) -> PlanError:
    """Return the error that lists all problems; unpacks only the names of the affected ranks."""
    lines: list[str] = []
    names: list[str] = []
    error_classes: set[type[PlanError]] = {PlanError} if len(untiled) else set()
    shown = [*mistyped.tolist()[:MAX_SHOWN], *untiled.tolist()[:MAX_SHOWN]]
    variants: dict[int, dict[tuple[str, str, tuple[int, ...]], list[int]]] = {h: {} for h in shown}
    total: dict[int, int] = {}
    for r, local_plan in enumerate(local_plans):
        positions = np.flatnonzero(np.isin(local_plan.leaf_key, np.array(shown, np.uint64)))
        rows = local_plan.unpack_leaf_types() if len(positions) else {}
        for i in positions.tolist():
            key_hash = int(local_plan.leaf_key[i])
            variants[key_hash].setdefault(rows[key_hash], []).append(r)
            total[key_hash] = int(local_plan.leaf_bytes[i])
    for key_hash in shown:
        ranks_by_type = variants[key_hash]
        key = next(iter(ranks_by_type))[0]
        names.append(key)
        if len(ranks_by_type) > 1:
            descriptions = [
                f"{describe_type(d, s)} on {format_ranks(r)}"
                for (_, d, s), r in ranks_by_type.items()
            ]
            lines.append(f"{key}: {', '.join(descriptions)}")
            error_classes.add(
                _error_class([d for _, d, _ in ranks_by_type], [s for _, _, s in ranks_by_type])
            )
        else:
            lines.append(f"{key}: {_describe_tiling(covered_bytes[key_hash], total[key_hash])}")
    count = len(mistyped) + len(untiled)
    error_class = error_classes.pop() if len(error_classes) == 1 else PlanError
    return error_class(
        f"The boxes of the ranks are inconsistent in {count} {'leaf' if count == 1 else 'leaves'}",
        expected="one dtype and shape per leaf on all ranks, and boxes that tile the leaf",
        found=format_list(lines, len(lines), "; ", count),
        todo="Pass the same global tensors on every rank; wrap what differs by rank in PerRank",
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
