"""``holdfast pin RUN STEP``: keep a version from being deleted, or let it go again."""

from __future__ import annotations

import re

import click

from holdfast.cli.output import json_option, print_json
from holdfast.cli.resolve import resolve_run

_STEP_PATTERN = re.compile(r"(0|[1-9][0-9]{0,17})(?:\.([0-9]{1,9}))?")


def parse_step_and_branch(
    ctx: click.Context, param: click.Parameter, value: str
) -> tuple[int, int | None]:
    """``120``, or ``120.1`` for step 120 of branch 1."""
    match = _STEP_PATTERN.fullmatch(value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no step; write 120, or 120.1 for that of branch 1")
    return int(match[1]), None if match[2] is None else int(match[2])


@click.command("pin", short_help="Keep a version from being deleted.")
@click.argument("run")
@click.argument("step", callback=parse_step_and_branch)
@click.option("--remove", is_flag=True, help="Unpin it: it may be deleted again.")
@json_option
def command(run: str, step: tuple[int, int | None], remove: bool, as_json: bool) -> None:
    """Keep the version of STEP in RUN from being deleted, by retention or "sweep --abandoned".

    STEP is on the line that training is on; 120.1 is step 120 of branch 1. "ls" shows what is
    pinned.
    """
    place, _ = resolve_run(run)
    version = place.unpin(*step) if remove else place.pin(*step)
    if as_json:
        print_json({"run": place.url, "version": str(version), "pinned": not remove})
    else:
        from holdfast.cli.console import make_console, styled_text

        done = f"{version} is no longer pinned" if remove else f"{version} is pinned"
        make_console().print(styled_text(done), soft_wrap=True)
