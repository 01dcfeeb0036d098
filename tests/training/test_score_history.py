"""The scores of early stopping: every order of arrival gives the result of a scan in step order."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.run.policy import StopState, StopWhen
from limpet.training.early_stop import ScoreHistory

SCORES = st.sampled_from([nan, -inf, -1, 0.0, 0.25, 0.5, 1, 2.5, inf])
POLICIES = st.builds(
    StopWhen,
    st.just("v"),
    st.integers(1, 4),
    st.sampled_from(["min", "max"]),
    st.sampled_from([0, 0.25, 1]),
)


def scan(stop, scores):
    """Return the result of the scores in the order of the steps, until they stop the training."""
    state = StopState()
    for _, score in sorted(scores.items()):
        if state.stopped:
            break
        state = stop.observe(state, score)
    return state


def restart(history, stop):
    return ScoreHistory.from_plain(stop, history.to_plain())


@given(POLICIES, st.dictionaries(st.integers(0, 60), SCORES, max_size=30), st.data())
def test_every_order_of_arrival_gives_the_result_of_a_scan(stop, scores, data):
    """Also with scores that come twice, with ones that are replaced, and with restarts."""
    history = ScoreHistory(stop)
    for step in data.draw(st.permutations(sorted(scores))):
        if data.draw(st.booleans()):
            history.give(step, data.draw(SCORES))
        if data.draw(st.booleans()):
            history.record(step, data.draw(SCORES))
        history.record(step, scores[step])
        history.give(step, data.draw(SCORES))  # the step has a score
        if data.draw(st.booleans()):
            history.record(step, scores[step])
        if data.draw(st.booleans()):
            history = restart(history, stop)
    assert history.state == scan(stop, scores)
    assert restart(history, stop).state == history.state
    assert all(history.covers(step, score) for step, score in scores.items())


@pytest.mark.parametrize(
    "edit",
    [
        {"scores": None}, {"scores": "abc"}, {"scores": [[1]]}, {"scores": [[1, "x"]]},
        {"scores": [[1, True]]},
        {"scores": [[-5, 1.0]]}, {"scores": [[10**30, 1.0]]}, {"scores": [None]}, {"scores": {}},
        {"best": "x"}, {"misses": None}, {"folded_step": "x"}, {"folded_step": True},
    ],
    ids=range(13),
)  # fmt: skip
def test_damaged_scores_begin_anew(edit):
    stop = StopWhen("v", patience=3)
    history = ScoreHistory(stop)
    history.record(1, 0.5)
    history.record(2, 0.6)
    damaged = ScoreHistory.from_plain(stop, {**history.to_plain(), **edit})
    assert damaged.state == StopState()
    damaged.record(3, 0.7)
    assert damaged.state == StopState(0.7)


def test_a_changed_patience_is_applied_to_a_stored_history():
    history = ScoreHistory(StopWhen("v", patience=2))
    for step in range(3):
        history.record(step, 1.0)
    assert history.state.stopped
    assert restart(history, StopWhen("v", patience=5)).state == StopState(1.0, 2)
    for other in (StopWhen("w", patience=2), StopWhen("v", patience=2, mode="max")):
        assert restart(history, other).state == StopState()
