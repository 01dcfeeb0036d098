"""What the verbs share without rich: options, JSON for programs, and errors as one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import click

from limpet.errors import Denied, LimpetError
from limpet.text import to_json_value, to_printable

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")

_AS_JSON = "limpet.as_json"
_SIZE_PREFIXES = ("", "K", "M", "G", "T")
_SECONDS_PER_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

keys_option = click.option(
    "--keys",
    multiple=True,
    metavar="PATTERN",
    help="Only keys that match: a plain key with all below it or after a dot; * within a level,"
    " ** across levels. May be repeated.",
)
"""The option ``--keys``, which selects leaves and values."""


def json_option(function: F) -> F:
    """Add the option ``--json``, which the verb receives as ``as_json``."""

    return click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=store_json_flag,
        help="Print one JSON document, for programs.",
    )(function)  # fmt: skip


def store_json_flag(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    """Return True if ``--json`` is given here, or before the verb."""
    ctx.meta[_AS_JSON] = value or wants_json(ctx)
    return wants_json(ctx)


def wants_json(ctx: click.Context) -> bool:
    """Return True if the verb of this context was called with ``--json``."""
    return bool(ctx.meta.get(_AS_JSON))


def parse_duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Parse ``90``, ``90s``, ``15m``, ``24h``, ``7d``, or ``1h30m`` to seconds."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return float(value)
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smhd])", value)
    if not parts or "".join(n + u for n, u in parts) != value:
        raise click.BadParameter(
            f"{value!r} is not a time; write 90 (seconds), 90s, 15m, 24h, 7d, or 1h30m"
        )
    return sum(float(n) * _SECONDS_PER_UNIT[u] for n, u in parts)


def parse_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Parse a size in bytes, such as ``5GB`` or ``500MB`` (as Hugging Face does) or ``4GiB``."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(i?)B?", value, re.IGNORECASE)
    if match is not None and (match[2] or not match[3]):
        unit = (1024 if match[3] else 1000) ** _SIZE_PREFIXES.index(match[2].upper())
        if (size := int(float(match[1]) * unit)) > 0:
            return size
    raise click.BadParameter(f"{value!r} is not a size; write 5GB, 500MB, or 4GiB")


def duration_option(
    name: str, default: str, help: str, parse: Callable[..., float] = parse_duration
) -> Callable[[F], F]:
    """Add an option whose value is a time; the verb receives it in seconds."""
    is_shown = default != "0"
    return click.option(
        name, callback=parse, default=default, show_default=is_shown, metavar="TIME", help=help
    )


def print_result(
    as_json: bool,
    build_document: Callable[P, Mapping[str, Any]],
    render: Callable[P, None],
    *result: P.args,
    **fields: P.kwargs,
) -> None:
    """Print the result of a verb: as the JSON document built from it, or as text for people."""
    if as_json:
        print_json(build_document(*result, **fields))
    else:
        render(*result, **fields)


def print_json(document: Mapping[str, Any], indent: int | None = 2) -> None:
    click.echo(json.dumps(to_json_value(document, limit=None), indent=indent))


def format_error_line(error: BaseException) -> str:
    """Format an error as one line, without the name of its class."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return to_printable(f"{where}{error.strerror}")
    return to_printable(str(error) or type(error).__name__)


def add_advice(error: BaseException) -> BaseException:
    """Return an error whose advice a user of a command can follow."""
    if isinstance(error, Denied) and "allow_weak=True" in (error.todo or ""):
        return error.with_advice(
            "No command can accept it, but Python can: pass that store to limpet.Run (pin,"
            " sweep), limpet.save, or limpet.Checkpointer"
        )
    return error


def describe_wait(fields: Mapping[str, Any]) -> str:
    """Return the line for the event ``waiting``."""
    from limpet.sinks.wording import number_field, text_field  # few commands wait, and it is slow

    error, seconds = fields.get("error"), number_field(fields, "seconds")
    cause = to_printable(error.brief) if isinstance(error, LimpetError) else str(error)
    longest = "" if seconds is None else f"up to {seconds:.0f} s; "
    return f"waiting for {text_field(fields, 'store')}: {cause} ({longest}Ctrl-C stops it)"


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return the class, message, and fields of an error as JSON members."""
    return {
        "kind": type(error).__name__,
        "message": format_error_line(error),
        "fields": dict(error.fields) if isinstance(error, LimpetError) else {},
    }
