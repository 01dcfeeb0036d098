"""The lines that a training prints on a terminal if nobody has attached a sink."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from limpet import events
from limpet.settings import read_settings
from limpet.sinks.terminal import Terminal
from limpet.sinks.wording import STYLES, text_field
from limpet.threads import no_op

_FREQUENT = frozenset({"saved", "save_skipped"})
"""A training may emit these at every step."""

_MIN_INTERVAL = 60.0
"""The least number of seconds between two lines of the same frequent event of a run."""

_OMITTED = frozenset(
    {
        "save_waited",
        "structure_changed",
        "platform_detected",
        "left_unsaved",  # a warning says it
        "preempted",  # the process says it as its last line
    }
)
_SHOWN = STYLES.keys() - _OMITTED


class DefaultTerminal:
    """Prints lines as a ``Terminal`` does, but at most one line per minute for the saves of a run.

    It prints only while stderr is a terminal and no other sink is attached, and only for the runs
    that ``open`` names. Events that name no run are of all trainings in this process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._terminal: Terminal | None = None
        self._runs: Counter[str] = Counter()
        self._attached = ExitStack()
        self._last_lines: dict[tuple[str, str], float] = {}

    def open(self, run: str) -> Callable[[], None]:
        """Print the events of ``run`` until the returned function is called, once, unless
        ``LIMPET_QUIET`` is 1."""
        if read_settings().quiet:
            return no_op
        if not self._runs:
            self._last_lines.clear()
            self._attached = events.attach_default(self)
        if _is_terminal(sys.stderr):
            self._get_terminal()  # now, not in a thread of a save: see ``Terminal``
        self._runs[run] += 1
        return partial(self._close, run)

    def _get_terminal(self) -> Terminal:
        self._terminal = self._terminal or Terminal()
        return self._terminal

    def _close(self, run: str) -> None:
        self._runs[run] -= 1
        self._runs += Counter()  # without the runs whose count is 0
        if not self._runs:
            self._attached.close()

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        run = text_field(fields, "run", "")
        if name not in _SHOWN or (run and run not in self._runs) or not _is_terminal(sys.stderr):
            return
        if name in _FREQUENT:
            now, last = self._clock(), self._last_lines.get((name, run))
            if last is not None and now - last < _MIN_INTERVAL:
                return
            self._last_lines[name, run] = now
        self._get_terminal()(name, fields)


def _is_terminal(stream: Any) -> bool:
    """Return True if a stream, which may be missing or closed, is a terminal."""
    return stream is not None and not stream.closed and stream.isatty()


default_terminal = DefaultTerminal()
