"""The engine on Ray: its tests run in a process of their own, on one small cluster."""

import importlib.util
import sys

import pytest

from limpet import tables
from limpet.errors import LimpetError
from tests.ray_cluster import run_cases

WORDS = tables.Table("words", 4, optimizer=tables.SGD(lr=1.0))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_cases_pass_in_a_process_of_their_own():
    run_cases("tests/tables/ray_cases.py")


def test_without_ray_the_engine_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LimpetError, match=r'engine="ray" needs the package ray\. Install'):
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
