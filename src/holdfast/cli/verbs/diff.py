"""``holdfast diff A B``: what differs between two snapshots, down to the bytes of each leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.console import progress
from holdfast.cli.exit_codes import DIFFERS
from holdfast.cli.output import json_option, print_json
from holdfast.cli.resolve import count, snapshot_at
from holdfast.cli.tree_rows import CONTAINERS, Row, rows
from holdfast.cli.verbs.show import choose
from holdfast.engine.snapshot.compare import Pair, compare_bytes, same_chunks
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.format import tree
from holdfast.format.names import join
from holdfast.types import DTYPES, Box

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Change:
    """One key at which both snapshots have something, but not the same. ``what``: ``kind``,
    ``dtype``, ``shape``, ``name``, ``metadata``, ``value`` or ``bytes``; for bytes, how many
    elements differ and how far."""

    key: str
    what: str
    a: Any = None
    b: Any = None
    elements: int | None = None
    differing: int | None = None
    largest: float | None = None


@dataclass(slots=True)
class Differences:
    """What differs between two snapshots. ``nbytes``: bytes that had to be read of each."""

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    equal: int = 0
    nbytes: int = 0

    @property
    def same(self) -> bool:
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
    ours, theirs = snapshot_at(a), snapshot_at(b)
    found = compare(ours, theirs, keys, quiet=as_json)
    if as_json:
        print_json(_document(ours, theirs, found))
    else:
        from holdfast.cli.console import console

        render(ours, theirs, found, console())
    if not found.same:
        ctx.exit(DIFFERS)


def compare(
    a: Snapshot, b: Snapshot, keys: Sequence[str] = (), *, quiet: bool = True
) -> Differences:
    """All that differs. Raises ``FormatError`` or ``StoreError`` for bytes that cannot be read."""
    ours = {r.key: r for r in choose(rows(a), keys)}
    theirs = {r.key: r for r in choose(rows(b), keys)}
    found = Differences(
        only_a=_tops([k for k in ours if k not in theirs]),
        only_b=_tops([k for k in theirs if k not in ours]),
    )
    pairs: list[Pair] = []
    for key, row in ours.items():
        other = theirs.get(key)
        if other is None:
            continue
        change = _change(row, other)
        if change is not None:
            found.changes.append(change)
        elif row.dtype is not None:
            pairs.append((row.tied or key, other.tied or key))
        elif row.kind == "value":
            found.equal += 1
    _compare_leaves(a, b, pairs, found, quiet)
    order = {key: i for i, key in enumerate(ours)}
    found.changes.sort(key=lambda c: order.get(c.key, 0))
    return found


def _tops(keys: list[str]) -> list[str]:
    """The keys, without those below another of them."""
    known = set(keys)
    return [k for k in keys if not any(k[:i] in known for i, c in enumerate(k) if c == "/")]


def _change(a: Row, b: Row) -> Change | None:
    """What differs without a look at the bytes."""
    if (a.dtype is None) != (b.dtype is None) or (a.dtype is None and a.kind != b.kind):
        return Change(a.key, "kind", a.kind, b.kind)
    if a.dtype != b.dtype:
        return Change(a.key, "dtype", a.dtype, b.dtype)
    if a.shape != b.shape:
        return Change(a.key, "shape", a.shape, b.shape)
    if a.is_leaf and b.is_leaf and a.node != b.node:
        return Change(a.key, "kind", _kind(a), _kind(b))
    # as text: to Python 1, 1.0 and True are equal, and 0.0 and -0.0
    if a.kind == "value" and repr(a.node) != repr(b.node):
        return Change(a.key, "value", a.value(), b.value())
    if a.kind != b.kind and "tied" not in (a.kind, b.kind):
        return Change(a.key, "kind", _kind(a), _kind(b))
    if a.kind in CONTAINERS:
        return _beside_members(a, b)
    return None


def _kind(row: Row) -> str:
    """What a leaf is beside dtype and shape."""
    if row.kind == "blob":
        return str(row.node["blob"][0])
    if row.kind == "array" and len(row.node["array"]) > 2:
        return f"array of {row.node['array'][2]}"
    return row.kind


def _beside_members(a: Row, b: Row) -> Change | None:
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
    notes = [tree.decode(r.node.get("metadata", {"dict": {}}), r.key, tree.refuse_leaf)
             for r in (a, b)]  # fmt: skip
    for name in notes[0].keys() & notes[1].keys():
        if notes[0][name] != notes[1][name]:
            return Change(
                join(a.key, name) if name else a.key, "metadata", notes[0][name], notes[1][name]
            )
    return None


def _compare_leaves(
    a: Snapshot, b: Snapshot, pairs: list[Pair], found: Differences, quiet: bool
) -> None:
    # Of leaves that are tied, each pair is compared once.
    pairs = list(dict.fromkeys(pairs))
    same = set(pairs) if a.digest == b.digest else same_chunks(a, b, pairs)
    unsure = [pair for pair in pairs if pair not in same]
    found.equal += len(pairs) - len(unsure)
    found.nbytes = sum(_nbytes(a, k) for k, _ in unsure)
    with progress("comparing", found.nbytes, quiet=quiet) as tell:
        distances = compare_bytes(a, b, unsure, tell)
    for pair, distance in distances.items():
        if distance.differing:
            found.changes.append(
                Change(
                    pair[0],
                    "bytes",
                    elements=distance.elements,
                    differing=distance.differing,
                    largest=distance.largest,
                )
            )
        else:
            found.equal += 1


def _nbytes(snapshot: Snapshot, key: str) -> int:
    dtype, shape = snapshot.leaves[key]
    return Box.whole(shape).elements * DTYPES[dtype].itemsize


def _document(a: Snapshot, b: Snapshot, found: Differences) -> dict[str, Any]:
    return {
        "a": {"snapshot": a.url, "step": a.step, "digest": a.digest},
        "b": {"snapshot": b.url, "step": b.step, "digest": b.digest},
        "same": found.same,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "changed": [
            {
                "key": c.key,
                "what": c.what,
                "a": c.a,
                "b": c.b,
                "elements": c.elements,
                "differing": c.differing,
                "largest": c.largest,
            }
            for c in found.changes
        ],
        "equal": found.equal,
        "bytes_read": found.nbytes,
    }


def render(a: Snapshot, b: Snapshot, found: Differences, screen: Console) -> None:
    """Print what differs, as a table, and the sum."""
    from holdfast.cli.console import size, table, text

    for mark, snapshot, style in (("A", a, "red"), ("B", b, "green")):
        at = "" if snapshot.step is None else f"  step {snapshot.step}"
        screen.print(text(f"{mark}  {snapshot.url}{at}", style), soft_wrap=True)
    screen.print()
    for key in found.only_a:
        screen.print(text(f"only in A  {key}", "red"), soft_wrap=True)
    for key in found.only_b:
        screen.print(text(f"only in B  {key}", "green"), soft_wrap=True)
    if found.changes:
        rest = table("key", "change")
        wide = min(max(len(_how(c)) for c in found.changes), max(34, screen.width // 2))
        for c in found.changes:
            # the end of a key tells more than its beginning
            room = max(20, screen.width - wide - 3)
            key = c.key if len(c.key) <= room else "\u2026" + c.key[1 - room :]
            rest.add_row(text(key), text(_how(c), "", wide))
        screen.print(rest)
    if found.same:
        screen.print(
            text(f"The same: {count(found.equal, 'leaf or value', 'leaves and values')}", "green")
        )
        return
    parts = [
        f"{len(found.changes):,} differ",
        f"{found.equal:,} equal",
        f"{len(found.only_a):,} only in A",
        f"{len(found.only_b):,} only in B",
    ]
    screen.print()
    screen.print(text("; ".join(parts), "bold"))
    screen.print(text(f"{size(found.nbytes)} of each had to be read", "dim"))


def _how(change: Change) -> str:
    """A change in few words."""
    from holdfast.cli.tree_rows import short

    if change.what == "bytes":
        all_of = change.differing == change.elements
        many = "all" if all_of else f"{change.differing:,} of {change.elements:,}"
        return f"{many} differ" + ("" if change.largest is None else f", max {change.largest:.4g}")
    if change.what in ("value", "name", "metadata"):
        return f"{short(change.a)} -> {short(change.b)}"
    if change.what == "shape":
        return f"{list(change.a)} -> {list(change.b)}"
    return f"{change.a} -> {change.b}"
