"""Select leaves by patterns over their keys, and rename members of a tree."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from holdfast.errors import PlanError
from holdfast.format import tree
from holdfast.format.names import join_key

KeyFilter = Callable[[str], bool]

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
"""A placeholder for a node that does not exist. None is a node (``null``)."""


def match_all(key: str) -> bool:
    """Match every key; the filter if no pattern is given."""
    return True


def make_key_filter(patterns: str | Sequence[str] | None) -> KeyFilter:
    """Return a function that returns True if a key matches one of the patterns.

    ``*`` matches within a level, ``**`` across levels, and ``?`` one character. Every other
    character matches itself. A pattern without wildcards also matches all keys below it. None
    matches every key.
    """
    if patterns is None:
        return match_all
    alternatives = map(_pattern_to_regex, [patterns] if isinstance(patterns, str) else patterns)
    regex = re.compile("|".join(f"(?:{a})" for a in alternatives), re.DOTALL)
    return lambda key: regex.fullmatch(key) is not None


def _pattern_to_regex(pattern: str) -> str:
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    wildcards = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    below = "(?:/.*)?" if len(parts) == 1 else ""
    return "".join(wildcards.get(p) or re.escape(p) for p in parts) + below


def prune(node: Any, key_filter: KeyFilter, key: str = "") -> Any:
    """Return the tree without the nodes that are not selected, or ``ABSENT`` if none is selected.

    In lists and tuples, None replaces a node that is not selected, so that the other nodes keep
    their positions.
    """
    tag = next(iter(node), None) if type(node) is dict else None
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
    if tag == "sparse":
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
    """Return the tree with members of dicts renamed.

    ``{"model/old": "model/new"}`` renames the member ``old`` of ``model`` and all members whose
    names start with ``old.``. The bytes of a leaf stay under the key that they were saved with, so
    the node of each leaf refers to that key.

    Raises ``PlanError`` for a rename that would move a member to another level, that matches no
    member, or that gives two members the same name.
    """
    for old, new in renames.items():
        if _WILDCARDS & set(old + new) and not (
            _same_level(old, new) and _has_member(node, old, key)
        ):
            raise PlanError(
                f"Keys to rename must not be patterns, but {old!r}: {new!r} is a pattern",
                todo=_advice(node, old.rstrip("*/"), new.rstrip("*/"), key),
                leaf=old,
            )
        if not _same_level(old, new):
            raise PlanError(
                f"Renaming {old!r} to {new!r} would move it to another level",
                expected="keys that differ only in their last level",
                found=f"{old!r} and {new!r}",
                leaf=old,
            )
    used: set[str] = set()
    renamed = _rename_members(node, renames, key, used)
    if unused := sorted(set(renames) - used):
        old = next((o for o in unused if _has_member(node, renames[o], key)), unused[0])
        raise PlanError(
            f"Keys to rename are not in the snapshot: {', '.join(unused)}",
            todo=_advice(node, old, renames[old], key),
            leaf=old,
        )
    return renamed


_WILDCARDS = frozenset("*?")
_MAX_KEYS_COMPARED = 10_000


def _same_level(old: str, new: str) -> bool:
    return old.rpartition("/")[0] == new.rpartition("/")[0]


def _has_member(node: Any, name: str, key: str) -> bool:
    """Return True if the tree has a member of that name."""
    used: set[str] = set()
    _rename_members(node, {name: name}, key, used)
    return bool(used)


def _advice(node: Any, old: str, new: str, key: str) -> str:
    """Return advice on how to correct a rename that matches nothing."""
    if old and new and old != new and _same_level(old, new):
        if _has_member(node, old, key):
            return f"rename={{{old!r}: {new!r}}} renames {old} and everything below it"
        if _has_member(node, new, key):
            return (
                f"The snapshot has {new}, so write rename={{{new!r}: {old!r}}}:"
                " the name in the snapshot comes first"
            )
    suggestion = "" if _WILDCARDS & set(old) else _suggest_key(node, old, key)
    return f"{suggestion}`holdfast show SNAPSHOT --keys '**'` prints the keys"


def _suggest_key(node: Any, old: str, key: str) -> str:
    """Suggest an existing key for one that does not exist.

    The given key may have dots between levels or may be misspelled.
    """
    for dots in range(1, old.count(".") + 1):
        if _has_member(node, slashed := old.replace(".", "/", dots), key):
            return f"Levels are separated by /; did you mean {slashed}? "
    matches = get_close_matches(
        old, [k for k, _ in tree.walk(node, key)][:_MAX_KEYS_COMPARED], 1, 0.8
    )
    return f"Did you mean {matches[0]}? " if matches else ""


def _rename_members(node: Any, renames: Mapping[str, str], key: str, used_names: set[str]) -> Any:
    tag = next(iter(node), None) if type(node) is dict else None
    if tag in ("dict", "ordered"):
        members: dict[str, Any] = {}
        for name, child, k in tree.children(node, key):
            target = name
            for old, new in renames.items():
                parent, _, last = old.rpartition("/")
                if parent == key and (name == last or name.startswith(last + ".")):
                    target = new.rpartition("/")[2] + name[len(last) :]
                    used_names.add(old)
            if target in members:
                raise PlanError(f"Two members of {key!r} would be called {target!r}", leaf=k)
            members[target] = _rename_members(child, renames, k, used_names)
        return {**node, tag: members}
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
    if tag == "sparse":
        parts = {
            n: _rename_members(p, renames, join_key(key, n), used_names)
            for n, p in node[tag]["parts"].items()
        }
        return {tag: {**node[tag], "parts": parts}}
    return _with_stored_key(node, key) if tag in tree.LEAF_TAGS else node
