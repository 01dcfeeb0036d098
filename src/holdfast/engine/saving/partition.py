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

from holdfast.buffers import Pool
from holdfast.engine.distributed.collective import Meeting
from holdfast.engine.distributed.group import Group
from holdfast.engine.planning.global_plan import WritePlan, plan_write, same_structure
from holdfast.engine.planning.local_plan import Offer, make_offer, structure
from holdfast.engine.planning.merge_trees import SHOWN, Asides, merge
from holdfast.engine.planning.shard_layout import Holding
from holdfast.engine.saving.replica_check import values_of
from holdfast.engine.state.flatten import Flat, Leaf
from holdfast.engine.state.replication import Held
from holdfast.errors import PlanError
from holdfast.format.names import new_attempt
from holdfast.text import named
from holdfast.types import MIB, Box

T = TypeVar("T")

SPLIT = 16 * MIB
"""Bytes of the largest box that ranks write as one."""

_KEPT = 4
"""Plans that are remembered: a training that saves several states by turns has one for each."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """What was agreed. ``leaves``: those boxes of this rank that it writes, with their
    ``holdings``; ``tree``: that of the snapshot, on rank 0."""

    attempt: str
    leaves: list[Leaf]
    holdings: list[Holding]
    tree: Any
    plan: WritePlan | None


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells first. ``structure``: digest of its boxes; ``tree``: of its tree; ``alike``
    and ``values``: of the keys and of the elements of what nobody has said to be the same; ``own``:
    nodes of its own values, as JSON; ``plans``: those that it remembers its part of."""

    structure: bytes
    tree: bytes
    alike: bytes
    values: bytes
    own: bytes
    plans: list[bytes]


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's answer: the attempt, and the ranks that are to send their boxes, their tree, and
    the digest of each of their elements. ``plan``: a number for the plan; ``deal``: whether each
    rank is told its part of it, since not all know it from before."""

    attempt: str
    plan: bytes
    deal: bool
    offers: list[int]
    trees: list[int]
    values: list[int]

    @property
    def more(self) -> bool:
        return bool(self.offers or self.trees or self.values)


class Details(msgspec.Struct, frozen=True, array_like=True):
    """What a rank that was asked sends."""

    offer: bytes = b""
    tree: bytes = b""
    values: bytes = b""


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """The part of a ``Flat`` that ranks have in common, on its way."""

    tree: Any
    unions: list[str]


def deal(meeting: Meeting, group: Group, flat: Flat, pool: Pool, threads: int) -> Dealt:
    """Agree on who writes what of a state. Raises ``PlanError`` where the ranks do not fit:
    values, shapes or elements that differ, boxes that overlap or leave gaps."""
    if meeting.size == 1:
        return _alone(flat)
    masks: dict[bytes, Any] = group.memory.setdefault("masks", {})
    leaves = [part for leaf in flat.leaves for part in _split(leaf)]
    mine = _Mine(flat, leaves, pool, threads)
    headers = meeting.gather(mine.header(list(masks)), Header)
    chair = None if headers is None else _Chair(headers, mine, group.memory)
    asked = meeting.share(None if chair is None else chair.ask(), Asked)
    if asked.more:
        details = meeting.gather(mine.details(asked, meeting.rank), Details)
        if chair is not None and details is not None:
            chair.hear(asked, details)
    tree = None if chair is None else chair.tree()
    if asked.deal:
        dealt = None if chair is None else chair.masks()
        _remember(masks, asked.plan, _unpacked(meeting.scatter(dealt, bytes), len(leaves)))
    elif asked.more:
        meeting.share(True if chair is not None else None, bool)  # all is well
    chosen = masks[asked.plan].nonzero()[0].tolist()
    return Dealt(
        asked.attempt,
        [leaves[i] for i in chosen],
        [mine.holdings[i] for i in chosen],
        tree,
        None if chair is None else chair.plan,
    )


def _alone(flat: Flat) -> Dealt:
    """One process writes all that it has, which must be everything."""
    holdings = [holding(leaf) for leaf in flat.leaves]
    plan = None
    if any(leaf.box.sizes != leaf.shape for leaf in flat.leaves):
        plan = plan_write([make_offer(holdings)])
    tree = flat.tree
    if flat.own or flat.first:
        own = {key: {0: node} for key, node in flat.own.items()}
        tree = merge([(tree, (0,))], Asides(own, flat.first))
    return Dealt(new_attempt(), flat.leaves, holdings, tree, plan)


def holding(leaf: Leaf) -> Holding:
    """What a process holds of a leaf."""
    return Holding(leaf.key, leaf.dtype, leaf.shape, leaf.box)


def _split(leaf: Leaf) -> Iterator[Leaf]:
    """A large box in several, so that ranks which hold the same can share the work."""
    box, source = leaf.box, leaf.source
    d = next((d for d, n in enumerate(box.sizes) if n > 1), None)
    if d is None or source.nbytes <= SPLIT:
        yield leaf
        return
    rows = max(1, SPLIT * box.sizes[d] // int(source.nbytes))
    for at in range(0, box.sizes[d], rows):
        count = min(rows, box.sizes[d] - at)
        offsets = (*box.offsets[:d], box.offsets[d] + at, *box.offsets[d + 1 :])
        part = Box(offsets, (*box.sizes[:d], count, *box.sizes[d + 1 :]))
        piece = source[(slice(None),) * d + (slice(at, at + count),)]
        yield Leaf(leaf.key, leaf.dtype, leaf.shape, piece, part, leaf.held)


class _Mine:
    """What this rank has to tell, made when it is asked for."""

    def __init__(self, flat: Flat, leaves: Sequence[Leaf], pool: Pool, threads: int) -> None:
        self.flat = flat
        self.holdings = [holding(leaf) for leaf in leaves]
        self.first = np.array([leaf.held == Held.FIRST for leaf in leaves], bool)
        self._alike = [leaf for leaf in flat.leaves if leaf.held == Held.ALIKE]
        self._values = values_of(self._alike, pool, threads)
        self.structure = xxh3_128_digest(structure(self.holdings) + self.first.tobytes())

    def header(self, plans: list[bytes]) -> Header:
        common = msgspec.msgpack.encode(Tree(self.flat.tree, self.flat.unions))
        alike = [(leaf.key, leaf.dtype, leaf.shape) for leaf in self._alike]
        return Header(
            self.structure,
            xxh3_128_digest(common),
            xxh3_128_digest(msgspec.msgpack.encode(alike)),
            xxh3_128_digest(b"".join(self._values)),
            msgspec.json.encode(self.flat.own),
            plans,
        )

    def details(self, asked: Asked, rank: int) -> Details:
        return Details(
            self.offer().to_bytes() if rank in asked.offers else b"",
            self.tree() if rank in asked.trees else b"",
            self.values() if rank in asked.values else b"",
        )

    def offer(self) -> Offer:
        return make_offer(self.holdings, self.first, self.structure)

    def tree(self) -> bytes:
        return msgspec.msgpack.encode(Tree([self.flat.tree, self.flat.first], self.flat.unions))

    def values(self) -> bytes:
        keys = [leaf.key for leaf in self._alike]
        return msgspec.msgpack.encode(list(zip(keys, self._values, strict=True)))


class _Chair:
    """Rank 0, who decides."""

    def __init__(self, headers: Sequence[Header], mine: _Mine, memory: dict[str, Any]) -> None:
        self._headers = headers
        self._plans: dict[bytes, WritePlan] = memory.setdefault("plans", {})
        self._id = xxh3_128_digest(b"".join(h.structure for h in headers))
        self._trees: dict[bytes, Any] = {headers[0].tree: [mine.flat.tree, mine.flat.first]}
        self._unions = set(mine.flat.unions)
        self.plan: WritePlan | None = self._plans.get(self._id)

    def ask(self) -> Asked:
        headers = self._headers
        known = same_structure([h.structure for h in headers], self.plan)
        values: list[int] = []
        kinds = _firsts((h.alike, h.values) for h in headers)
        if len(kinds) > 1:  # also where their keys differ: some of these may be the same
            values = list(kinds.values())[: max(SHOWN, len({h.alike for h in headers}))]
        return Asked(
            new_attempt(),
            self._id,
            not (known and all(self._id in h.plans for h in headers)),
            [] if known else list(_firsts(h.structure for h in headers).values()),
            [r for r in _firsts(h.tree for h in headers).values() if r],
            values,
        )

    def hear(self, asked: Asked, details: Sequence[Details]) -> None:
        """Take in what was asked for. Raises ``PlanError``."""
        headers = self._headers
        for r in asked.trees:
            told = msgspec.msgpack.decode(details[r].tree, type=Tree)
            self._trees[headers[r].tree] = told.tree
            self._unions.update(told.unions)
        if asked.offers:  # first: where shapes differ, elements do too
            kinds = {headers[r].structure: Offer.from_bytes(details[r].offer) for r in asked.offers}
            self.plan = plan_write([kinds[h.structure] for h in headers])
        if asked.values:
            self._compare({r: details[r].values for r in asked.values})
        if asked.offers and self.plan is not None:
            _remember(self._plans, self._id, self.plan)

    def _compare(self, told: Mapping[int, bytes]) -> None:
        """Raise for elements that are not the same on all ranks that have them."""
        said: dict[str, dict[bytes, list[int]]] = {}
        for r, raw in told.items():
            same = (self._headers[r].alike, self._headers[r].values)
            ranks = [i for i, h in enumerate(self._headers) if (h.alike, h.values) == same]
            for key, value in msgspec.msgpack.decode(raw, type=list[tuple[str, bytes]]):
                said.setdefault(key, {}).setdefault(value, []).extend(ranks)
        torn = {key: sides for key, sides in said.items() if len(sides) > 1}
        if torn:
            raise _torn(torn)

    def tree(self) -> Any:
        """The tree of the snapshot. Raises ``PlanError``."""
        headers, first = self._headers, {}
        own: dict[str, dict[int, Any]] = {}
        for rank, header in enumerate(headers):
            if header.own != b"{}":
                for key, node in msgspec.json.decode(header.own).items():
                    own.setdefault(key, {})[rank] = node
        trees = []
        for kind in _firsts(h.tree for h in headers):
            tree, theirs = self._trees[kind]
            first.update({key: node for key, node in theirs.items() if key not in first})
            trees.append((tree, tuple(r for r, h in enumerate(headers) if h.tree == kind)))
        if len(trees) == 1 and not own and not first:
            return trees[0][0]
        return merge(trees, Asides(own, first, frozenset(self._unions)))

    def masks(self) -> list[bytes]:
        """For each rank which of its boxes it writes."""
        plan = self.plan
        if plan is None:
            raise ValueError("nobody has sent boxes")
        return [np.packbits(plan.mask(r)).tobytes() for r in range(len(self._headers))]


def _unpacked(raw: bytes, count: int) -> Any:
    return np.unpackbits(np.frombuffer(raw, np.uint8), count=count).astype(bool)


def _firsts(values: Iterable[T]) -> dict[T, int]:
    """The first rank with each value."""
    found: dict[T, int] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, rank)
    return found


def _remember(kept: dict[bytes, T], number: bytes, value: T) -> None:
    """Keep a value, and of those before it only the latest."""
    kept[number] = value
    while len(kept) > _KEPT:
        del kept[next(iter(kept))]


_LISTED = 5


def _torn(torn: Mapping[str, Mapping[bytes, list[int]]]) -> PlanError:
    lines = []
    for key, sides in list(torn.items())[:_LISTED]:
        several = [named(sorted(ranks)) for ranks in sides.values()]
        alone = len(sides) > 2 and all(len(ranks) == 1 for ranks in sides.values())
        differ = "on each rank another" if alone else " unlike ".join(several[:3])
        lines.append(f"{key} ({differ})")
    more = len(torn) - len(lines)
    what = "A tensor of the state is" if len(torn) == 1 else f"{len(torn)} tensors of the state are"
    return PlanError(
        f"{what} not the same on all ranks",
        expected="the same elements on every rank that has a tensor, or a DTensor",
        found="; ".join(lines) + (f"; and {more} more" if more else ""),
        todo="Are the models seeded alike? A model in DistributedDataParallel goes into the state"
        " with its wrapper. Where they do differ: holdfast.Replicated(model) takes the first rank's"
        " of what is not a DTensor (BatchNorm's buffers, say), holdfast.PerRank keeps each rank's,"
        " holdfast.Boxed says which part of a larger tensor it is",
        leaves=tuple(torn),
    )
