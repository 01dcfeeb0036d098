"""``holdfast show SNAPSHOT``: what a snapshot holds, from its manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from holdfast.cli.output import describe, json_option, line, print_json
from holdfast.cli.resolve import count, snapshot_at
from holdfast.cli.tree_rows import CONTAINERS, Row, rows
from holdfast.engine.planning.select import selector
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import FormatError, MissingLeaf
from holdfast.format.index_columns import BoxAt

if TYPE_CHECKING:
    from rich.console import Console

LINES = 40
"""Rows of the tree that a terminal is given unasked."""

Layouts = dict[str, list[tuple[int, BoxAt]]]


@click.command("show", short_help="Show what a snapshot holds: the tree, shapes, sizes.")
@click.argument("snapshot")
@click.option(
    "--keys",
    multiple=True,
    metavar="PATTERN",
    help="Only what matches: * within a level, ** across levels. May be repeated.",
)
@click.option("--depth", type=click.IntRange(1), help="Show so many levels of the tree.")
@click.option("--all", "everything", is_flag=True, help="Show the whole tree, however long.")
@click.option("--layout", is_flag=True, help="Show which boxes of each leaf lie in which shard.")
@json_option
def command(
    snapshot: str,
    keys: Sequence[str],
    depth: int | None,
    everything: bool,
    layout: bool,
    as_json: bool,
) -> None:
    """Show what SNAPSHOT holds: where it comes from, and its tree of leaves and values.

    Only the manifest is read (and with --layout the indexes). On a terminal a long tree is cut
    to the levels that fit; --all, --depth and --keys choose otherwise.
    """  # fmt: skip
    opened = snapshot_at(snapshot)
    chosen = list(choose(rows(opened), keys))
    if keys and not chosen:
        raise MissingLeaf(
            f"Nothing in {opened.url} matches",
            expected=f"keys like {', '.join(keys)}",
            found=", ".join(list(opened.keys())[:5]),
            todo="* stays within a level, ** crosses levels",
        )
    layouts = _layouts(opened) if layout else None
    if as_json:
        print_json(_document(opened, chosen, layouts))
        return
    from holdfast.cli.console import console

    screen = console()
    if depth is None and not everything and not keys and screen.is_terminal:
        depth = fitting(chosen)
    render(opened, chosen, layouts, depth, screen)


def choose(found: Iterable[Row], keys: Sequence[str]) -> Iterable[Row]:
    """The rows whose key matches; with patterns, containers are left out."""
    if not keys:
        return found
    selected = selector(keys)
    return (
        r
        for r in found
        if (r.kind not in CONTAINERS and selected(r.key))
        or (r.kind == "value" and _within(r, keys))
    )


def _within(row: Row, keys: Sequence[str]) -> bool:
    """Whether a pattern means an element of a list that is shown as one value."""
    if type(row.node) is not dict or next(iter(row.node)) not in ("list", "tuple"):
        return False
    selected = selector(keys)
    return any(selected(f"{row.key}/{i}") for i in range(len(row.value())))


def fitting(found: Sequence[Row]) -> int | None:
    """The most levels with which the tree has at most ``LINES`` rows; None: all of them."""
    if len(found) <= LINES:
        return None
    depths = range(1, max(r.depth for r in found) + 1)
    return max((d for d in depths if sum(r.depth < d for r in found) <= LINES), default=1)


def _layouts(snapshot: Snapshot) -> Layouts:
    made: Layouts = {}
    for number, index in enumerate(snapshot.indexes()):
        for leaf in index.leaves:
            made.setdefault(leaf.key, []).extend((number, box) for box in leaf.boxes)
    return made


def _document(snapshot: Snapshot, found: Sequence[Row], layouts: Layouts | None) -> dict[str, Any]:
    manifest, metadata = snapshot.manifest, snapshot.metadata
    problem = _problem(snapshot)
    return {
        "snapshot": snapshot.url,
        "step": manifest.step,
        "branch": manifest.branch,
        "created": manifest.created,
        "writer": manifest.writer,
        "attempt": manifest.attempt,
        "digest": snapshot.digest,
        "parent": None
        if manifest.parent is None
        else {"version": manifest.parent.version, "digest": manifest.parent.digest},
        "reason": metadata.get("reason"),
        "metrics": metadata.get("metrics", {}),
        "note": metadata.get("note", {}),
        "statistics": metadata.get("statistics", {}),
        "shards": [{"name": s.name, "bytes": s.length} for s in manifest.shards],
        "bytes": snapshot.nbytes,
        "referred_bytes": snapshot.referred_bytes,
        "bases": [str(v) for v in sorted(snapshot.bases)],
        "chain": snapshot.chain,
        "intact": problem is None,
        "problem": None if problem is None else describe(problem),
        "bytes_checked": False,
        "leaves": [
            _leaf(r, layouts) for r in found if r.kind != "value" and r.kind not in CONTAINERS
        ],
        "values": [{"key": r.key, "value": r.value()} for r in found if r.kind == "value"],
    }


def _leaf(row: Row, layouts: Layouts | None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "key": row.key,
        "kind": row.kind,
        "dtype": row.dtype,
        "shape": row.shape,
        "bytes": row.nbytes,
        "tied": row.tied,
    }
    if layouts is not None:
        made["boxes"] = [
            {"shard": number, "offsets": b.offsets, "sizes": b.sizes, "at": b.at}
            for number, b in layouts.get(row.key, [])
        ]
    return made


def _problem(snapshot: Snapshot) -> FormatError | None:
    try:
        snapshot.check_files()
    except FormatError as e:
        return e
    return None


def render(
    snapshot: Snapshot,
    found: Sequence[Row],
    layouts: Layouts | None,
    depth: int | None,
    screen: Console,
) -> None:
    """Print the header and the tree, down to ``depth`` levels (None: all)."""
    from holdfast.cli import console as show

    screen.print(show.text(snapshot.url, "bold"), soft_wrap=True)
    head = show.table("", "")
    head.show_header = False
    problem = _problem(snapshot)
    for name, value in _header(snapshot):
        head.add_row(show.text(name, "dim"), show.text(value, "", screen.width - 12))
    screen.print(head)
    if problem is not None:
        screen.print(show.text(line(problem), "red"), soft_wrap=True)
    screen.print()
    table = show.table("key", "what", "size", right=("size",))
    lines = _lines(found, depth, layouts)
    wide = min(max((len(c.what) for c in lines), default=0), (screen.width - 14) // 2, 60)
    for cells in lines:
        table.add_row(
            show.text(cells.name, cells.style, screen.width - 15 - wide),
            show.text(cells.what, cells.style, wide),
            show.text(cells.size, cells.style),
        )
    screen.print(table)
    if depth is not None and any(r.depth >= depth for r in found):
        screen.print(
            show.text(f"Cut to --depth {depth}; --all shows everything, --keys a part", "dim")
        )


def _header(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """What is known of the snapshot, by name, for people."""
    from holdfast.cli.console import age, numbers, size

    manifest, metadata = snapshot.manifest, snapshot.metadata
    if manifest.step is not None:
        branch = f" on branch {manifest.branch}" if manifest.branch else ""
        yield "step", f"{manifest.step}{branch}"
    yield "created", f"{manifest.created} ({age(manifest.created)} ago) by {manifest.writer}"
    if manifest.parent is not None:
        yield "after", manifest.parent.version
    for name in ("reason", "metrics", "note"):
        if value := metadata.get(name):
            yield name, numbers(value) if isinstance(value, dict) else str(value)
    shards = count(len(manifest.shards), "shard")
    yield "files", f"{shards}, {size(snapshot.nbytes)}; bytes not checked"
    if snapshot.bases:
        bases = ", ".join(map(str, sorted(snapshot.bases)))
        yield "refers to", f"{size(snapshot.referred_bytes)} in {bases}"


class _Cells(NamedTuple):
    name: str
    what: str
    size: str
    style: str


def _lines(found: Sequence[Row], depth: int | None, layouts: Layouts | None) -> list[_Cells]:
    """The rows as they are printed. Where containers are left out, keys are whole."""
    from holdfast.cli.console import size

    nested = any(r.kind in CONTAINERS for r in found) or not any(r.depth for r in found)
    lines: list[_Cells] = []
    for i, row in enumerate(found):
        if depth is not None and row.depth >= depth:
            continue
        name = "  " * row.depth + row.name if nested else row.key
        if row.kind in CONTAINERS:
            leaves, nbytes = _below(found, i)
            what = f"{row.kind}, {count(leaves, 'leaf', 'leaves') if leaves else 'empty'}"
            style = "bold" if row.depth == 0 else ""
            lines.append(_Cells(name, what, size(nbytes) if nbytes else "", style))
        elif row.kind == "value":
            lines.append(_Cells(name, row.text(), "", "cyan"))
        else:
            lines.append(_Cells(name, _what(row), size(row.nbytes) if row.is_leaf else "", ""))
        for number, box in () if layouts is None else layouts.get(row.key, ()):
            ends = zip(box.offsets, box.sizes, strict=True)
            part = ", ".join(f"{o}:{o + n}" for o, n in ends)
            indent = "  " * (row.depth + 1 if nested else 1)
            where = f"shard {number} at byte {box.at}"
            lines.append(_Cells(f"{indent}[{part}]", where, "", "dim"))
    return lines


def _below(found: Sequence[Row], at: int) -> tuple[int, int]:
    """How many leaves and values a container has, and the bytes of the leaves."""
    inside = takewhile(lambda r: r.depth > found[at].depth, islice(found, at + 1, None))
    parts = [r for r in inside if r.kind not in CONTAINERS]
    return len(parts), sum(r.nbytes for r in parts)


def _what(row: Row) -> str:
    shape = ", ".join(map(str, row.shape or ()))
    if row.kind == "blob":
        return f"{row.node['blob'][0]} [{shape}]"
    if row.kind == "array" and len(row.node["array"]) > 2:
        shape = ", ".join(map(str, (row.shape or ())[:-1]))  # the last one counts bytes
        return f"array {row.node['array'][2]} [{shape}]"
    kind = "array " if row.kind == "array" else ""
    tied = f" = {row.tied}" if row.tied is not None else ""
    return f"{kind}{row.dtype} [{shape}]{tied}"
