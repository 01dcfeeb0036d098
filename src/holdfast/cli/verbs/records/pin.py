"""``holdfast pin RUN STEP``: protect a version from deletion, or unpin it."""

from __future__ import annotations

import re

import click

from holdfast.cli.console import make_console, print_line
from holdfast.cli.output import json_option, print_json
from holdfast.cli.resolve import resolve_run

_STEP_PATTERN = re.compile(r"(0|[1-9][0-9]{0,17})(?:\.([0-9]{1,9}))?")


def parse_step_and_branch(
    ctx: click.Context, param: click.Parameter, value: str
) -> tuple[int, int | None]:
    """Parse ``120``, or ``120.1`` for step 120 on branch 1.

    Returns the step and the branch; the branch is None for the current lineage.
    """
    match = _STEP_PATTERN.fullmatch(value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a step; write 120, or 120.1 for branch 1")
    return int(match[1]), None if match[2] is None else int(match[2])


@click.command("pin", short_help="Protect a version from deletion.")
@click.argument("run")
@click.argument("step", callback=parse_step_and_branch)
@click.option("--remove", is_flag=True, help="Unpin the version: it may be deleted again.")
@json_option
def command(run: str, step: tuple[int, int | None], remove: bool, as_json: bool) -> None:
    """Protect the version of STEP in RUN from deletion by retention and by "sweep --abandoned".

    STEP is a step on the current lineage, such as 120; 120.1 is step 120 on branch 1. "ls" marks
    pinned versions.
    """
    opened, _ = resolve_run(run)
    version = opened.unpin(*step) if remove else opened.pin(*step)
    if as_json:
        print_json({"run": opened.url, "version": str(version), "pinned": not remove})
    else:
        print_line(make_console(), f"{version} is {'no longer ' if remove else ''}pinned")
