"""Recognize a state of the disk that was checked before.

Most calls of a training that fail or are the last leave one of a few states. A check of such a
state takes most of the time, and its result depends on the bytes of the files alone.
"""

import os
import random
import secrets
import threading
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from limpet.training import ending

CLOCKS = ["machine.utc_now", "snapshot.pins.utc_now"]
ROUNDED = ["saving.commit.round", "training.goodput.round"]
"""The measured seconds in a manifest are rounded."""


@contextmanager
def equal_bytes():
    """Make equal work write equal bytes: the same random ids, and no times.

    Yield a function to call before each work. It begins the sequence of ids again. The threads that
    an earlier test has left, and those that they start, get other ids.
    """
    ids, other_ids, start = random.Random(), secrets.token_bytes, threading.Thread.start
    others = {*threading.enumerate()} - {threading.current_thread()}

    def make_id(nbytes):
        is_other = threading.current_thread() in others
        return other_ids(nbytes) if is_other else ids.randbytes(nbytes)

    def start_thread(thread):
        if threading.current_thread() in others:
            others.add(thread)
        start(thread)

    with ExitStack() as patches:
        patches.enter_context(mock.patch("secrets.token_bytes", make_id))
        patches.enter_context(mock.patch("threading.Thread.start", start_thread))
        for name in CLOCKS:
            now = mock.Mock(return_value="2026-01-01T00:00:00+00:00")
            patches.enter_context(mock.patch(f"limpet.{name}", now))
        for name in ROUNDED:
            zero = mock.Mock(return_value=0.0)
            patches.enter_context(mock.patch(f"limpet.{name}", zero, create=True))

        def restart():
            ids.seed(0)
            ending._trainings.clear()  # the process has died, and with it what it has not closed

        yield restart


class CheckedStates:
    """The states that were checked: the files of each, and what the training had reported."""

    def __init__(self):
        self._checked: set[tuple[Any, ...]] = set()

    def add(self, fs, *reported):
        """Return True if the state is new."""
        state = (frozenset(_entries(fs, "")), *map(repr, reported))
        is_new = state not in self._checked
        self._checked.add(state)
        return is_new

    def __len__(self):
        return len(self._checked)


def _entries(fs, folder):
    """Yield the path and the bytes of each file. A folder has None."""
    for name, kind in fs.scandir(folder or "/"):
        path = f"{folder}/{name}"
        if kind == "folder":
            yield path, None
            yield from _entries(fs, path)
        else:
            fd = fs.open(path, os.O_RDONLY)
            content = bytearray(fs.fstat(fd).size)
            fs.preadv(fd, memoryview(content), 0)
            fs.close(fd)
            yield path, bytes(content)
