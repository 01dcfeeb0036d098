"""Writes a page per package into build/reference from the docstrings of the public names."""

import inspect
import re
import shutil
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

FOLDER = Path(__file__).parents[2] / "build" / "reference"

PACKAGES = [
    "limpet", "limpet.preemption", "limpet.evaluation", "limpet.tables", "limpet.tasks",
    "limpet.sinks", "limpet.storage", "limpet.integrations.dcp", "limpet.testing",
]  # fmt: skip

TITLE = """# API reference

The public names of Limpet: signatures and docstrings. Other pages have the
[errors and warnings](../../docs/errors.md), the [commands](../../docs/commands.md), and the
[events](../../docs/events.md). What begins with an underscore, and every module that is not listed
here, may change at any time.

| package | content |
|---|---|
"""


def render():
    """Return the texts of the pages by their file names."""
    pages, seen, links = {"index.md": TITLE}, list[Any](), dict[str, str]()
    for package in map(import_module, PACKAGES):
        title, file = f"`{package.__name__}`", f"{package.__name__}.md"
        summary = docstring(package).partition("\n\n")[0].replace("\n", " ")
        pages["index.md"] += f"| [{title}]({file}) | {summary} |\n"
        parts = [f"# {title}\n\n{summary}\n"]
        for name in sorted(package.__all__, key=str.lower):
            value = getattr(package, name)
            if not inspect.ismodule(value) and value not in seen:
                seen.append(value)
                full_name = f"{package.__name__}.{name}"
                parts.append(render_name(full_name, value))
                links[f"`{full_name}`"] = f"{file}#{full_name.replace('.', '').lower()}"
        pages[file] = "\n".join(parts)
    return {file: add_links(text, links) for file, text in pages.items()}


def add_links(text, links):
    """Return the page with links from the full names in its texts, but not from its headings."""
    name = re.compile(r"(?<!# )`limpet\.[\w.]+`")
    return name.sub(lambda m: f"[{m[0]}]({links[m[0]]})" if m[0] in links else m[0], text)


def render_name(name, value):
    """Return the section of a class or a function."""
    parts = [f"## `{name}`", signature(name.rpartition(".")[2], value), docstring(value)]
    for member, found in vars(value).items() if inspect.isclass(value) else ():
        if member.startswith(("_", "test_")) or not found.__doc__:
            continue
        if isinstance(found, property):
            kind = inspect.signature(found.fget).return_annotation
            parts += [f"### `{member}`", f"```python\n{member}: {kind}\n```", docstring(found)]
        elif callable(method := getattr(value, member)) and not inspect.isclass(found):
            parts += [f"### `{member}`", signature(member, method), docstring(found)]
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
    lines = [str(inspect.Signature([as_written(p)]))[1:-1].removeprefix("*, ") for p in parameters]
    kinds = [p.kind for p in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        lines.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = found.return_annotation
    result = "" if result in ("None", None, found.empty) else f" -> {result}"
    text = f"{name}({', '.join(lines)})"
    if len(text) > 100:
        text = f"{name}(\n    {(',' + chr(10) + '    ').join(lines)},\n)"
    return f"```python\n{text}{result}\n```"


def as_written(parameter):
    """Return a parameter whose type and default are shown as they are written."""
    if isinstance(parameter.annotation, str):
        parameter = parameter.replace(annotation=Text(parameter.annotation))
    default = parameter.default
    if default is not parameter.empty and hasattr(default, "__name__"):
        parameter = parameter.replace(default=Text(default.__name__))
    return parameter


def docstring(value):
    """Return the docstring as Markdown: indented lines are code."""
    text = re.sub(r"``([^`]+)``", r"`\1`", inspect.getdoc(value) or "")
    text = re.sub(r"^::$\n\n|:(?=:$)", "", text, flags=re.MULTILINE)
    code = re.compile(r"^    .*(?:\n+    .*)*", re.MULTILINE)
    return code.sub(lambda found: f"```python\n{dedent(found[0])}\n```", text)


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for file, text in render().items():
        (FOLDER / file).write_text(text)
