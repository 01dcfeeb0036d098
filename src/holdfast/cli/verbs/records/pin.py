"""``holdfast pin RUN STEP``: protect a version from deletion, or unpin it."""

from __future__ import annotations

import re

import click

from holdfast.cli.console import make_console, print_line
from holdfast.cli.output import json_option, print_json
from holdfast.cli.resolve import resolve_run
from holdfast.run.address import open_version
from holdfast.run.run import Run

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


def parse_version(
    ctx: click.Context, param: click.Parameter, value: str
) -> str | tuple[int, int | None]:
    """Do the same, and also accept what an address has after the ``@``: ``latest``, ``best``, or
    ``best:METRIC``, which are returned as they are."""
    if value in ("latest", "best") or (value.startswith("best:") and value != "best:"):
        return value
    return parse_step_and_branch(ctx, param, value)


def find_step(run: Run, at: str | tuple[int, int | None]) -> tuple[int, int | None]:
    """Return the step and the branch of what ``parse_version`` returned."""
    if not isinstance(at, str):
        return at
    version = open_version(f"{run.url}@{at}").version
    return version.step, version.branch


@click.command("pin", short_help="Protect a version from deletion.")
@click.argument("run")
@click.argument("step", callback=parse_version)
@click.option("--remove", is_flag=True, help="Unpin the version: it may be deleted again.")
@json_option
def command(run: str, step: str | tuple[int, int | None], remove: bool, as_json: bool) -> None:
    """Protect the version of STEP in RUN from deletion by retention and by "sweep --abandoned".

    STEP is a step on the current lineage, such as 120; 120.1 is step 120 on branch 1. It may
    also be latest, best, or best:METRIC. "ls" marks pinned versions.
    """
    opened, _ = resolve_run(run)
    at = find_step(opened, step)
    version = opened.unpin(*at) if remove else opened.pin(*at)
    if as_json:
        print_json({"run": opened.url, "version": str(version), "pinned": not remove})
    else:
        print_line(make_console(), f"{version} is {'no longer ' if remove else ''}pinned")
