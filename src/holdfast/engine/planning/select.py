"""Choosing leaves by patterns over their keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from holdfast.errors import PlanError
from holdfast.format import tree
from holdfast.format.names import join

Selected = Callable[[str], bool]

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
"""Stands for a node where there is none; None is a node (``null``)."""


def everything(key: str) -> bool:
    """The choice where no pattern is given."""
    return True


def selector(patterns: str | Sequence[str] | None) -> Selected:
    """Whether a key matches one of the patterns: ``*`` within a level, ``**`` across levels,
    ``?`` one character; all else stands for itself. A pattern with none of these also matches
    whatever is below that key. None chooses everything."""
    if patterns is None:
        return everything
    several = [patterns] if isinstance(patterns, str) else list(patterns)
    found = re.compile("|".join(f"(?:{_regex(p)})" for p in several), re.DOTALL)
    return lambda key: found.fullmatch(key) is not None


def _regex(pattern: str) -> str:
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    special = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    below = "(?:/.*)?" if len(parts) == 1 else ""
    return "".join(special.get(p) or re.escape(p) for p in parts) + below


def prune(node: Any, selected: Selected, key: str = "") -> Any:
    """The tree without what is not selected; ``ABSENT`` where nothing is left. In lists and
    tuples what is not selected becomes None, so that the rest keeps its place."""
    tag = next(iter(node), None) if type(node) is dict else None
    if tag in ("dict", "ordered", "items"):
        several = [(n, prune(c, selected, k)) for n, c, k in tree.children(node, key)]
        kept = [(i, n, c) for i, (n, c) in enumerate(several) if c is not ABSENT]
        if several and not kept:
            return ABSENT
        if tag == "items":
            return {**node, "items": [[node["items"][i][0], c] for i, _, c in kept]}
        return {**node, tag: {n: c for _, n, c in kept}}
    if tag in ("list", "tuple"):
        parts = [prune(c, selected, join(key, str(i))) for i, c in enumerate(node[tag])]
        if parts and all(p is ABSENT for p in parts):
            return ABSENT
        return {tag: [None if p is ABSENT else p for p in parts]}
    if tag == "sparse":
        chosen = any(selected(k) for k, _ in tree.walk(node, key))
        return _renamed(node, {}, key, set()) if chosen else ABSENT
    if not selected(key):
        return ABSENT
    # its key may be another in the pruned tree, where members that were told apart are gone
    return _at(node, key) if tag in tree.LEAVES else node


def _at(leaf: Any, key: str) -> Any:
    """A leaf's node that says where its bytes are, for a tree in which its key is another."""
    return {**leaf, "tied": leaf.get("tied", key)}


def rename(node: Any, names: Mapping[str, str], key: str = "") -> Any:
    """The tree with members of dicts under other names: ``{"model/old": "model/new"}`` renames
    the member ``old`` of ``model``, and all whose name goes on after it with a dot. A leaf's
    bytes stay under the key that they were saved with, so nodes of leaves get that key.

    Raises ``PlanError`` for a name that would move a member to another place in the tree, that
    fits nothing, or that two members would get.
    """
    for old, new in names.items():
        fits = _same_level(old, new) and _has(node, old, key)
        if not fits and _WILD & set(old + new):
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
    made = _renamed(node, names, key, used)
    if unused := sorted(set(names) - used):
        old = next((o for o in unused if _has(node, names[o], key)), unused[0])
        raise PlanError(
            f"Names to be changed are not in the snapshot: {', '.join(unused)}",
            todo=_advice(node, old, names[old], key),
            leaf=old,
        )
    return made


_WILD = frozenset("*?")
_LOOKED_AT = 10_000


def _same_level(old: str, new: str) -> bool:
    return old.rpartition("/")[0] == new.rpartition("/")[0]


def _has(node: Any, name: str, key: str) -> bool:
    """Whether there is a member of that name."""
    used: set[str] = set()
    _renamed(node, {name: name}, key, used)
    return bool(used)


def _advice(node: Any, old: str, new: str, key: str) -> str:
    """What to write in place of a rename that fits nothing."""
    if old and new and old != new and _same_level(old, new):
        if _has(node, old, key):
            return f"rename={{{old!r}: {new!r}}} renames {old} and all that is below it"
        if _has(node, new, key):
            return f"The snapshot has {new}, so write rename={{{new!r}: {old!r}}}: its name first"
    near = "" if _WILD & set(old) else _near(node, old, key)
    return f"{near}`holdfast show SNAPSHOT --keys '**'` prints the keys"


def _near(node: Any, old: str, key: str) -> str:
    """The key that was meant by one that is not there: with dots for levels, or misspelt."""
    for dots in range(1, old.count(".") + 1):
        if _has(node, slashed := old.replace(".", "/", dots), key):
            return f"Levels are separated by /, so perhaps {slashed}. "
    found = get_close_matches(old, [k for k, _ in tree.walk(node, key)][:_LOOKED_AT], 1, 0.8)
    return f"Perhaps {found[0]}. " if found else ""


def _renamed(node: Any, names: Mapping[str, str], key: str, used: set[str]) -> Any:
    tag = next(iter(node), None) if type(node) is dict else None
    if tag in ("dict", "ordered"):
        members: dict[str, Any] = {}
        for name, child, k in tree.children(node, key):
            target = name
            for old, new in names.items():
                parent, _, last = old.rpartition("/")
                if parent == key and (name == last or name.startswith(last + ".")):
                    target = new.rpartition("/")[2] + name[len(last) :]
                    used.add(old)
            if target in members:
                raise PlanError(f"Two members of {key!r} would be called {target!r}", leaf=k)
            members[target] = _renamed(child, names, k, used)
        return {**node, tag: members}
    if tag == "items":
        several = [_renamed(child, names, k, used) for _, child, k in tree.children(node, key)]
        return {**node, "items": [[n, c] for (n, _), c in zip(node["items"], several, strict=True)]}
    if tag in ("list", "tuple"):
        return {tag: [_renamed(c, names, join(key, str(i)), used) for i, c in enumerate(node[tag])]}
    if tag == "sparse":
        parts = {n: _renamed(p, names, join(key, n), used) for n, p in node[tag]["parts"].items()}
        return {tag: {**node[tag], "parts": parts}}
    if tag in tree.LEAVES:
        return _at(node, key)
    return node
