"""Output that does not need rich: JSON for programs, and errors as one line."""

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
    """Add the option ``--json``, which the verb receives as ``as_json``."""

    def store_flag(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta[_AS_JSON] = value
        return value

    return click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=store_flag,
        help="Print one JSON document, for programs.",
    )(function)  # fmt: skip


def wants_json(ctx: click.Context) -> bool:
    """Return True if the verb of this context was called with ``--json``."""
    return bool(ctx.meta.get(_AS_JSON))


def print_json(document: Mapping[str, Any]) -> None:
    click.echo(json.dumps(to_json_value(document), indent=2))


def to_json_value(value: Any) -> Any:
    """Convert a value to one that JSON can represent.

    Other values become text: ``"nan"`` and ``"inf"``, integers of more than 64 bits in hexadecimal,
    and the ``repr`` of anything else.
    """
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
    """Make untrusted text safe for a terminal: one line without control characters."""
    return "".join(
        c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in str(text)
    )


def format_error_line(error: BaseException) -> str:
    """Format an error as one line, without the name of its class."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return sanitize_text(f"{where}{error.strerror}")
    return sanitize_text(str(error) or type(error).__name__)


def format_error_brief(error: HoldfastError) -> str:
    """Format what happened, what was expected, and what was found, without the advice."""
    return sanitize_text(HoldfastError(error.what, expected=error.expected, found=error.found))


def error_document(error: BaseException) -> dict[str, Any]:
    """Return the document that ``--json`` prints for a command that failed."""
    return {"error": describe_error(error), "exit": exit_code(error)}


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return the class, message, and fields of an error as JSON members."""
    fields = error.fields if isinstance(error, HoldfastError) else {}
    return {
        "kind": type(error).__name__,
        "message": format_error_line(error),
        "fields": dict(fields),
    }
