"""Terminal output: sizes, ages, text, the progress bar."""

import io
import sys
import time
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from rich.console import Console

from limpet.cli import console


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-60, "0 s"), (5, "5 s"), (180, "3 min"), (7300, "2 h"), (1e6, "12 d")]
)
def test_ages(seconds, shown):
    created = datetime.now(UTC) - timedelta(seconds=seconds)
    assert console.format_age(created.isoformat()) == shown


@pytest.mark.parametrize("width", [console.PIPE_WIDTH, 24])
def test_a_table_in_a_pipe_is_the_one_on_a_terminal_without_styles_and_trailing_spaces(
    width, capsys
):
    random = Random(1)
    texts = ["", "a", "two words", " indented", "end ", "\u65e5\u672c\u8a9e", "e\u0301", "x" * 30]
    for _ in range(100):
        table = console.make_table("n", "content", "", right_aligned=("n",))
        table.show_header = random.random() < 0.5
        for _ in range(random.randrange(5)):
            number, content, last = random.choices(texts, k=3)
            table.add_row(number.rstrip(), console.styled_text(content, "bold"), last)
        pipe = console.make_console()
        pipe.width = width
        console.print_table(pipe, table)
        terminal = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        console.print_table(terminal, table)
        shown = terminal.file.getvalue()
        expected = [line.rstrip(" ") for line in shown.splitlines()]
        assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("unit", ["bytes", "versions"])
def test_a_long_operation_shows_a_bar_that_disappears(monkeypatch, unit):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "_PROGRESS_DELAY", 0.0)
    with console.progress_bar("verifying", 100, quiet=False, unit=unit) as advance:
        deadline = time.monotonic() + 10
        while "verifying" not in terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        advance(60)
    assert "verifying" in terminal.getvalue()
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
