"""The HTTP client: every reply is complete, short, and in time, or an error."""

import socket
import time
from datetime import UTC, datetime

import msgspec
import pytest

from limpet.errors import LimpetError
from limpet.notices.metadata import MAX_BYTES, fetch, server_url
from limpet.notices.notice import BoundedSource
from tests.notices.metadata_servers import SLOW_FAULTS, MetadataServer


class OneDocument(MetadataServer):
    document = "{}"
    status = 200

    def answer(self, method, path, headers):
        return self.status, self.document


@pytest.fixture
def server():
    with OneDocument() as running:
        yield running


ANY = msgspec.json.Decoder(dict)


def read(server):
    return fetch(f"{server.url}/x", {}).decode(ANY)


def test_the_socket_is_closed_after_a_reply_and_after_an_error(server, monkeypatch):
    sockets: list[socket.socket] = []
    connect = socket.create_connection

    def record(*args):
        sockets.append(connect(*args))
        return sockets[-1]

    monkeypatch.setattr(socket, "create_connection", record)
    read(server)
    for fault in ("half", "no_http", "dead", "500"):
        server.fault = fault
        with pytest.raises(OSError, match="/x"):
            read(server)
    assert [s.fileno() for s in sockets] == [-1] * 5


class OneServer(BoundedSource):
    """A source that asks one server."""

    def __init__(self, server):
        super().__init__("the server", 1.0)
        self.poll_seconds = 0.2
        self._server = server

    def check(self):
        read(self._server)


@pytest.mark.parametrize("fault", SLOW_FAULTS)
def test_a_poll_ends_in_time_however_slowly_the_reply_arrives(server, fault):
    """Also if its bytes come one by one, each before the timeout of the socket."""
    server.fault = fault
    source = OneServer(server)
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="the server has not answered"):
            source.poll()
        assert time.monotonic() - begin < 4


def test_a_redirect_is_refused_and_not_followed(server):
    server.fault = "redirect"
    with pytest.raises(OSError, match=r"redirects to 'http://.*/elsewhere', which is refused"):
        read(server)
    assert server.count("elsewhere") == 0


def test_the_environment_names_no_proxy(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert read(server) == {}


def test_a_body_may_be_as_long_as_the_limit(server):
    server.document = "x" * MAX_BYTES
    assert fetch(f"{server.url}/x", {}).text == server.document
    server.document += "x"
    with pytest.raises(OSError, match="longer than 65536 bytes"):
        read(server)


def test_another_status_is_an_error_that_shows_the_reply(server):
    server.status, server.document = 403, "denied\x1b[2J"
    with pytest.raises(OSError, match=r"status 403\. Expected 200 or 404.*'denied\\x1b"):
        fetch(f"{server.url}/x", {}, allow=(200, 404))


def test_a_reply_that_is_not_understood_is_shown(server):
    server.fault = "html"
    with pytest.raises(OSError, match=r"another JSON document .*<html>Please log in.*text/html"):
        read(server)


def test_seconds_are_those_of_the_clock_of_the_server(server):
    server.clock = lambda: datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)
    reply = fetch(f"{server.url}/x", {})
    assert reply.seconds_until("2020-01-02T03:05:05Z") == 60.0
    assert reply.seconds_until("Thu, 02 Jan 2020 03:05:05 GMT") == 60.0
    assert reply.seconds_until("2 Jan 2020 03:05:05 GMT") == 60.0
    assert reply.seconds_until("2020-01-02T04:05:05+01:00") == 60.0
    assert reply.seconds_until("2020-01-02T03:05:05") == 60.0
    assert reply.seconds_until("2020-01-02T03:00:00Z") == 0.0


TOO_LARGE = "9" * 20


@pytest.mark.parametrize(
    "when",
    [
        *("", "soon", "2020-13-45T99:00:00Z", "2020"),
        pytest.param("9" * 5000, id="5000 digits"),
        *(f"Mon, 19 Sep {TOO_LARGE} 18:29:47 GMT", f"Mon, {TOO_LARGE} Sep 2020 18:29:47 GMT"),
        *(f"Mon, 19 Sep 2020 {TOO_LARGE}:29:47 GMT", f"Mon, 19 Sep 2020 18:29:47 +{TOO_LARGE}"),
        f"2020-01-02T03:05:05+{TOO_LARGE}",
    ],
)
def test_a_text_that_is_no_time_is_an_outage(server, when):
    """A number that is too large raises ``OverflowError`` in ``email.utils``."""
    reply = fetch(f"{server.url}/x", {})
    with pytest.raises(OSError, match="Expected a time"):
        reply.seconds_until(when)
    del reply.headers["Date"]
    reply.headers["Date"] = when
    with pytest.raises(OSError, match="Expected a time"):
        reply.seconds_until("2020-01-02T03:05:05Z")


@pytest.mark.parametrize(
    "url",
    [
        *("", "127.0.0.1", "ftp://127.0.0.1", "http://", "http://a:x", "http://u:p@127.0.0.1"),
        *("http://127.0.0.1/?a=b", "http://a b", "http://a\r\nX: y", None, 3),
    ],
)
def test_an_invalid_address_is_refused(url):
    with pytest.raises(LimpetError, match="Invalid address of a metadata server") as caught:
        server_url(url)
    assert "u:p" not in str(caught.value)


def test_a_host_that_is_no_host_name_is_an_error():
    with pytest.raises(OSError, match="Cannot read"):
        fetch("http://a..b/x", {})
