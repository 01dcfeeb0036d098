"""Wait for what other threads and processes do."""

import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress


def wait_until(condition, seconds=20.0, shown=lambda: "it did not happen in time"):
    """Wait until ``condition()`` is true. If it does not become true, fail with ``shown()``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, shown()
        time.sleep(0.01)


def wait_until_no_thread(*names, earlier=(), seconds=5.0):
    """Wait until only the ``earlier`` threads have a name that begins with one of ``names``."""

    def left():
        return [t for t in threading.enumerate() if t.name.startswith(names) and t not in earlier]

    wait_until(lambda: not left(), seconds, left)


def run_threads(threads, seconds=None):
    """Start all threads, and then wait for each of them."""
    threads = [*threads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)


def check_at_once(check, cases, threads=4):
    """Call ``check(*case)`` for all cases, in a few threads: each of them mostly waits."""

    def run(case):
        try:
            check(*case)
        except BaseException as e:
            e.add_note(f"in the case {case}")
            raise

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, cases))


def run_process(command, seconds, **options):
    """Return the ``subprocess.CompletedProcess`` of a command that may start processes of its own.

    After ``seconds``, it gets SIGTERM, so that it can end them, then SIGKILL; then this raises.
    ``subprocess.run(capture_output=True, timeout=...)`` would wait for the processes it had
    started, without a limit: they keep its pipes open.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, **options)
        try:
            process.wait(seconds)
            late = False
        except subprocess.TimeoutExpired:
            late = True
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(40)
        finally:
            process.kill()
            process.wait(30)
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))
    assert not late, f"not ended after {seconds} s: {command}\n{''.join(printed)}"
    return subprocess.CompletedProcess(command, process.returncode, *printed)
