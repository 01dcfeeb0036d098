"""The best version was evaluated, and is the same one for ``Run.best`` and ``KeepBest``."""

from math import inf, isnan, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.format.names import Version
from limpet.format.records import FailedEvaluation
from limpet.run.policy import EverySteps, KeepBest
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from tests.trainings import initial_state

SCORE = st.one_of(st.none(), st.sampled_from([nan, -inf, 0, 0.5, 1.0, inf]))


def scored_run(given_scores):
    store = MemoryStore()
    with Checkpointer(store, initial_state(), save=EverySteps(1)) as ckpt:
        for score in given_scores:
            ckpt.step({} if score is None else {"val": score})
            ckpt.wait()
    return store


@settings(max_examples=50)
@given(st.lists(st.tuples(SCORE, SCORE), min_size=1, max_size=6), st.sampled_from(["min", "max"]))
def test_the_best_version_is_the_one_that_retention_keeps_and_it_was_evaluated(scores, mode):
    """``scores``: what each step was given, and what an evaluation recorded later."""
    store = scored_run([given_score for given_score, _ in scores])
    run, effective = Run(store), dict[int, float]()
    for step, (given_score, recorded) in enumerate(scores, 1):
        if recorded is not None:
            run.add_metrics(step, {"val": recorded})
        score = given_score if recorded is None else recorded
        if score is not None and not isnan(score):
            effective[step] = score
    best = run.best("val", mode)
    if not effective:
        assert best is None
    else:
        choose = min if mode == "min" else max
        assert effective[best.version.step] == choose(effective.values())
    run.retain(KeepBest(1, "val", mode))
    newest = Version(len(scores))  # always kept, and all if none is the best
    every = map(Version, range(1, len(scores)))
    assert {*run.line()} == {newest, *(every if best is None else [best.version])}
    again = Run(store).best("val", mode)
    assert (again and again.version) == (best and best.version)


@pytest.mark.parametrize("kind", ["failed", "missing", "other"])
def test_a_version_without_a_score_is_never_the_best(kind):
    run = Run(scored_run([0.5, None]))
    if kind == "other":
        run.add_metrics(2, {"other": 0.1})
    elif kind == "failed":
        run.put_record(FailedEvaluation, "val", 2, cause="it failed")
    assert run.best("val").version == Version(1)
    run.retain(KeepBest(1, "val"))
    assert run.line() == [Version(1), Version(2)]
