"""``limpet ui RUN|FOLDER``: serve the pages of runs on loopback, while trainings write to them.

Nothing of an address is used as a path: it names runs and versions among those that are listed.
"""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Lock
from urllib.parse import parse_qsl, quote, unquote

import click

from limpet.cli.output import format_error_line, json_option, print_json
from limpet.cli.resolve import resolve_runs
from limpet.cli.verbs.diff import compare_snapshots, format_change
from limpet.cli.verbs.ls import RUN_COLUMNS, run_cells
from limpet.cli.verbs.report import stats_option
from limpet.cli.verbs.show import header_fields
from limpet.deadline import Call
from limpet.errors import LimpetError, NotFound, Unavailable
from limpet.format.config import compare_configs, describe_change
from limpet.format.digest import digest
from limpet.format.names import MetricsFile
from limpet.report.data import read_report, read_version
from limpet.report.html import note, page, render_contents, render_report, table, text, wrapped
from limpet.run import metrics_log, overview
from limpet.run.run import Run
from limpet.run.writer_lock import find_writer
from limpet.snapshot.contents import Contents
from limpet.storage.open import open_store

WAIT = 20.0
"""The longest time in seconds for which a request waits for its page, which is made meanwhile."""

_REFRESH = {"Refresh": "5"}
_MAX_CHANGES = 500
_HEADERS = {
    "Connection": "close",
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
}


@click.command("ui")
@click.argument("place", metavar="RUN|FOLDER")
@click.option("--port", type=click.IntRange(0, 65535), default=8787, show_default=True,
              help="The port on 127.0.0.1; 0: any free one.")  # fmt: skip
@stats_option
@json_option
def command(place: str, port: int, stats_bytes: int, as_json: bool) -> None:
    """Serve the pages of RUN, or of the runs in FOLDER, on this machine, until Ctrl-C.

    There is a page for each run, as report makes it, for each version, and for each diff of two. A
    browser reads it again every 5 s, and shows what has changed. Nothing is written.
    """
    is_folder = isinstance(resolve_runs(place, quiet=as_json, require_version=False), list)
    try:
        server = _Server(port, place, is_folder, stats_bytes)
    except OSError as e:
        if e.errno != errno.EADDRINUSE:
            raise
        raise LimpetError(f"Port {port} is in use; choose another one: --port 0") from None
    with server:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        print_json({"url": url}, indent=None) if as_json else click.echo(url)
        server.serve_forever()


class _Server(ThreadingHTTPServer):
    """Makes each page in a thread of its own, which goes on if a request does not wait so long."""

    def __init__(self, port: int, place: str, is_folder: bool, stats_bytes: int) -> None:
        self._place, self._is_folder, self._stats_bytes = place, is_folder, stats_bytes
        self._lock = Lock()
        self._calls: dict[str, tuple[float, Call[tuple[str, str]]]] = {}  # when it was last asked
        self._summaries: list[overview.RunSummary] = []
        super().__init__(("127.0.0.1", port), _Request)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # without a look-up of the host's name

    def get_page(self, address: str, known: str) -> tuple[str, str]:
        """Return a page after its tag; no page if the tag is ``known``. Raises ``LimpetError``."""
        while True:
            with self._lock:
                asked, call = self._calls.get(address, (0.0, None))
                is_left = time.monotonic() - asked > overview.CHECK_AGAIN
                if call is None or (is_left and call.wait(0)):  # a page that nobody waited for
                    call = Call(partial(self._make, address, known), "limpet-page")
                self._calls[address] = time.monotonic(), call
            if not call.wait(WAIT):
                what = f"The page is not ready after {WAIT:g} s: the store is slow, or is away"
                raise Unavailable(what, todo="This page tries again every 5 s")
            with self._lock:
                if self._calls.get(address, (0.0, None))[1] is call:
                    del self._calls[address]
            tag, html = call.result()
            if html or tag == known:  # otherwise, it was called for another request
                return tag, html

    def _make(self, address: str, known: str) -> tuple[str, str]:
        path, _, query = address.partition("?")
        names = [unquote(name, errors="surrogateescape") for name in path.split("/")[1:]] or ["?"]
        link = "/"
        if self._is_folder:
            name, *names = names
            link, shown = f"/{_quote(name)}/", self._render_runs()
            stores = {run.name: run.catalog.store for run in self._summaries}
            if not (name or names):
                tag = _make_tag(shown)
                return tag, "" if tag == known else page(f"Limpet: {self._place}", shown)
            if name not in stores:
                raise NotFound(f"There is no such run in {self._place}")
        run = Run(stores[name] if self._is_folder else open_store(self._place))
        listing, writer = run.listing(), find_writer(run.store)
        is_running = overview.RunSummary("", run.catalog, writer=writer).is_running()
        states = overview.read_states(run.store, ("", *map(str, listing.folders)))
        pins, minute = sorted(listing.lasting_pins), time.time() // overview.CHECK_AGAIN
        log = sorted(metrics_log.list_files(run.store))
        tag = _make_tag((listing.folders, listing.branches, pins, is_running, states, minute, log))
        if tag == known:
            return tag, ""
        result = overview.list_versions(run, listing)
        return tag, _render(result, log, names, dict(parse_qsl(query)), link, self._stats_bytes)

    def _render_runs(self) -> str:
        self._summaries = overview.summarize_runs(open_store(self._place), self._summaries)
        rows = []
        for run in reversed(self._summaries):
            cells = [f'<span class="{"bad" * (style == "red")}">{text(content)}</span>'
                     for content, style in run_cells(run)]  # fmt: skip
            problem = note(run.problem and run.problem.brief, "bad")
            rows.append([f'<a href="/{_quote(run.name)}/">{cells[0]}</a>{problem}', *cells[1:]])
        return table(RUN_COLUMNS, rows, RUN_COLUMNS[1:4]) + note("" if rows else "There is no run.")


_quote = partial(quote, errors="surrogateescape")  # a name may be no UTF-8


def _make_tag(state: object) -> str:
    return f'"{digest(repr(state).encode(errors="backslashreplace"))}"'


def _render(
    result: overview.ListResult,
    log: list[MetricsFile],
    names: list[str],
    query: dict[str, str],
    link: str,
    stats_bytes: int,
) -> str:
    """Return the page of a run, a version, or a diff. Raises ``NotFound``."""
    run = result.run
    entries = {str(e.version): e for e in result.entries}
    back, sides = f'<p><a href="{link}">all versions</a>', [query.get(n, "").strip() for n in "ab"]
    if names == [""]:
        return render_report([read_report(result, log, stats_bytes)], link)
    if names == ["diff"] and {*sides} <= entries.keys():
        a, b = (run.catalog.open(entries[side].version) for side in sides)
        found = compare_snapshots(a, b)
        configs = compare_configs(a.metadata_node("config"), b.metadata_node("config"))
        lines = [("config", describe_change(change)) for change in configs]
        lines += [(key, f"only in {a.version}") for key in found.only_a]
        lines += [(key, f"only in {b.version}") for key in found.only_b]
        lines += [(change.key, format_change(change)) for change in found.changes]
        rows = [(text(key), text(change, 300)) for key, change in lines[:_MAX_CHANGES]]
        count = f"{len(lines):,} differences, {found.equal_count:,} equal leaves and values"
        count += f"; the first {_MAX_CHANGES} are shown" * (len(lines) > _MAX_CHANGES)
        title = f"Limpet: {a.version} and {b.version} of {run.url}"
        return page(title, f"{back}</p>{note(count)}{table(('key', 'change'), rows)}")
    if len(names) != 1 or names[0] not in entries:
        raise NotFound(f"There is no such page or version of {run.url}")
    entry = entries[names[0]]
    contents, parent = read_version(result, entry, stats_bytes), result.parent(entry.version)
    if str(parent) in entries:
        back += f' <a href="{link}diff?a={parent}&amp;b={entry.version}">compare with {parent}</a>'
    fields = header_fields(contents.snapshot) if isinstance(contents, Contents) else ()
    rows = [(text(name), wrapped(value, 600)) for name, value in fields]
    back += f"</p>{note(entry.problem and entry.problem.brief, 'bad')}"
    shown = f"{back}{table(('', ''), rows)}<h2>Contents</h2>{render_contents(contents)}"
    return page(f"Limpet: {entry.version} of {run.url}", shown)


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # Chromium ignores the tags of older ones
    timeout = 10.0
    server: _Server

    def handle(self) -> None:
        with suppress(ConnectionError):  # a browser does not wait for what it no longer shows
            super().handle()

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        hosts = [f"{name}:{self.server.server_address[1]}" for name in ("127.0.0.1", "localhost")]
        host = self.headers.get("Host", "").lower()
        if self.command != "GET":
            self._send(405, page("Limpet", note("Only GET is allowed.", "bad")), Allow="GET")
        elif (host if ":" in host else f"{host}:80") not in hosts:
            self._send(403, page("Limpet", note("The Host is not this machine.", "bad")))
        else:
            return True
        return False

    def do_GET(self) -> None:
        refresh = _REFRESH if self.path.endswith("/") else {}  # a diff may read much
        try:
            tag, html = self.server.get_page(self.path, self.headers.get("If-None-Match", ""))
        except (LimpetError, OSError) as e:
            code = 404 if isinstance(e, NotFound) else 503 if isinstance(e, Unavailable) else 500
            refresh = _REFRESH if code == 503 else refresh
            self._send(code, page("Limpet", note(format_error_line(e), "bad")), **refresh)
        else:
            self._send(200 if html else 304, html, ETag=tag, **refresh)

    def _send(self, code: int, html: str, **headers: str) -> None:
        body = html.encode("ascii", "xmlcharrefreplace")
        self.send_response(code)
        length = {"Content-Length": str(len(body))} if body else {}
        for name, value in (_HEADERS | headers | length).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
