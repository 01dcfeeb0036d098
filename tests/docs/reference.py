"""Writes build/reference.md from the docstrings of the public names: ``make reference``."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "build" / "reference.md"

PACKAGES = [
    "limpet", "limpet.preemption", "limpet.evaluation", "limpet.tables", "limpet.tasks",
    "limpet.sinks", "limpet.storage", "limpet.integrations.dcp", "limpet.testing",
]  # fmt: skip

TITLE = """# API reference

The public names of Limpet: signatures and docstrings. `make reference` writes this
page; do not edit it by hand. Errors and warnings are in docs/errors.md, commands in
docs/commands.md, and events in docs/events.md. What begins with an underscore,
and every module that is not listed here, may change at any time.
"""


def render():
    """Return the text of the page."""
    parts, seen = [TITLE], list[Any]()
    for package in map(import_module, PACKAGES):
        parts.append(f"## `{package.__name__}`\n")
        for name in sorted(package.__all__, key=str.lower):
            value = getattr(package, name)
            if not inspect.ismodule(value) and value not in seen:
                seen.append(value)
                parts.append(render_name(f"{package.__name__}.{name}", value))
    return "\n".join(parts)


def render_name(name, value):
    """Return the section of a class or a function."""
    parts = [f"### `{name}`", signature(name.rpartition(".")[2], value), docstring(value)]
    for member, found in vars(value).items() if inspect.isclass(value) else ():
        if member.startswith(("_", "test_")) or not found.__doc__:
            continue
        if isinstance(found, property):
            parts += [f"**`{member}`** (property)", docstring(found)]
        elif callable(getattr(value, member)) and not inspect.isclass(found):
            parts += [signature(member, getattr(value, member)), docstring(found)]
    return "\n\n".join(parts) + "\n"


class Text:
    """What a signature shows as it is: a type without quotes, or the name of a function."""

    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


def signature(name, value):
    """Return the signature in a code block, with one parameter per line if it is long."""
    try:
        found = inspect.signature(value)
    except ValueError:  # an exception without a constructor of its own
        return f"```text\n{name}\n```"
    parameters = [p for p in found.parameters.values() if p.name != "self"]
    lines = [str(inspect.Signature([as_written(p)]))[1:-1] for p in parameters]
    kinds = [p.kind for p in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        lines = [line.removeprefix("*, ") for line in lines]
        lines.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = found.return_annotation
    result = "" if result in ("None", None, found.empty) else f" -> {result}"
    text = f"{name}({', '.join(lines)})"
    if len(text) > 100:
        text = f"{name}(\n    {(',' + chr(10) + '    ').join(lines)},\n)"
    return f"```text\n{text}{result}\n```"


def as_written(parameter):
    """Return a parameter whose type and default are shown as they are written."""
    if isinstance(parameter.annotation, str):
        parameter = parameter.replace(annotation=Text(parameter.annotation))
    default = parameter.default
    if default is not parameter.empty and hasattr(default, "__name__"):
        parameter = parameter.replace(default=Text(default.__name__))
    return parameter


def docstring(value):
    """Return the docstring as Markdown: a block of code is indented, as in the docstring."""
    text = re.sub(r"``([^`]+)``", r"`\1`", inspect.getdoc(value) or "")
    return re.sub(r"^::$\n\n|:(?=:$)", "", text, flags=re.MULTILINE)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render())
