"""Writes build/man, the manual pages of the commands, from what click knows: ``make man``."""

import inspect
import re
from pathlib import Path

import click

from limpet import __version__
from limpet.cli import VERBS, cli

FOLDER = Path(__file__).parents[2] / "build" / "man"


def escape(text):
    """Return text that the formatter of manual pages takes literally."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)


def paragraphs(text):
    """Return a help text of click: a paragraph that begins with \\b keeps its lines."""
    lines = []
    for part in inspect.cleandoc(text or "").split("\n\n"):
        body = escape(part.replace("\b\n", ""))
        lines += [".PP", *([".nf", body, ".fi"] if "\b" in part else [" ".join(body.split())])]
    return lines


def entries(rows):
    return [line for term, text in rows for line in (".TP", rf"\fB{escape(term)}\fR", escape(text))]


def render(context, summary):
    """Return the manual page of the command of a context."""
    command, name = context.command, context.command_path
    parameters = [p for p in command.get_params(context) if isinstance(p, click.Option)]
    options = [row for p in parameters if (row := p.get_help_record(context))]
    file = name.replace(" ", "-")
    lines = [f'.TH {file.upper()} 1 "" "limpet {__version__}" "Limpet"', ".SH NAME"]
    lines += [rf"{escape(file)} \- {escape(summary.rstrip('.'))}", ".SH SYNOPSIS"]
    lines += [escape(" ".join([name, *command.collect_usage_pieces(context)]))]
    lines += [".SH DESCRIPTION", *paragraphs(command.help), ".SH OPTIONS", *entries(options)]
    if isinstance(command, click.Group):
        lines += [".SH COMMANDS", *entries((f"{name} {v}", text) for v, text in VERBS.items())]
    if command.epilog:
        title, _, text = inspect.cleandoc(command.epilog).replace("\b\n", "").partition("\n")
        lines += [f".SH {title.rstrip(':').upper()}", ".nf", escape(text), ".fi"]
    others = ["limpet", *(f"limpet-{v}" for v in VERBS)]
    links = ", ".join(rf"\fB{escape(other)}\fR(1)" for other in others if other != file)
    return "\n".join([*lines, ".SH SEE ALSO", links, ""])


def pages():
    """Return the pages by the names of their files."""
    group = click.Context(cli, info_name="limpet", **cli.context_settings)
    found = {"limpet.1": render(group, "list, check, and copy the versions of a training")}
    for verb, summary in VERBS.items():
        context = click.Context(cli.get_command(group, verb), group, verb)
        found[f"limpet-{verb}.1"] = render(context, summary)
    return found


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, text in pages().items():
        (FOLDER / file).write_text(text)
