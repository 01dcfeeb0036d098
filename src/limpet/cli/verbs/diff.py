"""``limpet diff A B``: compare two snapshots, down to the bytes of each leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import click

from limpet.cli.console import print_line, print_table, progress_bar
from limpet.cli.exit_codes import DIFFERS
from limpet.cli.output import json_option, keys_option, print_result
from limpet.cli.resolve import find_problem, resolve_snapshot
from limpet.format import tree
from limpet.format.config import compare_configs, describe_change
from limpet.format.names import join_key
from limpet.layout.select import make_key_filter, match_all
from limpet.lazy_torch import import_torch
from limpet.snapshot.compare import LeafPair, compare_bytes, find_equal_by_digest
from limpet.snapshot.reader import SnapshotReader
from limpet.snapshot.tree_rows import (
    CONTAINER_KINDS,
    TreeRow,
    filter_rows,
    format_short,
    iter_tree_rows,
)
from limpet.text import format_count, format_size
from limpet.types import DTYPES


@dataclass(frozen=True, slots=True)
class Change:
    """A difference at one key of both. ``aspect``: kind, dtype, shape, name, metadata, value, or
    bytes, of whose ``elements`` ``differing`` differ, by at most ``max_difference``. Or rows (or
    candidates) of a table: only one has ``a`` or ``b``; of the others, some differ in values, some
    in slots or counts."""

    key: str
    aspect: str
    a: Any = None
    b: Any = None
    elements: int | None = None
    differing: int | None = None
    differing_slots: int | None = None
    max_difference: float | None = None


@dataclass(slots=True)
class Differences:
    """The differences between two snapshots; ``bytes_read``: of each, but for rows of tables."""

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    equal_count: int = 0
    bytes_read: int = 0

    @property
    def is_same(self) -> bool:
        return not (self.only_a or self.only_b or self.changes)


@click.command("diff")
@click.argument("a")
@click.argument("b")
@keys_option
@json_option
@click.pass_context
def command(ctx: click.Context, a: str, b: str, keys: Sequence[str], as_json: bool) -> None:
    """Compare the snapshots A and B: leaves, shapes, dtypes, values, and every byte.

    Leaves whose digests are equal are not read. The exit code is 0 if both contain the same state,
    and 7 if not.
    """
    first, second = resolve_snapshot(a), resolve_snapshot(b)
    if problem := find_problem(first) or find_problem(second):
        raise problem
    differences = compare_snapshots(first, second, keys, quiet=as_json)
    print_result(as_json, _build_document, render, first, second, differences)
    if not differences.is_same:
        ctx.exit(DIFFERS)


def compare_snapshots(
    a: SnapshotReader, b: SnapshotReader, keys: Sequence[str] = (), *, quiet: bool = True
) -> Differences:
    """Return the differences of two snapshots, of all keys or those that match ``keys``."""
    is_selected = make_key_filter([*keys]) if keys else match_all
    in_b = b.read_metadata("tables") or ()
    tables = [key for key in a.read_metadata("tables") or () if key in in_b and is_selected(key)]
    parts = ("segments", "candidates", "first_buckets")  # how the rows are stored
    stored = tuple(f"{key}/{part}" for key in tables for part in parts)
    rows_a, rows_b = (
        {r.key: r for r in filter_rows(iter_tree_rows(each), keys) if not r.key.startswith(stored)}
        for each in (a, b)
    )
    differences = Differences(
        only_a=_topmost_keys([k for k in rows_a if k not in rows_b]),
        only_b=_topmost_keys([k for k in rows_b if k not in rows_a]),
    )
    pairs: list[LeafPair] = []
    for key, row in rows_a.items():
        other = rows_b.get(key)
        if other is None:
            continue
        change = _compare_rows(row, other)
        if change is not None:
            differences.changes.append(change)
        elif row.dtype is not None:
            pairs.append((row.tied_to or key, other.tied_to or key))
        elif row.kind == "value":
            differences.equal_count += 1
    _compare_leaves(a, b, pairs, differences, quiet)
    if tables:
        import_torch("Comparing the rows of tables needs PyTorch")
        from limpet.tables.view import compare_tables

        differences.changes += [Change(*found) for found in compare_tables(a, b, tables)]
    order = {key: i for i, key in enumerate(rows_a)}
    differences.changes.sort(key=lambda c: order.get(c.key, 0))
    return differences


def _topmost_keys(keys: list[str]) -> list[str]:
    """Return the keys that are not below another one of them."""
    key_set = set(keys)
    return [k for k in keys if not any(k[:i] in key_set for i, c in enumerate(k) if c == "/")]


def _compare_rows(a: TreeRow, b: TreeRow) -> Change | None:
    """Return the difference that the trees show, without the bytes; None if there is none."""
    if (a.dtype is None) != (b.dtype is None) or (a.dtype is None and a.kind != b.kind):
        return Change(a.key, "kind", a.kind, b.kind)
    if a.dtype != b.dtype:
        return Change(a.key, "dtype", a.dtype, b.dtype)
    if a.shape != b.shape:
        return Change(a.key, "shape", a.shape, b.shape)
    if a.is_leaf and b.is_leaf and _leaf_kind(a) != _leaf_kind(b):
        return Change(a.key, "kind", _leaf_kind(a), _leaf_kind(b))
    # compare the repr: in Python, 1, 1.0, and True are equal, and so are 0.0 and -0.0
    if a.kind == "value" and repr(a.node) != repr(b.node):
        return Change(a.key, "value", a.value(), b.value())
    if a.kind != b.kind and "tied" not in (a.kind, b.kind):
        return Change(a.key, "kind", _leaf_kind(a), _leaf_kind(b))
    if a.kind in CONTAINER_KINDS:
        return _compare_containers(a, b)
    return None


def _leaf_kind(row: TreeRow) -> str:
    """Return what a leaf is, apart from its dtype and shape."""
    if row.kind == "blob":
        return str(row.node["blob"][0])
    if row.kind == "array" and len(row.node["array"]) > 2:
        return f"array of {row.node['array'][2]}"
    return row.kind


def _compare_containers(a: TreeRow, b: TreeRow) -> Change | None:
    """Return the difference between two containers of one kind, apart from their members."""
    if a.kind in tree.PART_TAGS:
        x, y = ({k: v for k, v in r.node[r.kind].items() if k != "parts"} for r in (a, b))
        return Change(a.key, "kind", x, y) if x != y else None
    if a.kind in ("list", "tuple"):
        return None
    names = [{k: name for name, _, k in tree.children(r.node, r.key)} for r in (a, b)]
    for key in names[0].keys() & names[1].keys():
        if names[0][key] != names[1][key]:
            return Change(key, "name", names[0][key], names[1][key])
    # metadata of the modules that both have; the leaves show modules that only one has
    metadata = [tree.decode(r.node.get("metadata", {"dict": {}}), r.key, tree.reject_leaf)
                for r in (a, b)]  # fmt: skip
    for name in metadata[0].keys() & metadata[1].keys():
        x, y = metadata[0][name], metadata[1][name]
        if x != y:
            return Change(join_key(a.key, name) if name else a.key, "metadata", x, y)
    return None


def _compare_leaves(
    a: SnapshotReader,
    b: SnapshotReader,
    pairs: list[LeafPair],
    differences: Differences,
    quiet: bool,
) -> None:
    """Compare the bytes of the pairs whose digests do not show that they are equal."""
    pairs = list(dict.fromkeys(pairs))  # tied leaves yield the same pair several times
    equal = set(pairs) if a.digest == b.digest else find_equal_by_digest(a, b, pairs)
    undecided = [pair for pair in pairs if pair not in equal]
    differences.equal_count += len(pairs) - len(undecided)
    leaves = [a.leaves[key] for key, _ in undecided]
    differences.bytes_read = sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in leaves)
    with progress_bar("comparing", differences.bytes_read, quiet=quiet) as advance:
        distances = compare_bytes(a, b, undecided, advance)
    differing = [(key, d) for (key, _), d in distances.items() if d.differing]
    differences.equal_count += len(distances) - len(differing)
    differences.changes += [
        Change(
            key,
            "bytes",
            elements=distance.elements,
            differing=distance.differing,
            max_difference=distance.largest,
        )
        for key, distance in differing
    ]


def _build_document(
    a: SnapshotReader, b: SnapshotReader, differences: Differences
) -> dict[str, Any]:
    return {
        "a": {"snapshot": a.url, "step": a.step, "digest": a.digest},
        "b": {"snapshot": b.url, "step": b.step, "digest": b.digest},
        "same": differences.is_same,
        "only_a": differences.only_a,
        "only_b": differences.only_b,
        "changed": [
            {
                "key": c.key,
                "what": c.aspect,
                "a": c.a,
                "b": c.b,
                "elements": c.elements,
                "differing": c.differing,
                "largest": c.max_difference,
                "differing_slots": c.differing_slots,
            }
            for c in differences.changes
        ],
        "equal": differences.equal_count,
        "bytes_read": differences.bytes_read,
        "config": [*compare_configs(a.metadata_node("config"), b.metadata_node("config"))],
    }


def render(a: SnapshotReader, b: SnapshotReader, differences: Differences) -> None:
    """Print the differences as a table, and a summary."""
    for label, snapshot, style in (("A", a, "red"), ("B", b, "green")):
        step = "" if snapshot.step is None else f"  step {snapshot.step}"
        print_line(f"{label}  {snapshot.url}{step}", style)
    print_line()
    for change in compare_configs(a.metadata_node("config"), b.metadata_node("config")):
        print_line(f"config  {describe_change(change)}")
    for key in differences.only_a:
        print_line(f"only in A  {key}", "red")
    for key in differences.only_b:
        print_line(f"only in B  {key}", "green")
    if differences.changes:
        changes = [[(c.key, ""), (format_change(c), "")] for c in differences.changes]
        print_table(changes, ("key", "change"), flexible=[1])
    if differences.is_same:
        count = format_count(differences.equal_count, "leaf or value", "leaves and values")
        print_line(f"Identical: {count}", "green")
        return
    parts = [
        f"{len(differences.changes):,} differ",
        f"{differences.equal_count:,} equal",
        f"{len(differences.only_a):,} only in A",
        f"{len(differences.only_b):,} only in B",
    ]
    print_line()
    print_line("; ".join(parts), "bold")
    print_line(f"{format_size(differences.bytes_read)} of each snapshot was read", "dim")


def format_change(change: Change) -> str:
    """Describe a difference without its key."""
    if change.differing_slots is not None:
        found = f"{change.aspect}: {change.a:,} only in A, {change.b:,} only in B"
        slots = f"{change.differing_slots:,} in slots or counts"
        return f"{found}, {change.differing:,} of {change.elements:,} differ, {slots}"
    if change.aspect == "bytes":
        count = (
            "all"
            if change.differing == change.elements
            else f"{change.differing:,} of {change.elements:,}"
        )
        return f"{count} differ" + (
            "" if change.max_difference is None else f", max {change.max_difference:.4g}"
        )
    if change.aspect in ("value", "name", "metadata"):
        return f"{format_short(change.a)} -> {format_short(change.b)}"
    if change.aspect == "shape":
        return f"{list(change.a)} -> {list(change.b)}"
    return f"{change.a} -> {change.b}"
