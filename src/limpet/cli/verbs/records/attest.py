"""``limpet attest RUN STEP...``: record whether versions can be trusted."""

from __future__ import annotations

from collections.abc import Sequence

import click

from limpet.cli.console import make_console, print_line
from limpet.cli.output import json_option, print_json
from limpet.cli.verbs.records.targets import resolve_targets
from limpet.format.names import EvaluationFile, parse_evaluation


def _check_author(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if parse_evaluation(str(EvaluationFile(value, "0" * 12))) is None:
        raise click.BadParameter(
            f"{value!r} is not a valid name; use 1 to 64 of the characters a-z, A-Z, 0-9, -, and _"
        )
    return value


def _require_result(ctx: click.Context, param: click.Parameter, value: bool | None) -> bool:
    if value is None:
        raise click.UsageError("Missing option '--ok' or '--not-ok'.", ctx)
    return value


@click.command("attest", short_help="Record whether versions can be trusted.")
@click.argument("versions", metavar="RUN STEP...|SNAPSHOT...", nargs=-1, required=True)
@click.option(
    "--ok/--not-ok", default=None, callback=_require_result, help="The result of the check."
)
@click.option("--by", required=True, callback=_check_author, help="Who says so: sdc-replay, ann.")
@click.option("--note", default="", help="Why, for people.")
@json_option
def command(
    versions: Sequence[str],
    ok: bool,
    by: str,
    note: str,
    as_json: bool,
) -> None:
    """Record the verdict of a check on the versions of each STEP in RUN, or on each SNAPSHOT.

    No training resumes from a version while the newest verdict of any author is --not-ok, and it is
    never the latest or the best one. Versions that were saved after it are not affected: name their
    steps as well if they are bad. If a version does not exist, nothing is recorded.

    STEP is a step on the current lineage, such as 120; 120.1 is step 120 on branch 1. It may
    also be latest, best, or best:METRIC. SNAPSHOT is RUN@STEP or RUN/version_120. "ls" shows the
    verdicts.
    """
    opened, targets = resolve_targets(versions)
    snapshots = [opened.open(opened.find(*target)) for target in targets]
    for snapshot in snapshots:
        opened.attest(snapshot, ok=ok, by=by, note=note)
    names = [str(snapshot.version) for snapshot in snapshots]
    if as_json:
        verdict = {"ok": ok, "by": by, "note": note}
        print_json({"run": opened.url, "versions": names, **verdict})
    else:
        for name in names:
            print_line(make_console(), f"{by} {'trusts' if ok else 'does not trust'} {name}")
