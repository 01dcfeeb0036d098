"""``limpet sweep RUN``: remove the files of saves that were never committed."""

from __future__ import annotations

import click

from limpet.cli.console import print_line
from limpet.cli.output import duration_option, json_option, print_json
from limpet.cli.resolve import resolve_run
from limpet.run.sweep import SweepResult
from limpet.text import format_count, format_size


@click.command("sweep")
@click.argument("run")
@duration_option("--grace", "24h", "Keep files that are younger: 90 (seconds), 15m, 24h, 7d.")
@click.option("--abandoned", is_flag=True, help="Also delete the versions on abandoned branches.")
@click.option("--dry-run", is_flag=True, help="Report what would be removed; remove nothing.")
@json_option
def command(run: str, grace: float, abandoned: bool, dry_run: bool, as_json: bool) -> None:
    """Remove the files in RUN that no manifest names: leftovers of saves that were never committed.

    Committed versions (without --abandoned) and files of a save in progress are never removed.
    With --abandoned, versions that are pinned or referred to are kept and reported.
    """  # fmt: skip
    opened, _ = resolve_run(run, require_version=False)
    result = opened.sweep(grace=grace, abandoned=abandoned, dry_run=dry_run)
    if as_json:
        print_json(
            {
                "run": opened.url,
                "dry_run": dry_run,
                "grace_seconds": grace,
                "abandoned": abandoned,
                "removed": result.removed,
                "bytes": result.nbytes,
                "kept": [{"key": key, "why": why} for key, why in result.kept],
                "hidden_uploads": result.hidden_uploads,
            }
        )
    else:
        render(result, dry_run)
        if result.hidden_uploads:
            note = f"Unfinished uploads cannot be listed here: {result.hidden_uploads}"
            print_line(note, "dim")


def render(result: SweepResult, dry_run: bool) -> None:
    """Print what was removed, what was kept and why, and a summary."""
    verb = "would remove" if dry_run else "removed"
    for key in result.removed:
        print_line(f"{verb}  {key}")
    for key, why in result.kept:
        print_line(f"kept     {key} ({why})", "dim")
    if not result.removed and not result.kept:
        print_line("Nothing to remove: every file belongs to a version.", "green")
        return
    removed = format_count(len(result.removed), "file") if result.removed else "nothing"
    size = f", {format_size(result.nbytes)}" if result.removed else ""
    kept = f"; {len(result.kept):,} kept" if result.kept else ""
    print_line(f"{verb.capitalize()} {removed}{size}{kept}", "bold")
