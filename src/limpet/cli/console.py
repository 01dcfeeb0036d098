"""Output for people: lines, tables, ages, and a progress bar.

Only the progress bar imports rich, and a table for the width of its characters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from shutil import get_terminal_size
from threading import Lock, Timer
from typing import Any

import click

from limpet.text import format_size, to_printable

PIPE_WIDTH = 400
"""Width in columns if the output is not a terminal: wide enough that no cell is truncated."""

_GAP = "  "
"""What separates two columns of a table."""

_LEAST_WIDTH = 14
"""Width that a flexible column keeps if another one gives way, too: that of "stopped early"."""

_PROGRESS_DELAY = 0.7
"""Seconds before a progress bar appears."""

Cell = tuple[object, str]
"""What a cell of a table contains, and its style: a color, "bold", "dim", or "" for none."""


def output_width() -> int:
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return get_terminal_size().columns if is_known else PIPE_WIDTH


def print_line(content: object = "", style: str = "") -> None:
    """Print a line of text, which may be longer than the terminal is wide."""
    click.echo(_style(to_printable(content).rstrip(" "), style))


def _style(text: str, style: str) -> str:
    """Return text with the codes of a style, if stdout is a terminal with colors."""
    if not (text and style) or "NO_COLOR" in os.environ or not sys.stdout.isatty():
        return text
    return click.style(text, bold=style == "bold" or None, dim=style == "dim" or None,
                       fg=style if style not in ("bold", "dim") else None)  # fmt: skip


def truncate(content: object, limit: int) -> str:
    """Return text of at most ``limit`` columns, or 4, as printable characters."""
    from rich.cells import cell_len, set_cell_size

    text, limit = to_printable(content), max(limit, 4)
    return text if cell_len(text) <= limit else set_cell_size(text, limit - 1) + "\u2026"


def print_table(
    rows: Sequence[Sequence[Cell]],
    header: Sequence[str] = (),
    *,
    right_aligned: Collection[str] = (),
    flexible: Sequence[int] = (),
) -> None:
    """Print a table without borders. ``right_aligned``: names of columns with numbers. The cells of
    the ``flexible`` columns are truncated, so that the lines are no longer than stdout is wide: one
    after the other to 14 characters, and the last one to the length of its name."""
    from rich.cells import cell_len

    names: list[Cell] = [(name, "bold") for name in header]
    table = [[(to_printable(c), style) for c, style in row] for row in (names, *rows) if row]
    columns = len(table[0]) if table else 0
    widths = [max(cell_len(row[i][0]) for row in table) for i in range(columns)]
    excess = sum(widths) + len(_GAP) * (columns - 1) - output_width() if flexible else 0
    for i in flexible if table else ():
        least = _LEAST_WIDTH if i != flexible[-1] else len(header[i]) if header else 4
        cut = max(0, min(excess, widths[i] - least))
        widths[i], excess = widths[i] - cut, excess - cut
    lines = []
    for row in table:
        cells = []
        for i, (text, style) in enumerate(row):
            shown = truncate(text, widths[i]) if i in flexible else text
            padding = " " * (widths[i] - cell_len(shown))
            is_number = bool(header) and header[i] in right_aligned
            if not is_number and i == columns - 1:
                shown, padding = shown.rstrip(" "), ""
            styled = _style(shown, style)
            cells.append(padding + styled if is_number else styled + padding)
        lines.append(_GAP.join(cells).rstrip(" "))
    if lines:
        click.echo("\n".join(lines))


def format_speed(nbytes: int, seconds: float) -> str:
    """Format a speed as the end of a summary, such as ``, 1.2 GiB/s``; empty up to a second."""
    return f", {format_size(nbytes / seconds)}/s" if seconds > 1 else ""


@contextmanager
def progress_bar(
    description: str, total: int | None, *, quiet: bool, unit: str = "bytes"
) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, after a delay and only on a terminal. Yields a function that adds
    completed work, from any thread."""
    if quiet or not sys.stderr.isatty():
        yield lambda step: None
        return
    with closing(_ProgressBar(description, total, unit)) as bar:
        yield bar.advance


class _ProgressBar:
    def __init__(self, description: str, total: int | None, unit: str) -> None:
        self._description, self._total, self._unit = to_printable(description), total, unit
        self._lock = Lock()
        self._done = 0
        self._display: Any = None
        self._closed = False
        self._timer = Timer(_PROGRESS_DELAY, self._show)
        self._timer.daemon = True
        self._timer.start()

    def advance(self, amount: int) -> None:
        with self._lock:
            self._done += amount
            if self._display is not None:
                self._display.update(self._task, completed=self._done)

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._display is not None:
                self._display.stop()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            [DownloadColumn(binary_units=True), TransferSpeedColumn()]
            if self._unit == "bytes"
            else [MofNCompleteColumn(), TextColumn(self._unit)]
        )
        with self._lock:
            if self._closed:
                return
            self._display = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                *columns,
                TimeRemainingColumn(compact=True),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._display.add_task(
                self._description, total=self._total, completed=self._done
            )
            self._display.start()
