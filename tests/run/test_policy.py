"""Policies are pure functions over records. Tables list their results."""

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.errors import LimpetError
from limpet.format.names import Version
from limpet.run.policy import (
    AtEnd,
    AtSteps,
    Continuously,
    EveryEpoch,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    KeepSteps,
    Never,
    OnException,
    OnPreemption,
    PolicyInput,
    Record,
    SavePolicy,
    StopState,
    StopWhen,
)
from limpet.run.run import Run

START = PolicyInput(0, 0.0, 0, 0, 0.0, 0)


@pytest.mark.parametrize(
    ("step", "last", "due"),
    [(1, 0, False), (2, 0, False), (3, 0, True), (4, 3, False), (5, 3, False), (6, 3, True)],
)
def test_every_steps_is_due_at_multiples(step, last, due):
    assert EverySteps(3).due(replace(START, step=step, last_step=last)) is due


def test_every_steps_is_due_after_skipping_a_multiple():
    assert EverySteps(100).due(replace(START, step=205, last_step=150))
    assert not EverySteps(100).due(replace(START, step=205, last_step=200))


@pytest.mark.parametrize(
    ("step", "last", "due"),
    [(9, 0, False), (10, 0, True), (11, 10, False), (12, 9, True), (35, 12, True), (31, 30, False),
     (99, 31, False), (40, 5, True)],
)  # fmt: skip
def test_at_steps_is_due_when_a_listed_step_is_reached_or_passed(step, last, due):
    assert AtSteps([30, 10]).due(replace(START, step=step, last_step=last)) is due


@pytest.mark.parametrize(("now", "last", "due"), [(59.9, 0, False), (60, 0, True), (65, 60, False)])
def test_every_seconds_counts_from_the_last_save(now, last, due):
    current = PolicyInput(
        step=1, seconds=now, epochs=0, last_step=0, last_seconds=last, last_epochs=0
    )
    assert EverySeconds(60).due(current) is due


@pytest.mark.parametrize(
    ("every", "epochs", "last", "due"),
    [
        (1, 0, 0, False), (1, 1, 0, True), (1, 1, 1, False), (1, 2, 1, True), (1, 5, 1, True),
        (3, 2, 0, False), (3, 3, 0, True), (3, 4, 3, False), (3, 7, 5, True), (3, 5, 3, False),
    ],
)  # fmt: skip
def test_every_epoch_is_due_when_one_is_completed(every, epochs, last, due):
    current = replace(START, step=9, epochs=epochs, last_epochs=last)
    assert EveryEpoch(every).due(current) is due


@pytest.mark.parametrize(
    ("least", "seconds", "is_saving", "due"),
    [
        (0, 0.0, False, True), (0, 0.0, True, False), (60, 59.9, False, False),
        (60, 60.0, False, True), (60, 1e9, True, False), (0.5, 0.5, False, True),
    ],
)  # fmt: skip
def test_continuously_is_due_when_the_last_save_has_ended(least, seconds, is_saving, due):
    now = replace(START, step=1, seconds=100.0 + seconds, last_seconds=100.0, is_saving=is_saving)
    assert Continuously(least).due(now) is Continuously(at_least=least).due(now) is due


@pytest.mark.parametrize("seconds", [-1, -0.1, nan, inf, None, True, "60"])
def test_continuously_takes_seconds(seconds):
    message = r"at_least= of Continuously must be 0 or more seconds, and finite, not "
    with pytest.raises(LimpetError, match=message):
        Continuously(seconds)


@pytest.mark.parametrize("policy", [OnPreemption(), AtEnd(), OnException(), Never(), SavePolicy()])
def test_policies_that_are_never_due(policy):
    assert not policy.due(PolicyInput(10**9, 1e9, 10**6, 0, 0.0, 0))


def test_every_policy_saves_at_the_end_but_two():
    never, at_preemption, steps = Never(), OnPreemption(), EverySteps(3)
    assert not never.at_end
    assert not at_preemption.at_end
    others = [steps, AtSteps([3]), EverySeconds(3), EveryEpoch(), Continuously(0), OnException()]
    assert all(policy.at_end for policy in [*others, AtEnd(), SavePolicy(), steps | AtEnd()])
    assert at_preemption | steps == steps | at_preemption == steps
    assert at_preemption | at_preemption == at_preemption
    assert (at_preemption | OnException()).on_exception
    for first, second in ((never, at_preemption), (at_preemption, never)):
        with pytest.raises(LimpetError, match=r"Never\(\) cannot be combined"):
            _ = first | second


def test_a_combined_policy_is_due_if_either_is():
    combined = EverySteps(10) | EverySeconds(60) | EverySteps(7)
    due = [s for s in range(1, 21) if combined.due(replace(START, step=s, last_step=s - 1))]
    assert due == [7, 10, 14, 20]
    assert combined.due(replace(START, step=1, seconds=61.0))


def records(*pairs, metric="loss"):
    """Return records of steps, or of pairs of a step and a metric."""
    found = []
    for pair in pairs:
        step, value = pair if isinstance(pair, tuple) else (pair, None)
        found.append(Record(Version(step), {} if value is None else {metric: value}))
    return found


def kept_steps(policy, found):
    return sorted(v.step for v in policy.keep(found))


def test_keep_last():
    found = records(10, 20, 30, 40)
    assert kept_steps(KeepLast(3), found) == [20, 30, 40]
    assert kept_steps(KeepLast(9), found) == [10, 20, 30, 40]
    assert kept_steps(KeepLast(1) | KeepLast(2), found) == [30, 40]
    assert kept_steps(KeepPolicy(), found) == [10, 20, 30, 40]
    assert kept_steps(KeepLast(3), []) == []


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], []),
        ([90, 99], []),
        ([0, 90, 100, 110], [0, 100]),
        ([0, 90], [0]),
        ([90, 110, 190, 210, 220], [110, 210]),
        ([90, 350, 360, 410], [350, 410]),  # 350 is the first at or after 100, 200 and 300
        ([100, 200, 300], [100, 200, 300]),
        ([99, 101, 102, 199, 200, 201], [101, 200]),
    ],
)
def test_keep_every(steps, expected):
    assert kept_steps(KeepEvery(100), records(*steps)) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([(5, 30.0), (10, 59.9)], []),
        ([(0, 0.1), (5, 30.0), (10, 60.0), (15, 61.0)], [0, 10]),
        ([(5, 59.0), (10, 61.0), (15, 119.0), (20, 121.0), (25, 300.0)], [10, 20, 25]),
        ([(5, None), (10, 61.0), (15, None), (20, 62.0)], [5, 10, 15]),  # no time: kept
    ],
)
def test_keep_every_by_trained_seconds(seconds, expected):
    found = [Record(Version(step), {}, trained) for step, trained in seconds]
    assert kept_steps(KeepEvery(seconds=60), found) == expected


@pytest.mark.parametrize(
    ("listed", "steps", "expected"),
    [
        ([20], [10, 20, 30], [20]),
        ([20], [10, 30, 40], [30]),  # 20 was passed over
        ([20, 25], [10, 30, 40], [30]),
        ([20], [10], []),
        ([0, 40], [0, 10, 40], [0, 40]),
        ([0], [10, 20], [10]),
        ([20], [], []),
    ],
)
def test_keep_steps(listed, steps, expected):
    assert kept_steps(KeepSteps(listed), records(*steps)) == expected


@pytest.mark.parametrize(
    ("found", "unscored", "expected"),
    [
        ([(1, 0.5), 2, 3, 4], 0, [1]),
        ([(1, 0.5), 2, 3, 4], 2, [1, 3, 4]),
        ([(1, 0.5), 2, 3, (4, 0.6), 5], 2, [1, 3, 5]),
        ([(1, nan), (2, 0.5), (3, nan)], 2, [2]),  # NaN is a score
        ([1, 2, 3], 1, [1, 2, 3]),  # the metric may be misspelled
        ([1, 2, 3], 0, [1, 2, 3]),
        ([1, (2, nan), 3], 0, [1, 2, 3]),
        ([1, 2, (3, 0.5), 4], 0, [3]),
        ([(1, 0.5), (2, 0.6)], 5, [1]),
    ],
)
def test_keep_best_keeps_versions_that_have_no_score_yet(found, unscored, expected):
    assert kept_steps(KeepBest(1, "loss", unscored=unscored), records(*found)) == expected


@pytest.mark.parametrize(
    ("found", "count", "mode", "expected"),
    [
        ([(1, 0.5), (2, 0.1), (3, 0.3)], 1, "min", [2]),
        ([(1, 0.5), (2, 0.1), (3, 0.3)], 2, "min", [2, 3]),
        ([(1, 0.5), (2, 0.1), (3, 0.3)], 1, "max", [1]),
        ([(1, nan), (2, 5.0), (3, nan)], 2, "min", [2]),
        ([(1, nan), (2, 5.0), (3, nan)], 2, "max", [2]),
        ([(1, nan), 2], 3, "max", [1, 2]),
        ([1, (2, 7), 3], 1, "min", [2]),
        ([(1, 0.1), (2, 0.1), (3, 0.1)], 2, "min", [2, 3]),
        ([(1, 0.1), (2, 0.1), (3, 0.1)], 2, "max", [2, 3]),
        ([(1, -0.0), (2, 0.0), (3, 0)], 1, "min", [3]),
        ([(1, inf), (2, 1e300), (3, -inf)], 1, "min", [3]),
        ([(1, inf), (2, 1e300), (3, -inf)], 2, "max", [1, 2]),
        ([(1, inf), (2, nan)], 1, "min", [1]),
        ([(1, 10**400), (2, 1e308), (3, inf)], 2, "min", [1, 2]),
        ([(1, 0.1)], 5, "min", [1]),
        ([], 1, "min", []),
    ],
)
def test_keep_best(found, count, mode, expected):
    assert kept_steps(KeepBest(count, "loss", mode), records(*found)) == expected


counts = st.integers(1, 4)
single = st.one_of(
    st.builds(KeepLast, counts),
    st.builds(KeepEvery, st.integers(1, 30)),
    st.builds(KeepEvery, seconds=st.floats(0.5, 20)),
    st.builds(KeepSteps, st.lists(st.integers(0, 60), min_size=1, max_size=5)),
    st.builds(
        KeepBest,
        counts,
        st.sampled_from(["a", "b"]),
        st.sampled_from(["min", "max"]),
        unscored=st.integers(0, 3),
    ),
)
policies = st.recursive(single, lambda p: st.builds(lambda a, b: a | b, p, p), max_leaves=4)
values = st.one_of(st.sampled_from([nan, inf, -inf, 0.0, -0.0]), st.integers(-3, 3))
metrics = st.dictionaries(st.sampled_from(["a", "b"]), values)
histories = st.lists(st.tuples(st.integers(0, 9), metrics, st.booleans()), max_size=25)


def history_of(gaps):
    """Return records with increasing steps, some on later branches. Some record no time."""
    history, step = [], -1
    for number, (gap, found, has_time) in enumerate(gaps):
        step += gap + 1
        seconds = step * 0.7 if has_time else None
        history.append(Record(Version(step, number // 10), found, seconds))
    return history


@given(policies, histories)
@settings(derandomize=True, max_examples=300)
def test_retention_after_every_save_keeps_the_same_versions_as_one_at_the_end(policy, gaps):
    """Frequent retention loses no version. In addition, the newest version is always kept.

    This applies to all policies whose metrics are saved with the version. It cannot apply to a
    metric that an evaluation adds, because the best version may have been deleted by then.
    """
    history = history_of(gaps)
    remaining: list[Record] = []
    for number, record in enumerate(history):
        remaining.append(record)
        keep_now = policy.keep(remaining) | {record.version}
        remaining = [r for r in remaining if r.version in keep_now]
        assert keep_now == policy.keep(history[: number + 1]) | {record.version}
        assert policy.keep(remaining) == policy.keep(history[: number + 1])


@given(policies, policies, histories)
@settings(derandomize=True, max_examples=100)
def test_a_combined_policy_keeps_what_either_keeps(a, b, gaps):
    history = history_of(gaps)
    assert (a | b).keep(history) == a.keep(history) | b.keep(history) == (b | a).keep(history)
    assert a.keep(history) <= {r.version for r in history}


def observe(stop, *found, state=None):
    state = StopState() if state is None else state
    for value in found:
        state = stop.observe(state, value)
    return state


@pytest.mark.parametrize(
    ("stop", "found", "state"),
    [
        (StopWhen("l", 2), [], StopState(None, 0, False)),
        (StopWhen("l", 2), [1.0], StopState(1.0, 0, False)),
        (StopWhen("l", 2), [1.0, 1.0], StopState(1.0, 1, False)),
        (StopWhen("l", 2), [1.0, 1.0, 2.0], StopState(1.0, 2, True)),
        (StopWhen("l", 2), [1.0, 2.0, 0.5, 0.6], StopState(0.5, 1, False)),
        (StopWhen("l", 2, "max"), [1.0, 2.0, 0.5, 0.6], StopState(2.0, 2, True)),
        (StopWhen("l", 1), [nan], StopState(None, 1, True)),
        (StopWhen("l", 2), [nan, 3.0, nan], StopState(3.0, 1, False)),
        (StopWhen("l", 2), [inf, 3.0], StopState(3.0, 0, False)),
        (StopWhen("l", 2), [-inf, -inf, -5.0], StopState(-inf, 2, True)),
        (StopWhen("l", 2), [inf, inf], StopState(inf, 1, False)),
        (StopWhen("l", 3, min_delta=0.1), [1.0, 0.95, 0.9], StopState(1.0, 2, False)),
        (StopWhen("l", 3, min_delta=0.1), [1.0, 0.95, 0.8], StopState(0.8, 0, False)),
        (StopWhen("l", 3, "max", min_delta=0.5), [1, 1.5, 1.6], StopState(1.6, 0, False)),
        # progress in steps smaller than min_delta is compared with the best value, not the last
        (StopWhen("l", 3, min_delta=0.1), [1.0, 0.94, 0.88], StopState(0.88, 0, False)),
    ],
)
def test_stop_when(stop, found, state):
    assert observe(stop, *found) == state


@pytest.mark.parametrize(
    "steps", [[], None, 5, "12", [1.0], [True], [-1], [3, "4"], [None]], ids=repr
)
@pytest.mark.parametrize("make", [AtSteps, KeepSteps])
def test_an_invalid_list_of_steps_is_rejected(make, steps):
    with pytest.raises(LimpetError, match=r"The argument of \w+ must be a list of steps, "):
        make(steps)


def test_step_zero_can_be_kept_but_never_saved_by_its_number():
    assert KeepSteps([0]).steps == (0,)
    with pytest.raises(LimpetError, match="each a whole number, 1 or more"):
        AtSteps([0])


@pytest.mark.parametrize("arguments", [{"steps": 5, "seconds": 5.0}, {"steps": None}, {}])
def test_keep_every_takes_steps_or_seconds(arguments):
    with pytest.raises(LimpetError, match="of KeepEvery must be"):
        KeepEvery(**arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepBest(1, ""),
        lambda: KeepBest(1, None),
        lambda: KeepBest(1, 3),
        lambda: KeepBest(1, "loss", "smallest"),
        lambda: KeepBest(1, "loss", "MIN"),
        lambda: KeepBest("loss", 1),
        lambda: StopWhen(""),
        lambda: StopWhen("loss", mode="up"),
        lambda: StopWhen("loss", min_delta=-0.1),
        lambda: StopWhen("loss", min_delta=nan),
        lambda: StopWhen("loss", min_delta=inf),
        lambda: StopWhen("loss", min_delta=True),
    ],
)
def test_invalid_arguments_for_metrics_are_rejected(make):
    with pytest.raises(LimpetError, match=r" must be "):
        make()


@pytest.mark.parametrize("metric", ["accuracy", "val/acc", "eval_F1", "top1 accuracy"])
def test_a_metric_of_which_larger_values_are_better_needs_a_mode(metric):
    for make in (
        lambda **mode: KeepBest(1, metric, **mode),
        lambda **mode: StopWhen(metric, **mode),
        lambda **mode: Run("memory://modes").best(metric, **mode),
    ):
        with pytest.raises(LimpetError, match=f"needs a mode for '{metric}'.*mode=\"max\""):
            make()
        make(mode="max")
        make(mode="min")
    assert KeepBest(1, f"{metric}_gap").mode == StopWhen("auction").mode == "min"


@pytest.mark.parametrize("other", [None, 3, "x", [EverySteps(3)]])
def test_only_policies_of_the_same_kind_can_be_combined(other):
    with pytest.raises(TypeError):
        _ = EverySteps(3) | other
    with pytest.raises(TypeError):
        _ = KeepLast(3) | other
    with pytest.raises(TypeError):
        _ = KeepLast(3) | EverySteps(3)


def test_policies_are_values():
    assert EverySteps(3) | EverySeconds(5) == EverySteps(3) | EverySeconds(5)
    assert hash(KeepLast(3)) == hash(KeepLast(3))
    assert KeepBest(2, "loss") == KeepBest(2, "loss", mode="min")
    assert AtSteps([30, 10, 10]) == AtSteps((10, 30)) != AtSteps([10])
    assert hash(KeepSteps([2, 1])) == hash(KeepSteps({1, 2}))
    with pytest.raises(AttributeError):
        KeepLast(3).count = 4
