"""The notices of Google Cloud, from a server that requires its header."""

import pytest

from limpet.notices.gcp import GcpNotice
from limpet.notices.notice import Notice
from tests.notices.metadata_servers import GcpServer

TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"
TERMINATION = "the termination for host maintenance by Google Cloud"
MIGRATE = "MIGRATE_ON_HOST_MAINTENANCE"
UPCOMING = "the host maintenance of Google Cloud"


@pytest.fixture
def server(clock):
    with GcpServer() as running:
        running.clock = clock.now
        yield running


@pytest.fixture
def source(server, clock):
    return GcpNotice(server.url, maintenance_seconds=3600, clock=clock)


def test_a_preemption_leaves_30_seconds(server, source, clock):
    assert source.poll() is None
    server.announce("preempted")
    assert source.poll() == Notice("the preemption by Google Cloud", 30.0)
    clock.advance(12)
    assert source.poll() == Notice("the preemption by Google Cloud", 18.0)
    clock.advance(60)
    assert source.poll() == Notice("the preemption by Google Cloud", 0.0)


def test_a_preemption_before_the_first_poll_leaves_an_unknown_time(server, source):
    server.announce("preempted")
    assert [source.poll() for _ in range(2)] == [Notice("the preemption by Google Cloud")] * 2


def test_upcoming_maintenance_is_asked_for_again_after_an_outage(server, source):
    server.upcoming = (200, "?")
    with pytest.raises(OSError, match="upcoming"):
        source.poll()
    server.schedule(100)
    assert source.poll() == Notice(UPCOMING, 100.0)


def test_a_live_migration_is_a_risk_that_is_reported_once(server, source):
    assert source.poll() is None
    server.announce(MIGRATE)
    assert source.poll() == Notice("the live migration by Google Cloud", 60.0, stops=False)
    assert source.poll() is None
    server.announce("NONE")
    assert source.poll() is None
    server.announce(MIGRATE)
    assert source.poll() is not None, "another migration"


def test_a_termination_of_a_gpu_machine_leaves_an_hour(server, source, clock):
    assert source.poll() is None
    server.announce(TERMINATE)
    assert source.poll() == Notice(TERMINATION, 3600.0, stops=False)
    clock.advance(3000)
    assert source.poll() is None
    clock.advance(350)
    assert source.poll() == Notice(TERMINATION, 250.0)
    clock.advance(400)
    assert source.poll() == Notice(TERMINATION, 0.0)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_termination_of_another_machine_leaves_a_minute(server, clock, monkeypatch, has_gpu):
    """A GPU is found by its device."""
    monkeypatch.setattr("os.path.exists", lambda path: has_gpu and path == "/dev/nvidiactl")
    source = GcpNotice(server.url, clock=clock)
    assert source.poll() is None
    server.announce(TERMINATE)
    seconds = 3600.0 if has_gpu else 60.0
    assert source.poll() == Notice(TERMINATION, seconds, stops=not has_gpu)


def test_a_termination_that_was_announced_before_does_not_stop_each_restart(server, source):
    server.announce(TERMINATE)
    assert source.poll() == Notice(TERMINATION, None, stops=False)
    assert source.poll() is None


def test_a_termination_that_is_called_off(server, source, clock):
    assert source.poll() is None
    server.announce(TERMINATE)
    assert source.poll() is not None
    server.announce("NONE")
    assert source.poll() is None
    clock.advance(10_000)
    server.announce(TERMINATE)
    assert source.poll() == Notice(TERMINATION, 3600.0, stops=False)


def test_upcoming_maintenance(server, source, clock):
    server.schedule(7 * 86400)
    assert source.poll() == Notice(UPCOMING, 7 * 86400.0, stops=False)
    clock.advance(7 * 86400 - 100)
    assert source.poll() == Notice(UPCOMING, 100.0)
    assert source.poll() is None, "asked once per minute only"
    assert server.count("upcoming") == 2


def test_upcoming_maintenance_of_a_machine_that_migrates_is_a_risk(server, source):
    server.schedule(100)
    server.values["scheduling/on-host-maintenance"] = "MIGRATE"
    assert source.poll() == Notice(UPCOMING, 100.0, stops=False)


def test_upcoming_maintenance_that_begins_early(server, source, clock):
    assert source.poll() is None
    server.schedule(86400, status="ONGOING")
    clock.advance(60)
    assert source.poll() == Notice(UPCOMING, 0.0)


@pytest.mark.parametrize(
    "reply",
    [
        (404, "<html>not found</html>"),
        (503, '{ "error": "no notifications have been received yet, try again later" }'),
        *((200, text) for text in ("NONE", '"NONE"', "{}", "{ }", "", '{"error": "later"}')),
    ],
)
def test_no_upcoming_maintenance(server, source, reply):
    server.upcoming = reply
    assert source.poll() is None


@pytest.mark.parametrize(
    "text", ["[]", '{"type": "SCHEDULED"}', '{"window_start_time": 5}', "{", "MAYBE"]
)
def test_upcoming_maintenance_that_is_not_understood(server, source, text):
    server.upcoming = (200, text)
    with pytest.raises(OSError, match=r"Cannot understand the reply of http.*upcoming-maintenance"):
        source.poll()


@pytest.mark.parametrize("key", ["preempted", "maintenance-event"])
@pytest.mark.parametrize("text", ["", "MAYBE", "true", "<html>"])
def test_an_unknown_value_is_an_outage_and_not_a_notice(server, source, key, text):
    server.values[key] = text
    with pytest.raises(OSError, match=f"Cannot understand the reply of http.*{key}"):
        source.poll()


def test_a_server_without_the_keys_is_an_outage(server, source):
    """As in a pod of GKE with Workload Identity."""
    del server.values["preempted"]
    with pytest.raises(OSError, match="preempted answered with status 404"):
        source.poll()


def test_a_reply_without_the_header_is_of_another_server(server, source, monkeypatch):
    server.announce("preempted")
    monkeypatch.setattr(GcpServer, "reply_headers", {})
    with pytest.raises(OSError, match="Expected the header 'Metadata-Flavor: Google'"):
        source.poll()
