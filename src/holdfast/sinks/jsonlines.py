"""Events for programs: a file of JSON objects, one a line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from holdfast.sinks.wording import to_json_value


class JsonLines:
    """Appends one JSON object a line to a file: ``time`` (of day, UTC), ``event``, its fields.

    A line is appended by one write, so several threads and, on a local disk, several processes may
    share a file. The file is opened for each event: nothing is buffered that a fork could write
    twice, a file that was moved away is begun anew, and what a network file system only says at
    the close is heard. ASCII only; errors are text; see ``docs/events.md`` for odd values.

    Folders are created. Raises ``OSError`` if the file cannot be opened or written.
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
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            while line:  # a second turn only where the disk is full: it raises
                line = line[os.write(file, line) :]
        except OSError as e:
            e.filename = self.path
            raise
        finally:
            os.close(file)


def _lacks_newline(path: str) -> bool:
    """Whether the last line lacks its end: the disk was full or the machine went down."""
    if not os.path.isfile(path) or os.path.getsize(path) == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
