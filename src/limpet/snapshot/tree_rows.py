"""The tree of a snapshot as rows: one for every container, leaf, and plain value, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from limpet.format import torch_types, tree
from limpet.format.names import join_key
from limpet.layout.select import make_key_filter
from limpet.snapshot.reader import SnapshotReader
from limpet.text import LongRepr, format_count
from limpet.types import DTYPES

CONTAINER_KINDS = ("dict", "ordered", "counter", "list", "tuple", *tree.PART_TAGS)

_short_repr = LongRepr()
_short_repr.maxlist = _short_repr.maxtuple = _short_repr.maxset = _short_repr.maxdict = 6
_short_repr.maxstring = _short_repr.maxother = 60


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A node of the tree. ``dtype`` and ``shape``: of the stored elements of a leaf or a tied
    tensor. A list or tuple of plain elements only is one value."""

    key: str
    depth: int
    kind: str
    node: Any
    dtype: str | None = None
    shape: tuple[int, ...] | None = None

    @property
    def is_leaf(self) -> bool:
        return self.kind in tree.LEAF_TAGS

    @property
    def has_numbers(self) -> bool:
        """Whether the row is a tensor or an array with elements that are numbers."""
        is_record = self.kind == "array" and len(self.node["array"]) > 2  # rows of bytes
        return self.is_leaf and self.kind != "blob" and self.nbytes > 0 and not is_record

    @property
    def nbytes(self) -> int:
        """Bytes of the elements of a leaf, or of all leaves of a table; 0 for every other row."""
        if self.dtype is None or self.shape is None or not self.is_leaf:
            return self.node["bytes"] if self.kind == "table" else 0
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def tied_to(self) -> str | None:
        """The key of the leaf that contains this tensor, if the row is a ``tied`` one."""
        return self.node["tied"] if self.kind == "tied" else None

    def value(self) -> Any:
        """Return the plain value of a row of kind ``value``."""
        return tree.decode(self.node, self.key, _describe)


def format_short(value: Any) -> str:
    """Format a plain value as its ``repr``, shortened if it is long."""
    return _short_repr.repr(value)


def iter_tree_rows(snapshot: SnapshotReader, *, by_table: bool = False) -> Iterator[TreeRow]:
    """Yield all rows below the root, in the order of the tree. ``by_table``: an embedding table is
    one, of the kind ``table``, whose ``node`` has its rows, dim, dtype, segments, and bytes."""
    above, tables = "", snapshot.read_metadata("tables") if by_table else None
    for row in _walk(snapshot, snapshot.manifest.tree, "", -1):
        fields = row.node["dict"] if row.kind == "dict" and row.key in (tables or ()) else {}
        if {"rows", "dim", "dtype", "segments"} <= fields.keys():
            above = f"{row.key}/"
            inside = (spec for key, spec in snapshot.leaves.items() if key.startswith(above))
            node = {name: fields[name] for name in ("rows", "dim", "dtype")}
            node["segments"] = len(fields["segments"]["dict"])
            node["bytes"] = sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in inside)
            yield TreeRow(row.key, row.depth, "table", node)
        elif row.depth >= 0 and not (above and row.key.startswith(above)):
            yield row


def describe_rows(rows: Sequence[TreeRow]) -> Iterator[tuple[TreeRow, str, int | None]]:
    """Yield each row with a description, and the bytes of its elements, if it has any."""
    for row, (leaves, nbytes) in zip(rows, subtree_totals(rows), strict=True):
        if row.kind in CONTAINER_KINDS:
            count = format_count(leaves, "leaf", "leaves") if leaves else "empty"
            yield row, f"{_container_name(row)}, {count}", nbytes or None
        elif row.kind == "value":
            yield row, format_short(row.value()), None
        elif row.kind == "table":
            length, dim, dtype, segments, _ = row.node.values()
            text = f"table, {length:,} rows of {dim} {dtype}, {format_count(segments, 'segment')}"
            yield row, text, row.nbytes
        else:
            yield row, _describe_leaf(row), row.nbytes if row.is_leaf else None


def _container_name(row: TreeRow) -> str:
    """Return what a container is: the class of a tensor subclass; ``dict`` for a module."""
    if row.kind == "subclass":
        return str(row.node["subclass"]["class"]).rpartition(".")[2]
    return "dict" if "metadata" in row.node else row.kind


def subtree_totals(rows: Sequence[TreeRow]) -> list[list[int]]:
    """Return the number of leaves and values below each row, and the bytes of the leaves."""
    totals = [[0, 0] for _ in rows]
    above: list[tuple[int, list[int]]] = []  # the depth and the totals of each open container
    for row, own in zip(rows, totals, strict=True):
        while above and above[-1][0] >= row.depth:
            above.pop()
        if row.kind in CONTAINER_KINDS:
            above.append((row.depth, own))
            continue
        nbytes = row.nbytes
        for _, total in above:
            total[0] += 1
            total[1] += nbytes
    return totals


def _describe_leaf(row: TreeRow) -> str:
    shape = ", ".join(map(str, row.shape or ()))
    if row.kind == "blob":
        return f"{row.node['blob'][0]} [{shape}]"
    if row.kind == "array" and len(row.node["array"]) > 2:
        shape = ", ".join(map(str, (row.shape or ())[:-1]))  # the last dimension counts bytes
        return f"array {row.node['array'][2]} [{shape}]"
    kind = "array " if row.kind == "array" else ""
    tied = f" = {row.tied_to}" if row.tied_to is not None else ""
    return f"{kind}{row.dtype} [{shape}]{tied}"


def filter_rows(rows: Iterable[TreeRow], keys: Sequence[str]) -> Iterable[TreeRow]:
    """Return the rows whose key matches, without containers; all rows if there are no patterns."""
    if not keys:
        return rows
    selected = make_key_filter(keys)
    return (
        r
        for r in rows
        if (r.kind not in CONTAINER_KINDS and selected(r.key))
        or (r.kind == "value" and _matches_element(r, selected))
    )


def _matches_element(row: TreeRow, selected: Callable[[str], bool]) -> bool:
    """Return True if a pattern matches an element of a list that is shown as one value."""
    is_list = tree.tag_of(row.node) in ("list", "tuple")
    return is_list and any(selected(f"{row.key}/{i}") for i in range(len(row.value())))


def _walk(snapshot: SnapshotReader, node: Any, key: str, depth: int) -> Iterator[TreeRow]:
    tag = tree.tag_of(node)
    if tag in ("dict", "ordered", "items"):
        yield TreeRow(key, depth, node["of"] if tag == "items" else tag, node)
        for _, child, k in tree.children(node, key):
            yield from _walk(snapshot, child, k, depth + 1)
    elif tag in ("list", "tuple") and not all(map(_is_plain_value, node[tag])):
        yield TreeRow(key, depth, tag, node)
        for i, child in enumerate(node[tag]):
            yield from _walk(snapshot, child, join_key(key, str(i)), depth + 1)
    elif tag in tree.PART_TAGS:
        yield TreeRow(key, depth, tag, node)
        for part, k in tree.parts(node, key):
            yield from _walk(snapshot, part, k, depth + 1)
    elif tag == "tied" or tag in tree.LEAF_TAGS:
        leaf = snapshot.leaves.get(node["tied"] if tag == "tied" else key)
        dtype, shape = leaf or (None, None)
        yield TreeRow(key, depth, tag, node, dtype=dtype, shape=shape)
    else:
        yield TreeRow(key, depth, "value", node)


def _describe(node: Any, key: str) -> Any:
    """Return one of torch's types as text: a command does not import torch."""
    if torch_types.TAGS.isdisjoint(node):
        return tree.reject_leaf(node, key)
    return torch_types.describe(node)


def _is_plain_value(node: Any) -> bool:
    """Return True if a node is a single value without members."""
    plain_tags = ("int", "float", "complex", "bytes", "bytearray", "scalar", *torch_types.TAGS)
    return type(node) is not dict or next(iter(node)) in plain_tags
