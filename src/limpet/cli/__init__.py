"""The command-line interface, ``limpet VERB ...``, with a module for each verb in ``cli/verbs``.

This module finds the verb, and converts errors to a message and an exit code. It imports a verb
only when the verb runs; rich is imported only to print for people. A script that uses ``--json``
therefore waits for neither.

Terms: a *verb* is the word that selects a command, such as ``ls``.
May import: the root modules, ``format``, ``storage``, ``sinks``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, ``run``, ``convert``, ``notices``, ``tiers``,
``evaluation``, and ``training``.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from keyword import iskeyword
from typing import IO, Any

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from limpet import events
from limpet.cli import output
from limpet.cli.exit_codes import BROKEN_PIPE, INTERRUPTED, epilog, exit_code
from limpet.errors import LimpetError
from limpet.text import hide_secrets

VERBS = {
    "ls": "List versions of a run, or runs: step, age, size, metrics, ...",
    "best": "Rank the runs in a folder by a metric, the best version first.",
    "metrics": "Print the metrics of the steps of a run, also as CSV.",
    "show": "Show what a snapshot contains: the tree, shapes, sizes.",
    "report": "Print a page in HTML that shows runs: plots, branches, contents.",
    "ui": "Serve the pages of runs on this machine, refreshed while they train.",
    "verify": "Read every byte and compare it with its digest.",
    "diff": "Compare two snapshots, down to the bytes.",
    "copy": "Copy a snapshot or a run, and check every byte.",
    "reshard": "Write a snapshot again in N shards.",
    "import": "Save another library's checkpoint as a version.",
    "export": "Write a snapshot's tensors in another format.",
    "evaluate": "Evaluate the versions of a run with several workers.",
    "pin": "Protect a version from deletion.",
    "rm": "Delete versions.",
    "sweep": "Remove files of saves that were never committed.",
    "request-save": "Request a save from a running training.",
    "run": "Run a training; the exit code says what to do next.",
}
"""The verbs, with the line of `limpet --help`, which must not wait for the imports of all."""
_IN_RECORDS = ("pin", "rm")
"""The verbs that share a module, in which each has its own name."""


class UsageErrorLine(click.UsageError):
    """An invalid command line, which is shown as one line, as every other error is."""

    def show(self, file: IO[str] | None = None) -> None:
        message = " ".join(hide_secrets(self.format_message()).split())
        end = "" if message.endswith((".", "?")) else "."
        path = "limpet" if self.ctx is None else self.ctx.command_path
        click.echo(f"limpet: {message}{end} See `{path} --help`.", file, err=file is None)


_NoArguments: type[click.UsageError] = getattr(
    click.exceptions, "NoArgsIsHelpError", UsageErrorLine
)
"""What click raises to show the help, from click 8.2 on."""


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except (UsageErrorLine, _NoArguments):
        raise
    except click.UsageError as e:
        raise UsageErrorLine(e.format_message(), e.ctx) from e


class _LocationType(StringParamType):
    """The type of arguments that name a run, a snapshot, or a file: the shell completes paths."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class VerbGroup(click.Group):
    """Find verbs by name, and convert errors to one line on stderr and an exit code."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _one_line():
            return super().make_context(*args, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = cmd_name.replace("-", "_") + "_" * iskeyword(cmd_name)
        module, name = ("records", cmd_name) if cmd_name in _IN_RECORDS else (module, "command")
        command: click.Command = getattr(import_module(f"limpet.cli.verbs.{module}"), name)
        command.short_help = VERBS[cmd_name]
        for param in command.params:
            if isinstance(param, click.Argument) and param.type is click.STRING:
                param.type = param.type if param.callback else _LocationType()
        return command

    def invoke(self, ctx: click.Context) -> Any:
        thresholds = gc.get_threshold()
        # A command creates millions of small objects that live until its end. With Python's
        # thresholds, a quarter of its time is scanning them.
        gc.set_threshold(100_000, 20, 50)
        try:
            with events.attach(_make_waiting_sink(ctx)), _one_line():
                result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # otherwise the flush of the remaining buffer at exit raises a second error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(BROKEN_PIPE)
        except (LimpetError, OSError) as e:
            document = output.describe_error(output.add_advice(e))
            click.echo(f"limpet: {document['message']}", err=True)
            if output.wants_json(ctx):
                output.print_json({"error": document, "exit": exit_code(e)}, indent=None)
            ctx.exit(exit_code(e))
        except KeyboardInterrupt:
            click.echo("limpet: interrupted", err=True)
            ctx.exit(INTERRUPTED)
        finally:
            gc.set_threshold(*thresholds)
        return result


def _make_waiting_sink(ctx: click.Context) -> Callable[[str, dict[str, Any]], None]:
    """Return a sink that prints one line for each server for which a command waits."""
    shown = set[str]()

    def show(name: str, fields: dict[str, Any]) -> None:
        store = str(fields.get("store"))
        if name == "waiting" and store not in shown and not output.wants_json(ctx):
            shown.add(store)
            click.echo(f"limpet: {output.describe_wait(fields)}", err=True)

    return show


@click.group(
    cls=VerbGroup, epilog=epilog(), context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="limpet", message="limpet %(version)s")
@click.option(
    "--json",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=output.store_json_flag,
    help="Print one JSON document, for programs. Also after the command.",
)
def cli() -> None:
    """Inspect, verify, compare, copy, and clean up the snapshots of a training run, request a new
    one, or run a training.

    RUN is a folder or URL that contains versions. SNAPSHOT is one version, such as
    runs/a/version_120, runs/a@120, or runs/a@best. With --json, a command prints one JSON
    document on stdout.
    """


def main() -> None:
    """Run the ``limpet`` command."""
    cli.main(prog_name="limpet")
