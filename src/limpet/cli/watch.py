"""``--watch``: show the result of a command again whenever it changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any, TypeVar

import click

from limpet.cli.output import format_error_line, print_json, print_result
from limpet.errors import FormatError, NotFound, StoreError

_INTERVAL = 2.0
"""Seconds between two looks; at least three times as long as a look takes."""

_MAX_FAILING = 300.0
"""Seconds of failing looks after which the error ends the command."""

T = TypeVar("T")


class _Screen(StringIO):
    def isatty(self) -> bool:
        return True  # so that the text has colors


@contextmanager
def _live(is_terminal: bool) -> Iterator[Callable[[str], None] | None]:
    """Yield a function that shows the end of a text in the place of the one before, or None."""
    if not is_terminal:
        yield None
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        line_end = Text("\n", no_wrap=True, overflow="ellipsis")
        yield lambda text: live.update(
            line_end.join(map(Text.from_ansi, text.splitlines()[1 - live.console.height :])),
            refresh=True,
        )


def show_result(
    read: Callable[[T | None], T],
    has_ended: Callable[[T], bool],
    build_document: Callable[[T], Mapping[str, Any]],
    render: Callable[[T], None],
    *,
    watched: str | None,
    as_json: bool,
) -> None:
    """Print what ``read(None)`` returns. With ``watched``, a location, read it again until it
    ``has_ended``: on a terminal, show it in place; elsewhere, print it when its document has
    changed, as a table or one line of JSON. Raises ``NotFound`` after a deletion, and an error that
    lasts."""
    if watched is None:
        print_result(as_json, build_document, render, read(None))
        return
    result, shown, worked = None, None, time.monotonic()
    with _live(sys.stdout.isatty() and not as_json) as update:
        while True:
            began = time.monotonic()
            try:
                result = read(result)
                is_over = has_ended(result)
            except (FormatError, StoreError) as e:
                if isinstance(e, NotFound) and result is not None:
                    raise NotFound(f"{watched} was deleted while it was watched") from e
                if result is None or began - worked > _MAX_FAILING:
                    raise
                click.echo(f"limpet: {format_error_line(e)}; trying again", err=True)
            else:
                document, worked = build_document(result), began
                if update is not None:
                    with redirect_stdout(_Screen()) as screen:
                        render(result)
                    update(screen.getvalue())
                elif document != shown:
                    print_json(document, indent=None) if as_json else render(result)
                    sys.stdout.flush()
                if is_over:
                    return
                shown = document
            time.sleep(max(_INTERVAL, 3 * (time.monotonic() - began)))
