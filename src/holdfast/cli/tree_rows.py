"""A snapshot's tree as rows: one for every container, leaf and plain value, in order."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.format import tree
from holdfast.format.names import join
from holdfast.types import DTYPES

CONTAINERS = ("dict", "ordered", "counter", "list", "tuple", "sparse")

_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 6
_short.maxstring = _short.maxother = 60


@dataclass(frozen=True, slots=True)
class Row:
    """A node of the tree. ``kind``: a container, ``tensor``, ``array``, ``blob``, ``tied`` or
    ``value``; ``dtype`` and ``shape`` (of the stored elements) are those of leaves. A list whose
    elements are all plain is one value."""

    key: str
    depth: int
    kind: str
    node: Any
    dtype: str | None = None
    shape: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The last level of its key."""
        return self.key.rpartition("/")[2]

    @property
    def is_leaf(self) -> bool:
        return self.kind in tree.LEAVES

    @property
    def nbytes(self) -> int:
        """Bytes of a leaf's elements; 0 for all else."""
        if self.dtype is None or self.shape is None or not self.is_leaf:
            return 0
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def tied(self) -> str | None:
        """The key of the leaf that this one is the same tensor as."""
        return self.node["tied"] if self.kind == "tied" else None

    def value(self) -> Any:
        """The plain value of a ``value``."""
        return tree.decode(self.node, self.key, tree.refuse_leaf)

    def text(self) -> str:
        """A plain value, short."""
        return short(self.value())


def short(value: Any) -> str:
    """A plain value as Python writes it, cut where it is long."""
    return _short.repr(value)


def rows(snapshot: Snapshot) -> Iterator[Row]:
    """All rows below the root."""
    for row in _rows(snapshot, snapshot.manifest.tree, "", -1):
        if row.depth >= 0:
            yield row


def _rows(snapshot: Snapshot, node: Any, key: str, depth: int) -> Iterator[Row]:
    tag = next(iter(node), "") if type(node) is dict else ""
    if tag in ("dict", "ordered", "items"):
        yield Row(key, depth, node["of"] if tag == "items" else tag, node)
        for _, child, k in tree.children(node, key):
            yield from _rows(snapshot, child, k, depth + 1)
    elif tag in ("list", "tuple") and not all(map(_plain, node[tag])):
        yield Row(key, depth, tag, node)
        for i, child in enumerate(node[tag]):
            yield from _rows(snapshot, child, join(key, str(i)), depth + 1)
    elif tag == "sparse":
        yield Row(key, depth, tag, node)
        for name, part in node[tag]["parts"].items():
            yield from _rows(snapshot, part, join(key, name), depth + 1)
    elif tag == "tied" or tag in tree.LEAVES:
        leaf = snapshot.leaves.get(node["tied"] if tag == "tied" else key)
        yield Row(key, depth, tag, node, *(leaf or ()))
    else:
        yield Row(key, depth, "value", node)


def _plain(node: Any) -> bool:
    """Whether a node is a value without parts of its own."""
    if type(node) is not dict:
        return True
    return next(iter(node)) in ("int", "float", "complex", "bytes", "bytearray", "scalar")
