"""The peak memory of a program that a test starts."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


def numbers_of(program, *arguments, **environment):
    """Run a program, and return the numbers that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


def memory(field):
    """Return a field of the status of this process, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


@contextmanager
def print_peak_resident():
    """Print by how many bytes the memory grows at most during a ``with`` block."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    yield
    print(memory("VmHWM") - before)


@contextmanager
def print_peak_memory():
    """The same for the anonymous memory, which excludes mapped files."""
    peak = before = memory("RssAnon")
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, memory("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    print(peak - before)
