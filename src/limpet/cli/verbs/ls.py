"""``limpet ls RUN|FOLDER``: list the versions of a run, or the runs in a folder; read no data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import isfinite
from typing import Any

import click

from limpet.cli.console import Cell, output_width, print_line, print_table, progress_bar, truncate
from limpet.cli.output import describe_error, json_option
from limpet.cli.resolve import resolve_run, resolve_runs
from limpet.cli.watch import show_result
from limpet.errors import FormatTooNew, LimpetError, NotFound
from limpet.format.names import Version
from limpet.run.listing import Listing
from limpet.run.overview import (
    ListResult,
    RunSummary,
    VersionEntry,
    list_versions,
    summarize_runs,
)
from limpet.run.records import find_statuses
from limpet.run.run import Run
from limpet.snapshot.pins import describe_holder
from limpet.storage.open import open_store
from limpet.text import format_age, format_count, format_metrics, format_size, format_value

Runs = list[RunSummary]


@click.command("ls")
@click.argument("place", metavar="RUN|FOLDER")
@click.option(
    "--watch", is_flag=True, help="Show changes until the training ends. The run must exist."
)
@click.option(
    "--plot",
    multiple=True,
    metavar="METRIC",
    help="Also print a line of block characters: the values of METRIC. May be repeated.",
)
@json_option
def command(place: str, watch: bool, plot: Sequence[str], as_json: bool) -> None:
    """List the versions of RUN: step, age, size, metrics, and whether they are intact. Or list the
    runs directly in FOLDER: newest intact version, age, size, running or not, and best metrics.

    Damaged versions and versions on abandoned branches are listed too. A version is intact here
    if its manifest is valid, its files exist with their full length, and neither a resume nor
    "verify", which read the bytes, has found damage. --watch --json prints a line for each change.
    """
    found = resolve_runs(place, quiet=as_json, require_version=not watch)
    watched = place if watch else None
    if isinstance(found, list):
        read, show = partial(_read_runs, place, found), partial(render_runs, place, plots=plot)

        def build(runs: Runs) -> dict[str, Any]:
            return {"folder": place, "runs": [*map(_build_run_document, runs)]}

        show_result(read, _have_ended, build, show, watched=watched, as_json=as_json)
    else:
        look, shown = partial(_read_versions, place, found, as_json), partial(render, plots=plot)
        show_result(look, _has_ended, _build_document, shown, watched=watched, as_json=as_json)


def _read_runs(place: str, first: Runs, last: Runs | None) -> Runs:
    runs = first if last is None else summarize_runs(open_store(place), last)
    if not runs:
        raise NotFound(f"There is no run in {place}", key=place)
    return runs


def _have_ended(runs: Iterable[RunSummary]) -> bool:
    return all(run.ended and run.is_running() is False for run in runs)


def _read_versions(
    place: str, first: tuple[Run, Listing], quiet: bool, last: ListResult | None
) -> ListResult:
    run, listing = first if last is None else resolve_run(place, require_version=False)
    count, quiet = len(listing.versions), quiet or last is not None
    with progress_bar("reading manifests", count, quiet=quiet, unit="versions") as advance:
        return list_versions(run if last is None else last.run, listing, advance)


def _has_ended(result: ListResult) -> bool:
    return _have_ended([result.summarize()])


def _build_document(result: ListResult) -> dict[str, Any]:
    latest = result.latest
    return {
        "run": result.run.url,
        "latest": None if latest is None else str(latest.version),
        "branch": result.branch,
        "versions": [_build_version_document(result, e) for e in result.entries],
        "branches": [
            {"number": number, "problem": describe_error(b)}
            if isinstance(b, LimpetError)
            else {
                "number": number,
                "from": b.from_version,
                "reason": b.reason,
                "created": b.created,
                "problem": None,
            }
            for number, b in result.branches.items()
        ],
        "orphans": {"files": len(result.orphans), "bytes": sum(s.length for s in result.orphans)},
        "contained_runs": result.runs,
        "bytes_checked": False,
    }


def _build_version_document(result: ListResult, entry: VersionEntry) -> dict[str, Any]:
    statuses = find_statuses(entry.version, entry.evaluations, result.leases)
    return {
        "version": str(entry.version),
        "url": result.run.location(entry.version).url,
        "step": entry.version.step,
        "branch": entry.version.branch,
        "on_line": entry.on_lineage,
        "latest": entry.is_latest,
        "created": entry.created,
        "bytes": entry.nbytes,
        "referred_bytes": entry.referred_bytes,
        "reason": entry.reason,
        "metrics": entry.metrics,
        "evaluations": {name: asdict(status) for name, status in statuses.items()},
        "pinned": entry.pinned,
        "intact": entry.problem is None,
        "problem": None if entry.problem is None else describe_error(entry.problem),
    }


def render(result: ListResult, plots: Sequence[str] = ()) -> None:
    """Print the table of versions, plots, their problems, and the other files in the run."""
    total = format_size(sum(e.nbytes for e in result.entries))
    count = format_count(len(result.entries), "version")
    print_table([[(result.run.url, "bold"), (f"{count}, {total}", "dim")]])
    show_branch = any(e.version.branch for e in result.entries)
    show_referred = any(e.referred_bytes for e in result.entries)
    sizes = ("own", "referred") if show_referred else ("size",)
    names = ("step", *(("branch",) if show_branch else ()), "age", *sizes, "state", "reason")
    rows = [_table_cells(entry, show_branch, show_referred) for entry in result.entries]
    # metrics get the rest of the line; no other column is truncated, even on a narrow terminal
    numbers = ("step", "branch", "age", *sizes)
    print_table(rows, (*names, "metrics"), right_aligned=numbers, flexible=[len(names)])
    _print_plots(plots, {"": [(e.version, e.metrics) for e in result.entries if e.on_lineage]})
    for note, style in _footnotes(result):
        print_line(note, style)


def _build_run_document(run: RunSummary) -> dict[str, Any]:
    latest, writer = run.records[-1] if run.records else None, run.writer
    return {
        "name": run.name,
        "url": run.url,
        "latest": latest and str(latest.version),
        "created": run.created,
        "bytes": run.nbytes,
        "versions": len(run.records),
        "damaged": run.damaged,
        "metrics": latest.metrics if latest else {},
        "best": {
            metric: {"mode": mode, "version": str(r.version), "value": r.metrics[metric]}
            for metric, mode, r in run.best_versions()
        },
        "running": run.is_running(),
        "writer": writer and {"holder": describe_holder(writer), "since": writer.created},
        "ended": run.ended,
        "problem": run.problem and describe_error(run.problem),
    }


def render_runs(place: str, runs: Runs, plots: Sequence[str] = ()) -> None:
    """Print the table of runs, that with the newest version last, plots, and their problems."""
    total = format_size(sum(run.nbytes for run in runs))
    print_table([[(place, "bold"), (f"{format_count(len(runs), 'run')}, {total}", "dim")]])
    numbers = ("step", "age", "size")
    print_table([*map(run_cells, runs)], RUN_COLUMNS, right_aligned=numbers, flexible=[4, 0, 5])
    _print_plots(plots, {run.name: [(r.version, r.metrics) for r in run.records] for run in runs})
    for run in runs:
        if run.problem is not None:
            print_line(f"{run.name}: {run.problem.brief}", "red")


RUN_COLUMNS = ("run", "step", "age", "size", "state", "metrics")


def run_cells(run: RunSummary) -> list[Cell]:
    """Return the line of a run in the table of runs."""
    shown, style = _build_run_document(run), ""
    state = run.state
    if run.writer is not None and run.is_running() is not False:
        style = "green" if run.is_running() else "yellow"
    if isinstance(run.problem, FormatTooNew):
        state, style = f"too new, {state}", "red"
    elif run.damaged or run.problem is not None:
        what = f"{run.damaged} damaged" if run.damaged else "unreadable"
        state, style = f"{what}, {state}", "red"
    best = [
        f"{format_metrics({metric: found['value']})} (step {found['version'][8:]})"
        for metric, found in shown["best"].items()
    ]
    return [
        (run.name, ""),
        (run.records[-1].version.name if run.records else "", ""),
        (format_age(run.created) if run.created else "", ""),
        (format_size(run.nbytes), ""),
        (state, style),
        (", ".join(best) or format_metrics(shown["metrics"]), ""),
    ]


_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def _print_plots(
    metrics: Iterable[str], runs: Mapping[str, Sequence[tuple[Version, Mapping[str, float]]]]
) -> None:
    """Print a line for each metric of each run that has it, with the range of its values."""
    width, lines = max(8, min(60, output_width() - 60)), list[list[Cell]]()
    for metric in metrics:
        count = len(lines)
        for name, versions in runs.items():
            points = [(v.step, found[metric]) for v, found in versions if metric in found]
            if points:
                size = -(-len(points) // width)
                line = _draw_line([value for _, value in points[::-1][::size][::-1]])
                values = [value for _, value in points if isfinite(value)]
                ends = map(format_value, (min(values), max(values)) if values else ())
                note = (
                    f"{' to '.join(ends) or 'not finite'}, steps {points[0][0]} to {points[-1][0]}"
                )
                lines.append([(f"{name} {metric}".strip(), ""), (line, "cyan"), (note, "dim")])
        if len(lines) == count:
            lines.append([(metric, ""), ("", ""), ("no version has this metric", "red")])
    print_table(lines, flexible=[0] if lines else ())


def _draw_line(values: Sequence[float]) -> str:
    """Return a block for each value, as high as it is; a dot if it is not finite."""
    finite = [value / 2 for value in values if isfinite(value)]  # the range may overflow
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    shares = ((v / 2 - low) / ((high - low) or 1.0) if isfinite(v) else None for v in values)
    return "".join("\u00b7" if s is None else _BLOCKS[min(int(8 * s), 7)] for s in shares)


_STATUS_STYLES = {"latest": "green", "ok": "", "abandoned": "dim"}
"""Styles of intact versions. Every other status is red."""


def _table_cells(entry: VersionEntry, show_branch: bool, show_referred: bool) -> list[Cell]:
    base = "" if entry.on_lineage else "dim"
    referred = format_size(entry.referred_bytes) if entry.referred_bytes else ""
    return [
        (entry.version.step, base),
        *([(entry.version.branch, base)] if show_branch else []),
        (format_age(entry.created), base),
        (format_size(entry.nbytes), base),
        *([(referred, base)] if show_referred else []),
        (entry.describe(), _STATUS_STYLES.get(entry.status, "red")),
        (truncate(entry.reason or "", 12), base),
        (format_metrics(entry.metrics), base),
    ]


def _footnotes(result: ListResult) -> Iterator[tuple[str, str]]:
    """Yield the lines below the table, each with its style."""
    for entry in result.entries:
        if entry.problem is not None:
            yield f"{entry.version}: {entry.problem.brief}", "red"
        statuses = find_statuses(entry.version, entry.evaluations, result.leases)
        for name, status in statuses.items():
            if status.state == "FAILED":
                yield f"{entry.version}: evaluation {name} failed: {status.cause}", "yellow"
            elif status.state == "PENDING":
                yield f"{entry.version}: evaluation {name} is pending ({status.cause})", "dim"
    for number, branch in result.branches.items():
        if isinstance(branch, LimpetError):
            yield f"branch {number}: {branch.brief}", "red"
        else:
            yield f"branch {number} starts at {branch.from_version} ({branch.reason})", "dim"
    if result.runs:
        count, url = format_count(len(result.runs), "run"), result.run.url
        yield f"also holds {count}: limpet ls {url}/{result.runs[0]}", "yellow"
    if result.latest is None:
        yield "No version on the current lineage is intact.", "red"
    if result.orphans:
        nbytes = format_size(sum(s.length for s in result.orphans))
        yield (
            f"{format_count(len(result.orphans), 'file')} ({nbytes}) that no manifest names, from"
            " a save in progress or one that was never committed; to clean up: limpet sweep"
            f" {result.run.url}",
            "yellow",
        )
    yield f"File contents were not checked; to check them: limpet verify {result.run.url}", "dim"
