"""``limpet show SNAPSHOT``: show what a snapshot contains, from its manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from limpet.cli import output
from limpet.cli.console import Cell, output_width, print_line, print_table, truncate
from limpet.cli.resolve import find_problem, resolve_newest
from limpet.errors import MissingLeaf
from limpet.format import tree
from limpet.format.config import config_entries
from limpet.format.index import IndexBox
from limpet.format.names import parse_version, to_dotted
from limpet.run.records import EvaluationStatus, find_statuses
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader
from limpet.snapshot.tree_rows import (
    CONTAINER_KINDS,
    TreeRow,
    describe_rows,
    filter_rows,
    iter_tree_rows,
    subtree_totals,
)
from limpet.text import format_age, format_count, format_list, format_metrics, format_size, to_repr

Layouts = dict[str, list[tuple[int, IndexBox]]]


@click.command("show")
@click.argument("snapshot")
@output.keys_option
@click.option("--depth", type=click.IntRange(1), help="Number of levels of the tree to show.")
@click.option("--layout", is_flag=True, help="Show which shard contains which boxes of each leaf.")
@output.json_option
def command(
    snapshot: str, keys: Sequence[str], depth: int | None, layout: bool, as_json: bool
) -> None:
    """Show the origin of SNAPSHOT, and its tree of leaves and values.

    If SNAPSHOT is a run, its newest version is shown. Only the manifest is read, and with --layout
    the indexes. An embedding table is one line without --layout and --keys.
    """  # fmt: skip
    opened = resolve_newest(snapshot, quiet=as_json)
    rows = list(filter_rows(iter_tree_rows(opened, by_table=not (keys or layout)), keys))
    if keys and not rows:
        raise MissingLeaf(
            f"Nothing in {opened.url} matches",
            expected=f"keys like {format_list(keys, 5)}",
            found=", ".join(list(opened.nodes())[:5]),
            todo="* matches within a level, ** across levels",
        )
    layouts = _read_layouts(opened) if layout else None
    if as_json:
        output.print_json(_build_document(opened, rows, layouts, depth))
    else:
        render(opened, rows, layouts, depth)


def _read_layouts(snapshot: SnapshotReader) -> Layouts:
    layouts: Layouts = {}
    for number, index in enumerate(snapshot.indexes()):
        for leaf in index.leaves:
            layouts.setdefault(leaf.key, []).extend((number, box) for box in leaf.boxes)
    return layouts


def _build_document(
    snapshot: SnapshotReader, rows: Sequence[TreeRow], layouts: Layouts | None, depth: int | None
) -> dict[str, Any]:
    collapsed = [
        {"key": r.key, "kind": r.kind, "leaves": leaves, "bytes": nbytes}
        for r, (leaves, nbytes) in zip(rows, subtree_totals(rows), strict=True)
        if depth is not None and r.depth == depth - 1 and r.kind in CONTAINER_KINDS
    ]
    rows = [r for r in rows if depth is None or r.depth < depth]
    manifest, metadata = snapshot.manifest, snapshot.metadata
    problem = find_problem(snapshot)
    statuses = _read_statuses(snapshot)
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
        "metrics": snapshot.metrics,
        "note": metadata.get("note", {}),
        "config": metadata.get("config"),
        "evaluations": {name: asdict(status) for name, status in statuses.items()},
        "statistics": metadata.get("statistics", {}),
        "shards": [{"name": s.name, "bytes": s.length} for s in manifest.shards],
        "bytes": snapshot.nbytes,
        "referred_bytes": snapshot.referred_bytes,
        "bases": [str(v) for v in sorted(snapshot.bases)],
        "chain": snapshot.manifest.chain,
        "intact": problem is None,
        "problem": None if problem is None else output.describe_error(problem),
        "bytes_checked": False,
        "leaves": [
            _build_leaf_document(r, layouts)
            for r in rows
            if r.kind not in ("value", "table", *CONTAINER_KINDS)
        ],
        "tables": [{"key": r.key, **r.node} for r in rows if r.kind == "table"],
        "values": [{"key": r.key, "value": r.value()} for r in rows if r.kind == "value"],
        "collapsed": collapsed,
    }


def _build_leaf_document(row: TreeRow, layouts: Layouts | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "key": row.key,
        "kind": row.kind,
        "dtype": row.dtype,
        "shape": row.shape,
        "bytes": row.nbytes,
        "tied": row.tied_to,
    }
    if layouts is not None:
        document["boxes"] = [
            {"shard": number, "offsets": b.offsets, "sizes": b.sizes, "at": b.at}
            for number, b in layouts.get(row.key, [])
        ]
    return document


def _read_statuses(snapshot: SnapshotReader) -> dict[str, EvaluationStatus]:
    """Return the state of each evaluation of a run's version; else nothing."""
    version = parse_version(snapshot.location.folder)
    if version is None:
        return {}
    catalog = Run(snapshot.location.store).catalog
    evaluations = catalog.evaluations.read(version, snapshot.digest)
    return find_statuses(version, evaluations, catalog.leases.live().values())


def render(
    snapshot: SnapshotReader, rows: Sequence[TreeRow], layouts: Layouts | None, depth: int | None
) -> None:
    """Print the header and ``depth`` levels of the tree, or all."""
    print_line(snapshot.url, "bold")
    problem = find_problem(snapshot)
    fields: list[list[Cell]] = [[(n, "dim"), (v, "")] for n, v in header_fields(snapshot)]
    print_table(fields, flexible=[1])
    if problem is not None:
        print_line(output.format_error_line(problem), "red")
    print_line()
    width = min((output_width() - 14) // 2, 60)
    table: list[list[Cell]] = [
        [(name, style), (truncate(description, width), style), (size, style)]
        for name, description, size, style in _table_lines(rows, depth, layouts)
    ]
    print_table(table, ("key", "content", "size"), right_aligned=("size",), flexible=[0])


def header_fields(snapshot: SnapshotReader) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the header of ``show``."""
    manifest, metadata = snapshot.manifest, snapshot.metadata
    if manifest.step is not None:
        branch = f" on branch {manifest.branch}" if manifest.branch else ""
        yield "step", f"{manifest.step}{branch}"
    yield "created", f"{manifest.created} ({format_age(manifest.created)} ago) by {manifest.writer}"
    if manifest.parent is not None:
        yield "parent", manifest.parent.version
    for name in ("reason", "metrics", "note"):
        if value := metadata.get(name):
            text = value if isinstance(value, str) else to_repr(value)
            yield name, format_metrics(value) if isinstance(value, dict) else text
    for key, node in config_entries(snapshot.metadata_node("config")):
        yield f"config.{to_dotted(key)}", to_repr(tree.decode(node, key, tree.reject_leaf))
    for name, status in _read_statuses(snapshot).items():
        found = status.cause or format_metrics(status.metrics)
        steps = ""
        if status.state == "INEXACT":
            does_count = "counts" if status.counts else "does not count"
            steps = f", steps {status.first_step} to {status.last_step}, {does_count}"
        is_done = status.state == "DONE"  # a cause may be long, and is cut
        text = f"{found} ({name})" if is_done else f"{status.state} ({name}{steps}): {found}"
        yield "evaluation", text
    shards = format_count(len(manifest.shards), "shard")
    yield "files", f"{shards}, {format_size(snapshot.nbytes)}; contents not checked"
    if snapshot.bases:
        bases = ", ".join(map(str, sorted(snapshot.bases)))
        yield "refers to", f"{format_size(snapshot.referred_bytes)} in {bases}"


def _table_lines(
    rows: Sequence[TreeRow], depth: int | None, layouts: Layouts | None
) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, description, size, style. Without containers, the names are complete keys."""
    nested = any(r.kind in CONTAINER_KINDS for r in rows) or not any(r.depth for r in rows)
    for row, description, nbytes in describe_rows(rows):
        if depth is not None and row.depth >= depth:
            continue
        name = "  " * row.depth + row.key.rpartition("/")[2] if nested else row.key
        is_top = row.kind in CONTAINER_KINDS and not row.depth
        style = "bold" if is_top else "cyan" if row.kind == "value" else ""
        yield name, description, "" if nbytes is None else format_size(nbytes), style
        for number, box in () if layouts is None else layouts.get(row.key, ()):
            dimensions = zip(box.offsets, box.sizes, strict=True)
            slices = ", ".join(f"{o}:{o + n}" for o, n in dimensions)
            indent = "  " * (row.depth + 1 if nested else 1)
            yield f"{indent}[{slices}]", f"shard {number} at byte {box.at}", "", "dim"
