"""Events for programs: a file with one JSON object per line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from limpet.machine import OPEN_FLAGS
from limpet.text import to_json_value


class JsonLines:
    """Appends a JSON object to a file for each event: ``time`` (UTC), ``event``, and its fields.

    Each line is appended with one write. Several threads can therefore share a file, and so can
    several processes on a local disk. The file is opened and closed for each event: there is no
    buffer that a fork could write twice, a file that was moved away is created again, and errors
    that a network file system reports only on close are raised. The output is ASCII, and errors are
    text. ``docs/events.md`` describes values that JSON cannot represent.

    Parent folders are created. Raises ``OSError`` if the file cannot be opened or written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = os.path.abspath(path)
        self._clock = clock
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._append(b"\n" if _lacks_newline(self.path) else b"")

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        first = {"time": now, "event": name}
        self._append(json.dumps({**first, **to_json_value(fields), **first}).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | OPEN_FLAGS, 0o666)
        try:
            while line:  # a short write means that the disk is full; the next write raises
                line = line[os.write(file, line) :]
        except OSError as e:
            e.filename = self.path
            raise
        finally:
            os.close(file)


def _lacks_newline(path: str) -> bool:
    """Return True if the last line is incomplete: the disk was full or the machine crashed."""
    if not os.path.isfile(path) or os.path.getsize(path) == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
