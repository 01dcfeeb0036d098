"""``holdfast sweep RUN``: remove the files of saves that were never committed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from holdfast.cli.output import json_option, print_json
from holdfast.cli.resolve import format_count, resolve_run
from holdfast.format.names import MANIFEST, parse_version
from holdfast.run.sweep import ALL_ABANDONED, SweepResult

if TYPE_CHECKING:
    from rich.console import Console

_SECONDS_PER_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Parse a duration such as ``90``, ``90s``, ``15m``, ``24h``, ``7d``, or ``1h30m`` to
    seconds."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return float(value)
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smhd])", value)
    if not parts or "".join(n + u for n, u in parts) != value:
        raise click.BadParameter(
            f"{value!r} is not a time; write 90 (seconds), 90s, 15m, 24h, 7d, or 1h30m"
        )
    return sum(float(n) * _SECONDS_PER_UNIT[u] for n, u in parts)


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
            }
        )
    else:
        from holdfast.cli.console import make_console

        render(result, dry_run, make_console())


def render(result: SweepResult, dry_run: bool, console: Console) -> None:
    """Print what was removed, what was kept and why, and a summary."""
    from holdfast.cli.console import format_size, styled_text

    verb = "would remove" if dry_run else "removed"
    files, versions = _group_by_version(result.removed)
    for name, count in versions.items():
        line = f"{verb}  {name} ({format_count(count, 'file')})"
        console.print(styled_text(line), soft_wrap=True)
    for key in files:
        console.print(styled_text(f"{verb}  {key}"), soft_wrap=True)
    for key, why in result.kept:
        console.print(styled_text(f"kept     {key} ({why})", "dim"), soft_wrap=True)
    if not result.removed and not result.kept:
        console.print(styled_text("Nothing to remove: every file belongs to a version.", "green"))
        return
    kept_keys = [key for key, _ in result.kept]
    kept_versions = [key for key in kept_keys if parse_version(key) is not None]
    kept_files = [key for key in kept_keys if key not in (*kept_versions, ALL_ABANDONED)]
    summary = f"{verb.capitalize()} {_format_counts(len(versions), len(files)) or 'nothing'}"
    summary += f", {format_size(result.nbytes)}" if result.removed else ""
    kept = _format_counts(len(kept_versions), len(kept_files))
    console.print(styled_text(summary + (f"; {kept} kept" if kept else ""), "bold"))


def _group_by_version(removed: list[str]) -> tuple[list[str], dict[str, int]]:
    """Split removed keys into single files and whole versions.

    A version was deleted as a whole if its manifest is among the keys. Returns the keys of the
    single files, and the number of files of each version.
    """
    manifests = (key for key in removed if key.endswith(f"/{MANIFEST}"))
    deleted = sorted(v for key in manifests if (v := parse_version(key.partition("/")[0])))
    versions = {str(version): 0 for version in deleted}
    files = []
    for key in removed:
        folder = key.partition("/")[0]
        if folder in versions:
            versions[folder] += 1
        else:
            files.append(key)
    return files, versions


def _format_counts(versions: int, files: int) -> str:
    counts = ((versions, "version"), (files, "file"))
    return " and ".join(format_count(number, noun) for number, noun in counts if number)
