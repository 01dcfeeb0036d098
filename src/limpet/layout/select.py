"""Select leaves by patterns over their keys, and rename members of a tree."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from limpet.errors import PlanError
from limpet.format import tree
from limpet.format.names import join_key

KeyFilter = Callable[[str], bool]

NumberedRenames = dict[str, tuple[int, str]]
"""By the old name: the number of a rename, and the new name."""

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
"""A placeholder for a node that does not exist. None is a node (``null``)."""


def match_all(key: str) -> bool:
    """Match every key; the filter if no pattern is given."""
    return True


def make_key_filter(patterns: str | Sequence[str] | None) -> KeyFilter:
    """Return a function that returns True if a key matches one of the patterns; None: all match.
    One without wildcards also matches the keys that continue it with a slash or a dot."""
    if patterns is None:
        return match_all
    plain: set[str] = set()
    # by the levels before the first wildcard, so that the time per key does not depend on the
    # number of patterns: a program may list thousands of them
    regexes: defaultdict[str, list[str]] = defaultdict(list)
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        literal, *wild = re.split(r"(\*\*|\*|\?)", pattern)
        if not wild:
            plain.add(literal)
        else:
            wildcards = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
            regex = "".join(wildcards.get(p) or re.escape(p) for p in wild)
            regexes[literal.rpartition("/")[0]].append(re.escape(literal) + regex)
    compiled = {
        level: re.compile("|".join(f"(?:{r})" for r in group), re.DOTALL)
        for level, group in regexes.items()
    }
    above_all = compiled.pop("", None)

    def matches(key: str) -> bool:
        if above_all is not None and above_all.fullmatch(key):
            return True
        levels = [key[: m.start()] for m in re.finditer("[/.]", key)]
        return (
            key in plain
            or not plain.isdisjoint(levels)
            or any(level in compiled and compiled[level].fullmatch(key) for level in levels)
        )

    return matches


match_none = make_key_filter(())


def prune(node: Any, key_filter: KeyFilter, key: str = "") -> Any:
    """Return the tree without the nodes that are not selected, or ``ABSENT``. In lists and tuples,
    None replaces them, so that the others keep their positions."""
    tag = tree.tag_of(node)
    if tag in ("dict", "ordered", "items"):
        members = [(n, prune(c, key_filter, k)) for n, c, k in tree.children(node, key)]
        kept = [(i, n, c) for i, (n, c) in enumerate(members) if c is not ABSENT]
        if members and not kept:
            return ABSENT
        if tag == "items":
            return {**node, "items": [[node["items"][i][0], c] for i, _, c in kept]}
        return {**node, tag: {n: c for _, n, c in kept}}
    if tag in ("list", "tuple"):
        elements = [prune(c, key_filter, join_key(key, str(i))) for i, c in enumerate(node[tag])]
        if elements and all(p is ABSENT for p in elements):
            return ABSENT
        return {tag: [None if p is ABSENT else p for p in elements]}
    if tag in tree.PART_TAGS:
        chosen = any(key_filter(k) for k, _ in tree.walk(node, key))
        return _rename_members(node, {}, key, set()) if chosen else ABSENT
    if not key_filter(key):
        return ABSENT
    # A leaf's key may change in the pruned tree if members with colliding names are gone.
    return _with_stored_key(node, key) if tag in tree.LEAF_TAGS else node


def _with_stored_key(leaf: Any, key: str) -> Any:
    """Return a leaf's node that names the key of its bytes, for a tree in which its key differs."""
    return {**leaf, "tied": leaf.get("tied", key)}


def rename(node: Any, renames: Mapping[str, str], key: str = "") -> Any:
    """Return the tree with members, and those that continue them with a dot, renamed. Raises
    ``PlanError`` for another level, no match, or two members with one name."""
    for old, new in renames.items():
        if old.rpartition("/")[0] != new.rpartition("/")[0]:
            raise PlanError(
                f"Renaming {old!r} to {new!r} would move it to another level",
                expected="keys that differ only in their last level",
                found=f"{old!r} and {new!r}",
                leaf=old,
            )
    used: set[str] = set()
    renamed = _rename_members(node, number_renames(renames), key, used)
    if unused := sorted(set(renames) - used):
        raise PlanError(
            f"Keys to rename are not in the snapshot: {', '.join(unused)}",
            todo="Write rename={'name in the snapshot': 'new name'}. There are no wildcards: a name"
            " includes what is below it. `limpet show SNAPSHOT --keys '**'` prints the keys",
            leaf=unused[0],
        )
    return renamed


def number_renames(renames: Mapping[str, str]) -> NumberedRenames:
    """Return the renames for ``find_renames``."""
    return {old: (number, new) for number, (old, new) in enumerate(renames.items())}


def find_renames(name: Any, renames: NumberedRenames) -> list[tuple[int, str, str]]:
    """Return the renames of a name, each as its number, its old name, and its new one. The last one
    applies. A rename is for a name, and for every name that continues it with a dot."""
    if not renames or type(name) is not str:
        return []
    prefixes = [name[: m.start()] for m in re.finditer(r"\.", name)]
    found = ((old, renames[old]) for old in (*prefixes, name) if old in renames)
    return sorted((number, old, new) for old, (number, new) in found)


def _rename_members(node: Any, renames: NumberedRenames, key: str, used_names: set[str]) -> Any:
    tag = tree.tag_of(node)
    if tag in ("dict", "ordered"):
        members: dict[str, Any] = {}
        for name, child, k in tree.children(node, key):
            target = name
            # a name with a slash has no rename, because the last level of a rename has none
            for _, old, new in find_renames(
                join_key(key, name) if "/" not in name else "", renames
            ):
                if old.rpartition("/")[0] == key:
                    target = new.rpartition("/")[2] + join_key(key, name)[len(old) :]
                    used_names.add(old)
            if target in members:
                raise PlanError(f"Two members of {key!r} would be called {target!r}", leaf=k)
            members[target] = _rename_members(child, renames, k, used_names)
        metadata = {}
        if "metadata" in node:  # of submodules, by the names of their members
            metadata["metadata"] = _rename_members(node["metadata"], renames, key, set())
        return {**node, tag: members, **metadata}
    if tag == "items":
        children = zip(node["items"], tree.children(node, key), strict=True)
        renamed = [
            [n, _rename_members(c, renames, k, used_names)] for (n, _), (_, c, k) in children
        ]
        return {**node, "items": renamed}
    if tag in ("list", "tuple"):
        return {
            tag: [
                _rename_members(c, renames, join_key(key, str(i)), used_names)
                for i, c in enumerate(node[tag])
            ]
        }
    if tag in tree.PART_TAGS:
        placed = zip(node[tag]["parts"], tree.parts(node, key), strict=True)
        parts = {n: _rename_members(p, renames, k, used_names) for n, (p, k) in placed}
        return {tag: {**node[tag], "parts": parts}}
    return _with_stored_key(node, key) if tag in tree.LEAF_TAGS else node
