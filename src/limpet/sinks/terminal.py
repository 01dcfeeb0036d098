"""Events for people at a terminal: one line for each save, also if nobody has attached a sink."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from io import StringIO
from threading import RLock
from typing import Any, TextIO

from limpet import events
from limpet.generators import kept_generators
from limpet.lazy_torch import rank_and_world_size
from limpet.settings import read_settings
from limpet.sinks.wording import STYLES, describe_event, describe_saved, number_field, text_field
from limpet.text import hide_in_urls

_MIN_WAIT_SECONDS = 0.1
"""Shorter waits in seconds are not shown: in a fast loop every save waits."""

# All sinks share one lock. It is also held during a fork, so that a child inherits neither half a
# line in a buffer nor a locked lock.
_line_lock = RLock()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_line_lock.acquire,
        after_in_parent=_line_lock.release,
        after_in_child=_line_lock.release,
    )


class Terminal:
    """Prints one line for each save, resume, skipped version, and failure.

    The line of a save contains the step, the size, the seconds and bytes per second in the
    background, the seconds for which it blocked training, further details if applicable, and the
    versions that the save deleted. A save that waited 0.1 s or longer for the previous save gets an
    extra line.

    ``stream``: by default, the value of ``sys.stderr`` at the time of the event. Lines are colored
    (rich respects ``NO_COLOR``) and truncated at the right edge only if the stream is a terminal. A
    failure is never truncated. Each line is one write, and tqdm progress bars stay
    intact. Raises the errors of the stream.

    With several ranks of torch.distributed, only rank 0 prints what all ranks do. The first rank
    that reports late ranks prints that.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        if _is_terminal(sys.stderr if stream is None else stream):
            _import_rich()
        self._stream = stream
        self._deleted: list[str] = []
        self._shown: set[str] = set()

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        is_late = name == "ranks_awaited"
        if not (fields.get("first", True) if is_late else rank_and_world_size()[0] == 0):
            return
        with _line_lock:
            if name == "deleted":
                self._deleted.append(text_field(fields, "version").removeprefix("version_"))
                return
            text = describe_event(name, fields)
            if name not in STYLES or text is None or text in self._shown:
                return
            waited = number_field(fields, "seconds")
            if name == "save_waited" and waited is not None and waited < _MIN_WAIT_SECONDS:
                return
            if name == "skipped":
                self._shown.add(text)  # retention skips a damaged version after every save
            if name == "saved":
                parts = _saved_line(fields, self._deleted)
                self._deleted = []
            else:
                verb, _, rest = text.partition(" ")
                failed = name == "save_failed"
                parts = [
                    (verb.upper() if failed else verb, STYLES[name]),
                    (f" {rest}", STYLES[name] if failed else ""),
                ]
            stream = sys.stderr if self._stream is None else self._stream
            if stream is not None:  # None if the program has no console
                if self._stream is None and not _is_terminal(stream):  # others write to it, too
                    parts.insert(0, ("limpet: ", ""))
                _print_line(stream, parts, is_cut=name == "saved")


def _import_rich() -> None:
    """Import rich now: it draws a random number, which must not be one of the training's."""
    with kept_generators():
        import rich.console
        import rich.text  # noqa: F401


def _saved_line(fields: Mapping[str, Any], deleted: Sequence[str]) -> list[tuple[str, str]]:
    """Return the parts of the line of a save, each with its style, the least important one last."""
    texts = describe_saved(fields)
    versions = ", ".join(deleted) if len(deleted) <= 3 else f"{len(deleted)} versions"
    optional = (
        (texts["referred"], "dim"),
        (texts["reason"], "cyan"),
        (texts["metrics"], ""),
        (f"deleted {versions}" if deleted else "", "dim"),
    )
    return [
        ("saved", STYLES["saved"]),
        (f" step {texts['step']:>5}  {texts['size']:>8} in {texts['seconds']:>7}", ""),
        (f"  blocked {texts['blocked']:>7}", ""),
        (f"  {texts['rate']:>10}", "dim"),
        *((f"  {text}", style) for text, style in optional if text),
    ]


def _print_line(stream: TextIO, parts: Sequence[tuple[str, str]], *, is_cut: bool) -> None:
    """Print a line. With ``is_cut``, it ends at the right edge of a terminal."""
    text = "".join(part for part, _ in parts) + "\n"
    if _is_terminal(stream):
        from rich.console import Console
        from rich.text import Text

        detected = Console(file=stream, force_jupyter=False)
        line = Text.assemble(*parts)
        if is_cut:
            line.truncate(detected.width, overflow="ellipsis")
        # rich detects the features of the stream but does not write to it: it would write more than
        # once, and it ends the program if the pipe is broken
        buffer = StringIO()
        console = Console(
            file=buffer,
            force_terminal=detected.is_terminal,
            force_jupyter=False,
            color_system=detected.color_system,  # type: ignore[arg-type]
            no_color=detected.no_color,
        )
        console.print(line, soft_wrap=True)
        text = buffer.getvalue()
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with _pause_progress_bars(stream):
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def _pause_progress_bars(stream: TextIO) -> AbstractContextManager[object]:
    """Return a context in which tqdm redraws its progress bars below any output."""
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    return nullcontext() if bars is None else bars.external_write_mode(file=stream)


# -- the lines of a training if nobody has attached a sink ----------------------------------------

_MIN_INTERVAL = 60.0
"""The least number of seconds between two lines for saves of a run, which may come at each step."""

_OMITTED = frozenset(
    {
        "save_waited",
        "platform_detected",
        "left_unsaved",  # a warning says it
        "preempted",  # the process says it as its last line
    }
)
_SHOWN = STYLES.keys() - _OMITTED

_ALWAYS = frozenset(
    {
        *("began", "resumed", "loaded", "config_changed", "options_replaced", "finished"),
        *("ranks_awaited", "notice_source_failed", "metric_missing", "metrics_unwritten"),
    }
)
"""Also shown if stderr is no terminal: where a training begins and ends, what it uses, what it
lacks, and what it waits for."""


class DefaultTerminal:
    """Prints as a ``Terminal`` does, while stderr is a terminal and no other sink is attached: for
    runs that ``open`` names, and events of no run. Per run, one line a minute about saves. What is
    in ``_ALWAYS`` needs no terminal, and ``ranks_awaited`` no run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._terminal: Terminal | None = None
        self._runs: dict[object, str] = {}  # by opening; each access is one operation, as in events
        self._last_lines: dict[str, float] = {}

    def open(self, run: str) -> Callable[[], object]:
        """Print ``run``'s events until the result is called, unless ``LIMPET_QUIET`` is 1."""
        if read_settings().quiet:
            return lambda: None
        if not self._runs:
            self._last_lines.clear()
        events.set_default(self)  # again, after an error of the stream
        if _is_terminal(sys.stderr):
            self._get_terminal()  # now, not in a thread of a save: see ``Terminal``
        opening = object()
        self._runs[opening] = hide_in_urls(run)  # as events do
        return partial(self._runs.pop, opening, None)

    def _get_terminal(self) -> Terminal:
        with _line_lock:  # a second one would show again what the first one has shown
            self._terminal = self._terminal or Terminal()
        return self._terminal

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        run = fields.get("run", "")  # as it is: what is shown lacks the current folder
        is_open = run in [*self._runs.values()] if run else bool(self._runs)
        if name == "ranks_awaited":
            is_open = not read_settings().quiet
        if name not in _SHOWN or not is_open:
            return
        if not _is_terminal(sys.stderr) and (name not in _ALWAYS or not _is_open(sys.stderr)):
            return
        if name == "saved":
            now, last = self._clock(), self._last_lines.get(run)
            if last is not None and now - last < _MIN_INTERVAL:
                return
            self._last_lines[run] = now
        self._get_terminal()(name, fields)


def _is_open(stream: Any) -> bool:
    """Return True if a stream is neither missing nor closed."""
    return stream is not None and not getattr(stream, "closed", False)


def _is_terminal(stream: Any) -> bool:
    """Return True if a stream, which may be missing or closed, is a terminal."""
    return _is_open(stream) and getattr(stream, "isatty", bool)()


default_terminal = DefaultTerminal()
events.set_default(default_terminal)
