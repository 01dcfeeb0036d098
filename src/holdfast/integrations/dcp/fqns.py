"""Names of ``torch.distributed.checkpoint`` (DCP) and the tree of a snapshot, one from the other.

DCP flattens a nested state: ``{"model": {"fc.weight": t}}`` becomes ``model.fc.weight``, its FQN,
and a mapping keeps the path ``("model", "fc.weight")``. By the path the tree has the nested state
again, and the leaf has the key ``model/fc.weight``. The way back is to join a path by dots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from holdfast.errors import PlanError
from holdfast.format import tree
from holdfast.format.names import escape_level, join_key

ObjectPath = tuple[str | int, ...]

_DICT_TAGS = ("dict", "ordered", "items")
_TENSOR_TAGS = ("tensor", "tied", "sparse")


class FqnEntry(NamedTuple):
    """What stands under one FQN: its path in the state, its key and node in the tree."""

    path: ObjectPath
    key: str
    node: Any

    @property
    def is_tensor(self) -> bool:
        """Whether DCP sees a tensor; all else are bytes to it, sparse tensors too."""
        return type(self.node) is dict and next(iter(self.node)) in ("tensor", "tied")


def fqn_of(path: ObjectPath) -> str:
    return ".".join(map(str, path))


def path_of(fqn: str, mapping: Any) -> ObjectPath:
    """Where in the nested state a name stands, if ``mapping`` is what DCP's planner makes and says
    so; else the name is one level."""
    path = mapping.get(fqn) if isinstance(mapping, Mapping) else None
    levels = isinstance(path, tuple) and all(
        type(level) is str or (type(level) is int and level >= 0) for level in path
    )
    return path if levels and path and fqn_of(path) == fqn else (fqn,)


def key_of(path: ObjectPath) -> str:
    """The key of the leaf at a path."""
    return "/".join(escape_level(str(level)) for level in path)


def build_tree(leaves: Mapping[ObjectPath, Any]) -> Any:
    """The tree with these leaves: dicts where levels are names, lists where they are numbers.

    Raises ``PlanError`` where two paths contradict each other.
    """
    members: dict[ObjectPath, dict[str | int, None]] = {(): {}}
    for path in leaves:
        for depth, level in enumerate(path):
            members.setdefault(path[:depth], {})[level] = None

    def node(path: ObjectPath) -> Any:
        levels = members.get(path)
        if levels is None:
            return leaves[path]
        kinds = {type(level) for level in levels}
        if path in leaves or len(kinds) > 1:
            raise PlanError(
                f"What DCP calls {fqn_of(path)!r} is two things at once",
                expected="a tensor, a value, a dict or a list, the same on all ranks",
                found=", ".join(fqn_of((*path, level)) for level in list(levels)[:5]),
                todo="Give the members of the state other names",
            )
        if kinds == {int}:
            last = max(level for level in levels if type(level) is int)
            return {"list": [node((*path, i)) if i in levels else None for i in range(last + 1)]}
        return {"dict": {str(level): node((*path, level)) for level in levels}}

    return node(())


def collect_entries(root: Any, flattened: bool) -> dict[str, FqnEntry]:
    """What DCP finds in a tree, by FQN. ``flattened``: the tree was built from DCP's leaves;
    otherwise it is cut into leaves where DCP's planner would cut the same state.

    Raises ``PlanError`` if two leaves have one FQN.
    """
    found: dict[str, FqnEntry] = {}
    for entry in _walk(FqnEntry((), "", root), flattened):
        if flattened and (type(entry.node) is not dict or not _is_leaf(entry.node)):
            continue  # None stands where a list has no member that was saved
        fqn = fqn_of(entry.path)
        if found.setdefault(fqn, entry) is not entry:
            raise PlanError(
                f"DCP calls two leaves of this snapshot {fqn!r}",
                found=f"{found[fqn].key} and {entry.key}",
                todo="Load it by holdfast.load, whose keys tell them apart",
                leaf=entry.key,
            )
    return found


def mapping_of(entries: Mapping[str, FqnEntry]) -> dict[str, ObjectPath]:
    """The mapping that DCP's planner makes of a state with these names."""
    return {fqn: entry.path for fqn, entry in entries.items()}


def _is_leaf(node: dict[str, Any]) -> bool:
    return next(iter(node)) in tree.LEAF_TAGS


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
    """Whether DCP takes a list with these nodes as one value: it has no tensor and no dict in it,
    nor a list that has."""
    for node in members:
        tag = next(iter(node)) if type(node) is dict else None
        if tag in _DICT_TAGS or tag in _TENSOR_TAGS:
            return False
        if tag == "list" and not _is_terminal(node["list"]):
            return False
    return True
