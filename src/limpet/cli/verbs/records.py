"""``limpet pin RUN STEP`` and ``limpet rm RUN STEP...``: protect versions from deletion, or delete
them. A version is named by ``RUN STEP``, its address, or its folder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from limpet.cli.console import print_line
from limpet.cli.output import json_option, print_json
from limpet.cli.resolve import resolve_run, split_version
from limpet.errors import NotFound
from limpet.format.names import Version
from limpet.run.address import open_version
from limpet.run.run import Run
from limpet.text import format_size


@click.command("pin")
@click.argument("version", metavar="RUN STEP|SNAPSHOT", nargs=-1, required=True)
@click.option("--remove", is_flag=True, help="Unpin the version: it may be deleted again.")
@json_option
@click.pass_context
def pin(ctx: click.Context, version: Sequence[str], remove: bool, as_json: bool) -> None:
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
        print_line(f"{found} is {'no longer ' if remove else ''}pinned")


@click.command("rm")
@click.argument("versions", metavar="RUN STEP...|SNAPSHOT", nargs=-1, required=True)
@json_option
def rm(versions: Sequence[str], as_json: bool) -> None:
    """Delete the versions of each STEP in RUN, or SNAPSHOT: all of them, or none and an error.

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
        print_line(f"deleted {', '.join(names)}: {format_size(nbytes)}", "bold")


_STEP = re.compile(r"(0|[1-9][0-9]{0,17})(?:\.([0-9]{1,9}))?")

Target = tuple[int, int | None]
"""The step and the branch of a version; the branch is None for the current lineage."""


def resolve_targets(words: Sequence[str], *, by_name: bool = True) -> tuple[Run, list[Target]]:
    """Return the run and the versions that arguments name: a run and steps (``runs/a 120 240.1``),
    or one version. Unless ``by_name``, ``latest`` and ``best`` are refused."""
    url, *steps = words
    if (first := split_version(url)) is not None:
        url, step = first
        if steps:
            raise _usage_error(f"{words[0]} is one version; for several, write {url} STEP ...")
        steps = [step]
    for step in steps:
        _check_step(step, url, by_name)
    run, _ = resolve_run(url)
    if not steps:
        verb = click.get_current_context().command_path
        raise _usage_error(
            f"{url} is a run; name the version: {verb} {url} STEP, or {verb} {url}@STEP"
        )
    return run, [_find_target(run, step) for step in steps]


def _check_step(step: str, url: str, by_name: bool) -> None:
    if _STEP.fullmatch(step):
        return
    if step not in ("latest", "best") and not (step.startswith("best:") and step != "best:"):
        raise _usage_error(f"{step!r} is not a step; write 120, or 120.1 for branch 1")
    if not by_name:
        raise _usage_error(
            f"{step!r} may be another version by now. Look which one it is, with `limpet show"
            f" {url}@{step}`, and write its step"
        )


def _find_target(run: Run, step: str) -> Target:
    match = _STEP.fullmatch(step)
    if match is None:
        version = open_version(f"{run.url}@{step}").version
        return version.step, version.branch
    if match[2] is None:
        return int(match[1]), None
    version = Version(int(match[1]), int(match[2]))
    found = run.find(version.step, version.branch)
    if found != version:
        raise NotFound(
            f"There is no {version} in {run.url}",
            found=f"{found}, from which that branch continues",
            todo=f"Write {found.step}.{found.branch} if you mean that one",
            key=str(version),
            store=run.url,
        )
    return version.step, version.branch


def _usage_error(message: str) -> click.UsageError:
    return click.UsageError(message, click.get_current_context())
