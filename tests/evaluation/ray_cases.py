"""Evaluations by Ray actors equal a computation in one process. ``test_ray.py`` runs this file."""

import json
import os
import re
import threading
from pathlib import Path

import pytest

from limpet.errors import LimpetError
from limpet.evaluation import Workers
from limpet.run.lease import list_leases
from limpet.run.run import Run
from tests.evaluation import functions
from tests.evaluation.test_evaluation import check, check_script, evaluator, save_version
from tests.evaluation.test_evaluation import evaluation as local_evaluation
from tests.waiting import wait_until


@pytest.fixture
def run(cluster, tmp_path):
    yield tmp_path / "run"
    wait_until(lambda: not actors(), 30)  # whatever the test did, Ray has got everything back
    for left in ("first", "second", "hang", *map(str, cluster.glob("pid-*"))):
        (cluster / left).unlink(missing_ok=True)


def evaluation(run, evaluate=functions.evaluate, count=2, ray=None, **more):
    limits = {name: more.pop(name) for name in ("start", "task") if name in more}
    return local_evaluation(run, evaluate, workers=Workers(count, ray=ray or {}, **limits), **more)


def pids(folder):
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def actors():
    """The process ids of all actors that are alive."""
    return [pid for pid in _processes() if b"ray::RayActor" in _command(pid)]


def _processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def start(run, **more):
    """Start a slow evaluation in a thread."""
    own, found = evaluation(run, functions.evaluate_and_tell, **more), []
    thread = threading.Thread(target=lambda: found.append(own.run()))
    thread.start()
    return thread, found, own


def test_the_metrics_equal_those_of_a_computation_in_one_process(run):
    state = save_version(run, 5)
    (outcome,) = evaluation(run).run()
    check(outcome, run, state)
    assert list_leases(Run(run).store) == []


def test_actors_that_die_in_a_task_change_nothing(run, cluster):
    state = save_version(run, 5)
    (outcome,) = evaluation(run, functions.evaluate_dying).run()
    check(outcome, run, state)
    assert (cluster / "second").exists()


def test_an_actor_that_never_returns_its_task_is_replaced(run, cluster):
    state = save_version(run, 5)
    (outcome,) = evaluation(run, functions.evaluate_hanging, task=1.0).run()
    check(outcome, run, state)
    assert (cluster / "hang").exists()


def test_the_death_of_each_actor_at_one_task_is_recorded_as_the_cause(run):
    save_version(run, 5)
    (outcome,) = evaluation(run, functions.evaluate_poison).run()
    assert outcome.state == "FAILED"
    assert re.search(r"records 500 to 519.*The actor died unexpectedly", outcome.cause)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"ray": {"resources": {"none": 1}}, "start": 1.0},
            r"Expected an answer within 1 s, found none.*ray status",
        ),
        ({"ray": {"num_cpus": -1}}, r"Ray refuses ray=\{'num_cpus': -1\}"),
    ],
)
def test_what_cannot_be_started_is_an_error_of_the_command(run, arguments, message):
    save_version(run, 5)
    with pytest.raises(LimpetError, match=message):
        evaluation(run, **arguments).run()
    assert list_leases(Run(run).store) == []


def test_a_stop_ends_the_actors_and_those_that_wait_for_resources(run):
    save_version(run, 5)
    thread, found, own = start(run, count=3)  # the third one waits for a CPU
    wait_until(lambda: len(own._pool._places) == 3 and len(actors()) >= 2, 30)
    own.stop()
    thread.join(30)
    assert not thread.is_alive()
    wait_until(lambda: not actors(), 30)
    assert found == [[]]


def test_the_functions_of_a_script_are_found_and_its_handlers_stay(run):
    check_script(run, "ray")


def test_actors_end_with_their_evaluator(run, cluster):
    save_version(run, 5)
    with evaluator(run.parent, "script.py", str(run), "ray") as process:
        wait_until(lambda: pids(cluster), 60)
        process.kill()
        process.communicate(timeout=30)
    assert process.returncode != 0
    for pid in pids(cluster):
        wait_until(lambda pid=pid: not _command(pid), 30)
    assert Run(run).metrics(5) == {}


def test_the_command_evaluates_with_ray(run):
    save_version(run, 5)
    (run.parent / "scoring.py").write_text(
        "from tests.evaluation.functions import *\nevaluate = evaluate_and_tell\n"
    )
    command = ["-m", "limpet", "evaluate", str(run), "--with", "scoring", "--engine", "ray"]
    more = ["--data", "scoring:data", "--workers", "2", "--json"]
    with evaluator(run.parent, *command, *more) as process:
        output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert json.loads(output)["versions"][0]["state"] == "DONE", "nothing else is on stdout"
