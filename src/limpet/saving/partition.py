"""Partition: the ranks decide which rank writes which boxes.

Each rank sends digests of its boxes, its tree, and the elements that other ranks may also hold.
Rank 0 requests what it does not know yet, from one rank for each distinct digest. It assigns the
boxes, compares elements, merges trees, and sends each rank a mask of its boxes to write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_128_digest

from limpet.buffers import Buffer
from limpet.errors import PlanError
from limpet.format import tree
from limpet.format.names import join_key, random_id
from limpet.layout.global_plan import GlobalPlan, can_reuse_plan, make_global_plan
from limpet.layout.local_plan import LocalPlan, make_local_plan
from limpet.layout.shard_layout import LeafBox, digest_leaf_boxes
from limpet.ranks.collective import Collective
from limpet.ranks.group import Group
from limpet.saving.image import copy_bytes
from limpet.state.arrays import part_library
from limpet.state.flatten import FlatState, LocalLeaf
from limpet.state.replication import Replication
from limpet.text import MAX_SHOWN, format_list, format_ranks
from limpet.threads import Workers
from limpet.types import BLOCK_SIZE, MIB, Box

T = TypeVar("T")

MAX_BOX_BYTES = 16 * MIB
"""Largest box that is not split across ranks, in bytes."""

_MAX_CACHED_PLANS = 4
"""Largest number of cached plans: a training that alternates between states has one for each."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The boxes that this rank writes. On rank 0 only, the snapshot's tree and the plan for all
    ranks, None if one process writes whole leaves."""

    attempt: str
    sources: list[Any]
    leaf_boxes: list[LeafBox]
    tree: Any
    plan: GlobalPlan | None


class RankSummary(msgspec.Struct, frozen=True, array_like=True):
    """A rank's first message: digests of its boxes, its tree, and the keys and elements of leaves
    not declared replicated; the nodes of its per-rank values, as JSON; plans whose mask it has."""

    structure: bytes
    tree_digest: bytes
    unverified_keys: bytes
    unverified_values: bytes
    per_rank_nodes: bytes
    known_plans: list[bytes]


class DetailRequest(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's reply: the attempt, the plan, whether it will send masks because a rank lacks its
    own, and which ranks must send their boxes, their tree, and a digest of each unverified leaf."""

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
    """A rank's reply to a ``DetailRequest``; empty fields were not requested."""

    local_plan: bytes = b""
    tree: bytes = b""
    values: bytes = b""


class CommonTree(msgspec.Struct, frozen=True, array_like=True):
    """The part of a ``FlatState`` that the ranks have in common, as it is sent."""

    tree: Any
    merged_lists: list[str]


_COMMON_TREE = msgspec.msgpack.Decoder(CommonTree)
_VALUE_DIGESTS = msgspec.msgpack.Decoder(list[tuple[str, bytes]])
_PER_RANK_NODES = msgspec.json.Decoder(dict[str, Any])


def partition_state(
    collective: Collective, group: Group, flat: FlatState, workers: Workers
) -> Partition:
    """Decide with the other ranks which rank writes which boxes. Raises ``PlanError`` if values,
    shapes, or elements differ, or boxes overlap or leave gaps."""
    if collective.size == 1:
        return _partition_locally(flat, group.rank)
    masks: dict[bytes, Any] = group.cache.setdefault("masks", {})
    leaves = [part for leaf in flat.leaves for part in _split_leaf(leaf)]
    local = _LocalRank(flat, leaves, workers)
    summaries = collective.gather(local.make_summary(list(masks)), RankSummary)
    coordinator = None if summaries is None else _Coordinator(summaries, local, group)
    request = collective.broadcast(
        None if coordinator is None else coordinator.make_request(), DetailRequest
    )
    if request.has_requests:
        details = collective.gather(local.make_details(request, collective.rank), Details)
        if coordinator is not None and details is not None:
            coordinator.collect(request, details)
    tree = None if coordinator is None else coordinator.merge_trees()
    if request.send_masks:
        encoded_masks = None if coordinator is None else coordinator.encode_masks()
        bits = np.frombuffer(collective.scatter(encoded_masks, bytes), np.uint8)
        mask = np.unpackbits(bits, count=len(leaves)).astype(bool)
        _add_to_cache(masks, request.plan_id, mask)
    elif request.has_requests:
        # wait until rank 0 has accepted the details: it raises if they conflict
        collective.broadcast(None if coordinator is None else True, bool)
    chosen = masks[request.plan_id].nonzero()[0].tolist()
    return Partition(
        request.attempt,
        [leaves[i].source for i in chosen],
        [local.leaf_boxes[i] for i in chosen],
        tree,
        None if coordinator is None else coordinator.plan,
    )


def _partition_locally(flat: FlatState, rank: int) -> Partition:
    """Return the partition of one process, which writes all of its boxes. They must cover every
    leaf; raises ``PlanError``."""
    sources = [leaf.source for leaf in flat.leaves]
    leaf_boxes = [LeafBox(leaf.key, leaf.dtype, leaf.shape, leaf.box) for leaf in flat.leaves]
    is_partial = any(leaf.box.sizes != leaf.shape for leaf in flat.leaves)
    plan = make_global_plan([make_local_plan(leaf_boxes)]) if is_partial else None
    return Partition(random_id(), sources, leaf_boxes, local_tree(flat, rank), plan)


def local_tree(flat: FlatState, rank: int) -> Any:
    """Return the tree that the snapshot of this rank alone has."""
    if not (flat.per_rank or flat.from_first):
        return flat.tree
    per_rank = {key: {rank: node} for key, node in flat.per_rank.items()}
    return merge_trees([(flat.tree, (rank,))], RankNodes(per_rank, flat.from_first))


def _split_leaf(leaf: LocalLeaf) -> Iterator[LocalLeaf]:
    """Split a large box into parts, so that ranks that hold the same box can share the work."""
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
    """The messages of this rank, made on request."""

    def __init__(self, flat: FlatState, leaves: Sequence[LocalLeaf], workers: Workers) -> None:
        self.flat = flat
        self.leaf_boxes = [LeafBox(leaf.key, leaf.dtype, leaf.shape, leaf.box) for leaf in leaves]
        self.from_first = np.array([s.replication == Replication.FROM_FIRST for s in leaves], bool)
        self._unverified = [s for s in flat.leaves if s.replication == Replication.UNVERIFIED]
        self._value_digests = digest_values(self._unverified, workers)
        self.structure = xxh3_128_digest(
            digest_leaf_boxes(self.leaf_boxes) + self.from_first.tobytes()
        )

    def make_summary(self, known_plans: list[bytes]) -> RankSummary:
        common = msgspec.msgpack.encode(CommonTree(self.flat.tree, self.flat.merged_lists))
        unverified = [(leaf.key, leaf.dtype, leaf.shape) for leaf in self._unverified]
        return RankSummary(
            self.structure,
            xxh3_128_digest(common),
            xxh3_128_digest(msgspec.msgpack.encode(unverified)),
            xxh3_128_digest(b"".join(self._value_digests)),
            msgspec.json.encode(self.flat.per_rank),
            known_plans,
        )

    def make_details(self, request: DetailRequest, rank: int) -> Details:
        plan = tree = values = b""
        if rank in request.local_plan_ranks:
            plan = make_local_plan(self.leaf_boxes, self.from_first, self.structure).to_bytes()
        if rank in request.tree_ranks:
            nodes = [self.flat.tree, self.flat.from_first]
            tree = msgspec.msgpack.encode(CommonTree(nodes, self.flat.merged_lists))
        if rank in request.value_ranks:
            keys = [leaf.key for leaf in self._unverified]
            values = msgspec.msgpack.encode([*zip(keys, self._value_digests, strict=True)])
        return Details(plan, tree, values)


class _Coordinator:
    """Rank 0's part: it makes every decision."""

    def __init__(self, summaries: Sequence[RankSummary], local: _LocalRank, group: Group) -> None:
        cache = group.cache
        self._summaries = summaries
        self._cached_plans: dict[bytes, GlobalPlan] = cache.setdefault("plans", {})
        self._plan_id = xxh3_128_digest(b"".join(s.structure for s in summaries))
        self._trees: dict[bytes, Any] = {
            summaries[0].tree_digest: [local.flat.tree, local.flat.from_first]
        }
        self._merged_lists = set(local.flat.merged_lists)
        self.plan: GlobalPlan | None = self._cached_plans.get(self._plan_id)

    def make_request(self) -> DetailRequest:
        summaries = self._summaries
        known = can_reuse_plan([s.structure for s in summaries], self.plan)
        distinct = _first_ranks((s.unverified_keys, s.unverified_values) for s in summaries)
        count = max(MAX_SHOWN, len({s.unverified_keys for s in summaries}))
        return DetailRequest(
            random_id(),
            self._plan_id,
            not (known and all(self._plan_id in s.known_plans for s in summaries)),
            [] if known else list(_first_ranks(s.structure for s in summaries).values()),
            [r for r in _first_ranks(s.tree_digest for s in summaries).values() if r],
            # also if only the keys differ, because some keys may be the same
            list(distinct.values())[:count] if len(distinct) > 1 else [],
        )

    def collect(self, request: DetailRequest, details: Sequence[Details]) -> None:
        """Process the requested details. Raises ``PlanError``."""
        summaries = self._summaries
        for r in request.tree_ranks:
            common = _COMMON_TREE.decode(details[r].tree)
            self._trees[summaries[r].tree_digest] = common.tree
            self._merged_lists.update(common.merged_lists)
        # before the values are compared: if shapes differ, elements differ too
        if request.local_plan_ranks:
            local_plans = {
                summaries[r].structure: LocalPlan.from_bytes(details[r].local_plan)
                for r in request.local_plan_ranks
            }
            self.plan = make_global_plan([local_plans[s.structure] for s in summaries])
        if request.value_ranks:
            self._compare_values({r: details[r].values for r in request.value_ranks})
        if request.local_plan_ranks and self.plan is not None:
            _add_to_cache(self._cached_plans, self._plan_id, self.plan)

    def _compare_values(self, encoded_values: Mapping[int, bytes]) -> None:
        """Raise ``PlanError`` for leaves whose elements differ between the ranks that have them."""
        ranks_by_digest: dict[str, dict[bytes, list[int]]] = {}
        sent = [(s.unverified_keys, s.unverified_values) for s in self._summaries]
        for r, raw in encoded_values.items():
            ranks = [i for i, each in enumerate(sent) if each == sent[r]]
            for key, digest in _VALUE_DIGESTS.decode(raw):
                ranks_by_digest.setdefault(key, {}).setdefault(digest, []).extend(ranks)
        mismatches = {key: ranks for key, ranks in ranks_by_digest.items() if len(ranks) > 1}
        if mismatches:
            raise _replica_mismatch_error(mismatches)

    def merge_trees(self) -> Any:
        """Return the tree of the snapshot. Raises ``PlanError``."""
        summaries, from_first = self._summaries, {}
        per_rank: dict[str, dict[int, Any]] = {}
        for rank, summary in enumerate(summaries):
            if summary.per_rank_nodes != b"{}":
                for key, node in _PER_RANK_NODES.decode(summary.per_rank_nodes).items():
                    per_rank.setdefault(key, {})[rank] = node
        trees = []
        for digest in _first_ranks(s.tree_digest for s in summaries):
            tree, nodes = self._trees[digest]
            from_first.update({key: n for key, n in nodes.items() if key not in from_first})
            ranks = tuple(r for r, s in enumerate(summaries) if s.tree_digest == digest)
            trees.append((tree, ranks))
        if len(trees) == 1 and not per_rank and not from_first:
            return trees[0][0]
        return merge_trees(trees, RankNodes(per_rank, from_first, frozenset(self._merged_lists)))

    def encode_masks(self) -> list[bytes]:
        """Return, for each rank, a bit mask of the boxes that it writes."""
        plan = self.plan
        if plan is None:
            raise ValueError("no rank has sent its boxes")
        return [np.packbits(plan.write_mask(r)).tobytes() for r in range(len(self._summaries))]


def _first_ranks(values: Iterable[T]) -> dict[T, int]:
    """Return the first rank with each distinct value."""
    first_ranks: dict[T, int] = {}
    for rank, value in enumerate(values):
        first_ranks.setdefault(value, rank)
    return first_ranks


def _add_to_cache(cache: dict[bytes, T], key: bytes, value: T) -> None:
    """Add a value, and remove the oldest values beyond ``_MAX_CACHED_PLANS``."""
    cache[key] = value
    while len(cache) > _MAX_CACHED_PLANS:
        del cache[next(iter(cache))]


_MAX_LISTED = 5


def _replica_mismatch_error(mismatches: Mapping[str, Mapping[bytes, list[int]]]) -> PlanError:
    lines = []
    for key, ranks_by_digest in list(mismatches.items())[:_MAX_LISTED]:
        sides = list(ranks_by_digest.values())
        difference = " vs. ".join(format_ranks(sorted(ranks)) for ranks in sides[:3])
        if len(sides) > 2 and all(len(ranks) == 1 for ranks in sides):
            difference = "different on every rank"
        lines.append(f"{key} ({difference})")
    what = (
        "A tensor of the state is"
        if len(mismatches) == 1
        else f"{len(mismatches)} tensors of the state are"
    )
    return PlanError(
        f"{what} not the same on all ranks",
        expected="the same elements on every rank that has the tensor, or a DTensor",
        found=format_list(lines, _MAX_LISTED, "; ", len(mismatches)),
        todo="Check that every rank initializes the model from the same seed, and put a"
        " DistributedDataParallel model into the state with its wrapper. For tensors that differ on"
        " purpose, use limpet.Replicated(model) to save the first rank's values of everything"
        " that is not a DTensor (such as BatchNorm buffers), limpet.PerRank to save every rank's"
        " values, or limpet.Boxed to state which part of a larger tensor each rank has",
        leaves=tuple(mismatches),
    )


# -- whether several ranks hold the same tensors --------------------------------------------------
#
# At every save, each rank digests its tensors that are not declared to be replicated. Otherwise, if
# such tensors differed, all ranks' values but one would be lost. On the CPU, the digest is
# XXH3-128, which runs at memory speed.

_INLINE_BYTES = 4096


def digest_values(leaves: Sequence[LocalLeaf], workers: Workers) -> list[bytes]:
    """Return a 16-byte digest of the elements of each leaf, whose box is the whole leaf."""
    block_digests: list[list[bytes]] = []
    blocks: list[tuple[int, int, int]] = []

    def digest_block(block: tuple[int, int, int]) -> None:
        i, n, start = block
        source = leaves[i].source
        stop = min(start + BLOCK_SIZE, int(source.nbytes))
        block_digests[i][n] = _digest_range(source, start, stop, workers)

    for i, leaf in enumerate(leaves):
        if (computed := part_library(type(leaf.source)).digest(leaf.source)) is not None:
            block_digests.append([computed])
            continue
        nbytes = int(leaf.source.nbytes)
        leaf_blocks = [(i, n, a) for n, a in enumerate(range(0, nbytes, BLOCK_SIZE))]
        block_digests.append([b""] * len(leaf_blocks))
        if nbytes > _INLINE_BYTES:
            blocks += leaf_blocks
        elif leaf_blocks:
            digest_block(leaf_blocks[0])
    workers.each(blocks, digest_block)
    return [d[0] if len(d) == 1 else xxh3_128_digest(b"".join(d)) for d in block_digests]


def _digest_range(source: Any, start: int, stop: int, workers: Workers) -> bytes:
    """Return the digest of bytes ``start`` to ``stop``, in row-major order, of a CPU array."""
    if address := part_library(type(source)).address(source):
        return xxh3_128_digest((ctypes.c_char * (stop - start)).from_address(address + start))
    is_small = stop - start <= _INLINE_BYTES
    with nullcontext(Buffer(stop - start)) if is_small else workers.buffer() as buffer:
        copy_bytes(source, start, stop, buffer)
        return xxh3_128_digest(buffer.view[: stop - start])


# -- the trees of all ranks as one tree ------------------------------------------------------------
#
# Equal values are stored once. Members of dicts that only some ranks have are added. Values that
# differ between ranks raise an error that names the ranks.

_MAX_NODE_CHARS = 60
"""The maximum number of characters of a node that an error message shows."""

Ranks = tuple[int, ...]
NodeVariant = tuple[Any, Ranks]
"""A node and the ranks that have it."""


@dataclass(frozen=True, slots=True)
class RankNodes:
    """Nodes by key that the trees refer to, of each rank or the first rank that has one, and the
    keys of lists whose length may differ between ranks."""

    per_rank: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    from_first: Mapping[str, Any] = field(default_factory=dict)
    merged_lists: frozenset[str] = frozenset()


def merge_trees(trees: Sequence[NodeVariant], rank_nodes: RankNodes) -> Any:
    """Merge the distinct trees, with their ranks and that of rank 0 first, into one. Raises
    ``PlanError``, which names the values that differ and their ranks."""
    merger = _Merger(rank_nodes)
    merged = merger.merge(list(trees), "")
    if merger.differences:
        raise _difference_error(merger.differences)
    return merged


@dataclass(slots=True)
class _Merger:
    rank_nodes: RankNodes
    differences: dict[str, list[NodeVariant]] = field(default_factory=dict)

    def merge(self, nodes: list[NodeVariant], key: str) -> Any:
        first = nodes[0][0]
        tag = next(iter(first), None) if type(first) is dict else None
        if tag in ("own", "first") and all(nodes_equal(n, first) for n, _ in nodes):
            if tag == "first":
                return self.rank_nodes.from_first[first[tag]]
            per_rank = self.rank_nodes.per_rank[first[tag]]
            return {"dict": {str(rank): n for rank, n in sorted(per_rank.items())}}
        if tag not in ("dict", "ordered", "items", "list", "tuple") or not all(
            type(n) is dict and next(iter(n), None) == tag and n.get("of") == first.get("of")
            for n, _ in nodes
        ):
            return self._merge_equal(nodes, key)
        if tag in ("list", "tuple"):
            return {tag: self._merge_sequence([(n[tag], r) for n, r in nodes], key)}
        return self._merge_dict(tag, nodes, key)

    def _merge_equal(self, nodes: list[NodeVariant], key: str) -> Any:
        first = nodes[0][0]
        compared = nodes  # the order of a tensor's dimensions in memory is rank 0's
        if all(type(n) is dict and "tensor" in n for n, _ in nodes):
            compared = [({"tensor": n["tensor"][:2]}, ranks) for n, ranks in nodes]
        if not all(nodes_equal(n, compared[0][0]) for n, _ in compared):
            self.differences[key] = nodes
        return first

    def _merge_dict(self, tag: str, nodes: list[NodeVariant], key: str) -> Any:
        members: dict[Any, list[NodeVariant]] = {}
        names: dict[Any, Any] = {}
        for node, ranks in nodes:
            for name, child in node[tag] if tag == "items" else node[tag].items():
                identity = repr(name) if tag == "items" else name
                names.setdefault(identity, name)
                members.setdefault(identity, []).append((child, ranks))
        # Names that are equal as text get keys that depend on their positions in the merged dict.
        merged_names = {tag: [[n, None] for n in names.values()] if tag == "items" else names}
        placed = tree.children({**merged_names, "of": "dict"}, key)
        if tag == "items" and not _has_consistent_keys(nodes, placed, key):
            self.differences[key] = nodes
        merged = [self.merge(m, k) for m, (_, _, k) in zip(members.values(), placed, strict=True)]
        merged_pairs = zip(names.values(), merged, strict=True)
        merged_node: dict[str, Any] = (
            {"items": [list(p) for p in merged_pairs], "of": nodes[0][0]["of"]}
            if tag == "items"
            else {tag: dict(merged_pairs)}
        )
        if metadata := [(n["metadata"], r) for n, r in nodes if "metadata" in n]:
            merged_node["metadata"] = self.merge(metadata, join_key(key, "~metadata"))
        return merged_node

    def _merge_sequence(self, nodes: list[NodeVariant], key: str) -> list[Any]:
        first: list[Any] = nodes[0][0]
        if key in self.rank_nodes.merged_lists and not any(
            type(n) is dict for n, _ in nodes for n in n
        ):
            return list(dict.fromkeys(member for members, _ in nodes for member in members))
        if key not in self.rank_nodes.merged_lists and any(len(n) != len(first) for n, _ in nodes):
            self.differences[key] = [({"list": n}, ranks) for n, ranks in nodes]
            return first
        return [
            self.merge([(n[i], r) for n, r in nodes if i < len(n)], join_key(key, str(i)))
            for i in range(max(len(members) for members, _ in nodes))
        ]


def _has_consistent_keys(
    nodes: Sequence[NodeVariant], merged: Sequence[tuple[Any, Any, str]], key: str
) -> bool:
    """Return True if each member of a dict has the same key on all ranks as when merged, and
    another name: 1 and True are one name; 1 and "1" have keys that depend on their positions."""
    expected_keys = {(type(name), name): k for name, _, k in merged}
    return len({name for name, _, _ in merged}) == len(merged) and all(
        expected_keys[type(name), name] == k
        for node, _ in nodes
        for name, _, k in tree.children(node, key)
    )


def nodes_equal(a: Any, b: Any) -> bool:
    """Return True if two nodes are identical: 1, 1.0, and true differ, and so do -0.0 and 0.0."""
    if type(a) is not type(b):
        return False
    if type(a) is dict:
        return a.keys() == b.keys() and all(nodes_equal(v, b[k]) for k, v in a.items())
    if type(a) is list:
        return len(a) == len(b) and all(map(nodes_equal, a, b))
    return repr(a) == repr(b) if type(a) is float else bool(a == b)


def _difference_error(differences: Mapping[str, list[NodeVariant]]) -> PlanError:
    lines = []
    for key, nodes in list(differences.items())[:MAX_SHOWN]:
        ranks_by_node: dict[str, tuple[str, list[int]]] = {}
        for node, ranks in nodes:
            ranks_by_node.setdefault(repr(node), (_describe_node(node), []))[1].extend(ranks)
        descriptions = [
            f"{description} on {format_ranks(sorted(r))}"
            for description, r in list(ranks_by_node.values())[:4]
        ]
        lines.append(
            f"{key}: " + ", ".join(descriptions) + (", ..." if len(ranks_by_node) > 4 else "")
        )
    return PlanError(
        "The ranks disagree about "
        + ("a value" if len(differences) == 1 else f"{len(differences)} values")
        + " of the state",
        expected="the same value on every rank that has it",
        found=format_list(lines, MAX_SHOWN, "; ", len(differences)),
        todo="Wrap values that differ by rank in limpet.PerRank; to save the first rank's value"
        " for all ranks, wrap it in limpet.Replicated",
        leaves=tuple(differences),
    )


def _describe_node(node: Any) -> str:
    """Return a short description of a node for a message."""
    if type(node) is not dict:
        return tree.describe_node(node)
    tag, body = next(iter(node.items()))
    if tag in ("own", "first"):
        return {"own": "a PerRank", "first": "a Replicated"}[tag]
    text = msgspec.json.encode(body).decode()
    return f"{tag} {text[:_MAX_NODE_CHARS]}" + ("..." if len(text) > _MAX_NODE_CHARS else "")
