"""One tree out of the trees of all ranks: what is equal stands once, what only some have is added,
and what differs is an error that names the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.errors import PlanError
from holdfast.format import tree
from holdfast.format.names import join_key
from holdfast.text import format_ranks

MAX_SHOWN = 20
"""Most keys that one error message names."""

_MAX_NODE_CHARS = 60
"""Characters of a node that it shows."""

Ranks = tuple[int, ...]
NodeVariant = tuple[Any, Ranks]
"""A node, and the ranks that have it."""


@dataclass(frozen=True, slots=True)
class RankNodes:
    """What stands beside the trees. ``own``: by key the node of each rank; ``first``: by key that
    of the first rank that has one; ``unions``: keys of lists that may be of any length."""

    per_rank: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    from_first: Mapping[str, Any] = field(default_factory=dict)
    merged_lists: frozenset[str] = frozenset()


def merge(trees: Sequence[NodeVariant], rank_nodes: RankNodes) -> Any:
    """The tree of the snapshot. ``trees``: the different trees, that of rank 0 first, each with the
    ranks that have it. Raises ``PlanError`` naming all values that differ, with the ranks."""
    merger = _Merger(rank_nodes)
    made = merger.merge(list(trees), "")
    if merger.differences:
        raise _difference_error(merger.differences)
    return made


class _Merger:
    def __init__(self, rank_nodes: RankNodes) -> None:
        self.rank_nodes = rank_nodes
        self.differences: dict[str, list[NodeVariant]] = {}

    def merge(self, nodes: list[NodeVariant], key: str) -> Any:
        first = nodes[0][0]
        tag = next(iter(first), None) if type(first) is dict else None
        if tag is None:
            return self._merge_equal(nodes, key)
        if tag in ("own", "first") and all(_nodes_equal(n, first) for n, _ in nodes):
            return self._resolve_rank_node(tag, first[tag])
        if tag not in ("dict", "ordered", "items", "list", "tuple"):
            return self._merge_equal(nodes, key)
        if not all(type(n) is dict and next(iter(n), None) == tag for n, _ in nodes):
            return self._merge_equal(nodes, key)
        if any(n.get("of") != first.get("of") for n, _ in nodes):
            return self._merge_equal(nodes, key)
        if tag in ("list", "tuple"):
            return {tag: self._merge_sequence([(n[tag], r) for n, r in nodes], key)}
        return self._merge_dict(tag, nodes, key)

    def _resolve_rank_node(self, tag: str, key: str) -> Any:
        if tag == "first":
            return self.rank_nodes.from_first[key]
        return {"dict": {str(rank): n for rank, n in sorted(self.rank_nodes.per_rank[key].items())}}

    def _merge_equal(self, nodes: list[NodeVariant], key: str) -> Any:
        first = nodes[0][0]
        if not all(_nodes_equal(n, first) for n, _ in nodes):
            self.differences[key] = nodes
        return first

    def _merge_dict(self, tag: str, nodes: list[NodeVariant], key: str) -> Any:
        members: dict[Any, list[NodeVariant]] = {}
        names: dict[Any, Any] = {}
        for node, ranks in nodes:
            pairs = node[tag] if tag == "items" else node[tag].items()
            for name, child in pairs:
                same = repr(name) if tag == "items" else name
                names.setdefault(same, name)
                members.setdefault(same, []).append((child, ranks))
        # a key tells members apart that are equal as text, by their place: as in the whole
        made = {tag: [[n, None] for n in names.values()] if tag == "items" else names}
        several = tree.children({**made, "of": "dict"}, key)
        keys = [k for _, _, k in several]
        if tag == "items" and not _has_consistent_keys(nodes, several, key):
            self.differences[key] = nodes
        merged = [self.merge(m, k) for m, k in zip(members.values(), keys, strict=True)]
        whole: dict[str, Any] = {
            tag: [list(p) for p in zip(names.values(), merged, strict=True)]
            if tag == "items"
            else dict(zip(names.values(), merged, strict=True))
        }
        if tag == "items":
            whole["of"] = nodes[0][0]["of"]
        if metadata := [(n["metadata"], r) for n, r in nodes if "metadata" in n]:
            whole["metadata"] = self.merge(metadata, join_key(key, "~metadata"))
        return whole

    def _merge_sequence(self, nodes: list[NodeVariant], key: str) -> list[Any]:
        first: list[Any] = nodes[0][0]
        if key in self.rank_nodes.merged_lists and not any(
            type(n) is dict for n, _ in nodes for n in n
        ):
            return list(dict.fromkeys(member for several, _ in nodes for member in several))
        longest = max(len(several) for several, _ in nodes)
        if key not in self.rank_nodes.merged_lists and any(len(n) != len(first) for n, _ in nodes):
            self.differences[key] = [({"list": n}, ranks) for n, ranks in nodes]
            return first
        return [
            self.merge([(n[i], r) for n, r in nodes if i < len(n)], join_key(key, str(i)))
            for i in range(longest)
        ]


def _has_consistent_keys(
    nodes: Sequence[NodeVariant], merged: Sequence[tuple[Any, Any, str]], key: str
) -> bool:
    """Whether the members of a dict have one key on all ranks, and different names in the whole:
    1 and True are the same name, 1 and "1" are not, but have keys made of their places."""
    placed = {(type(name), name): k for name, _, k in merged}
    return len({name for name, _, _ in merged}) == len(merged) and all(
        placed[type(name), name] == k
        for node, _ in nodes
        for name, _, k in tree.children(node, key)
    )


def _nodes_equal(a: Any, b: Any) -> bool:
    """Whether two nodes say the same: 1, 1.0 and true are three things, -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if type(a) is dict:
        return a.keys() == b.keys() and all(_nodes_equal(v, b[k]) for k, v in a.items())
    if type(a) is list:
        return len(a) == len(b) and all(map(_nodes_equal, a, b))
    return repr(a) == repr(b) if type(a) is float else bool(a == b)


def _difference_error(differences: Mapping[str, list[NodeVariant]]) -> PlanError:
    lines = []
    for key, nodes in list(differences.items())[:MAX_SHOWN]:
        sides: dict[str, tuple[str, list[int]]] = {}
        for node, ranks in nodes:
            sides.setdefault(repr(node), (_describe_node(node), []))[1].extend(ranks)
        told = [f"{said} on {format_ranks(sorted(r))}" for said, r in list(sides.values())[:4]]
        lines.append(f"{key}: " + ", ".join(told) + (", ..." if len(sides) > 4 else ""))
    more = len(differences) - len(lines)
    return PlanError(
        "The ranks do not agree about "
        + ("a value" if len(differences) == 1 else f"{len(differences)} values")
        + " of the state",
        expected="the same on every rank that has it",
        found="; ".join(lines) + (f"; and {more} more" if more else ""),
        todo="Wrap what each rank has of its own in holdfast.PerRank, and what is meant to be the"
        " same but is not in holdfast.Replicated, which takes the first rank's",
        leaves=tuple(differences),
    )


def _describe_node(node: Any) -> str:
    """A node in words."""
    if type(node) is not dict:
        return tree.describe_node(node)
    tag, body = next(iter(node.items()))
    if tag in ("own", "first"):
        return {"own": "a PerRank", "first": "a Replicated"}[tag]
    text = msgspec.json.encode(body).decode()
    return f"{tag} {text[:_MAX_NODE_CHARS]}" + ("..." if len(text) > _MAX_NODE_CHARS else "")
