"""Choosing leaves by patterns over their keys."""

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
"""Stands for a node where there is none; None is a node (``null``)."""


def match_all(key: str) -> bool:
    """The choice where no pattern is given."""
    return True


def make_key_filter(patterns: str | Sequence[str] | None) -> KeyFilter:
    """Whether a key matches one of the patterns: ``*`` within a level, ``**`` across levels,
    ``?`` one character; all else stands for itself. A pattern with none of these also matches
    whatever is below that key. None chooses everything."""
    if patterns is None:
        return match_all
    several = [patterns] if isinstance(patterns, str) else list(patterns)
    found = re.compile("|".join(f"(?:{_pattern_to_regex(p)})" for p in several), re.DOTALL)
    return lambda key: found.fullmatch(key) is not None


def _pattern_to_regex(pattern: str) -> str:
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    special = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    below = "(?:/.*)?" if len(parts) == 1 else ""
    return "".join(special.get(p) or re.escape(p) for p in parts) + below


def prune(node: Any, key_filter: KeyFilter, key: str = "") -> Any:
    """The tree without what is not selected; ``ABSENT`` where nothing is left. In lists and
    tuples what is not selected becomes None, so that the rest keeps its place."""
    tag = next(iter(node), None) if type(node) is dict else None
    if tag in ("dict", "ordered", "items"):
        several = [(n, prune(c, key_filter, k)) for n, c, k in tree.children(node, key)]
        kept = [(i, n, c) for i, (n, c) in enumerate(several) if c is not ABSENT]
        if several and not kept:
            return ABSENT
        if tag == "items":
            return {**node, "items": [[node["items"][i][0], c] for i, _, c in kept]}
        return {**node, tag: {n: c for _, n, c in kept}}
    if tag in ("list", "tuple"):
        parts = [prune(c, key_filter, join_key(key, str(i))) for i, c in enumerate(node[tag])]
        if parts and all(p is ABSENT for p in parts):
            return ABSENT
        return {tag: [None if p is ABSENT else p for p in parts]}
    if tag == "sparse":
        chosen = any(key_filter(k) for k, _ in tree.walk(node, key))
        return _rename_members(node, {}, key, set()) if chosen else ABSENT
    if not key_filter(key):
        return ABSENT
    # its key may be another in the pruned tree, where members that were told apart are gone
    return _with_stored_key(node, key) if tag in tree.LEAF_TAGS else node


def _with_stored_key(leaf: Any, key: str) -> Any:
    """A leaf's node that says where its bytes are, for a tree in which its key is another."""
    return {**leaf, "tied": leaf.get("tied", key)}


def rename(node: Any, renames: Mapping[str, str], key: str = "") -> Any:
    """The tree with members of dicts under other names: ``{"model/old": "model/new"}`` renames
    the member ``old`` of ``model``, and all whose name goes on after it with a dot. A leaf's
    bytes stay under the key that they were saved with, so nodes of leaves get that key.

    Raises ``PlanError`` for a name that would move a member to another place in the tree, that
    fits nothing, or that two members would get.
    """
    for old, new in renames.items():
        fits = _same_level(old, new) and _has_member(node, old, key)
        if not fits and _WILDCARDS & set(old + new):
            raise PlanError(
                f"Names to be changed are no patterns, but {old!r}: {new!r} is one",
                todo=_advice(node, old.rstrip("*/"), new.rstrip("*/"), key),
                leaf=old,
            )
        if not _same_level(old, new):
            raise PlanError(
                f"Renaming {old!r} to {new!r} would move it to another level",
                expected="names that differ in their last level only",
                found=f"{old!r} and {new!r}",
                leaf=old,
            )
    used: set[str] = set()
    made = _rename_members(node, renames, key, used)
    if unused := sorted(set(renames) - used):
        old = next((o for o in unused if _has_member(node, renames[o], key)), unused[0])
        raise PlanError(
            f"Names to be changed are not in the snapshot: {', '.join(unused)}",
            todo=_advice(node, old, renames[old], key),
            leaf=old,
        )
    return made


_WILDCARDS = frozenset("*?")
_MAX_KEYS_COMPARED = 10_000


def _same_level(old: str, new: str) -> bool:
    return old.rpartition("/")[0] == new.rpartition("/")[0]


def _has_member(node: Any, name: str, key: str) -> bool:
    """Whether there is a member of that name."""
    used: set[str] = set()
    _rename_members(node, {name: name}, key, used)
    return bool(used)


def _advice(node: Any, old: str, new: str, key: str) -> str:
    """What to write in place of a rename that fits nothing."""
    if old and new and old != new and _same_level(old, new):
        if _has_member(node, old, key):
            return f"rename={{{old!r}: {new!r}}} renames {old} and all that is below it"
        if _has_member(node, new, key):
            return f"The snapshot has {new}, so write rename={{{new!r}: {old!r}}}: its name first"
    near = "" if _WILDCARDS & set(old) else _suggest_key(node, old, key)
    return f"{near}`holdfast show SNAPSHOT --keys '**'` prints the keys"


def _suggest_key(node: Any, old: str, key: str) -> str:
    """The key that was meant by one that is not there: with dots for levels, or misspelt."""
    for dots in range(1, old.count(".") + 1):
        if _has_member(node, slashed := old.replace(".", "/", dots), key):
            return f"Levels are separated by /, so perhaps {slashed}. "
    found = get_close_matches(
        old, [k for k, _ in tree.walk(node, key)][:_MAX_KEYS_COMPARED], 1, 0.8
    )
    return f"Perhaps {found[0]}. " if found else ""


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
        several = [
            _rename_members(child, renames, k, used_names)
            for _, child, k in tree.children(node, key)
        ]
        return {**node, "items": [[n, c] for (n, _), c in zip(node["items"], several, strict=True)]}
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
    if tag in tree.LEAF_TAGS:
        return _with_stored_key(node, key)
    return node
