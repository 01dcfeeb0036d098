"""The Ray engine: the tests of it run in a process of their own, on one small cluster."""

import importlib.util
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

import limpet
from limpet.errors import LimpetError
from limpet.evaluation import Workers
from tests.evaluation import functions
from tests.evaluation.test_evaluation import evaluation
from tests.ray_cluster import run_cases


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_cases_pass_in_a_process_of_their_own():
    run_cases("tests/evaluation/ray_cases.py", "tests/tasks/ray_cases.py")


def test_without_ray_the_engine_is_an_error_that_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LimpetError, match=r'needs the package ray\. .*"limpet\[ray\]"'):
        evaluation(tmp_path / "run", workers=Workers(1, ray={}))


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_at_which_nothing_listens_is_an_error_at_once(tmp_path, monkeypatch, form):
    """Ray itself tries for more than six minutes."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = form.format(closed.getsockname()[1])
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(LimpetError, match=f"one that listens at {address}, the RAY_ADDRESS"):
        evaluation(tmp_path / "run", workers=Workers(1, ray={}))


def test_nothing_imports_ray_unless_an_evaluation_uses_it():
    code = (
        "import sys, limpet\n"
        "limpet.Evaluation('run', 'm:s', 'm:e', data='m:d')\n"
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0, "ray": {}}, "count= of Workers must be"),
        ({"ray": 4}, "ray= of Workers must be"),
        ({"ray": {"lifetime": "detached", 5: 1}}, r"some of .*, not \['5', 'lifetime'\]"),
        ({"ray": {}, "setup": lambda snapshot: None}, "cannot import the function setup"),
    ],
)
def test_invalid_options_are_refused_before_ray_is_used(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "ray", None)
    functions_of_user = {k: arguments.pop(k) for k in ("setup",) if k in arguments}
    with pytest.raises(LimpetError, match=message):
        evaluation(tmp_path / "run", workers=Workers(**arguments), **functions_of_user)


def test_a_version_that_a_worker_does_not_find_is_a_failure(tmp_path):
    """It was skipped as deleted; but a worker on another machine may not have the folder."""
    limpet.save(tmp_path / "run" / "version_5", {"model": functions.make_model()}, step=5)
    (outcome,) = evaluation(
        tmp_path / "run", setup=functions.setup_that_finds_nothing, workers=0
    ).run()
    assert outcome.state == "FAILED"
    assert "has no shard" in outcome.cause
