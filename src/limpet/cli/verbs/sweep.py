"""``limpet sweep RUN``: remove the files of saves that were never committed."""

from __future__ import annotations

from collections import Counter

import click

from limpet.cli.console import print_line
from limpet.cli.output import json_option, parse_duration, print_json
from limpet.cli.resolve import resolve_run
from limpet.format.names import MANIFEST, parse_version
from limpet.run.sweep import ALL_ABANDONED, SweepResult
from limpet.text import format_count, format_size


@click.command("sweep", short_help="Remove files of saves that were never committed.")
@click.argument("run")
@click.option(
    "--grace",
    callback=parse_duration,
    default="24h",
    show_default=True,
    metavar="TIME",
    help="Keep files that are younger: 90 (seconds), 15m, 24h, 7d.",
)
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
    files, versions = _group_by_version(result.removed)
    for name, count in versions.items():
        print_line(f"{verb}  {name} ({format_count(count, 'file')})")
    for key in files:
        print_line(f"{verb}  {key}")
    for key, why in result.kept:
        print_line(f"kept     {key} ({why})", "dim")
    if not result.removed and not result.kept:
        print_line("Nothing to remove: every file belongs to a version.", "green")
        return
    kept_keys = [key for key, _ in result.kept if key != ALL_ABANDONED]
    kept_versions = sum(parse_version(key) is not None for key in kept_keys)
    summary = f"{verb.capitalize()} {_format_counts(len(versions), len(files)) or 'nothing'}"
    summary += f", {format_size(result.nbytes)}" if result.removed else ""
    kept = _format_counts(kept_versions, len(kept_keys) - kept_versions)
    print_line(summary + (f"; {kept} kept" if kept else ""), "bold")


def _group_by_version(removed: list[str]) -> tuple[list[str], dict[str, int]]:
    """Split removed keys into single files, and counts of files of versions removed as a whole."""
    manifests = (key for key in removed if key.endswith(f"/{MANIFEST}"))
    deleted = sorted(v for key in manifests if (v := parse_version(key.partition("/")[0])))
    folders = Counter(key.partition("/")[0] for key in removed)
    versions = {str(version): folders[str(version)] for version in deleted}
    return [key for key in removed if key.partition("/")[0] not in versions], versions


def _format_counts(versions: int, files: int) -> str:
    counts = ((versions, "version"), (files, "file"))
    return " and ".join(format_count(number, noun) for number, noun in counts if number)
