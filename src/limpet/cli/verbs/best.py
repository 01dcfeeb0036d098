"""``limpet best FOLDER``: the best version of all runs in a folder by a metric."""

from __future__ import annotations

import click

from limpet.cli.console import print_line, print_table
from limpet.cli.output import describe_error, json_option, print_json
from limpet.cli.resolve import resolve_runs
from limpet.errors import LimpetError
from limpet.run.overview import find_runs, rank_runs, summarize_run
from limpet.text import format_value


@click.command("best")
@click.argument("place", metavar="FOLDER|RUN")
@click.option("--metric", help="By default, the only one whose mode is recorded.")
@click.option("--mode", type=click.Choice(["min", "max"]), help="By default, as recorded.")
@json_option
def command(place: str, metric: str | None, mode: str | None, as_json: bool) -> None:
    """Print the best version of each run in FOLDER, or of one RUN, by a metric: the best run first.

    KeepBest, StopWhen, and "evaluate --metric --mode" record a mode. It is never guessed.
    """
    found = resolve_runs(place, quiet=as_json)
    one = None if isinstance(found, list) else summarize_run(found[0].store)
    runs = found if isinstance(found, list) else [one] if one else []
    try:
        metric, how, ranked = rank_runs(place, runs, metric, mode)
    except LimpetError as e:
        if one and (inside := find_runs(one.catalog.store)):
            raise e.with_advice(f"{place} also holds runs: limpet best {place}/{inside[0]}") from e
        raise
    rows = [
        {
            "address": f"{place.rstrip('/')}{run.name and '/'}{run.name}@{best.version.name}",
            "run": run.url,
            "version": str(best.version),
            "value": best.metrics[metric],
        }
        for run, best in ranked
    ]
    problems = [(run, run.problem) for run in runs if run.problem is not None]
    if as_json:
        failed = [{"run": run.url, **describe_error(e)} for run, e in problems]
        print_json({"metric": metric, "mode": how, "runs": rows, "problems": failed})
        return
    cells = [[(row["address"], ""), (format_value(row["value"]), "")] for row in rows]
    print_table(cells, ("version", f"{metric} ({how})"))
    for run, problem in problems:
        print_line(f"{run.name or place}: {problem.brief}", "red")
