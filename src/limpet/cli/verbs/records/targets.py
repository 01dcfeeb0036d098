"""The arguments of the verbs that change what is recorded of versions: ``RUN STEP...``, or versions
by their addresses or folders."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from limpet.cli.resolve import is_same_run, resolve_run, split_version
from limpet.errors import NotFound
from limpet.format.names import Version
from limpet.run.address import open_version
from limpet.run.run import Run

_STEP = re.compile(r"(0|[1-9][0-9]{0,17})(?:\.([0-9]{1,9}))?")

Target = tuple[int, int | None]
"""The step and the branch of a version; the branch is None for the current lineage."""


def resolve_targets(words: Sequence[str], *, by_name: bool = True) -> tuple[Run, list[Target]]:
    """Return the run and the versions that the arguments of a verb name.

    They are a run and steps (``runs/a 120 240.1``), or versions of one run (``runs/a@120
    runs/a/version_240.1``). A step is what follows the ``@`` of an address. Without ``by_name``,
    ``latest`` and ``best`` are refused.

    Raises ``click.UsageError``, and ``NotFound`` if there is no such run, or no version with a
    branch that was named.
    """
    url, *steps = words
    if (first := split_version(url)) is not None:
        url, step = first
        steps = [step, *(_split_other(word, url, words[0]) for word in words[1:])]
    for step in steps:
        _check_step(step, url, by_name)
    run, _ = resolve_run(url)
    if not steps:
        verb = click.get_current_context().command_path
        raise _usage_error(
            f"{url} is a run; name the version: {verb} {url} STEP, or {verb} {url}@STEP"
        )
    return run, [_find_target(run, step) for step in steps]


def _split_other(word: str, run: str, first: str) -> str:
    """Return the step that a word after ``first``, a version of ``run``, names."""
    split = split_version(word)
    if split is None:
        if _STEP.fullmatch(word):
            resolve_run(first)  # raises an error: it is one version, not a run
        raise _usage_error(f"{word} is not a version; write {first} and others like it")
    if not is_same_run(run, split[0]):
        raise _usage_error(f"{word} and {first} are in different runs; name those of one run")
    return split[1]


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
