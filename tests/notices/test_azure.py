"""The scheduled events of Azure."""

import pytest

from limpet.notices.azure import AzureNotice
from limpet.notices.notice import Notice
from tests.notices.metadata_servers import AzureServer


@pytest.fixture
def server(clock):
    with AzureServer() as running:
        running.clock = clock.now
        yield running


@pytest.fixture
def source(server):
    """A source that has polled once."""
    source = AzureNotice(server.url)
    assert source.poll() is None
    return source


def event(kind):
    return f"the Azure scheduled event {kind!r}"


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_an_event_that_stops(server, source, clock, kind):
    server.announce(kind, seconds=40)
    assert source.poll() == Notice(event(kind), 40.0)
    clock.advance(15)
    assert source.poll() == Notice(event(kind), 25.0)
    server.announce(kind, status="Started")
    assert source.poll() == Notice(event(kind), 0.0)
    assert {method for method, _ in server.requests} == {"GET"}, "no event is approved"


def test_a_reboot_that_is_far_away_is_first_a_risk(server, source, clock):
    server.announce("Reboot", seconds=900)
    assert source.poll() == Notice(event("Reboot"), 900.0, stops=False)
    assert source.poll() is None
    clock.advance(601)
    assert source.poll() == Notice(event("Reboot"), 299.0)


def test_a_freeze_is_a_risk_that_is_reported_once(server, source):
    server.announce("Freeze", seconds=90, duration=9)
    assert source.poll() == Notice(event("Freeze") + " for 9 s", 90.0, stops=False)
    server.announce("Freeze", status="Started")
    assert source.poll() is None
    server.events.clear()
    assert source.poll() is None
    server.announce("Freeze", seconds=90)
    assert source.poll() is not None, "another one"


def test_the_earliest_stop_is_reported(server, source):
    for kind, seconds in (("Reboot", 200), ("Redeploy", 100), ("Terminate", 9999)):
        server.announce(kind, seconds=seconds)
    assert source.poll() == Notice(event("Redeploy"), 100.0)


def test_an_event_without_a_time_has_begun(server, source):
    server.announce("Reboot", seconds=90)
    server.events[0]["NotBefore"] = ""
    assert source.poll() == Notice(event("Reboot"), 0.0)


def test_an_event_of_an_unknown_kind_is_a_risk(server, source):
    server.announce("Rebalance", seconds=90)
    assert source.poll() == Notice(event("Rebalance"), 90.0, stops=False)


@pytest.mark.parametrize(("kind", "stops"), [("Reboot", False), ("Preempt", True)])
def test_an_event_that_began_before_the_process(server, kind, stops):
    server.announce(kind, status="Started")
    assert AzureNotice(server.url).poll() == Notice(event(kind), 0.0, stops=stops)


def test_events_of_other_machines_do_not_count(server, source):
    server.announce("Preempt", machine="vm_1")
    assert source.poll() is None
    server.announce("Reboot", machine="VM_0", seconds=100)
    assert source.poll() == Notice(event("Reboot"), 100.0)
    assert server.count("compute/name") == 1


def test_each_event_counts_while_the_name_of_the_machine_is_unknown(server, source):
    server.announce("Preempt", machine="vm_1")
    server.machine = None
    assert source.poll() == Notice(event("Preempt"), 30.0)
    server.machine = "vm_0"
    assert source.poll() is None


def test_the_clock_of_this_machine_does_not_matter(server):
    server.announce("Preempt", seconds=30)
    assert AzureNotice(server.url, clock=lambda: 5.0).poll() == Notice(event("Preempt"), 30.0)


@pytest.mark.parametrize(
    "change",
    [
        {"EventStatus": "Completed"},
        {"NotBefore": "soon"},
        {"Resources": "vm_0"},
        {"EventType": 5},
        {"EventId": None},
    ],
)
def test_an_event_that_is_not_understood_is_an_outage_and_not_a_notice(server, source, change):
    server.announce("Preempt")
    server.events[0].update(change)
    with pytest.raises(OSError, match=r"Cannot understand the reply of http.*scheduledevents"):
        source.poll()
