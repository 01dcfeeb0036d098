"""What a command says without rich: JSON for programs, and errors as one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, TypeVar

import click
import numpy as np

from holdfast.cli.exit_codes import exit_code
from holdfast.errors import HoldfastError

F = TypeVar("F", bound=Callable[..., Any])

_AS_JSON = "holdfast.as_json"


def json_option(function: F) -> F:
    """The option ``--json``, given to the verb as ``as_json``."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta[_AS_JSON] = value
        return value

    return click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=remember,
        help="Print one JSON document, for programs.",
    )(function)  # fmt: skip


def wants_json(ctx: click.Context) -> bool:
    """Whether the verb that ran in this context was asked for JSON."""
    return bool(ctx.meta.get(_AS_JSON))


def print_json(document: Mapping[str, Any]) -> None:
    click.echo(json.dumps(to_json_value(document), indent=2))


def to_json_value(value: Any) -> Any:
    """A value as JSON can say it. What it has no word for becomes text: ``"nan"``, ``"inf"``,
    integers beyond 64 bits in hexadecimal, and whatever else as Python writes it."""
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= 64 else hex(value)
    if isinstance(value, float):
        return value if isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else repr(k): to_json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(v) for v in value]
    return repr(value)


def sanitize_text(text: object) -> str:
    """Text from outside for a terminal: one line, and nothing in it that steers the terminal."""
    return "".join(
        c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in str(text)
    )


def format_error_line(error: BaseException) -> str:
    """An error as one line, without the name of its class."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return sanitize_text(f"{where}{error.strerror}")
    return sanitize_text(str(error) or type(error).__name__)


def format_error_brief(error: HoldfastError) -> str:
    """What happened, without the advice."""
    return sanitize_text(HoldfastError(error.what, expected=error.expected, found=error.found))


def error_document(error: BaseException) -> dict[str, Any]:
    """An error as the document that ``--json`` prints instead of an answer."""
    return {"error": describe_error(error), "exit": exit_code(error)}


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error's class, message and fields."""
    fields = error.fields if isinstance(error, HoldfastError) else {}
    return {
        "kind": type(error).__name__,
        "message": format_error_line(error),
        "fields": dict(fields),
    }
