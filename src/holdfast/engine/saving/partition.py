"""Who writes what, agreed among the ranks: one round of digests where nothing has changed, the
boxes and trees themselves where something has.

1. Each rank tells digests: of its boxes, its tree, and the elements that others may have too. 2.
Rank 0 asks for what it does not know yet, from one rank of each kind. 3. It merges the trees, deals
the boxes out, and tells each rank which of its own to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_128_digest

from holdfast.buffers import BufferPool
from holdfast.engine.distributed.collective import Collective
from holdfast.engine.distributed.group import Group
from holdfast.engine.planning.global_plan import GlobalPlan, can_reuse_plan, make_global_plan
from holdfast.engine.planning.local_plan import LocalPlan, digest_leaf_boxes, make_local_plan
from holdfast.engine.planning.merge_trees import MAX_SHOWN, RankNodes, merge
from holdfast.engine.planning.shard_layout import LeafBox
from holdfast.engine.saving.replica_check import digest_values
from holdfast.engine.state.flatten import FlatState, LocalLeaf
from holdfast.engine.state.replication import Replication
from holdfast.errors import PlanError
from holdfast.format.names import new_attempt
from holdfast.text import format_ranks
from holdfast.types import MIB, Box

T = TypeVar("T")

MAX_BOX_BYTES = 16 * MIB
"""Bytes of the largest box that ranks write as one."""

_MAX_CACHED_PLANS = 4
"""Plans that are remembered: a training that saves several states by turns has one for each."""


@dataclass(frozen=True, slots=True)
class Partition:
    """What was agreed. ``leaves``: those boxes of this rank that it writes, with their
    ``holdings``; ``tree``: that of the snapshot, on rank 0."""

    attempt: str
    leaves: list[LocalLeaf]
    leaf_boxes: list[LeafBox]
    tree: Any
    plan: GlobalPlan | None


class RankSummary(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells first. ``structure``: digest of its boxes; ``tree``: of its tree; ``alike``
    and ``values``: of the keys and of the elements of what nobody has said to be the same; ``own``:
    nodes of its own values, as JSON; ``plans``: those that it remembers its part of."""

    structure: bytes
    tree_digest: bytes
    unverified_keys: bytes
    unverified_values: bytes
    per_rank_nodes: bytes
    known_plans: list[bytes]


class DetailRequest(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's answer: the attempt, and the ranks that are to send their boxes, their tree, and
    the digest of each of their elements. ``plan``: a number for the plan; ``deal``: whether each
    rank is told its part of it, since not all know it from before."""

    attempt: str
    plan_id: bytes
    send_masks: bool
    local_plan_ranks: list[int]
    tree_ranks: list[int]
    value_ranks: list[int]

    @property
    def has_requests(self) -> bool:
        return bool(self.local_plan_ranks or self.tree_ranks or self.value_ranks)


class Details(msgspec.Struct, frozen=True, array_like=True):
    """What a rank that was asked sends."""

    local_plan: bytes = b""
    tree: bytes = b""
    values: bytes = b""


class CommonTree(msgspec.Struct, frozen=True, array_like=True):
    """The part of a ``Flat`` that ranks have in common, on its way."""

    tree: Any
    merged_lists: list[str]


def partition_state(
    collective: Collective, group: Group, flat: FlatState, pool: BufferPool, threads: int
) -> Partition:
    """Agree on who writes what of a state. Raises ``PlanError`` where the ranks do not fit:
    values, shapes or elements that differ, boxes that overlap or leave gaps."""
    if collective.size == 1:
        return _partition_locally(flat)
    masks: dict[bytes, Any] = group.cache.setdefault("masks", {})
    leaves = [part for leaf in flat.leaves for part in _split_leaf(leaf)]
    mine = _LocalRank(flat, leaves, pool, threads)
    headers = collective.gather(mine.make_summary(list(masks)), RankSummary)
    chair = None if headers is None else _Coordinator(headers, mine, group.cache)
    asked = collective.broadcast(None if chair is None else chair.make_request(), DetailRequest)
    if asked.has_requests:
        details = collective.gather(mine.make_details(asked, collective.rank), Details)
        if chair is not None and details is not None:
            chair.collect(asked, details)
    tree = None if chair is None else chair.merge_trees()
    if asked.send_masks:
        dealt = None if chair is None else chair.encode_masks()
        _add_to_cache(
            masks, asked.plan_id, _unpack_mask(collective.scatter(dealt, bytes), len(leaves))
        )
    elif asked.has_requests:
        collective.broadcast(True if chair is not None else None, bool)  # all is well
    chosen = masks[asked.plan_id].nonzero()[0].tolist()
    return Partition(
        asked.attempt,
        [leaves[i] for i in chosen],
        [mine.leaf_boxes[i] for i in chosen],
        tree,
        None if chair is None else chair.plan,
    )


def _partition_locally(flat: FlatState) -> Partition:
    """One process writes all that it has, which must be everything."""
    holdings = [make_leaf_box(leaf) for leaf in flat.leaves]
    plan = None
    if any(leaf.box.sizes != leaf.shape for leaf in flat.leaves):
        plan = make_global_plan([make_local_plan(holdings)])
    tree = flat.tree
    if flat.per_rank or flat.from_first:
        own = {key: {0: node} for key, node in flat.per_rank.items()}
        tree = merge([(tree, (0,))], RankNodes(own, flat.from_first))
    return Partition(new_attempt(), flat.leaves, holdings, tree, plan)


def make_leaf_box(leaf: LocalLeaf) -> LeafBox:
    """What a process holds of a leaf."""
    return LeafBox(leaf.key, leaf.dtype, leaf.shape, leaf.box)


def _split_leaf(leaf: LocalLeaf) -> Iterator[LocalLeaf]:
    """A large box in several, so that ranks which hold the same can share the work."""
    box, source = leaf.box, leaf.source
    d = next((d for d, n in enumerate(box.sizes) if n > 1), None)
    if d is None or source.nbytes <= MAX_BOX_BYTES:
        yield leaf
        return
    rows = max(1, MAX_BOX_BYTES * box.sizes[d] // int(source.nbytes))
    for at in range(0, box.sizes[d], rows):
        count = min(rows, box.sizes[d] - at)
        offsets = (*box.offsets[:d], box.offsets[d] + at, *box.offsets[d + 1 :])
        part = Box(offsets, (*box.sizes[:d], count, *box.sizes[d + 1 :]))
        piece = source[(slice(None),) * d + (slice(at, at + count),)]
        yield LocalLeaf(leaf.key, leaf.dtype, leaf.shape, piece, part, leaf.replication)


class _LocalRank:
    """What this rank has to tell, made when it is asked for."""

    def __init__(
        self, flat: FlatState, leaves: Sequence[LocalLeaf], pool: BufferPool, threads: int
    ) -> None:
        self.flat = flat
        self.leaf_boxes = [make_leaf_box(leaf) for leaf in leaves]
        self.from_first = np.array(
            [leaf.replication == Replication.FROM_FIRST for leaf in leaves], bool
        )
        self._unverified = [
            leaf for leaf in flat.leaves if leaf.replication == Replication.UNVERIFIED
        ]
        self._value_digests = digest_values(self._unverified, pool, threads)
        self.structure = xxh3_128_digest(
            digest_leaf_boxes(self.leaf_boxes) + self.from_first.tobytes()
        )

    def make_summary(self, known_plans: list[bytes]) -> RankSummary:
        common = msgspec.msgpack.encode(CommonTree(self.flat.tree, self.flat.merged_lists))
        alike = [(leaf.key, leaf.dtype, leaf.shape) for leaf in self._unverified]
        return RankSummary(
            self.structure,
            xxh3_128_digest(common),
            xxh3_128_digest(msgspec.msgpack.encode(alike)),
            xxh3_128_digest(b"".join(self._value_digests)),
            msgspec.json.encode(self.flat.per_rank),
            known_plans,
        )

    def make_details(self, request: DetailRequest, rank: int) -> Details:
        return Details(
            self.make_local_plan().to_bytes() if rank in request.local_plan_ranks else b"",
            self.encode_tree() if rank in request.tree_ranks else b"",
            self.encode_values() if rank in request.value_ranks else b"",
        )

    def make_local_plan(self) -> LocalPlan:
        return make_local_plan(self.leaf_boxes, self.from_first, self.structure)

    def encode_tree(self) -> bytes:
        return msgspec.msgpack.encode(
            CommonTree([self.flat.tree, self.flat.from_first], self.flat.merged_lists)
        )

    def encode_values(self) -> bytes:
        keys = [leaf.key for leaf in self._unverified]
        return msgspec.msgpack.encode(list(zip(keys, self._value_digests, strict=True)))


class _Coordinator:
    """Rank 0, who decides."""

    def __init__(
        self, summaries: Sequence[RankSummary], local: _LocalRank, cache: dict[str, Any]
    ) -> None:
        self._summaries = summaries
        self._cached_plans: dict[bytes, GlobalPlan] = cache.setdefault("plans", {})
        self._plan_id = xxh3_128_digest(b"".join(h.structure for h in summaries))
        self._trees: dict[bytes, Any] = {
            summaries[0].tree_digest: [local.flat.tree, local.flat.from_first]
        }
        self._merged_lists = set(local.flat.merged_lists)
        self.plan: GlobalPlan | None = self._cached_plans.get(self._plan_id)

    def make_request(self) -> DetailRequest:
        headers = self._summaries
        known = can_reuse_plan([h.structure for h in headers], self.plan)
        values: list[int] = []
        kinds = _first_ranks((h.unverified_keys, h.unverified_values) for h in headers)
        if len(kinds) > 1:  # also where their keys differ: some of these may be the same
            values = list(kinds.values())[
                : max(MAX_SHOWN, len({h.unverified_keys for h in headers}))
            ]
        return DetailRequest(
            new_attempt(),
            self._plan_id,
            not (known and all(self._plan_id in h.known_plans for h in headers)),
            [] if known else list(_first_ranks(h.structure for h in headers).values()),
            [r for r in _first_ranks(h.tree_digest for h in headers).values() if r],
            values,
        )

    def collect(self, request: DetailRequest, details: Sequence[Details]) -> None:
        """Take in what was asked for. Raises ``PlanError``."""
        headers = self._summaries
        for r in request.tree_ranks:
            told = msgspec.msgpack.decode(details[r].tree, type=CommonTree)
            self._trees[headers[r].tree_digest] = told.tree
            self._merged_lists.update(told.merged_lists)
        if request.local_plan_ranks:  # first: where shapes differ, elements do too
            kinds = {
                headers[r].structure: LocalPlan.from_bytes(details[r].local_plan)
                for r in request.local_plan_ranks
            }
            self.plan = make_global_plan([kinds[h.structure] for h in headers])
        if request.value_ranks:
            self._compare_values({r: details[r].values for r in request.value_ranks})
        if request.local_plan_ranks and self.plan is not None:
            _add_to_cache(self._cached_plans, self._plan_id, self.plan)

    def _compare_values(self, encoded_values: Mapping[int, bytes]) -> None:
        """Raise for elements that are not the same on all ranks that have them."""
        said: dict[str, dict[bytes, list[int]]] = {}
        for r, raw in encoded_values.items():
            same = (self._summaries[r].unverified_keys, self._summaries[r].unverified_values)
            ranks = [
                i
                for i, h in enumerate(self._summaries)
                if (h.unverified_keys, h.unverified_values) == same
            ]
            for key, value in msgspec.msgpack.decode(raw, type=list[tuple[str, bytes]]):
                said.setdefault(key, {}).setdefault(value, []).extend(ranks)
        torn = {key: sides for key, sides in said.items() if len(sides) > 1}
        if torn:
            raise _replica_mismatch_error(torn)

    def merge_trees(self) -> Any:
        """The tree of the snapshot. Raises ``PlanError``."""
        headers, first = self._summaries, {}
        own: dict[str, dict[int, Any]] = {}
        for rank, header in enumerate(headers):
            if header.per_rank_nodes != b"{}":
                for key, node in msgspec.json.decode(header.per_rank_nodes).items():
                    own.setdefault(key, {})[rank] = node
        trees = []
        for kind in _first_ranks(h.tree_digest for h in headers):
            tree, theirs = self._trees[kind]
            first.update({key: node for key, node in theirs.items() if key not in first})
            trees.append((tree, tuple(r for r, h in enumerate(headers) if h.tree_digest == kind)))
        if len(trees) == 1 and not own and not first:
            return trees[0][0]
        return merge(trees, RankNodes(own, first, frozenset(self._merged_lists)))

    def encode_masks(self) -> list[bytes]:
        """For each rank which of its boxes it writes."""
        plan = self.plan
        if plan is None:
            raise ValueError("nobody has sent boxes")
        return [np.packbits(plan.write_mask(r)).tobytes() for r in range(len(self._summaries))]


def _unpack_mask(raw: bytes, count: int) -> Any:
    return np.unpackbits(np.frombuffer(raw, np.uint8), count=count).astype(bool)


def _first_ranks(values: Iterable[T]) -> dict[T, int]:
    """The first rank with each value."""
    found: dict[T, int] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, rank)
    return found


def _add_to_cache(cache: dict[bytes, T], key: bytes, value: T) -> None:
    """Keep a value, and of those before it only the latest."""
    cache[key] = value
    while len(cache) > _MAX_CACHED_PLANS:
        del cache[next(iter(cache))]


_MAX_LISTED = 5


def _replica_mismatch_error(mismatches: Mapping[str, Mapping[bytes, list[int]]]) -> PlanError:
    lines = []
    for key, sides in list(mismatches.items())[:_MAX_LISTED]:
        several = [format_ranks(sorted(ranks)) for ranks in sides.values()]
        alone = len(sides) > 2 and all(len(ranks) == 1 for ranks in sides.values())
        differ = "on each rank another" if alone else " unlike ".join(several[:3])
        lines.append(f"{key} ({differ})")
    more = len(mismatches) - len(lines)
    what = (
        "A tensor of the state is"
        if len(mismatches) == 1
        else f"{len(mismatches)} tensors of the state are"
    )
    return PlanError(
        f"{what} not the same on all ranks",
        expected="the same elements on every rank that has a tensor, or a DTensor",
        found="; ".join(lines) + (f"; and {more} more" if more else ""),
        todo="Are the models seeded alike? A model in DistributedDataParallel goes into the state"
        " with its wrapper. Where they do differ: holdfast.Replicated(model) takes the first rank's"
        " of what is not a DTensor (BatchNorm's buffers, say), holdfast.PerRank keeps each rank's,"
        " holdfast.Boxed says which part of a larger tensor it is",
        leaves=tuple(mismatches),
    )
