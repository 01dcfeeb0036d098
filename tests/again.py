"""Run the tests that failed once more, alone: ``python -m tests.again STATUS [OPTION]...``.

``make test`` and ``make test-stores`` do so. STATUS is the exit status of their first run, and the
options are those of pytest.

Many tests wait for processes, deadlines, and threads, beside other tests on the same two cores. If
a test passes alone, the whole passes, and its last lines name the test: it has a race, in the
test or in the code, that someone has to find. Longer timeouts do not help: the failures had other
causes, such as a thread that another test had left.
"""

import json
import subprocess
import sys
from pathlib import Path

TESTS_FAILED = 1  # the exit status of pytest; every other one but 0 is final
MOST = 12  # more failures have a cause that is not a race
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def run_again(status, options):
    """Return the exit status of the whole: that of the tests, or of those that ran again."""
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if status != TESTS_FAILED or not 1 <= len(failed) <= MOST:
        return status
    print(f"\nOnce more, alone: {len(failed)} failed tests", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *options, *failed]
    status = subprocess.run(command, check=False).returncode
    if status == 0:
        print("\nRACE: failed beside other tests, passed alone:")
        print("\n".join(f"    {name}" for name in failed), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(run_again(int(sys.argv[1]), sys.argv[2:]))
