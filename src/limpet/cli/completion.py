"""What the shell offers for arguments: paths, and the versions of a local run."""

from __future__ import annotations

import os
from itertools import islice

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class
from click.types import StringParamType

_SECONDS = 1.0
"""The longest time to wait for a folder, which may be on a server that is away."""

_MAX_NAMES = 20_000
"""The largest number of names in a folder that are looked at."""

_MAX_OFFERED = 200
"""The largest number of versions that are offered, the newest ones."""


class LocationType(StringParamType):
    """The type of arguments that name a run, a snapshot, or a file: the shell completes paths, and
    the steps after ``RUN@``, or after RUN where a verb takes them."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        given = ctx.params.get(param.name or "") if param.nargs == -1 else None
        if given and (offered := _offer_steps(given[0], incomplete)):
            return [CompletionItem(step) for step in offered]
        if given and incomplete.isdecimal():
            return []  # a step of a run that is not here
        run, separator, start = incomplete.rpartition("@")
        if separator and param.name != "run" and (offered := _offer_steps(run, start)):
            return [CompletionItem(f"{run}@{step}") for step in offered]
        return [CompletionItem(incomplete, type="file")]


def _offer_steps(run: str, start: str) -> list[str]:
    """Return what may follow ``RUN@`` and begins with ``start``, of a local run; nothing if there
    is none, or if its folder does not answer."""
    if "://" in run:
        return []
    from limpet.deadline import Call  # imports NumPy, which no command needs to parse arguments

    call = Call(lambda: _list_steps(os.path.expanduser(run), start), "limpet-completion")
    try:
        return call.result() if call.wait(_SECONDS) else []
    except (OSError, ValueError):
        return []


def _list_steps(run: str, start: str) -> list[str]:
    from limpet.format.names import MANIFEST, Version, parse_version

    with os.scandir(run) as entries:
        found = [parse_version(entry.name) for entry in islice(entries, _MAX_NAMES)]
    versions = sorted(v for v in found if v is not None)
    has_branches = any(v.branch for v in versions)  # a step alone is one of the current lineage

    def step(version: Version) -> str:
        return f"{version.step}.{version.branch}" if has_branches else str(version.step)

    matches = [v for v in versions if step(v).startswith(start)][-_MAX_OFFERED:]
    return [step(v) for v in matches if os.path.exists(os.path.join(run, str(v), MANIFEST))]


class _BashComplete(BashComplete):
    """Bash splits ``RUN@120`` into three words, and replaces the last one and the ``@``."""

    _kept = ""
    """What bash keeps of the word on the command line, before the part that it replaces."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        words: list[str] = []
        for word in (*args, incomplete):
            if words and (word == "@" or words[-1].endswith("@")):
                words[-1] += word
            else:
                words.append(word)
        *args, whole = words
        self._kept = "" if whole == incomplete else whole.rpartition("@")[0]
        return args, whole

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{item.value.removeprefix(self._kept)}"


add_completion_class(_BashComplete)
