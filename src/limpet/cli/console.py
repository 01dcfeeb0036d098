"""Output for people: tables, ages, and a progress bar.

Only this module imports rich, and only when it prints something.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from threading import Lock, Timer
from typing import TYPE_CHECKING, Any

from limpet.text import format_size, to_printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PIPE_WIDTH = 400
"""Width in columns if the output is not a terminal: wide enough that no cell is truncated."""

_GAP = "  "
"""What separates two columns of a table."""

_PROGRESS_DELAY = 0.7
"""Seconds before a progress bar appears."""


def make_console() -> Console:
    """Return a console for stdout, which may be a terminal or a pipe."""
    from rich.console import Console

    class StdoutConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704  (rich calls this from an except block; VerbGroup.invoke handles it)

        def print(self, *objects: Any, **options: Any) -> None:
            if self.is_terminal:
                super().print(*objects, **options)
                return
            # rich pads the last column of a table with spaces, which do not belong in a pipe
            with self.capture() as captured:
                super().print(*objects, **options)
            lines = captured.get().split("\n")
            self.file.write("\n".join(line.rstrip(" ") for line in lines))
            self.file.flush()

    console = StdoutConsole(highlight=False, emoji=False, markup=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def styled_text(content: object, style: str = "", limit: int | None = None) -> Text:
    """Return text without terminal control characters, truncated to ``limit`` columns (None: no
    limit)."""
    from rich.text import Text

    text = Text(to_printable(content), style=style)
    if limit is not None:
        text.truncate(max(limit, 4), overflow="ellipsis")
    return text


def print_line(console: Console, content: object, style: str = "") -> None:
    """Print a line of text, which may be longer than the terminal is wide."""
    if console.is_terminal:
        console.print(styled_text(content, style), soft_wrap=True)
    else:  # rich takes 0.2 ms per line
        console.file.write(to_printable(content).rstrip(" ") + "\n")
        console.file.flush()


def make_table(*columns: str, right_aligned: tuple[str, ...] = ()) -> Table:
    """Return a table without borders; the columns in ``right_aligned`` contain numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0), header_style="bold")
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right_aligned else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table that ``make_table`` returned.

    In a pipe, a table that fits needs no style and no truncation. It is aligned here, because rich
    takes 0.2 ms per line: 37 s for a model with 16,000 parameters and its optimizer.
    """
    lines = [] if console.is_terminal else _align(table, console.width)
    if lines:
        console.file.writelines(lines)
        console.file.flush()
    else:
        console.print(table)


def _align(table: Table, max_width: int) -> list[str]:
    """Return the lines of a table, or an empty list if it is wider than ``max_width`` columns."""
    from rich.cells import cell_len

    columns = [[str(column.header)] * table.show_header + [str(c) for c in column.cells]
               for column in table.columns]  # fmt: skip
    lengths = [[cell_len(text) for text in column] for column in columns]
    widths = [max(column, default=0) for column in lengths]
    if sum(widths) + len(_GAP) * (len(widths) - 1) > max_width:
        return []
    aligned = [
        [" " * (width - n) + text for text, n in zip(texts, each, strict=True)]
        if column.justify == "right"
        else [text + " " * (width - n) for text, n in zip(texts, each, strict=True)]
        for column, texts, each, width in zip(table.columns, columns, lengths, widths, strict=True)
    ]
    return [_GAP.join(line).rstrip(" ") + "\n" for line in zip(*aligned, strict=True)]


def format_speed(nbytes: int, seconds: float) -> str:
    """Format a speed as the end of a summary, such as ``, 1.2 GiB/s``; empty up to a second."""
    return f", {format_size(nbytes / seconds)}/s" if seconds > 1 else ""


def format_age(created: str) -> str:
    """Format the age of an ISO 8601 timestamp, such as ``3 min``; a future time has age 0."""
    seconds = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds())
    for limit, unit, length in ((90, "s", 1), (5400, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


@contextmanager
def progress_bar(
    description: str, total: int, *, quiet: bool, unit: str = "bytes"
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr while the context is active.

    The bar appears only after a delay, and only if stderr is a terminal and ``quiet`` is False.
    Yields a function that adds an amount of completed work; any thread may call it.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda step: None
        return
    with closing(_ProgressBar(description, total, unit)) as bar:
        yield bar.advance


class _ProgressBar:
    def __init__(self, description: str, total: int, unit: str) -> None:
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
