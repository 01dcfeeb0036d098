"""The commands: ``holdfast VERB ...``. One file per verb; this one finds them and ends them.

A verb is imported when it is used, and rich only when something is printed to people, so that a
script that asks for ``--json`` waits for neither.
"""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module
from keyword import iskeyword
from typing import Any

import click

from holdfast.cli.exit_codes import BROKEN_PIPE, INTERRUPTED, epilog, exit_code
from holdfast.errors import HoldfastError

VERBS = (
    "ls",
    "show",
    "verify",
    "diff",
    "copy",
    "reshard",
    "import",
    "export",
    "pin",
    "sweep",
    "request-save",
)


class VerbGroup(click.Group):
    """Verbs by name, and the one place where errors become a line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = cmd_name.replace("-", "_") + "_" * iskeyword(cmd_name)
        command: click.Command = import_module(f"holdfast.cli.verbs.{module}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in VERBS:
            close = difflib.get_close_matches(name, VERBS, n=1, cutoff=0.5)
            advice = f"Did you mean {close[0]}?" if close else f"There are {', '.join(VERBS)}."
            raise click.UsageError(f"There is no command {name!r}. {advice}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_stdout()
            ctx.exit(BROKEN_PIPE)
        except (HoldfastError, OSError) as e:
            _print_error(e, ctx)
            ctx.exit(exit_code(e))
        except KeyboardInterrupt:
            click.echo("holdfast: interrupted", err=True)
            ctx.exit(INTERRUPTED)
        return result


@click.group(
    cls=VerbGroup, epilog=epilog(), context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="holdfast", message="holdfast %(version)s")
def cli() -> None:
    """Look at the snapshots of a training run, check them, compare, copy and clean up; ask for
    one more.

    RUN is a folder or URL that holds versions; SNAPSHOT is one of them, such as
    runs/a/version_120 or runs/a@120. Every command takes --json: one JSON document on stdout.
    """


def main() -> None:
    """The entry point of the ``holdfast`` command."""
    cli.main(prog_name="holdfast")


def _discard_stdout() -> None:
    """Whoever read our output has left: what is still buffered goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(error: Exception, ctx: click.Context) -> None:
    from holdfast.cli.output import error_document, format_error_line, print_json, wants_json

    click.echo(f"holdfast: {format_error_line(error)}", err=True)
    if wants_json(ctx):
        print_json(error_document(error))
