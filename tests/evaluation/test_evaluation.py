"""Evaluations by several workers equal a computation in one process, whatever happens to them."""

import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import limpet
from limpet import events
from limpet.convert.reshard import reshard
from limpet.errors import LimpetError, NotFound, Unavailable
from limpet.evaluation.evaluation import Evaluation, Outcome
from limpet.evaluation.options import Selection, Workers
from limpet.format.names import Version
from limpet.format.records import FailedEvaluation
from limpet.loading.snapshot import reader_of
from limpet.run.lease import list_leases
from limpet.run.policy import KeepLast
from limpet.run.run import Run
from limpet.snapshot.location import locate
from tests.evaluation import functions
from tests.evaluation.functions import expected, make_model
from tests.trainings import delete_version
from tests.waiting import wait_until

ALL, FUNCTIONS = Selection(skip_none=True), "tests.evaluation.functions"


def save_version(run, step, seed=None):
    state = {"model": make_model(step if seed is None else seed), "big": torch.zeros(1000)}
    limpet.save(run / f"version_{step}", state, step=step)
    return {"model": state["model"].state_dict()}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    return tmp_path / "run"


def evaluation(run, evaluate=functions.evaluate, **more):
    options = {"setup": functions.setup, "data": functions.data, "batch_size": 10, "workers": 1}
    options |= {"lease_seconds": 1.0, **more}
    return Evaluation(run, options.pop("setup"), evaluate, **options)


def check(outcome, run, state):
    assert outcome.state == "DONE", outcome.cause
    assert outcome.metrics == pytest.approx(expected(state), rel=1e-6)
    assert Run(run).metrics(outcome.version) == outcome.metrics


@pytest.mark.parametrize("workers", [0, 1])
def test_the_metrics_equal_those_of_a_computation_in_one_process(run, workers, monkeypatch):
    state = save_version(run, 5)
    monkeypatch.setattr(sys, "path", [run, *sys.path])  # Python ignores what is no string
    (outcome,) = evaluation(run, workers=workers).run()
    check(outcome, run, state)
    assert list_leases(Run(run).store) == []
    assert evaluation(run, workers=0).run() == [], "it is not evaluated again"


SCRIPT = """
import signal
import sys

import limpet
from limpet.evaluation import Workers
from tests.evaluation import functions


def evaluate(model, batch):
    return functions.evaluate_and_tell(model, batch)


if __name__ == "__main__":
    own = limpet.Evaluation(
        sys.argv[1],
        functions.setup,
        evaluate,
        data=functions.data,
        batch_size=10,
        workers=Workers(1, ray={} if sys.argv[2] == "ray" else None),
    )
    is_same = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    print(is_same, [outcome.state for outcome in own.run()])
"""


@contextmanager
def evaluator(folder, *command):
    """Another process, in which all modules of this one can be imported."""
    (folder / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def check_script(run, engine):
    """Functions at the top level of a script are found, and its handlers stay."""
    state = save_version(run, 5)
    with evaluator(run.parent, "script.py", str(run), engine) as process:
        output, errors = process.communicate(timeout=90)
    assert output.endswith("True ['DONE']\n"), errors
    assert Run(run).metrics(5) == pytest.approx(expected(state), rel=1e-6)


def test_the_functions_of_a_script_are_found(run):
    check_script(run, "local")


def test_a_metric_that_the_function_keeps_is_not_counted_twice(run):
    save_version(run, 5)
    chosen = {"evaluate": functions.evaluate_with_one_metric, "workers": 0}
    one = evaluation(run, **chosen, name="one").run()[0]
    whole = evaluation(run, **chosen, name="whole", batch_size=1000).run()[0]
    assert one.metrics == pytest.approx(whole.metrics)


def test_workers_that_are_killed_change_nothing(run):
    state = save_version(run, 5)
    (outcome,) = evaluation(run, functions.evaluate_dying, workers=2).run()
    check(outcome, run, state)


def test_a_function_that_returns_in_two_processes_gives_one_result(run):
    """The second one was taken for that of the next task."""
    state = save_version(run, 5)
    (outcome,) = evaluation(run, functions.evaluate_forking).run()
    check(outcome, run, state)


def test_a_worker_that_never_returns_its_task_is_replaced(run):
    state = save_version(run, 5)
    workers = Workers(1, task=1.0)
    (outcome,) = evaluation(run, functions.evaluate_hanging, workers=workers).run()
    check(outcome, run, state)


@pytest.mark.parametrize(
    ("evaluate", "cause"),
    [
        (functions.evaluate_nothing, r"evaluate_nothing\(\) did not return metrics.*nothing"),
        (functions.evaluate_raising, r"records 500 to 519.*ZeroDivisionError: one bad shard"),
        (functions.evaluate_poison, r"records 500 to 519.*SIGKILL"),
        (functions.evaluate_naming_nonsense, r"would be longer than a reader accepts"),
        (functions.evaluate_vector, r"MulticlassConfusionMatrix.compute\(\) returned something"),
        (functions.setup_failing, "FileNotFoundError: tokenizer.json"),
    ],
)  # fmt: skip
def test_a_failure_is_recorded_with_its_cause_and_blocks_nothing(run, evaluate, cause):
    state = save_version(run, 5)
    workers = 2 if evaluate is functions.evaluate_poison else 0
    which = "setup" if evaluate is functions.setup_failing else "evaluate"
    (outcome,) = evaluation(run, workers=workers, **{which: evaluate}).run()
    assert outcome.state == "FAILED"
    opened = Run(run).open(Version(5))
    (record,) = (
        Run(run).catalog.evaluations.read(Version(5), reader_of(opened).digest).of(FailedEvaluation)
    )
    assert record.cause == outcome.cause[: len(record.cause)]
    assert re.search(cause, record.cause), record.cause
    assert Run(run).metrics(5) == {}
    assert Run(run).best("val/loss") is None
    (status,) = Run(run).evaluations(5).values()
    assert (status.state, status.cause) == ("FAILED", record.cause)
    assert evaluation(run).run() == [], "a failure is not retried by itself"
    (again,) = evaluation(run, select=Selection(retry=True), workers=0).run()
    check(again, run, state)


def test_nan_is_recorded_and_never_the_best(run):
    save_version(run, 5)
    (outcome,) = evaluation(run, functions.evaluate_nan, workers=0).run()
    assert outcome.state == "DONE"
    assert Run(run).metrics(5)["loss"] != Run(run).metrics(5)["loss"]
    assert Run(run).best("loss") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"setup": "no.such.module:setup"}, "no.such.module:setup cannot be imported"),
        ({"setup": f"{FUNCTIONS}:missing", "workers": 0}, "missing cannot be imported"),
        ({"setup": "nonsense"}, "setup= must be a function, or package.module:function"),
        ({"setup": lambda snapshot: None}, "Another process cannot import the function setup"),
        ({"data": f"{FUNCTIONS}:RECORDS", "workers": 0}, "RECORDS is not a function"),
        ({"data": f"{FUNCTIONS}:evaluate_nothing"}, "evaluate_nothing"),
        ({"data": functions.empty, "workers": 0}, "is empty"),
        (
            {
                "data": functions.data_of_any_length,
                "evaluate": functions.evaluate_when_two_have_the_data,
                "workers": 2,
            },
            "A worker has other data.*Expected 100 records, found 90",
        ),
        ({"objective": ("loss", "best")}, "objective= must be"),
        ({"objective": "loss"}, "objective= must be"),
        ({"objective": ("loss", "min", "max")}, "objective= must be"),
        ({"keys": None}, "keys= must be"),
        ({"keys": ["model/**", 3]}, "keys= must be"),
        ({"data": [1, 2]}, "data= must be.*not dataset"),
        ({"data": [1, 2], "workers": 0}, "data= must be.*not dataset"),
        ({"collate": 3, "workers": 0}, "collate= must be"),
        ({"lease_seconds": 100_000}, "lease_seconds= must be"),
        ({"select": 60}, "select= must be"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_of_the_command(run, arguments, message):
    save_version(run, 5)
    with pytest.raises(LimpetError, match=message):
        evaluation(run, **arguments).run()
    assert list_leases(Run(run).store) == []


def test_a_run_that_does_not_exist_is_an_error_without_follow(run):
    with pytest.raises(NotFound, match="is not a run with versions"):
        evaluation(run).run()


def follow(run, workers=1, **more):
    outcomes: list[Outcome] = []
    own = evaluation(run, follow=True, workers=workers, **more)
    thread = threading.Thread(target=lambda: own.run(outcomes.append))
    thread.start()
    return thread, outcomes, own


@pytest.fixture
def quick_polls(monkeypatch):
    for module in ("evaluation", "worker"):
        monkeypatch.setattr(f"limpet.evaluation.{module}.POLL_SECONDS", 0.05)


@pytest.mark.usefixtures("quick_polls")
def test_an_evaluation_follows_a_run_that_does_not_exist_yet(run):
    thread, outcomes, own = follow(run)
    time.sleep(0.2)
    states = {step: save_version(run, step) for step in (1, 2)}
    wait_until(lambda: outcomes and outcomes[-1].version.step == 2, 30)
    states[3] = save_version(run, 3)
    wait_until(lambda: outcomes[-1].version.step == 3, 30)
    own.stop()
    thread.join(20)
    assert not thread.is_alive()
    for outcome in outcomes:
        check(outcome, run, states[outcome.version.step])


@pytest.mark.usefixtures("quick_polls")
def test_a_version_is_not_pending_while_the_evaluation_waits_for_the_next(run):
    for step in (1, 2):
        save_version(run, step)
    own = evaluation(run, workers=0, follow=True)
    thread = threading.Thread(target=own.run)
    thread.start()
    wait_until(lambda: [s.state for s in Run(run).evaluations(2).values()] == ["DONE"], 30)
    wait_until(lambda: len(list_leases(Run(run).store)) == 1, 30)  # a renewal has two for a moment
    delete_version(Run(run).store, 2)
    own.stop()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.usefixtures("quick_polls")
def test_skip_none_evaluates_all_and_protects_those_that_wait(run):
    for step in range(1, 6):
        save_version(run, step)
    own = evaluation(run, functions.evaluate_slowly, workers=1, batch_size=100, select=ALL)
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: own.run(outcomes.append))
    thread.start()
    # the lease protects a version until the evaluator begins with the next one
    wait_until(lambda: outcomes and Run(run).evaluations(1)["evaluation"].state == "DONE", 30)
    assert Run(run).evaluations(5)["evaluation"].state == "PENDING"
    deleted = Run(run).retain(KeepLast(1))
    assert {version.step for version in deleted} <= {o.version.step for o in outcomes}
    thread.join(60)
    assert [outcome.version.step for outcome in outcomes] == [1, 2, 3, 4, 5]
    assert {outcome.state for outcome in outcomes} == {"DONE"}


def test_the_lease_of_very_many_versions_that_wait_can_be_read(run, monkeypatch):
    """With 60,000 of them, readers rejected it, and nothing was protected."""
    save_version(run, 5)
    own = evaluation(run, workers=0, select=ALL)
    longest = [Version(10**17 + number, 10**8) for number in range(60_000)]
    found = Run(run).open(Version(5)), longest
    monkeypatch.setattr(own._follower, "next", lambda: found)
    own._lease.acquire()
    assert own._find_version() is found[0]
    statuses = Run(run).evaluations(5), Run(run).catalog.leases.live()
    own._lease.release()
    assert statuses[0]["evaluation"].state == "PENDING"
    (lease,) = statuses[1].values()
    assert len(lease.versions) == 10_001


def test_a_version_that_is_damaged_fails_and_one_that_is_deleted_is_skipped(run):
    save_version(run, 5)
    (shard,) = (run / "version_5").glob("shard-*.safetensors")
    raw = bytearray(shard.read_bytes())
    raw[-10] ^= 1
    shard.write_bytes(raw)
    save_version(run, 4)
    (outcome,) = evaluation(run, setup=functions.setup_from_dict, keys="**", workers=0).run()
    assert outcome.state == "FAILED"
    assert "damaged" in outcome.cause


@pytest.mark.parametrize("older", [False, True])
def test_a_version_with_a_damaged_manifest_fails(run, older):
    """Nothing said so: the outcome was that all versions have been evaluated."""
    if older:
        state = save_version(run, 4)
    save_version(run, 5)
    (run / "version_5" / "manifest.json").write_text("{}")
    failed, *done = evaluation(run, workers=0).run()
    assert (failed.version, failed.state) == (Version(5), "FAILED")
    assert "manifest.json" in failed.cause
    assert len(done) == older
    if older:
        check(done[0], run, state)


def test_two_evaluations_with_one_name_do_not_run_at_once(run):
    save_version(run, 5)
    slow = evaluation(run, functions.evaluate_slowly, workers=1)
    thread = threading.Thread(target=slow.run)
    thread.start()
    wait_until(lambda: list_leases(Run(run).store), 30)
    with pytest.raises(LimpetError, match=r"Another process evaluates .* under the name"):
        evaluation(run, workers=0).run()
    (other,) = evaluation(run, workers=0, name="other").run()
    assert other.state == "DONE"
    thread.join(60)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_that_is_stopped_ends_its_workers_and_records_nothing(run, workers):
    save_version(run, 5)
    slow = evaluation(run, functions.evaluate_slowly, workers=workers)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(slow.run()))
    thread.start()
    wait_until(lambda: len(slow._pool._places) == workers and list_leases(Run(run).store), 30)
    pids = [place.process.pid for place in slow._pool._places]
    slow.stop()
    thread.join(20)
    assert not thread.is_alive()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert found == [[]]
    assert Run(run).metrics(5) == {}


def test_the_objective_of_an_evaluation_makes_the_best_version_addressable(run):
    for step in (1, 2, 3):
        save_version(run, step)
    outcomes = evaluation(run, workers=0, select=ALL, objective=("val/loss", "min")).run()
    losses = {outcome.version.step: outcome.metrics["val/loss"] for outcome in outcomes}
    best = min(losses, key=losses.__getitem__)
    assert limpet.open(f"{run}@best").step == best
    assert limpet.open(f"{run}@best:val/loss").step == best
    with pytest.raises(NotFound, match=r"does not name a version.*limpet evaluate RUN --metric"):
        limpet.open(f"{run}@best:accuracy")
    evaluation(run, workers=0, select=ALL, name="again", objective=("val/loss", "max")).run()
    with pytest.raises(NotFound, match="does not name a version"):
        limpet.open(f"{run}@best:val/loss")


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.usefixtures("quick_polls")
def test_an_objective_that_is_given_after_the_evaluation_is_recorded(run, follow):
    save_version(run, 1)
    evaluation(run, workers=0).run()
    own = evaluation(run, workers=0, follow=follow, objective=("val/loss", "min"))
    with events.attach(lambda name, fields: own.stop() if name == "evaluation_waits" else None):
        assert own.run() == []
    assert limpet.open(f"{run}@best").step == 1


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.usefixtures("quick_polls")
def test_one_event_says_that_a_follower_waits(run, saved):
    waits: list[str] = []
    if saved:
        save_version(run, 1)
        evaluation(run, workers=0).run()
    with events.attach(lambda name, _: waits.append(name) if "waits" in name else None):
        thread, outcomes, own = follow(run, workers=0)
        wait_until(lambda: waits, 30)
        save_version(run, 2)
        wait_until(lambda: outcomes, 30)
        time.sleep(0.2)
        own.stop()
        thread.join(20)
    assert waits == ["evaluation_waits"]


@pytest.mark.parametrize("written", ["record_objective", "Run.add_metrics"])
def test_an_objective_is_recorded_also_if_the_evaluator_dies_between_two_records(
    run, written, monkeypatch
):
    save_version(run, 1)
    own = evaluation(run, workers=0, objective=("val/loss", "min"))

    def die(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"limpet.evaluation.evaluation.{written}", die)
        own.run()
    evaluation(run, workers=0, objective=("val/loss", "min")).run()
    assert limpet.open(f"{run}@best").step == 1


def test_an_objective_that_the_evaluation_does_not_return_is_an_error_of_the_arguments(run):
    save_version(run, 1)
    with pytest.raises(LimpetError, match=r"returns no metric loss.*accuracy, val/loss"):
        evaluation(run, workers=0, objective=("loss", "min")).run()
    assert Run(run).evaluations(1) == {}


def test_a_version_without_the_metric_of_earlier_ones_fails(run):
    save_version(run, 1)
    Run(run).add_metrics(1, {"loss": 0.5}, "val")
    save_version(run, 2)
    select = Selection(skip_none=True)
    own = evaluation(run, workers=0, name="val", objective=("loss", "min"), select=select)
    (outcome,) = own.run()
    assert (outcome.version.step, outcome.state) == (2, "FAILED")
    assert "returns no metric loss" in outcome.cause


@pytest.mark.usefixtures("quick_polls")
def test_a_store_that_does_not_answer_for_a_while_fails_no_version(run):
    state = save_version(run, 5)
    (outcome,) = evaluation(run, setup=functions.setup_unavailable, workers=0).run()
    check(outcome, run, state)


@pytest.mark.usefixtures("quick_polls")
@pytest.mark.parametrize("evaluate", [functions.evaluate, functions.evaluate_nothing])
def test_a_store_that_does_not_answer_for_a_while_loses_no_result(run, evaluate, monkeypatch):
    save_version(run, 5)
    original, calls = Run.put_record, list[object]()

    def fail(*arguments, **content):
        calls.append(None)
        if len(calls) < 5:
            raise Unavailable("503")
        original(*arguments, **content)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "put_record", fail)
        (outcome,) = evaluation(run, evaluate, workers=0).run()
    assert len(calls) == 5
    assert Run(run).evaluations(5)["evaluation"].state == outcome.state

    def fail_always(*arguments, **content):
        raise Unavailable("503")

    monkeypatch.setattr(Run, "put_record", fail_always)
    with pytest.raises(Unavailable):
        evaluation(run, evaluate, workers=0, name="other").run()
    assert list_leases(Run(run).store) == []


@pytest.mark.usefixtures("quick_polls")
def test_failures_of_the_store_end_an_evaluation_only_in_a_row(run, monkeypatch):
    """Ten that were hours apart, while no new version came, ended it."""
    save_version(run, 5)
    own = evaluation(run, workers=0, follow=True)
    original, looks = own._follower.next, list[object]()

    def fail_often():
        looks.append(None)
        if len(looks) == 60:
            own.stop()
        if len(looks) % 4 == 0:
            raise Unavailable("503")
        return original()

    monkeypatch.setattr(own._follower, "next", fail_often)
    (outcome,) = own.run()
    assert outcome.state == "DONE"
    assert len(looks) == 60


def test_what_a_worker_prints_does_not_go_to_stdout(run, capfd):
    save_version(run, 5)
    evaluation(run, functions.evaluate_printing, workers=1).run()
    out, err = capfd.readouterr()
    assert "a batch" not in out
    assert "a batch" in err


def test_an_evaluation_runs_once(run):
    save_version(run, 5)
    own = evaluation(run, workers=0)
    own.run()
    with pytest.raises(LimpetError, match="has been run"):
        own.run()


def test_only_the_selected_leaves_are_read(run):
    """Damage in a part of the version that the evaluation does not need does not matter."""
    model = make_model(5)
    state = {"model": model, "optimizer": torch.zeros(4 << 20)}
    limpet.save(run / "version_5", state, step=5)
    (shard,) = (run / "version_5").glob("shard-*.safetensors")
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    assert not limpet.open(run / "version_5").verify().ok
    (outcome,) = evaluation(run, workers=0).run()
    check(outcome, run, {"model": model.state_dict()})


def test_a_version_that_a_person_deletes_meanwhile_is_skipped(run):
    save_version(run, 4)
    save_version(run, 5)
    (outcome,) = evaluation(run, setup=functions.setup_of_a_deleted_version).run()
    assert outcome.state == "SKIPPED"
    assert re.search("There is no snapshot|was deleted", outcome.cause)
    assert sorted(path.name for path in run.iterdir()) == ["version_4"]


def test_a_version_of_any_layout_is_evaluated(run, tmp_path):
    state = save_version(tmp_path / "other", 5)
    reshard(reader_of(limpet.open(tmp_path / "other" / "version_5")), locate(run / "version_5"), 3)
    assert len([*(run / "version_5").glob("shard-*.safetensors")]) == 3
    (outcome,) = evaluation(run, workers=1).run()
    check(outcome, run, state)


@pytest.mark.parametrize("option", ["throttle", "every_seconds"])
def test_evaluations_keep_their_distance(run, option):
    for step in (1, 2, 3):
        save_version(run, step)
    times: list[tuple[float, float]] = []

    def note(outcome):
        now = time.monotonic()
        times.append((now - outcome.seconds, now))

    evaluation(run, workers=0, select=Selection(skip_none=True, **{option: 0.5})).run(note)
    (first, end), (second, _), (third, _) = times
    assert second - (end if option == "throttle" else first) >= 0.49
    assert third - first >= 0.99
