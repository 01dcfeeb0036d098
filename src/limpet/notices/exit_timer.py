"""Ends the process before its machine does, if the training does not leave by itself."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from threading import RLock, Thread
from typing import IO

from limpet.deadline import Deadline
from limpet.notices.exit_status import write_error
from limpet.threads import call_with_limit, start_thread


class ExitTimer:
    """Calls functions at monotonic times, which may only move earlier, on its own thread."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[float, Callable[[], object]]] = {}
        self._lock = RLock()
        self._changes: SimpleQueue[None] = SimpleQueue()
        self._thread: Thread | None = None
        self._pid = os.getpid()

    def set(self, name: str, at: float, function: Callable[[], object]) -> None:
        """Call ``function`` at a time, unless an earlier time is set for ``name``."""
        with self._lock:
            if at < self._calls.get(name, (inf, None))[0]:
                self._calls[name] = at, function
            if self._thread is None:
                thread = Thread(target=self._run, name="limpet-deadline", daemon=True)
                self._thread = thread if start_thread(thread) else None
        self._changes.put(None)

    def clear(self, name: str | None = None) -> None:
        """Call nothing anymore, or not the function of one name."""
        with self._lock:
            for key in list(self._calls) if name is None else [name]:
                self._calls.pop(key, None)
        self._changes.put(None)

    def _run(self) -> None:
        while True:
            due: Callable[[], object] | None = None
            with self._lock:
                if not self._calls:
                    self._thread = None
                    return
                name, (at, function) = min(self._calls.items(), key=lambda item: item[1][0])
                if (delay := at - time.monotonic()) <= 0:
                    del self._calls[name]
                    due = function
            if due is not None:
                due()
                continue
            with suppress(Empty):
                self._changes.get(timeout=min(delay, 3600.0))


def end_process(code: int, message: str) -> None:
    """End this process at once, and show where its threads were. ``message``: without a period. The
    training thread may be in a call that never returns, and nobody may read stderr."""
    call_with_limit(partial(_show, message), "limpet-end", 1.0)
    os._exit(code)


def _show(message: str) -> None:
    with suppress(Exception):  # stderr may be closed; the exit is more important
        # not to stderr itself: faulthandler keeps the GIL while it writes
        with _open_unnamed() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        write_error(f"{message}. The stacks of its threads:\n{stacks}")
        sys.stdout.flush()


def _open_unnamed() -> IO[str]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stacks"), "r+")
    return TemporaryFile("r+")


def exit_margin(left: float) -> float:
    """Return the seconds before the deadline at which a process ends that has not left."""
    return min(2.0, left / 20)


def save_deadline(deadline: Deadline) -> Deadline:
    """Return the deadline of the last save: its cleanups and its waits for late ranks still fit."""
    reserved = exit_margin(deadline.seconds_left) + 3 * deadline.cleanup_seconds
    seconds = max(deadline.seconds_left - reserved, deadline.seconds_left / 2, 0.1)
    return Deadline.after(seconds, deadline.purpose, deadline.clock, deadline.cleanup)
