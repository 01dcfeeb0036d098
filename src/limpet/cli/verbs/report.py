"""``limpet report RUN...``: print one page in HTML that shows runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from limpet.cli.console import progress_bar
from limpet.cli.output import json_option, parse_size, print_json
from limpet.cli.resolve import resolve_run
from limpet.cli.verbs.verify import verify_run
from limpet.report.data import RunReport, read_report
from limpet.report.html import render_report
from limpet.run.metrics_log import list_files
from limpet.run.overview import list_versions


def parse_stats_bytes(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Parse a size, or 0."""
    return 0 if value == "0" else parse_size(ctx, param, value)


def stats_option(function: Any) -> Any:
    """Add the option ``--stats-bytes``."""
    return click.option(
        "--stats-bytes", callback=parse_stats_bytes, default="64MiB", show_default=True,
        metavar="SIZE", help="The bytes to read for statistics of the tensors of a version; or 0.",
    )(function)  # fmt: skip


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("--verify", is_flag=True, help="First read every byte, as limpet verify does.")
@stats_option
@json_option
def command(runs: Sequence[str], verify: bool, stats_bytes: int, as_json: bool) -> None:
    """Print a page in HTML: limpet report runs/a > a.html.

    It shows the versions and branches of RUN, metrics, bytes per save, the config, and what the
    newest version contains. Several runs are in the same plots. The file needs no other files.
    """
    html = render_report([_read(url, verify, stats_bytes, as_json) for url in runs])
    if as_json:
        print_json({"runs": runs, "html": html})
    else:
        click.echo(html.encode("ascii", "xmlcharrefreplace"))  # whatever the encoding of stdout is


def _read(url: str, verify: bool, stats_bytes: int, quiet: bool) -> RunReport:
    run, listing = resolve_run(url, require_version=False)
    results = verify_run(run, listing, quiet) if verify else []
    damaged = {result.name: result.problems[0].error for result in results if result.problems}
    count = len(listing.versions)
    with progress_bar("reading manifests", count, quiet=quiet, unit="versions") as advance:
        listed = list_versions(run, listing, advance, damaged)
    checked = sum(result.nbytes for result in results) if verify else None
    return read_report(listed, list_files(run.store), stats_bytes, checked)
