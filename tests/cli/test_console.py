"""Terminal output: sizes, ages, text, the progress bar."""

import io
import sys
import time
from datetime import UTC, datetime, timedelta

import click
import pytest
from rich.cells import cell_len

from limpet.cli import console
from limpet.text import format_age
from tests.waiting import wait_until


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-60, "0 s"), (5, "5 s"), (180, "3 min"), (7300, "2 h"), (1e6, "12 d")]
)
def test_ages(seconds, shown):
    created = datetime.now(UTC) - timedelta(seconds=seconds)
    assert format_age(created.isoformat()) == shown


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_table_is_aligned_by_columns_of_the_terminal(is_terminal, monkeypatch):
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    rows = [[(7, ""), ("\u65e5\u672c", "red"), ("end ", "")], [(12, ""), ("e\u0301", ""), ("", "")]]
    console.print_table(rows, ("n", "content", ""), right_aligned=("n",))
    assert click.unstyle(stream.getvalue()).splitlines() == [
        " n  content", " 7  \u65e5\u672c     end", "12  e\u0301"
    ]  # fmt: skip
    assert ("\x1b[31m" in stream.getvalue()) == is_terminal


def test_a_flexible_column_gets_the_rest_of_the_line(monkeypatch, capsys):
    rows = [[("key" * 20, ""), (12, "")], [("\u65e5" * 30, ""), (3456, "red")]]
    for columns in (20, 31, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        console.print_table(rows, ("key", "size"), right_aligned=("size",), flexible=[0])
        head, *lines = capsys.readouterr().out.splitlines()
        assert {cell_len(line) for line in (head, *lines)} == {min(columns, 66)}
        assert [line.split()[-1] for line in lines] == ["12", "3456"]
        assert all(("\u2026" in line) == (columns < 66) for line in lines)


@pytest.mark.parametrize("unit", ["bytes", "versions"])
def test_a_long_operation_shows_a_bar_that_disappears(monkeypatch, unit):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "_PROGRESS_DELAY", 0.0)
    with console.progress_bar("verifying", 100, quiet=False, unit=unit) as advance:
        wait_until(lambda: "verifying" in terminal.getvalue())
        advance(60)
    assert terminal.getvalue().endswith("\x1b[2K")


def test_a_short_operation_shows_no_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with console.progress_bar("verifying", 100, quiet=False) as advance:
        advance(100)
    assert terminal.getvalue() == ""


def test_no_bar_is_shown_without_a_terminal(monkeypatch):
    monkeypatch.setattr(console, "_PROGRESS_DELAY", 0.0)
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    with console.progress_bar("verifying", 100, quiet=False) as advance:
        time.sleep(0.02)
        advance(100)
    assert plain.getvalue() == ""
