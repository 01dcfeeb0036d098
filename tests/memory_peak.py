"""The peak memory of a program, for tests that start one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process, which excludes mapped files."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


@contextmanager
def print_peak_memory() -> Iterator[None]:
    """Print by how many bytes the anonymous memory grows at most during a ``with`` block."""
    peak = before = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    print(peak - before)
