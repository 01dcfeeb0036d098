"""``limpet metrics RUN``: print the metrics of the steps of a run."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from typing import Any

import click
import numpy as np

from limpet.cli.console import Cell, print_line, print_table, progress_bar
from limpet.cli.exit_codes import exit_on_errors
from limpet.cli.output import describe_error, json_option, print_json
from limpet.cli.resolve import resolve_run
from limpet.run.lineage import line_ends
from limpet.run.metrics_log import list_files
from limpet.run.overview import BranchMetrics, read_steps
from limpet.text import format_value, to_printable


@click.command("metrics")
@click.argument("run")
@click.option("--csv", "as_csv", is_flag=True, help="Print a line for each step.")
@json_option
@click.pass_context
def command(ctx: click.Context, run: str, as_csv: bool, as_json: bool) -> None:
    """Print the metrics of all versions of RUN, and of all steps if the training has a
    Checkpointer(metrics_log=True): a line for each metric, or with --csv for each step.

    Steps that a crash has undone are left out. Those that are not on the current lineage are
    "abandoned", or have 0 in the CSV column "current".
    """
    if as_csv and as_json:
        raise click.UsageError("--csv cannot be combined with --json", ctx)
    opened, listing = resolve_run(run, require_version=False)
    catalog, store = opened.catalog, opened.store
    files, ends = list_files(store), line_ends(catalog, listing)
    with progress_bar("reading metrics", len(files), quiet=as_json, unit="files") as advance:
        records = {v: r for v, r in catalog.read_versions(listing).items() if r.digest}
        added = {v: catalog.evaluations.read(v, r.digest).metrics() for v, r in records.items()}
        versions = {v: {**r.metrics, **added[v]} for v, r in records.items()}
        pieces, problems = read_steps(store, ends, versions, files, advance)
    if as_json:
        damaged = [{"file": file, **describe_error(e)} for file, e in problems.items()]
        branches = [*map(_build_document, pieces)]
        print_json({"run": opened.url, "branches": branches, "damaged": damaged}, indent=None)
    elif as_csv:
        _print_csv(pieces)
    else:
        rows = [row for piece in pieces for row in _table_rows(piece)]
        names = ("branch", "state", "metric", "steps", "last step", "last", "smallest", "largest")
        print_table(rows, names, right_aligned=("branch", *names[3:]), flexible=[2])
    for file, error in problems.items() if not as_json else ():
        line = f"limpet: {file} was left out: {to_printable(error.brief)}"
        click.echo(line, err=True) if as_csv else print_line(line, "red")
    exit_on_errors(ctx, problems.values())


def _build_document(piece: BranchMetrics) -> dict[str, Any]:
    metrics = {
        name: {"steps": steps.tolist(), "values": values.tolist()}
        for name, (steps, values) in piece.curves.items()
    }
    return {"branch": piece.branch, "current": piece.is_current, "metrics": metrics}


def _table_rows(piece: BranchMetrics) -> list[list[Cell]]:
    style = "" if piece.is_current else "dim"
    rows = []
    for name, (steps, values) in piece.curves.items():
        state = "current" if piece.is_current else "abandoned"
        # of no value if all are NaN
        extremes = [np.fmin.reduce(values), np.fmax.reduce(values)]
        numbers = [format_value(_plain(float(v))) for v in (values[-1], *extremes)]
        row = (piece.branch, state, name, len(steps), steps[-1], *numbers)
        rows.append([(cell, style) for cell in row])
    return rows


def _print_csv(pieces: Sequence[BranchMetrics]) -> None:
    write = csv.writer(sys.stdout, lineterminator="\n").writerow
    names = [*dict.fromkeys(name for piece in pieces for name in piece.curves)]
    write(["branch", "current", "step", *map(to_printable, names)])
    for piece in sorted(pieces, key=lambda piece: not piece.is_current):
        all_steps = np.unique(np.concatenate([steps for steps, _ in piece.curves.values()]))
        columns = []
        for name in names:
            columns.append(np.full(len(all_steps), "", object))
            steps, values = piece.curves.get(name, ((), np.array([])))
            columns[-1][np.searchsorted(all_steps, steps)] = [*map(_plain, values.tolist())]
        for step, *row in zip(all_steps.tolist(), *columns, strict=True):
            write([piece.branch, int(piece.is_current), step, *row])


def _plain(value: float) -> float:
    """Return a whole number as an int."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
