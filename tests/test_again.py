"""``make test`` runs a few failed tests once more, alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


# Fails until a file exists that the first run creates, as a race does.
RACE = """
import pathlib
def test_race():
    ran = pathlib.Path("ran")
    try:
        assert ran.exists()
    finally:
        ran.touch()
"""


def run(folder, tests, *options, configuration="[pytest]\n"):
    """Run ``tests`` as ``make test`` does; return the exit status and the output."""
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text(configuration)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", *options]
    first = subprocess.run(command, cwd=folder, env=env, check=False)
    again = subprocess.run(
        [sys.executable, "-m", "tests.again", str(first.returncode), *options],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    return again.returncode, again.stdout


def test_a_test_that_passes_alone_is_named(tmp_path):
    status, output = run(tmp_path, RACE)
    assert status == 0
    assert output.endswith(
        "RACE: failed beside other tests, passed alone:\n    test_it.py::test_race\n"
    )


@pytest.mark.parametrize(
    ("tests", "status", "ran"),
    [
        ("def test_it(): assert False", 1, True),
        (RACE + "def test_it(): assert False", 1, True),
        ("import nothing_of_that_name", 2, True),
        (
            "import pytest\n@pytest.mark.parametrize('n', range(13))\ndef test_it(n): assert 0",
            1,
            False,
        ),
    ],
    ids=["twice", "one of two", "no tests", "too many"],
)
def test_a_real_failure_fails(tmp_path, tests, status, ran):
    found, output = run(tmp_path, tests)
    assert found == status
    assert ("Once more, alone" in output) is ran
    assert "RACE" not in output
