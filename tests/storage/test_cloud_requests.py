"""What ``az://`` and ``gs://`` send to a small server, and how they take its replies."""

import os
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

import limpet
from limpet.deadline import Deadline
from limpet.errors import NotFound, StoreError, Unavailable
from limpet.storage.cloud import CloudFolder, CloudStream, translate
from limpet.storage.store import Stat

KEY, OTHER = "c2VjcmV0LWtleQ==", "b3RoZXIta2V5"
SAS = "sv=2021&sig=SECRETSIG"
PAGE = b"<!DOCTYPE html><html><body>hello<br></body></html>"
BLOB = """<Blob><Name>{}</Name><Properties>
<Last-Modified>Tue, 01 Jan 2030 00:00:00 GMT</Last-Modified>
<Etag>1</Etag><Content-Length>1</Content-Length><Content-Type>text/plain</Content-Type>
<BlobType>BlockBlob</BlobType></Properties></Blob>"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in os.environ:
        if name.startswith(("AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)


class WebServer(ThreadingHTTPServer):
    """Answers every request with ``reply(path)``, and keeps the requests."""

    daemon_threads = True

    def __init__(self):
        self.requests, self.reply, self.stopped = [], lambda path: PAGE, threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    @classmethod
    @contextmanager
    def running(cls):
        with cls() as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            yield server
            server.stopped.set()
            server.shutdown()


class Handler(BaseHTTPRequestHandler):
    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, self.headers.get("Authorization")))
        body = self.server.reply(self.path)
        try:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except OSError:  # the client has left
            return

    def __getattr__(self, name):  # do_GET and the like
        if name.startswith("do_"):
            return self.answer
        raise AttributeError(name)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with WebServer.running() as server:
        yield server


def open_azure(server, **options):
    options = {"timeout": 0.2, **options}  # most replies are those of a web server
    return limpet.open_store("az://bucket/run", endpoint=server.url, account="a", **options)


# credentials

VARIABLES = [
    {"AZURE_STORAGE_ACCOUNT_KEY": OTHER},
    {"AZURE_STORAGE_ACCOUNT_KEY": "-"},
    {"AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=other"},
    {"AZURE_STORAGE_TOKEN": "other"},
]


def sent(store, server):
    """Return how a request is signed, whatever the reply."""
    server.requests.clear()
    with pytest.raises(StoreError):
        store.stat("a")
    _, path, authorization = server.requests[0]
    return (authorization or "").partition(" ")[0], path.partition("?")[2]


@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"account_key": KEY}, ("SharedKey", "")),
        ({"sas_token": SAS}, ("", SAS)),
        ({"sas_token": f"?{SAS}"}, ("", SAS)),
        ({"anonymous": True}, ("", "")),
    ],
)
def test_an_option_precedes_the_environment(server, monkeypatch, variables, options, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert sent(open_azure(server, **options), server) == expected


def test_the_key_of_an_option_signs(server, monkeypatch):
    def signature(**options):
        sent(open_azure(server, **options), server)
        return server.requests[0][2]

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", OTHER)
    assert signature(account_key=KEY) != signature()


def test_two_credentials_are_refused(server):
    for options in ({"sas_token": SAS, "account_key": KEY}, {"anonymous": True, "sas_token": SAS}):
        with pytest.raises(StoreError, match=r"two credentials. Found \w+= and \w+=") as caught:
            open_azure(server, **options)
        assert "SECRETSIG" not in str(caught.value)


@pytest.mark.parametrize(
    ("reply", "is_unknown"),
    [("upstream connect error", True), ("<Error><Code>ServerBusy</Code></Error>", False)],
)
def test_a_proxy_that_is_busy_may_have_passed_a_write_on(reply, is_unknown):
    error = translate(OSError(f"status code: 503, body: {reply}"), "write", "a", "az://bucket")
    assert isinstance(error, Unavailable)
    assert (error.throttled, error.is_outcome_unknown) == (True, is_unknown)


@pytest.mark.parametrize(("error", "is_unknown"), [(Unavailable, True), (NotFound, False)])
def test_a_completion_that_was_refused_and_cannot_be_looked_up(
    server, monkeypatch, error, is_unknown
):
    """Azure refuses the second one, which obstore sends when the reply to the first is lost."""
    stream = CloudStream("a", 3, 16 << 20)
    replies = [NotFound("a"), error("a")]

    def close():
        raise OSError("status code: 400, body: <Code>InvalidBlockList</Code>")

    def stat(*_):
        raise replies.pop(0)

    stream._writer = SimpleNamespace(close=close)
    monkeypatch.setattr(CloudFolder, "stat", stat)
    with pytest.raises(StoreError, match="InvalidBlockList") as caught:
        open_azure(server, account_key=KEY).repeat("complete", "a", stream.commit)
    assert caught.value.is_outcome_unknown == is_unknown


def test_an_invalid_reply_of_a_known_server_is_repeated(server):
    replies = [listing(["run/a"]), PAGE, listing(["run/a"])]
    server.reply = lambda path: replies.pop(0)
    store = open_azure(server, account_key=KEY, timeout=20)
    for _ in range(2):
        assert [stat.key for stat in store.list("")] == ["a"]
    assert replies == []


@pytest.mark.parametrize(
    ("scheme", "reply"),
    [
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n"),  # a server without TLS
        ("http", b"\x15\x03\x01\x00\x02\x02\x46"),  # the alert of one with TLS: protocol_version
    ],
)
def test_a_server_that_differs_in_tls(scheme, reply):
    listener, ended = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def answer():
        while True:
            with listener.accept()[0] as client:
                if ended.is_set():
                    return
                client.recv(10_000)
                client.sendall(reply)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    store = limpet.open_store("az://bucket", account="a", account_key=KEY, endpoint=url)
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"TLS.*Check whether the endpoint") as caught:
        store.stat("a")
    assert not isinstance(caught.value, Unavailable)
    assert time.monotonic() - began < 5
    ended.set()
    socket.create_connection(listener.getsockname()).close()
    thread.join(10)
    listener.close()


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("az://bucket", "AZURE_STORAGE_ENDPOINT"),
        ("az://bucket", "AZURE_ENDPOINT"),
        ("gs://bucket", "GOOGLE_BASE_URL"),
    ],
)
def test_a_variable_with_an_endpoint_without_a_scheme(monkeypatch, url, name):
    monkeypatch.setenv(name, "127.0.0.1:10")
    with pytest.raises(StoreError, match=f"variable {name}. Expected http://HOST or https://HOST"):
        limpet.open_store(url)
    limpet.open_store(url, endpoint="http://127.0.0.1:9")


# listings


def listing(names, marker=""):
    blobs = "".join(map(BLOB.format, names))
    return (
        f'<?xml version="1.0"?><EnumerationResults><Blobs>{blobs}</Blobs>'
        f"<NextMarker>{marker}</NextMarker></EnumerationResults>"
    ).encode()


@pytest.fixture
def slow_pages(server):
    """6 pages of 3 objects, each after 0.2 s."""

    def reply(path):
        server.stopped.wait(0.2)
        page = int(path.partition("marker=")[2].partition("&")[0] or "0")
        names = [f"run/{page:02}-{n}" for n in range(3)]
        return listing(names, str(page + 1) if page < 5 else "")

    server.reply = reply
    return server


@pytest.mark.slow
@pytest.mark.parametrize("how", ["list", "list_level", "missing"])
@pytest.mark.parametrize("limit", ["timeout", "deadline"])
def test_a_listing_ends_by_its_deadline(slow_pages, how, limit):
    store = open_azure(slow_pages, account_key=KEY, timeout=0.8 if limit == "timeout" else 300)
    if limit == "deadline":
        store = store.within(Deadline.after(0.8, "the test"))
    began = time.monotonic()
    with pytest.raises(Unavailable, match="too slow"):
        if how == "missing":
            store.repeat("look up", "a", lambda remote: remote._require_container())
            raise AssertionError
        list(store.list("") if how == "list" else store.list_level(""))
    assert time.monotonic() - began < 2


@pytest.mark.slow
def test_a_slow_listing_is_complete(slow_pages):
    store = open_azure(slow_pages, account_key=KEY, timeout=60)
    expected = [f"{page:02}-{n}" for page in range(6) for n in range(3)]
    assert [stat.key for stat in store.list("")] == expected
    assert [entry.name for entry in store.list_level("")] == expected


@pytest.mark.slow
def test_a_listing_goes_on_with_another_client(server):
    """When less time is left than the requests of the first client may take. The server ignores
    the name from which it should list."""
    names = [f"run/{n:04}" for n in range(1500)]
    server.reply = lambda path: listing(names)
    store = open_azure(server, account_key=KEY).within(Deadline.after(10, "the test"))
    clients, read = [], CloudFolder._send

    def send(self, operation, action, key, request):
        def on(client):
            clients.append(client)
            return request(client)

        self.deadline = Deadline.after(10 if not clients else 2, "t")
        return read(self, operation, action, key, on)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CloudFolder, "_send", send)
        assert [stat.key for stat in store.list("")] == [name[4:] for name in names]
    assert len({id(client) for client in clients}) == len(server.requests) == 2


def test_empty_objects_of_others_with_any_name_are_listed(server):
    """An empty object is looked up, because it may be a "folder", but not under any name."""
    blobs = listing(["run/a", "run/b.", "run/c\\d", "run/e?f=g"])
    server.reply = lambda path: blobs.replace(b"<Content-Length>1<", b"<Content-Length>0<")
    store = open_azure(server, account_key=KEY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CloudFolder, "stat", lambda self, key: Stat(key, 0, 0))
        assert [stat.key for stat in store.list("")] == ["a", "b.", "c\\d", "e?f=g"]
        assert len([*store.list_level("")]) == 4
