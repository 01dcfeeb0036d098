"""Convert between the names of ``torch.distributed.checkpoint`` (DCP) and the tree of a snapshot.

DCP flattens ``{"model": {"fc.weight": t}}`` to the FQN ``model.fc.weight``, and records the path
``("model", "fc.weight")``, with which the tree has the nested state again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from limpet.errors import PlanError
from limpet.format import tree
from limpet.format.names import escape_level, join_key

ObjectPath = tuple[str | int, ...]

_DICT_TAGS = ("dict", "ordered", "items")
_TENSOR_TAGS = ("tensor", "tied", "sparse")


class FqnEntry(NamedTuple):
    """The entry of one FQN: its path in the state, and its key and node in the tree."""

    path: ObjectPath
    key: str
    node: Any

    @property
    def is_tensor(self) -> bool:
        """True if DCP treats the entry as a tensor, not as bytes (as it does sparse tensors)."""
        return type(self.node) is dict and next(iter(self.node)) in ("tensor", "tied")


def fqn_of(path: ObjectPath) -> str:
    return ".".join(map(str, path))


def path_of(fqn: str, mapping: Any) -> ObjectPath:
    """Return the path of an FQN in the nested state: a single level if ``mapping``, of DCP's
    planner, has no valid path of it."""
    path = mapping.get(fqn) if isinstance(mapping, Mapping) else None
    is_path = isinstance(path, tuple) and all(
        type(level) is str or (type(level) is int and level >= 0) for level in path
    )
    return path if is_path and path and fqn_of(path) == fqn else (fqn,)


def key_of(path: ObjectPath) -> str:
    """Return the key of the leaf at a path."""
    return "/".join(escape_level(str(level)) for level in path)


def build_tree(leaves: Mapping[ObjectPath, Any]) -> Any:
    """Return the tree with these leaves: names become dicts, numbers lists. Raises ``PlanError`` if
    two paths contradict each other."""
    members: dict[ObjectPath, dict[str | int, None]] = {(): {}}
    for path in leaves:
        for depth, level in enumerate(path):
            members.setdefault(path[:depth], {})[level] = None

    def build_node(path: ObjectPath) -> Any:
        levels = members.get(path)
        if levels is None:
            return leaves[path]
        kinds = {type(level) for level in levels}
        if path in leaves or len(kinds) > 1:
            raise PlanError(
                f"DCP uses the name {fqn_of(path)!r} for two different values",
                expected="one tensor, value, dict, or list, the same on all ranks",
                found=", ".join(fqn_of((*path, level)) for level in list(levels)[:5]),
                todo="Rename members of the state",
            )
        if kinds == {int}:
            last = max(level for level in levels if type(level) is int)
            return {
                "list": [build_node((*path, i)) if i in levels else None for i in range(last + 1)]
            }
        return {"dict": {str(level): build_node((*path, level)) for level in levels}}

    return build_node(())


def collect_entries(root: Any, flattened: bool) -> dict[str, FqnEntry]:
    """Return the entries of a tree by FQN, split where DCP's planner would split the state unless
    DCP's leaves made it (``flattened``). Raises ``PlanError`` for two leaves with one FQN."""
    entries: dict[str, FqnEntry] = {}
    for entry in _walk(FqnEntry((), "", root), flattened):
        if flattened and tree.tag_of(entry.node) not in tree.LEAF_TAGS:
            continue  # None fills the positions of a list that have no saved member
        fqn = fqn_of(entry.path)
        if entries.setdefault(fqn, entry) is not entry:
            raise PlanError(
                f"DCP uses the name {fqn!r} for two leaves of this snapshot",
                found=f"{entries[fqn].key} and {entry.key}",
                todo="Load it with limpet.load, whose keys are unique",
                leaf=entry.key,
            )
    return entries


def mapping_of(entries: Mapping[str, FqnEntry]) -> dict[str, ObjectPath]:
    """Return the mapping that DCP's planner creates for a state with these entries."""
    return {fqn: entry.path for fqn, entry in entries.items()}


def _walk(entry: FqnEntry, flattened: bool) -> Iterator[FqnEntry]:
    tag = next(iter(entry.node)) if type(entry.node) is dict else None
    if tag in _DICT_TAGS:
        for name, child, key in tree.children(entry.node, entry.key):
            yield from _walk(FqnEntry((*entry.path, str(name)), key, child), flattened)
    elif tag == "list" and (flattened or not _is_terminal(entry.node["list"])):
        for i, child in enumerate(entry.node["list"]):
            yield from _walk(
                FqnEntry((*entry.path, i), join_key(entry.key, str(i)), child), flattened
            )
    else:
        yield entry


def _is_terminal(members: Iterable[Any]) -> bool:
    """Return True if DCP treats a list as one value: no list in it has a tensor or dict."""
    for node in members:
        tag = next(iter(node)) if type(node) is dict else None
        if tag in (*_DICT_TAGS, *_TENSOR_TAGS) or (
            tag == "list" and not _is_terminal(node["list"])
        ):
            return False
    return True
