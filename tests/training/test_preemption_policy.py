"""What follows from a notice."""

from math import inf

import pytest

from limpet.errors import LimpetError
from limpet.notices.notice import Notice
from limpet.notices.signals import SignalNotice
from limpet.training.preemption_plan import Plan, Preemption


@pytest.mark.parametrize(
    ("grace", "notice_seconds", "exit_seconds", "plan"),
    [
        # the notice does not say how much time is left: 30 s
        (None, None, 3.0, Plan(30, 0)),
        (7, None, 3.0, Plan(30, 4)),
        (60, None, 3.0, Plan(60, 55)),
        # a short notice: save and leave at once, unless the user wants to go on
        (None, 120.0, 3.0, Plan(120, 0)),
        (600, 120.0, 3.0, Plan(120, 115)),
        # a long notice, such as a maintenance in an hour: go on, unless the user says 0
        (None, 3600.0, 10.0, Plan(3600, 3588)),
        (0, 3600.0, 10.0, Plan(3600, 0)),
        (100, 3600.0, 10.0, Plan(3600, 90)),
        # the first save alone takes the time
        (7, None, 3.6, Plan(30, 0)),
        (None, 3600.0, 2000.0, Plan(3600, 0)),
        (3600, 5.0, 1.5, Plan(5, 0)),
        # too late, or in the past: there is still some time, or the process is dead anyway
        (None, 0.0, 3.0, Plan(5, 0)),
        (7, -100.0, 3.0, Plan(5, 0)),
    ],
)
def test_a_plan(grace, notice_seconds, exit_seconds, plan):
    notice = Notice("a test", notice_seconds)
    assert Preemption(grace=grace).plan(notice, exit_seconds) == plan


@pytest.mark.parametrize(
    ("grace", "seconds", "age", "plan"),
    [
        (None, None, 12.0, Plan(18, 0)),
        (None, None, 42.0, Plan(5, 0)),
        (60, None, 12.0, Plan(48, 43)),
        # the seconds of a notice are those that are left now
        (None, 20.0, 12.0, Plan(20, 0)),
    ],
)
def test_an_unknown_time_counts_from_when_the_notice_came(grace, seconds, age, plan):
    assert Preemption(grace=grace).plan(Notice("a test", seconds, age=age), 3.0) == plan


@pytest.mark.parametrize(
    ("run_grace", "grace", "notice_seconds", "plan"),
    [
        ("25", None, None, Plan(22.5, 0)),
        ("1", None, None, Plan(0.9, 0)),
        ("110", None, None, Plan(107, 0)),
        ("110", 60, None, Plan(107, 57)),
        ("25", 60, None, Plan(22.5, 17.5)),  # ``limpet run`` kills all the same
        ("25", None, 120.0, Plan(120, 0)),
    ],
)
def test_limpet_run_says_how_much_time_is_left(run_grace, grace, notice_seconds, plan, monkeypatch):
    monkeypatch.setenv("LIMPET_GRACE", run_grace)
    notice = Notice("a test", notice_seconds)
    assert Preemption(grace=grace).plan(notice, 3.0) == plan


def test_a_notice_that_does_not_stop_has_no_deadline():
    notice = Notice("AWS rebalance", 60.0, stops=False)
    assert Preemption(grace=0).plan(notice, 3.0) == Plan(inf, inf)


@pytest.mark.parametrize(
    "wrong",
    [
        {"grace": inf},
        {"exit_fn": 75},
        {"save_fn": "save"},
        {"notices": "SIGTERM"},
        {"notices": [15]},
        {"notices": [SignalNotice]},
        {"notices": SignalNotice()},
    ],
    ids="".join,
)
def test_invalid_settings_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(LimpetError, match=f"{name}= of Preemption must be"):
        Preemption(**wrong)
