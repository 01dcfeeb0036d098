"""Evaluation of exactly one version at a time, by worker processes, while the training goes on."""

import threading

import pytest
import torch

import limpet
from limpet.errors import LimpetError
from limpet.evaluation import evaluation as evaluation_module
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from tests.evaluation import functions
from tests.evaluation.functions import expected, make_model
from tests.fakegroup import FakeGroup


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch):
    monkeypatch.setattr(evaluation_module, "POLL_SECONDS", 0.05)


def evaluation(run, **more):
    options = {"setup": functions.setup, "evaluate": functions.evaluate, **more}
    options = {"data": functions.data, "workers": 1, "follow": True, "batch_size": 50, **options}
    return limpet.Evaluation(run, options.pop("setup"), options.pop("evaluate"), **options)


def training(run):
    state = {"model": make_model(), "progress": limpet.Progress()}
    return state, limpet.Checkpointer(run, state, save=EverySteps(4))


def step(state, ckpt):
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.mul_(0.9)
    ckpt.step()


def evaluating_threads():
    return [t for t in threading.enumerate() if t.name == "limpet-evaluation"]


@pytest.mark.slow
def test_the_newest_version_is_evaluated_exactly_while_the_training_goes_on(tmp_path):
    run = tmp_path / "run"
    state, ckpt = training(run)
    with evaluation(run).background() as outcomes, ckpt:
        ckpt.resume()
        while not outcomes:  # the training does not wait for it
            assert ckpt.current_step < 100_000
            step(state, ckpt)
            ckpt.wait()
        step(state, ckpt)
        ckpt.save()
    assert outcomes[-1].version.step == ckpt.current_step
    assert len(outcomes) >= 2
    for outcome in outcomes:
        loaded = limpet.load(run / str(outcome.version))
        assert outcome.metrics == pytest.approx(expected({"model": loaded["model"]}), rel=1e-6)
        assert Run(run).metrics(outcome.version) == outcome.metrics
    assert evaluating_threads() == []


@pytest.mark.slow
def test_a_failure_is_reported_at_once_and_never_stops_the_training(tmp_path):
    run, reported = tmp_path / "run", threading.Event()
    state, ckpt = training(run)
    broken = evaluation(run, setup="tests.evaluation.no_such_module:setup")

    def sink(name, fields):
        if name == "evaluation_stopped":
            assert "no_such_module" in str(fields["error"])
            reported.set()

    with (
        limpet.attach(sink),
        pytest.raises(LimpetError, match="no_such_module"),
        broken.background() as outcomes,
        ckpt,
    ):
        ckpt.resume()
        assert reported.wait(60)
        for _ in range(9):
            step(state, ckpt)
    assert [s.step for s in Run(run).snapshots()][:2] == [4, 8]
    assert outcomes == []


@pytest.mark.slow
def test_an_exception_of_the_training_ends_the_workers_at_once(tmp_path):
    run, started = tmp_path / "run", threading.Event()
    state, ckpt = training(run)
    slow = evaluation(run, evaluate=functions.evaluate_slowly, batch_size=1)  # 50 s per version

    def sink(name, fields):
        if name == "evaluation_started":
            started.set()
        assert name != "evaluation_stopped"

    background = slow.background()
    with limpet.attach(sink), pytest.raises(ZeroDivisionError), background as outcomes, ckpt:
        ckpt.resume()
        for _ in range(4):
            step(state, ckpt)
        ckpt.wait()
        assert started.wait(60)
        raise ZeroDivisionError
    assert evaluating_threads() == []
    assert outcomes == []
    assert Run(run).metrics(4) == {}


def test_only_the_first_rank_evaluates(tmp_path):
    def work(rank):
        before = len(evaluating_threads())
        if rank == 1:
            with evaluation(tmp_path / "run").background():
                return len(evaluating_threads()) - before
        return 0

    with FakeGroup(2) as group:
        assert group.run(work) == [0, 0]


@pytest.mark.parametrize("option", [{"follow": False}, {"workers": 0}])
def test_it_must_follow_and_have_workers(tmp_path, option):
    background = evaluation(tmp_path / "run", **option).background()
    with pytest.raises(LimpetError, match="to run in the background"), background:
        pass
