"""The notices of AWS, from a server that implements IMDSv2."""

import socket

import pytest

from limpet.notices import metadata
from limpet.notices.aws import AwsNotice
from limpet.notices.notice import Notice
from tests.notices.metadata_servers import AwsServer

SPOT = "/latest/meta-data/spot"


@pytest.fixture
def server(clock):
    with AwsServer() as running:
        running.clock = clock.now
        yield running


@pytest.fixture
def source(server, clock):
    return AwsNotice(server.url, clock=clock)


def test_an_instance_that_is_not_interrupted(server, source):
    assert source.poll() is None
    assert server.requests[0] == ("PUT", "/latest/api/token")
    assert all(method in ("PUT", "GET") for method, _ in server.requests)


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_a_spot_instance_action(server, source, action):
    server.announce(action, seconds=120)
    assert source.poll() == Notice(f"the AWS spot instance action {action!r}", 120.0)


def test_the_seconds_decrease_and_end_at_0(server, source, clock):
    server.announce(seconds=120)
    seconds = []
    for _ in range(4):
        notice = source.poll()
        assert notice is not None
        seconds.append(notice.seconds)
        clock.advance(50)
    assert seconds == [120.0, 70.0, 20.0, 0.0]


@pytest.mark.parametrize("trouble", ["no date", "no time"])
def test_an_action_without_a_time_is_still_a_notice(server, source, trouble):
    server.announce()
    if trouble == "no date":
        server.has_date = False
    else:
        server.documents["spot/instance-action"] = '{"action": "stop", "time": "soon"}'
    notice = source.poll()
    assert notice is not None
    assert (notice.seconds, notice.stops) == (None, True)


@pytest.mark.parametrize(
    "document", ['{"action": "pause", "time": "x"}', '{"action": "stop"}', "[]", "", "null"]
)
def test_an_unknown_action_is_an_outage_and_not_a_notice(server, source, document):
    server.documents["spot/instance-action"] = document
    with pytest.raises(OSError, match=r"Cannot understand the reply of http.*instance-action"):
        source.poll()
    server.announce()
    assert source.poll() is not None


def test_a_rebalance_recommendation_is_a_risk_that_is_reported_once(server, source, clock):
    server.recommend_rebalance()
    assert source.poll() == Notice("the AWS rebalance recommendation", stops=False)
    assert source.poll() is None
    clock.advance(100)
    server.recommend_rebalance()
    assert source.poll() is not None, "a later recommendation"
    server.announce()
    notice = source.poll()
    assert notice is not None
    assert notice.stops


def test_scheduled_events(server, source, clock):
    assert source.poll() is None
    server.schedule("system-reboot", 86400)
    assert source.poll() is None, "asked once per minute only"
    clock.advance(60)
    assert source.poll() == Notice("the AWS scheduled event 'system-reboot'", 86340.0, stops=False)
    clock.advance(86340 - 200)
    assert source.poll() == Notice("the AWS scheduled event 'system-reboot'", 200.0)
    assert server.count("maintenance") == 3


def test_scheduled_events_are_asked_for_again_after_an_outage(server, source):
    server.documents["events/maintenance/scheduled"] = "{}"
    with pytest.raises(OSError, match="maintenance"):
        source.poll()
    server.schedule("system-reboot", 100)
    assert source.poll() == Notice("the AWS scheduled event 'system-reboot'", 100.0)


@pytest.mark.parametrize(
    ("code", "state", "stops"),
    [
        ("instance-retirement", "active", True),
        ("instance-stop", "active", True),
        ("system-maintenance", "active", False),
        ("another-code", "active", False),
        ("system-reboot", "completed", None),
        ("system-reboot", "canceled", None),
    ],
)
def test_kinds_of_scheduled_events(server, source, code, state, stops):
    server.schedule(code, 100, state)
    notice = source.poll()
    assert (None if notice is None else notice.stops) is stops


@pytest.mark.parametrize(
    ("code", "stops"),
    [
        ("system-reboot", False),
        ("instance-reboot", False),
        ("instance-stop", True),
        ("instance-retirement", True),
    ],
)
def test_an_event_that_began_before_the_first_poll(server, source, code, stops):
    server.schedule(code, -60)
    notice = source.poll()
    assert notice is not None
    assert (notice.seconds, notice.stops) == (0.0, stops)


def test_a_token_is_used_again_and_renewed_in_time(server, source, clock):
    for _ in range(3):
        source.poll()
    assert server.count("token") == 1
    assert set(server.tokens.values()) == {21600}
    clock.advance(3 * 3600)
    source.poll()
    assert server.count("token") == 2


def test_a_token_that_expired_is_replaced(server, source):
    source.poll()
    server.expire_tokens()
    server.announce()
    assert source.poll() is not None
    assert server.count("token") == 2


def test_a_server_that_refuses_each_token_is_an_outage(server, source, monkeypatch):
    monkeypatch.setattr(server, "tokens", Forgetful())
    with pytest.raises(PermissionError, match="refuses a new token"):
        source.poll()
    assert server.count("token") == 1
    with pytest.raises(PermissionError, match="refuses a new token"):
        source.poll()
    assert server.count("token") == 2, "one per poll"


class Forgetful(dict):
    def __setitem__(self, *_):
        pass


@pytest.mark.parametrize("token", ["", "a\nb: c", "\u00e9"])
def test_a_token_that_is_no_token_is_an_outage(server, source, token, monkeypatch):
    monkeypatch.setattr(server, "answer", lambda *_: (200, token))
    with pytest.raises(OSError, match="Expected a token"):
        source.poll()


def test_a_token_that_does_not_come_names_the_hop_limit(server):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(OSError, match=r"Connection refused.*hop limit .* to 2 or more"):
            AwsNotice(url).poll()


def test_a_slow_document_hides_no_other(server, source, monkeypatch):
    monkeypatch.setattr(metadata, "REQUEST_SECONDS", 0.2)
    server.recommend_rebalance()
    server.fault, server.fault_paths = "hang", (SPOT,)
    assert source.poll() is not None
    with pytest.raises(TimeoutError, match="instance-action has not answered"):
        source.poll()
