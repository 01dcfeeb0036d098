"""``holdfast sweep RUN``: remove what saves that were never committed left behind."""

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
    """A length of time such as ``90`` or ``90s``, ``15m``, ``24h``, ``7d`` or ``1h30m``, in
    seconds."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return float(value)
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smhd])", value)
    if not parts or "".join(n + u for n, u in parts) != value:
        raise click.BadParameter(
            f"{value!r} is no time; write 90 (seconds), 90s, 15m, 24h, 7d or 1h30m"
        )
    return sum(float(n) * _SECONDS_PER_UNIT[u] for n, u in parts)


@click.command("sweep", short_help="Remove what saves that were never committed left.")
@click.argument("run")
@click.option(
    "--grace",
    callback=parse_duration,
    default="24h",
    show_default=True,
    metavar="TIME",
    help="Leave alone what is younger: 90 (seconds), 15m, 24h, 7d.",
)
@click.option(
    "--abandoned", is_flag=True, help="Also delete the versions on branches that training has left."
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
@json_option
def command(run: str, grace: float, abandoned: bool, dry_run: bool, as_json: bool) -> None:
    """Remove the files in RUN that no manifest names: what saves that were never committed left.

    A committed version is never touched (but see --abandoned), nor is anything of a save that is
    under way. With --abandoned, what is pinned or referred to is left alone, and named.
    """  # fmt: skip
    place, _ = resolve_run(run, require_version=False)
    swept = place.sweep(grace=grace, abandoned=abandoned, dry_run=dry_run)
    if as_json:
        print_json(
            {
                "run": place.url,
                "dry_run": dry_run,
                "grace_seconds": grace,
                "abandoned": abandoned,
                "removed": swept.removed,
                "bytes": swept.nbytes,
                "kept": [{"key": key, "why": why} for key, why in swept.kept],
            }
        )
    else:
        from holdfast.cli.console import make_console

        render(swept, dry_run, make_console())


def render(swept: SweepResult, dry_run: bool, console: Console) -> None:
    """Print what was removed, what was kept and why, and the sum."""
    from holdfast.cli.console import format_size, styled_text

    word = "would remove" if dry_run else "removed"
    files, versions = _group_by_version(swept.removed)
    for name, many in versions.items():
        console.print(styled_text(f"{word}  {name} ({format_count(many, 'file')})"), soft_wrap=True)
    for key in files:
        console.print(styled_text(f"{word}  {key}"), soft_wrap=True)
    for key, why in swept.kept:
        console.print(styled_text(f"kept     {key} ({why})", "dim"), soft_wrap=True)
    if not swept.removed and not swept.kept:
        console.print(styled_text("Nothing to remove: every file belongs to a version.", "green"))
        return
    stay = [key for key, _ in swept.kept]
    stay_versions = [key for key in stay if parse_version(key) is not None]
    stay_files = [key for key in stay if key not in (*stay_versions, ALL_ABANDONED)]
    done = f"{word.capitalize()} {_format_counts(len(versions), len(files)) or 'nothing'}"
    done += f", {format_size(swept.nbytes)}" if swept.removed else ""
    kept = _format_counts(len(stay_versions), len(stay_files))
    console.print(styled_text(done + (f"; {kept} kept" if kept else ""), "bold"))


def _group_by_version(removed: list[str]) -> tuple[list[str], dict[str, int]]:
    """Files that were removed by themselves, and the versions that were deleted whole (those whose
    manifest is among the files), each with the number of its files."""
    manifests = (key for key in removed if key.endswith(f"/{MANIFEST}"))
    whole = sorted(v for key in manifests if (v := parse_version(key.partition("/")[0])))
    versions = {str(version): 0 for version in whole}
    files = []
    for key in removed:
        folder = key.partition("/")[0]
        if folder in versions:
            versions[folder] += 1
        else:
            files.append(key)
    return files, versions


def _format_counts(versions: int, files: int) -> str:
    parts = [format_count(versions, "version")] * bool(versions) + [
        format_count(files, "file")
    ] * bool(files)
    return " and ".join(parts)
