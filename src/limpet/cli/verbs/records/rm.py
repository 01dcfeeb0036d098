"""``limpet rm RUN STEP...``: delete versions."""

from __future__ import annotations

from collections.abc import Sequence

import click

from limpet.cli.console import make_console, print_line
from limpet.cli.output import json_option, print_json
from limpet.cli.verbs.records.targets import resolve_targets
from limpet.text import format_size


@click.command("rm", short_help="Delete versions.")
@click.argument("versions", metavar="RUN STEP...|SNAPSHOT...", nargs=-1, required=True)
@json_option
def command(versions: Sequence[str], as_json: bool) -> None:
    """Delete the versions of each STEP in RUN, or each SNAPSHOT: all of them, or none and an error.

    A version is not deleted if it is pinned, if a process or an evaluation is using it, if another
    version refers to it, or if it is the newest one, from which a training would continue.

    STEP is a step on the current lineage, such as 120; 120.1 is step 120 on branch 1. SNAPSHOT is
    RUN@STEP or RUN/version_120. The names latest and best are refused, because they may mean
    another version by now.
    """
    opened, targets = resolve_targets(versions, by_name=False)
    found = sorted({opened.find(*target) for target in targets})
    nbytes = opened.delete(*found)
    names = [str(version) for version in found]
    if as_json:
        print_json({"run": opened.url, "deleted": names, "bytes": nbytes})
    else:
        print_line(make_console(), f"deleted {', '.join(names)}: {format_size(nbytes)}", "bold")
