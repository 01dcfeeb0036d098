"""Merge the trees of all ranks into one tree.

Equal values are stored once. Members of dicts that only some ranks have are added. Values that
differ between ranks raise an error that names the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from limpet.errors import PlanError
from limpet.format import tree
from limpet.format.names import join_key
from limpet.text import MAX_SHOWN, format_list, format_ranks

_MAX_NODE_CHARS = 60
"""The maximum number of characters of a node that an error message shows."""

Ranks = tuple[int, ...]
NodeVariant = tuple[Any, Ranks]
"""A node and the ranks that have it."""


@dataclass(frozen=True, slots=True)
class RankNodes:
    """Nodes that the trees refer to by key, and the keys of lists to merge.

    ``per_rank``: by key, the node of each rank; ``from_first``: by key, the node of the first rank
    that has one; ``merged_lists``: keys of lists whose length may differ between ranks.
    """

    per_rank: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    from_first: Mapping[str, Any] = field(default_factory=dict)
    merged_lists: frozenset[str] = frozenset()


def merge(trees: Sequence[NodeVariant], rank_nodes: RankNodes) -> Any:
    """Merge the trees of all ranks into the tree of the snapshot.

    ``trees`` has each distinct tree with the ranks that have it, and the tree of rank 0 first.
    Raises ``PlanError`` that names the values that differ and their ranks.
    """
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
        if tag in ("own", "first") and all(_nodes_equal(n, first) for n, _ in nodes):
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
        if not all(_nodes_equal(n, first) for n, _ in nodes):
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
    """Return True if the members of a dict have consistent keys and distinct names.

    Each member must have the same key on all ranks as in the merged dict. The names in the merged
    dict must differ: 1 and True are the same name. 1 and "1" are different names, but their keys
    depend on their positions.
    """
    expected_keys = {(type(name), name): k for name, _, k in merged}
    return len({name for name, _, _ in merged}) == len(merged) and all(
        expected_keys[type(name), name] == k
        for node, _ in nodes
        for name, _, k in tree.children(node, key)
    )


def _nodes_equal(a: Any, b: Any) -> bool:
    """Return True if two nodes are identical: 1, 1.0, and true differ, and so do -0.0 and 0.0."""
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
