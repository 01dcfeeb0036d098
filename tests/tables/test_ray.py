"""The engine on Ray: its tests run in a process of their own, on one small cluster."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from limpet import tables
from limpet.errors import LimpetError

WORDS = tables.Table("words", 4, optimizer=tables.SGD(lr=1.0))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_cases_pass_in_a_process_of_their_own():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "-p", "tests.ray_cluster", "tests/tables/ray_cases.py"],
        cwd=Path(__file__).parents[2],
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_without_ray_the_engine_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LimpetError, match=r'engine="ray" needs the package ray: pip install ray'):
        tables.Servers([WORDS], engine="ray")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "threads"}, 'engine= must be "local" or "ray"'),
        ({"ray": {"num_cpus": 1}}, 'ray= must be None without engine="ray"'),
        ({"engine": "ray", "ray": {"lifetime": "detached"}}, r"some of .*, not \['lifetime'\]"),
        ({"engine": "ray", "ray": 3}, "ray= must be a dict"),
        ({"engine": "ray", "count": 4097}, "a number of servers, 1 to 4096"),
    ],
)
def test_invalid_arguments_are_refused_before_ray_is_used(monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LimpetError, match=message):
        tables.Servers([WORDS], **arguments)
