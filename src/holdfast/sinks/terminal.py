"""Events for a person at a terminal: a line for each save."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from io import StringIO
from itertools import count
from threading import RLock
from typing import Any, NamedTuple, TextIO

from holdfast.sinks.wording import describe_event, describe_saved, number_field, text_field

_STYLES = {
    "saved": "green",
    "save_waited": "dim",
    "structure_changed": "dim",
    "began": "cyan",
    "resumed": "cyan",
    "stopped": "cyan",
    "skipped": "yellow",
    "save_skipped": "yellow",
    "left_unsaved": "yellow",
    "pin_left": "yellow",
    "request_unseen": "yellow",
    "read_alone": "yellow",
    "not_agreed": "yellow",
    "ranks_awaited": "yellow",
    "save_failed": "bold red",
}
_MIN_WAIT_SECONDS = 0.1
"""Seconds of waiting below which a person need not see it: in a quick loop every save waits."""
_METRICS_DROP_ORDER = 5
_MIN_METRICS_WIDTH = 12
"""Columns below which metrics are left out rather than cut."""

# One for all, taken around a fork too: no child inherits half a line in a buffer, or a held lock.
_line_lock = RLock()
os.register_at_fork(
    before=_line_lock.acquire, after_in_parent=_line_lock.release, after_in_child=_line_lock.release
)


class Terminal:
    """A line for each save: step, size, seconds and bytes a second in the background, seconds
    blocked, and what else there is to say; a line for what was resumed, skipped or failed, and for
    a save that waited 0.1 s or longer for the one before.

    The versions that a save deleted stand at the end of its line. Colours, and the cut at
    the right edge, only where ``stream`` is a terminal (rich decides, and heeds ``NO_COLOR``); a
    failure is never cut. ``stream``: if not given, stderr, whatever that is at the moment. A line
    is one write; a bar of tqdm moves out of its way. Raises what the stream raises.

    Of several ranks of torch.distributed the first shows what all of them do; on the others nothing
    is shown, but that the first is waited for, which the second shows.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._deleted: list[str] = []
        self._shown: set[str] = set()

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        if _rank() != _showing_rank(name, fields):
            return
        with _line_lock:
            if name == "deleted":
                self._deleted.append(text_field(fields, "version").removeprefix("version_"))
                return
            said = describe_event(name, fields)
            if name not in _STYLES or said is None or said in self._shown:
                return
            waited = number_field(fields, "seconds")
            if name == "save_waited" and waited is not None and waited < _MIN_WAIT_SECONDS:
                return
            if name == "skipped":
                self._shown.add(said)  # retention meets a damaged version after every save
            if name == "saved":
                parts = _saved_line(fields, self._deleted)
                self._deleted = []
            else:
                verb, _, rest = said.partition(" ")
                loud = name == "save_failed"
                parts = [
                    LinePart(0, verb.upper() if loud else verb, _STYLES[name]),
                    LinePart(0, f" {rest}", _STYLES[name] if loud else ""),
                ]
            stream = sys.stderr if self._stream is None else self._stream
            if stream is not None:  # None: a program without a console
                _print_line(stream, parts)


def _rank() -> int:
    """The rank of this process; 0 if it is the only one."""
    from holdfast.lazy_torch import torch_or_none

    torch: Any = torch_or_none()
    if torch is None or not torch.distributed.is_available():
        return 0
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _showing_rank(name: str, fields: Mapping[str, Any]) -> int:
    """The rank that shows an event: the first of those that are not waited for themselves."""
    awaited = fields.get("ranks") if name == "ranks_awaited" else None
    several = {r for r in awaited if type(r) is int} if isinstance(awaited, list) else set()
    return next(rank for rank in count() if rank not in several)


class LinePart(NamedTuple):
    """A piece of a line. ``rank``: what has the larger one goes first where room is short."""

    drop_order: int
    text: str
    style: str = ""


def _saved_line(fields: Mapping[str, Any], deleted: Sequence[str]) -> list[LinePart]:
    said = describe_saved(fields)
    gone = ", ".join(deleted) if len(deleted) <= 3 else f"{len(deleted)} versions"
    parts = [
        LinePart(0, "saved", _STYLES["saved"]),
        LinePart(0, f" step {said['step']:>5}"),
        LinePart(0, f"  {said['size']:>8} in {said['seconds']:>7}"),
        LinePart(1, f"  blocked {said['blocked']:>7}"),
        LinePart(4, f"  {said['rate']:>10}", "dim"),
        LinePart(2, f"  {said['referred']}", "dim") if said["referred"] else None,
        LinePart(3, f"  {said['reason']}", "cyan") if said["reason"] else None,
        LinePart(_METRICS_DROP_ORDER, f"  {said['metrics']}") if said["metrics"] else None,
        LinePart(6, f"  deleted {gone}", "dim") if deleted else None,
    ]
    return [part for part in parts if part is not None]


def _print_line(stream: TextIO, parts: Sequence[LinePart]) -> None:
    from rich.console import Console
    from rich.text import Text

    seen = Console(file=stream, force_jupyter=False)
    if stream.isatty():
        parts = _fit_width(parts, seen.width)
    # rich is asked what the stream shows, but not to write: it would write more than once, and
    # ends the program if the pipe is broken
    written = StringIO()
    console = Console(
        file=written,
        force_terminal=seen.is_terminal,
        force_jupyter=False,
        color_system=seen.color_system,  # type: ignore[arg-type]
        no_color=seen.no_color,
    )
    console.print(Text.assemble(*((part.text, part.style) for part in parts)), soft_wrap=True)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    line = written.getvalue().encode(encoding, "backslashreplace").decode(encoding)
    with _pause_progress_bars(stream):
        stream.write(line)
        stream.flush()


def _fit_width(parts: Sequence[LinePart], width: int) -> list[LinePart]:
    """The parts for which there is room, in their order; metrics may be cut short."""
    from rich.cells import cell_len, set_cell_size

    kept = {}
    for number, part in sorted(enumerate(parts), key=lambda p: p[1].drop_order):
        if (
            part.drop_order == _METRICS_DROP_ORDER
            and cell_len(part.text) > width >= _MIN_METRICS_WIDTH
        ):
            part = part._replace(text=set_cell_size(part.text, width - 2) + "..")
        if part.drop_order == 0 or cell_len(part.text) <= width:
            kept[number] = part
            width -= cell_len(part.text)
    return [kept[number] for number in sorted(kept)]


def _pause_progress_bars(stream: TextIO) -> AbstractContextManager[object]:
    """Bars of tqdm are drawn anew below what is written meanwhile, if the program has any."""
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    return nullcontext() if bars is None else bars.external_write_mode(file=stream)
