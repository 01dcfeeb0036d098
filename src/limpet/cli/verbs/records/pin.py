"""``limpet pin RUN STEP``: protect a version from deletion, or unpin it."""

from __future__ import annotations

from collections.abc import Sequence

import click

from limpet.cli.console import make_console, print_line
from limpet.cli.output import json_option, print_json
from limpet.cli.verbs.records.targets import resolve_targets


@click.command("pin", short_help="Protect a version from deletion.")
@click.argument("version", metavar="RUN STEP|SNAPSHOT", nargs=-1, required=True)
@click.option("--remove", is_flag=True, help="Unpin the version: it may be deleted again.")
@json_option
@click.pass_context
def command(ctx: click.Context, version: Sequence[str], remove: bool, as_json: bool) -> None:
    """Protect the version of STEP in RUN, or SNAPSHOT, from deletion by retention and by "sweep
    --abandoned".

    STEP is a step on the current lineage, such as 120; 120.1 is step 120 on branch 1. It may
    also be latest, best, or best:METRIC. SNAPSHOT is RUN@STEP or RUN/version_120. "ls" marks pinned
    versions.
    """
    opened, targets = resolve_targets(version)
    if len(targets) > 1:
        raise click.UsageError("Name one version at a time", ctx)
    found = opened.unpin(*targets[0]) if remove else opened.pin(*targets[0])
    if as_json:
        print_json({"run": opened.url, "version": str(found), "pinned": not remove})
    else:
        print_line(make_console(), f"{found} is {'no longer ' if remove else ''}pinned")
