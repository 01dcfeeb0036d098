"""``holdfast diff A B``: what differs between two snapshots, down to the bytes of each leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.console import progress_bar
from holdfast.cli.exit_codes import DIFFERS
from holdfast.cli.output import json_option, print_json
from holdfast.cli.resolve import format_count, resolve_snapshot
from holdfast.cli.tree_rows import CONTAINER_KINDS, TreeRow, iter_tree_rows
from holdfast.cli.verbs.show import filter_rows
from holdfast.engine.snapshot.compare import LeafPair, compare_bytes, find_equal_by_digest
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.format import tree
from holdfast.format.names import join_key
from holdfast.types import DTYPES, Box

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Change:
    """One key at which both snapshots have something, but not the same. ``what``: ``kind``,
    ``dtype``, ``shape``, ``name``, ``metadata``, ``value`` or ``bytes``; for bytes, how many
    elements differ and how far."""

    key: str
    aspect: str
    a: Any = None
    b: Any = None
    elements: int | None = None
    differing: int | None = None
    max_difference: float | None = None


@dataclass(slots=True)
class Differences:
    """What differs between two snapshots. ``nbytes``: bytes that had to be read of each."""

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    equal_count: int = 0
    bytes_read: int = 0

    @property
    def is_same(self) -> bool:
        return not (self.only_a or self.only_b or self.changes)


@click.command("diff", short_help="Compare two snapshots, down to the bytes.")
@click.argument("a")
@click.argument("b")
@click.option(
    "--keys",
    multiple=True,
    metavar="PATTERN",
    help="Only what matches: * within a level, ** across levels. May be repeated.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, a: str, b: str, keys: Sequence[str], as_json: bool) -> None:
    """Compare the snapshots A and B: leaves, shapes, dtypes, values, and every byte.

    Leaves whose digests are equal are not read. The exit code is 0 if both hold the same state,
    and 7 if not.
    """
    ours, theirs = resolve_snapshot(a), resolve_snapshot(b)
    found = compare_snapshots(ours, theirs, keys, quiet=as_json)
    if as_json:
        print_json(_build_document(ours, theirs, found))
    else:
        from holdfast.cli.console import make_console

        render(ours, theirs, found, make_console())
    if not found.is_same:
        ctx.exit(DIFFERS)


def compare_snapshots(
    a: Snapshot, b: Snapshot, keys: Sequence[str] = (), *, quiet: bool = True
) -> Differences:
    """All that differs. Raises ``FormatError`` or ``StoreError`` for bytes that cannot be read."""
    ours = {r.key: r for r in filter_rows(iter_tree_rows(a), keys)}
    theirs = {r.key: r for r in filter_rows(iter_tree_rows(b), keys)}
    found = Differences(
        only_a=_topmost_keys([k for k in ours if k not in theirs]),
        only_b=_topmost_keys([k for k in theirs if k not in ours]),
    )
    pairs: list[LeafPair] = []
    for key, row in ours.items():
        other = theirs.get(key)
        if other is None:
            continue
        change = _compare_rows(row, other)
        if change is not None:
            found.changes.append(change)
        elif row.dtype is not None:
            pairs.append((row.tied_to or key, other.tied_to or key))
        elif row.kind == "value":
            found.equal_count += 1
    _compare_leaves(a, b, pairs, found, quiet)
    order = {key: i for i, key in enumerate(ours)}
    found.changes.sort(key=lambda c: order.get(c.key, 0))
    return found


def _topmost_keys(keys: list[str]) -> list[str]:
    """The keys, without those below another of them."""
    known = set(keys)
    return [k for k in keys if not any(k[:i] in known for i, c in enumerate(k) if c == "/")]


def _compare_rows(a: TreeRow, b: TreeRow) -> Change | None:
    """What differs without a look at the bytes."""
    if (a.dtype is None) != (b.dtype is None) or (a.dtype is None and a.kind != b.kind):
        return Change(a.key, "kind", a.kind, b.kind)
    if a.dtype != b.dtype:
        return Change(a.key, "dtype", a.dtype, b.dtype)
    if a.shape != b.shape:
        return Change(a.key, "shape", a.shape, b.shape)
    if a.is_leaf and b.is_leaf and a.node != b.node:
        return Change(a.key, "kind", _leaf_kind(a), _leaf_kind(b))
    # as text: to Python 1, 1.0 and True are equal, and 0.0 and -0.0
    if a.kind == "value" and repr(a.node) != repr(b.node):
        return Change(a.key, "value", a.value(), b.value())
    if a.kind != b.kind and "tied" not in (a.kind, b.kind):
        return Change(a.key, "kind", _leaf_kind(a), _leaf_kind(b))
    if a.kind in CONTAINER_KINDS:
        return _compare_containers(a, b)
    return None


def _leaf_kind(row: TreeRow) -> str:
    """What a leaf is beside dtype and shape."""
    if row.kind == "blob":
        return str(row.node["blob"][0])
    if row.kind == "array" and len(row.node["array"]) > 2:
        return f"array of {row.node['array'][2]}"
    return row.kind


def _compare_containers(a: TreeRow, b: TreeRow) -> Change | None:
    """What differs between two containers of one kind beside their members."""
    if a.kind == "sparse":
        x, y = ({k: v for k, v in r.node["sparse"].items() if k != "parts"} for r in (a, b))
        return Change(a.key, "kind", x, y) if x != y else None
    if a.kind in ("list", "tuple"):
        return None
    names = [{k: name for name, _, k in tree.children(r.node, r.key)} for r in (a, b)]
    for key in names[0].keys() & names[1].keys():
        if names[0][key] != names[1][key]:
            return Change(key, "name", names[0][key], names[1][key])
    # what modules note of themselves; of modules that only one has, the leaves tell
    notes = [tree.decode(r.node.get("metadata", {"dict": {}}), r.key, tree.reject_leaf)
             for r in (a, b)]  # fmt: skip
    for name in notes[0].keys() & notes[1].keys():
        if notes[0][name] != notes[1][name]:
            return Change(
                join_key(a.key, name) if name else a.key, "metadata", notes[0][name], notes[1][name]
            )
    return None


def _compare_leaves(
    a: Snapshot, b: Snapshot, pairs: list[LeafPair], differences: Differences, quiet: bool
) -> None:
    # Of leaves that are tied, each pair is compared once.
    pairs = list(dict.fromkeys(pairs))
    same = set(pairs) if a.digest == b.digest else find_equal_by_digest(a, b, pairs)
    unsure = [pair for pair in pairs if pair not in same]
    differences.equal_count += len(pairs) - len(unsure)
    differences.bytes_read = sum(_leaf_nbytes(a, k) for k, _ in unsure)
    with progress_bar("comparing", differences.bytes_read, quiet=quiet) as tell:
        distances = compare_bytes(a, b, unsure, tell)
    for pair, distance in distances.items():
        if distance.differing:
            differences.changes.append(
                Change(
                    pair[0],
                    "bytes",
                    elements=distance.elements,
                    differing=distance.differing,
                    max_difference=distance.largest,
                )
            )
        else:
            differences.equal_count += 1


def _leaf_nbytes(snapshot: Snapshot, key: str) -> int:
    dtype, shape = snapshot.leaves[key]
    return Box.whole(shape).numel * DTYPES[dtype].itemsize


def _build_document(a: Snapshot, b: Snapshot, differences: Differences) -> dict[str, Any]:
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
            }
            for c in differences.changes
        ],
        "equal": differences.equal_count,
        "bytes_read": differences.bytes_read,
    }


def render(a: Snapshot, b: Snapshot, differences: Differences, console: Console) -> None:
    """Print what differs, as a table, and the sum."""
    from holdfast.cli.console import format_size, make_table, styled_text

    for mark, snapshot, style in (("A", a, "red"), ("B", b, "green")):
        at = "" if snapshot.step is None else f"  step {snapshot.step}"
        console.print(styled_text(f"{mark}  {snapshot.url}{at}", style), soft_wrap=True)
    console.print()
    for key in differences.only_a:
        console.print(styled_text(f"only in A  {key}", "red"), soft_wrap=True)
    for key in differences.only_b:
        console.print(styled_text(f"only in B  {key}", "green"), soft_wrap=True)
    if differences.changes:
        rest = make_table("key", "change")
        wide = min(
            max(len(_format_change(c)) for c in differences.changes), max(34, console.width // 2)
        )
        for c in differences.changes:
            # the end of a key tells more than its beginning
            room = max(20, console.width - wide - 3)
            key = c.key if len(c.key) <= room else "\u2026" + c.key[1 - room :]
            rest.add_row(styled_text(key), styled_text(_format_change(c), "", wide))
        console.print(rest)
    if differences.is_same:
        same = format_count(differences.equal_count, "leaf or value", "leaves and values")
        console.print(styled_text(f"The same: {same}", "green"))
        return
    parts = [
        f"{len(differences.changes):,} differ",
        f"{differences.equal_count:,} equal",
        f"{len(differences.only_a):,} only in A",
        f"{len(differences.only_b):,} only in B",
    ]
    console.print()
    console.print(styled_text("; ".join(parts), "bold"))
    console.print(
        styled_text(f"{format_size(differences.bytes_read)} of each had to be read", "dim")
    )


def _format_change(change: Change) -> str:
    """A change in few words."""
    from holdfast.cli.tree_rows import format_short

    if change.aspect == "bytes":
        all_of = change.differing == change.elements
        many = "all" if all_of else f"{change.differing:,} of {change.elements:,}"
        return f"{many} differ" + (
            "" if change.max_difference is None else f", max {change.max_difference:.4g}"
        )
    if change.aspect in ("value", "name", "metadata"):
        return f"{format_short(change.a)} -> {format_short(change.b)}"
    if change.aspect == "shape":
        return f"{list(change.a)} -> {list(change.b)}"
    return f"{change.a} -> {change.b}"
