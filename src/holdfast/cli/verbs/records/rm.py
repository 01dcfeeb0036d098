"""``holdfast rm RUN STEP...``: delete versions."""

from __future__ import annotations

import click

from holdfast.cli.console import format_size, make_console, print_line
from holdfast.cli.output import json_option, print_json
from holdfast.cli.resolve import resolve_run
from holdfast.cli.verbs.records.pin import parse_step_and_branch


def _parse_steps(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> list[tuple[int, int | None]]:
    return [parse_step_and_branch(ctx, param, value) for value in values]


@click.command("rm", short_help="Delete versions.")
@click.argument("run")
@click.argument("steps", metavar="STEP...", nargs=-1, required=True, callback=_parse_steps)
@json_option
def command(run: str, steps: list[tuple[int, int | None]], as_json: bool) -> None:
    """Delete the versions of each STEP in RUN: all of them, or none and an error.

    A version is not deleted if it is pinned, if a process or an evaluation is using it, if another
    version refers to it, or if it is the newest one, from which a training would continue.

    STEP is a step on the current lineage, such as 120; 120.1 is step 120 on branch 1.
    """
    opened, _ = resolve_run(run)
    versions = sorted({opened.find(*step) for step in steps})
    nbytes = opened.delete(*versions)
    names = [str(version) for version in versions]
    if as_json:
        print_json({"run": opened.url, "deleted": names, "bytes": nbytes})
    else:
        print_line(make_console(), f"deleted {', '.join(names)}: {format_size(nbytes)}", "bold")
