"""Which planned events stop the training, and when."""

from __future__ import annotations

import pytest

from limpet.errors import LimpetError
from limpet.notices.notice import Notice
from limpet.notices.planned import PlannedEvent, PlannedEvents, most_urgent


def reboot(seconds: float | None, *, key: str = "1", final: bool = False) -> PlannedEvent:
    return PlannedEvent(key, "reboot", seconds, is_final=final)


@pytest.fixture
def events() -> PlannedEvents:
    """Events after a first answer without any."""
    events = PlannedEvents(before=300)
    assert events.notice([]) is None
    return events


def test_a_stop_within_the_time_is_reported_at_each_poll(events: PlannedEvents) -> None:
    assert events.notice([reboot(300)]) == Notice("reboot", 300)
    assert events.notice([reboot(290)]) == Notice("reboot", 290)


def test_a_stop_at_an_unknown_time_is_reported(events: PlannedEvents) -> None:
    assert events.notice([reboot(None)]) == Notice("reboot", None)


def test_a_stop_that_is_far_away_is_first_a_risk(events: PlannedEvents) -> None:
    assert events.notice([reboot(7 * 86400)]) == Notice("reboot", 7 * 86400, stops=False)
    assert events.notice([reboot(6 * 86400)]) is None
    assert events.notice([reboot(299)]) == Notice("reboot", 299)


def test_the_earliest_stop_is_reported(events: PlannedEvents) -> None:
    found = [reboot(200), reboot(100, key="2"), reboot(9999, key="3")]
    assert events.notice(found) == Notice("reboot", 100)


def test_a_pause_is_reported_once(events: PlannedEvents) -> None:
    pause = PlannedEvent("p", "pause", 10, stops=False)
    assert events.notice([pause]) == Notice("pause", 10, stops=False)
    assert events.notice([pause]) is None
    assert events.notice([]) is None
    assert events.notice([pause]) == Notice("pause", 10, stops=False), "another one"


@pytest.mark.parametrize("seconds", [0.0, None])
def test_an_event_that_began_before_the_first_poll_does_not_stop_each_restart(
    seconds: float | None,
) -> None:
    """Azure lists a reboot for 10 minutes after the machine is up again."""
    restarted = PlannedEvents(before=300)
    assert restarted.notice([reboot(seconds)]) == Notice("reboot", seconds, stops=False)
    assert restarted.notice([reboot(seconds)]) is None
    assert restarted.notice([reboot(0, key="2")]) == Notice("reboot", 0), "another one"
    assert restarted.notice([]) is None
    assert restarted.notice([reboot(0)]) == Notice("reboot", 0), "again"


def test_an_event_that_begins_later_stops(events: PlannedEvents) -> None:
    """After a failure of the hardware, Azure announces a reboot that has begun."""
    assert events.notice([reboot(0)]) == Notice("reboot", 0)


def test_a_machine_that_does_not_come_back_stops_even_if_that_began_before() -> None:
    assert PlannedEvents(before=300).notice([reboot(0, final=True)]) == Notice("reboot", 0)


@pytest.mark.parametrize("before", [0, -1, float("nan"), None])
def test_the_time_before_a_stop_is_positive(before: object) -> None:
    with pytest.raises(LimpetError, match="Invalid value for before="):
        PlannedEvents(before)


def fail() -> Notice | None:
    raise OSError("away")


STOP, RISK = Notice("stop"), Notice("risk", stops=False)


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ([lambda: None, lambda: None], None),
        ([lambda: RISK, lambda: STOP], STOP),
        ([fail, lambda: STOP], STOP),
        ([fail, lambda: RISK], RISK),
        ([lambda: RISK, fail], RISK),
    ],
)
def test_an_outage_of_one_document_hides_no_notice(checks: list, expected: Notice | None) -> None:
    assert most_urgent(checks) == expected


def test_an_outage_without_a_notice_is_raised() -> None:
    with pytest.raises(OSError, match="away"):
        most_urgent([lambda: None, fail, lambda: None])
