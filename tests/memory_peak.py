"""The peak memory of a program, for tests that start one."""

import threading
from contextlib import contextmanager


def anonymous_bytes():
    """Return the anonymous memory of this process, which excludes mapped files."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


@contextmanager
def print_peak_memory():
    """Print by how many bytes the anonymous memory grows at most during a ``with`` block."""
    peak = before = anonymous_bytes()
    done = threading.Event()

    def watch():
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
