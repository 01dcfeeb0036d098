"""Notices by a file that somebody creates."""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Callable

from limpet.arguments import check_seconds, require
from limpet.machine import full_path, path_text, process_started_at
from limpet.notices.notice import BoundedSource, Notice

Identity = tuple[int, int, int]
"""The device, the inode, and the change time in nanoseconds of a file."""

_MAX_BYTES = 64

_reported: dict[str, Identity] = {}
"""The files that sources of this process have reported, by path."""


class FileNotice(BoundedSource):
    """A notice when a file is created, or when one that is there is touched.

    Its contents may be a number, the seconds until the stop; otherwise, these are ``seconds``. Any
    folder will do that this process can read, also one of several hosts. Ignored are a file that is
    older than this process when it is first seen, and one that an earlier ``FileNotice`` of this
    process has reported. After that, each change of its status (``ctime``) counts: a new file,
    ``touch``, or a file that is moved there. Nothing deletes the file.

    ``check`` raises ``OSError`` if the folder is missing or unreadable, or the path is no file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        seconds: float | None = None,
        interval: float = 1.0,
        started_at: Callable[[], float] = process_started_at,
    ) -> None:
        """Raises ``LimpetError`` for an invalid value. ``interval``: seconds between two polls."""
        require("The path of a FileNotice", path_text("The path", path) != "", "a path", path)
        self.path = full_path(path)
        self.seconds = None if seconds is None else check_seconds("seconds=", seconds)
        super().__init__(f"the file {self.path}", interval, time.monotonic)
        self._started_at = started_at
        self._is_first = True
        self._ignored = _reported.get(self.path)

    def check(self) -> Notice | None:
        found = self._identify()
        if self._is_first:
            # only here, a clock is compared with that of a file server, which may be another
            if found is not None and found[2] < self._started_at() * 1e9:
                self._ignored = found
            self._is_first = False
        if found is None or found == self._ignored:
            return None
        _reported[self.path] = found
        seconds = self._read_seconds()
        return Notice(self.name, self.seconds if seconds is None else seconds)

    def _identify(self) -> Identity | None:
        """Return which file is there, or None. Raises ``OSError``."""
        try:
            # a link that is created now may lead to an old file
            link, file = os.lstat(self.path), os.stat(self.path)
        except FileNotFoundError:
            folder = os.path.dirname(self.path)
            if not os.path.isdir(folder):
                raise FileNotFoundError(
                    f"{folder} is not a folder, so nobody can create {self.path}: create the "
                    "folder, or correct the path"
                ) from None
            return None
        if not stat.S_ISREG(file.st_mode):
            raise OSError(f"{self.path} is not a file: remove it, or use another path")
        return link.st_dev, link.st_ino, max(link.st_ctime_ns, file.st_ctime_ns)

    def _read_seconds(self) -> float | None:
        try:
            with open(self.path, "rb") as file:
                seconds = float(file.read(_MAX_BYTES))
        except (OSError, ValueError):
            return None  # the file itself is the notice
        return max(0.0, seconds) if math.isfinite(seconds) else None
