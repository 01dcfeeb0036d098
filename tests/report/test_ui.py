"""``limpet ui``: the same pages on loopback, read-only, for this machine only."""

import http.client
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

import limpet
from limpet.cli.verbs import ui
from limpet.errors import Unavailable
from limpet.format.names import MANIFEST
from limpet.format.records import StepMetrics, encode_record
from limpet.run import overview
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from tests.cli.invoke import check_error_line, make_run, run_cli, train_branch
from tests.forging import seal, sealed_content
from tests.report.pages import Page, hold
from tests.trainings import damage_version, flip_bit, shard_of
from tests.waiting import wait_until


class Served:
    """A server in this process, and its answers."""

    def __init__(self, place, monkeypatch, stats_bytes=1 << 20):
        servers, serve = [], ui._Server.serve_forever

        def serve_forever(server):
            servers.append(server)
            serve(server, poll_interval=0.01)

        monkeypatch.setattr(ui._Server, "serve_forever", serve_forever)
        options = {"place": str(place), "port": 0, "stats_bytes": stats_bytes, "as_json": True}
        self._thread = threading.Thread(target=ui.command.callback, kwargs=options, daemon=True)
        self._thread.start()
        wait_until(lambda: servers or not self._thread.is_alive())
        self.server = servers[0]
        self.port = self.server.server_address[1]

    def close(self):
        self.server.shutdown()
        self._thread.join()

    def ask(self, path, method="GET", **headers):
        """Return the status, the headers, and the page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            if value is not None:
                connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        reply = connection.getresponse()
        html = reply.read().decode()
        connection.close()
        return reply.status, reply.headers, Page(html) if html else None


@pytest.fixture
def serve(monkeypatch):
    servers = []

    def start(place, **options):
        servers.append(Served(place, monkeypatch, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def runs(tmp_path):
    make_run(LocalStore(tmp_path / "a"))
    make_run(LocalStore(tmp_path / "b & c"))
    return tmp_path


def links(page):
    return [attributes["href"] for tag, attributes in page.tags if tag == "a"]


def test_pages_of_a_folder_its_runs_versions_and_diffs(serve, runs):
    train_branch(LocalStore(runs / "a"), 40, 60)
    limpet.Run(runs / "a").pin(20)
    before = {path: path.stat().st_mtime_ns for path in sorted(runs.rglob("*"))}
    served = serve(runs)
    status, headers, folder = served.ask("/")
    assert (status, headers["Refresh"]) == (200, "5")
    assert re.search(r"a 60\.1 \d+ s [0-9.]+ KiB finished loss", folder.text)
    assert links(folder) == ["/a/", "/b%20%26%20c/"] or links(folder) == ["/b%20%26%20c/", "/a/"]
    _, _, page = served.ask("/a/")
    assert page.sections().keys() == Page(run_cli("report", runs / "a").out).sections().keys()
    assert {"/a/version_20", "/a/version_60", "/a/version_60.1"} <= {*links(page)}
    assert served.ask("/b%20%26%20c/")[0] == 200
    _, headers, version = served.ask("/a/version_60.1")
    assert headers["Refresh"] is None, "it does not change"
    assert "weights" in version.text
    assert "contents not checked" in version.text
    assert links(version)[:2] == ["/a/", "/a/diff?a=version_40&b=version_60.1"]
    _, _, diff = served.ask(links(version)[1])
    assert re.search(r"weights (all|[0-9,]+ of 1,000) differ", diff.text)
    assert "differences" in diff.text
    assert served.ask("/a/diff?a=+version_20&b=version_20+")[2].text.count("0 differences") == 1
    assert [a["name"] for tag, a in page.tags if tag == "input"] == ["a", "b"]
    after = {path: path.stat().st_mtime_ns for path in sorted(runs.rglob("*"))}
    assert before == after, "nothing is written"


def test_a_page_changes_if_the_listing_does(serve):
    store = make_run(open_store("memory://ui-changes"))
    served = serve(store.url)
    status, headers, _ = served.ask("/")
    assert status == 200
    known = headers["ETag"]
    status, headers, page = served.ask("/", If_None_Match=known)
    assert (status, headers["Refresh"], page) == (304, "5", None)
    train_branch(store, 60, 80)
    status, headers, page = served.ask("/", If_None_Match=known)
    assert status == 200
    assert headers["ETag"] != known
    assert "version_80" in page.text
    known = headers["ETag"]
    limpet.Run(store).pin(20)
    assert served.ask("/", If_None_Match=known)[0] == 200


def test_a_page_changes_if_the_metrics_log_does(serve, tmp_path, monkeypatch):
    """Its folder changes, but not that of the run."""
    monkeypatch.setattr(overview, "CHECK_AGAIN", 1e9)
    monkeypatch.setattr(overview, "_SETTLED", -1.0)
    store = make_run(LocalStore(tmp_path))

    def log(step):
        record = StepMetrics(0, step, step, "2026-11-30T00:00:00+00:00", [(step, {"m": 9.0})])
        store.put_if_absent(record.file.key, encode_record(record))

    log(70)
    served = serve(tmp_path)
    known = served.ask("/")[1]["ETag"]
    assert served.ask("/", If_None_Match=known)[0] == 304
    log(80)
    assert served.ask("/", If_None_Match=known)[0] == 200


@pytest.mark.parametrize("name", [b"\xff run", b"a#b?c%2e\"'", "\u202e\u00e9".encode()])
def test_names_that_are_hard_to_write_in_an_address(serve, tmp_path, name):
    make_run(LocalStore(tmp_path / os.fsdecode(name)))
    served = serve(tmp_path)
    status, _, page = served.ask("/")
    assert status == 200
    [link] = links(page)
    status, _, page = served.ask(link)
    assert (status, "version_60" in page.text) == (200, True)
    assert served.ask(next(url for url in links(page) if url.endswith("version_60")))[0] == 200


def test_only_get_from_this_machine_is_served(serve, runs):
    served = serve(runs)
    policy = served.ask("/")[1]["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "X"):
        status, headers, _ = served.ask("/", method)
        assert (status, headers["Allow"]) == (405, "GET")
    assert served.server.server_address[0] == "127.0.0.1"
    for host in ("evil.example", f"evil.example:{served.port}", "127.0.0.1", "", None):
        assert served.ask("/", Host=host)[0] == 403, host
    for host in (f"localhost:{served.port}", f"LocalHost:{served.port}"):
        assert served.ask("/", Host=host)[0] == 200
    served.server.server_address = "127.0.0.1", 80  # which browsers omit
    assert [served.ask("/", Host=host)[0] for host in ("localhost", "evil.example")] == [200, 403]


ABSENT = """/../a/ /a/.. /a/../../etc/passwd /%2e%2e/a/ /a/%2e%2e/b /..%2fa/ //etc/passwd /c/ /a
 /. /a/. x /a/version_20/manifest.json /a/version_21 /a/version_20.7 /a/version_20/ /a/diff /a/%00
 /a/diff?a=version_20 /a/diff?a=version_20&b=../x /a%00/ /x?<b> /<script> /%ff/ *"""


def test_what_is_not_there_is_not_found(serve, runs):
    served = serve(runs)
    for path in ABSENT.split():
        status, _, page = served.ask(path)
        assert status == 404, path
        assert "There is no such" in page.text
        assert "root:" not in page.text


def test_a_port_that_is_in_use(serve, runs):
    port = serve(runs).port
    check_error_line(run_cli("ui", runs, "--port", port), 1, f"Port {port} is in use", "--port 0")
    check_error_line(run_cli("ui", runs / "none", "--port", 0), 4, "There is no run at")


def test_damaged_and_newer_versions(serve, runs):
    damage_version(LocalStore(runs / "a"), "version_60", "manifest")
    manifest = runs / "a" / "version_40" / MANIFEST
    manifest.write_bytes(seal(sealed_content(manifest.read_bytes()), format_number=99))
    flip_bit(LocalStore(runs / "b & c"), shard_of(LocalStore(runs / "b & c"), "version_60"))
    served = serve(runs)
    status, headers, page = served.ask("/b%20%26%20c/diff?a=version_40&b=version_60")
    assert (status, headers["Refresh"]) == (500, None), "it stays so"
    assert "is damaged between bytes" in page.text
    assert "2 damaged" in served.ask("/")[2].text
    page = served.ask("/a/")[2].sections()["Versions"]
    assert "damaged" in page
    assert "too new" in page
    for version, text in (("version_60", "is damaged"), ("version_40", "format")):
        status, _, page = served.ask(f"/a/{version}")
        assert status == 200
        assert text in page.text


def test_a_store_that_does_not_answer(serve, monkeypatch):
    store = make_run(open_store("memory://ui-slow"))
    served = serve(store.url)
    answers = hold(monkeypatch, "list_level")
    monkeypatch.setattr(ui, "WAIT", 0.3)
    began = time.monotonic()
    replies = [served.ask("/", If_None_Match=tag) for tag in ('"a"', '"b"', '"c"')]
    assert time.monotonic() - began < 10
    for status, headers, page in replies:
        assert (status, headers["Refresh"]) == (503, "5")
        assert "not ready after 0.3 s: the store is slow, or is away" in page.text
    assert [t.name for t in threading.enumerate()].count("limpet-page") == 1, "they share one call"
    answers.set()
    wait_until(lambda: served.ask("/")[0] == 200)


def test_a_page_for_which_nobody_waited_is_not_shown_later(serve, monkeypatch):
    store = make_run(open_store("memory://ui-left"))
    served = serve(store.url)
    with monkeypatch.context() as slow:
        answers = hold(slow, "list_level")
        slow.setattr(ui, "WAIT", 0.1)
        assert served.ask("/")[0] == 503
        answers.set()
        wait_until(lambda: "limpet-page" not in str(threading.enumerate()))
    train_branch(store, 60, 80)
    monkeypatch.setattr(overview, "CHECK_AGAIN", 0.01)
    assert "version_80" in served.ask("/")[2].text


def test_a_diff_that_is_cut_says_so(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(ui, "_MAX_CHANGES", 2)
    with limpet.Run(tmp_path).writer() as writer:
        for step in (1, 2):
            writer.save({f"x{i}": step for i in range(3)}, step=step)
    page = serve(tmp_path).ask("/diff?a=version_1&b=version_2")[2]
    assert "3 differences, 0 equal leaves and values; the first 2 are shown" in page.text
    assert "x1" in page.text
    assert "x2" not in page.text


def test_a_store_that_fails(serve, monkeypatch):
    store = make_run(open_store("memory://ui-fails"))
    served = serve(store.url)

    def fail(*_):
        raise Unavailable("the server <b>is</b> away")

    monkeypatch.setattr(MemoryStore, "list_level", fail)
    status, headers, page = served.ask("/")
    assert (status, headers["Refresh"]) == (503, "5")
    assert "the server <b>is</b> away" in page.text
    monkeypatch.undo()


def test_a_client_that_sends_nothing_does_not_keep_others_waiting(serve, runs):
    served = serve(runs)
    with socket.create_connection(("127.0.0.1", served.port)):
        assert served.ask("/")[0] == 200


def test_a_browser_that_does_not_wait(serve, runs, capsys):
    served, host = serve(runs), b"Host: localhost:%d\r\n\r\n"
    for request in (b"GET", b"GET /a/ HTTP/1.1\r\n" + host % served.port):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            reset = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            connection.sendall(request)
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(b"GET http://[::1/ HTTP/1.1\r\n" + host % served.port)
        assert b"404 Not Found" in connection.recv(100)
    wait_until(lambda: "process_request_thread" not in str(threading.enumerate()), ui.WAIT + 40)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_it_serves_until_ctrl_c(runs):
    command = [sys.executable, "-m", "limpet", "ui", str(runs), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = process.stdout.readline().strip()
    host, port = re.fullmatch(r"http://(127\.0\.0\.1):(\d+)/", url).groups()
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("GET", "/")
    assert connection.getresponse().status == 200
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == "limpet: interrupted\n"
    assert process.returncode == 130
