"""Metadata servers of the clouds and an API server of Kubernetes, on loopback.

``server.announce(...)`` changes what a server says, and ``server.fault`` how it fails::

    with AwsServer() as server:
        server.announce("terminate", seconds=120)
        AwsNotice(server.url).poll()
"""

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

FAULTS = (
    *("500", "redirect", "garbage", "html", "half", "no_http", "endless", "endless_header"),
    *("huge_length", "dead", "latin"),
)
"""The faults with which a server replies at once."""
SLOW_FAULTS = ("hang", "drip", "drip_header", "endless_continue")
"""The faults with which a reply does not end in time."""


class MetadataServer:
    """A server in a thread, which answers ``requests`` and records them.

    ``fault``: one of ``FAULTS`` or ``SLOW_FAULTS``, or None; ``fault_paths``: the beginnings of the
    paths that it concerns. ``clock``: the time of the server. ``has_date``: whether replies have a
    Date header. ``pause``: seconds between the header and the body of a reply. ``padding``: the
    number of spaces before a body, which mean nothing in the text and the JSON of these servers.

    A reply has ``Connection: close`` if the request has it, as RFC 9112 (9.6) demands.
    """

    reply_headers: ClassVar[dict[str, str]] = {}

    def __init__(self, context=None):
        self.fault: str | None = None
        self.fault_paths: tuple[str, ...] = ("/",)
        self.clock: Callable[[], datetime] = lambda: datetime.now(UTC)
        self.has_date = True
        self.pause = 0.0
        self.padding = 0
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self._ended = threading.Event()
        self._http = _Server(("127.0.0.1", 0), _Exchange)
        self._http.owner = self
        if context is not None:
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, method, path, headers):
        """Return the status and the body of the reply to a request."""
        raise NotImplementedError

    def time_in(self, seconds):
        return self.clock() + timedelta(seconds=seconds)

    def count(self, part):
        """The number of requests whose path contains a text."""
        return sum(part in path for _, path in self.requests)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    owner: MetadataServer

    def handle_error(self, *_):
        """A client that closes the connection is no error of the server."""


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_):
        pass

    def do_GET(self):
        owner = self.server.owner
        owner.requests.append((self.command, self.path))
        owner.headers.append(dict(self.headers.items()))
        if owner.fault is not None and self.path.startswith(owner.fault_paths):
            with suppress(OSError):  # the client has given up
                self.fail(owner.fault)
            self.close_connection = True
            return
        status, body = owner.answer(self.command, self.path, self.headers)
        self.reply(status, b" " * owner.padding + body.encode())

    def do_PUT(self):
        self.do_GET()

    def do_POST(self):
        self.do_GET()

    def reply(self, status, body, length=None, **more):
        owner = self.server.owner
        self.send_response_only(status)
        if owner.has_date:
            self.send_header("Date", format_datetime(owner.clock(), usegmt=True))
        headers = {"Content_Type": "text/plain", **more, **owner.reply_headers}
        headers["Content_Length"] = str(len(body) if length is None else length)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        owner._ended.wait(owner.pause)
        self.wfile.write(body)

    def fail(self, fault):
        match fault:
            case "500":
                self.reply(500, b"internal error")
            case "redirect":
                self.reply(302, b"", Location=f"{self.server.owner.url}/elsewhere")
            case "garbage":
                self.reply(200, b'{"action": "term')
            case "html":
                self.reply(200, b"<html>Please log in</html>", Content_Type="text/html")
            case "latin":
                self.reply(200, b"\xe9\xff")
            case "half":
                self.reply(200, b"{}", length=50)
            case "huge_length":
                self.reply(200, b"{}", length=10**15)
            case "no_http":
                self.wfile.write(b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n")
            case "endless":
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                self.repeat(b"0" * 65536, 0)
            case "endless_header":
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                self.repeat(b"A: 1\r\n" * 10_000, 0)
            case "endless_continue":
                self.repeat(b"HTTP/1.1 100 Continue\r\n\r\n", 0.02)
            case "drip":
                head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\nConnection: close\r\n\r\n"
                self.wfile.write(head)
                self.repeat(b"0", 0.02)
            case "drip_header":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nA: ")
                self.repeat(b"0", 0.02)
            case "hang":
                self.server.owner._ended.wait(30)
            case "dead":
                self.connection.shutdown(socket.SHUT_RDWR)

    def repeat(self, data, pause):
        for _ in range(2000):
            self.wfile.write(data)
            if self.server.owner._ended.wait(pause):
                return


class AwsServer(MetadataServer):
    """IMDSv2. A request without a valid token is refused (401)."""

    def __init__(self):
        super().__init__()
        self.tokens: dict[str, int] = {}
        self.documents: dict[str, str] = {}

    def answer(self, method, path, headers):
        if path == "/latest/api/token":
            if method != "PUT":
                return 405, "method not allowed"
            seconds = headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if not seconds.isdecimal() or not 1 <= int(seconds) <= 21600:
                return 400, "bad request"
            token = f"AQAE{len(self.requests)}=="
            self.tokens[token] = int(seconds)
            return 200, token
        if headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return 401, "unauthorized"
        document = self.documents.get(path.removeprefix("/latest/meta-data/"))
        return (404, "not found") if document is None else (200, document)

    def expire_tokens(self):
        self.tokens.clear()

    def announce(self, action="terminate", seconds=120.0):
        """Announce an interruption of the spot instance."""
        document = {"action": action, "time": f"{self.time_in(seconds):%Y-%m-%dT%H:%M:%SZ}"}
        self.documents["spot/instance-action"] = json.dumps(document)

    def recommend_rebalance(self):
        document = {"noticeTime": f"{self.clock():%Y-%m-%dT%H:%M:%SZ}"}
        self.documents["events/recommendations/rebalance"] = json.dumps(document)

    def schedule(self, code, seconds, state="active"):
        """Schedule one event."""
        event = {
            "NotBefore": f"{self.time_in(seconds):%d %b %Y %H:%M:%S GMT}",
            "NotAfter": f"{self.time_in(seconds + 7200):%d %b %Y %H:%M:%S GMT}",
            "Code": code,
            "Description": "scheduled",
            "EventId": f"instance-event-{code}",
            "State": state,
        }
        self.documents["events/maintenance/scheduled"] = json.dumps([event])


class GcpServer(MetadataServer):
    """The metadata server of Compute Engine. It requires, and sends, ``Metadata-Flavor``."""

    reply_headers: ClassVar = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}

    def __init__(self):
        super().__init__()
        self.values = {
            "preempted": "FALSE",
            "maintenance-event": "NONE",
            "scheduling/on-host-maintenance": "MIGRATE",
        }
        self.upcoming: tuple[int, str] = (404, "not found")

    def answer(self, method, path, headers):
        if headers.get("Metadata-Flavor") != "Google":
            return 403, "missing Metadata-Flavor"
        key = path.removeprefix("/computeMetadata/v1/instance/")
        if key == "upcoming-maintenance?alt=json":
            return self.upcoming
        return (200, self.values[key]) if key in self.values else (404, "not found")

    def announce(self, what="preempted"):
        """Announce a preemption, or a ``maintenance-event`` of this name."""
        if what == "preempted":
            self.values["preempted"] = "TRUE"
        else:
            self.values["maintenance-event"] = what

    def schedule(self, seconds, status="PENDING"):
        """Announce upcoming maintenance of a machine that cannot migrate."""
        self.values["scheduling/on-host-maintenance"] = "TERMINATE"
        document = {
            "can_reschedule": "true",
            "maintenance_status": status,
            "type": "SCHEDULED",
            "window_start_time": f"{self.time_in(seconds):%Y-%m-%dT%H:%M:%SZ}",
            "window_end_time": f"{self.time_in(seconds + 7200):%Y-%m-%dT%H:%M:%SZ}",
        }
        self.upcoming = (200, json.dumps(document))


class AzureServer(MetadataServer):
    """The scheduled events of Azure. A POST, which would approve an event, is recorded."""

    def __init__(self, machine="vm_0"):
        super().__init__()
        self.machine: str | None = machine
        self.events: list[dict[str, Any]] = []

    def answer(self, method, path, headers):
        if headers.get("Metadata") != "true" or "api-version=20" not in path:
            return 400, "bad request"
        if path.startswith("/metadata/scheduledevents?"):
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events})
        if path.startswith("/metadata/instance/compute/name?") and self.machine is not None:
            return 200, self.machine
        return 404, "not found"

    def announce(
        self, kind="Preempt", seconds=30.0, *, machine=None, duration=-1, status="Scheduled"
    ):
        """Announce an event for a machine, or let it start."""
        started = status == "Started"
        when = "" if started else format_datetime(self.time_in(seconds), usegmt=True)
        event = {
            "EventId": f"id-{kind}",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": [machine or self.machine or "vm_0"],
            "EventStatus": status,
            "NotBefore": when,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": duration,
        }
        others = [e for e in self.events if e["EventId"] != event["EventId"]]
        self.events = [*others, event]


class KubernetesServer(MetadataServer):
    """The API server of Kubernetes, with one pod. ``allowed``: whether it may be read."""

    def __init__(self, context=None):
        super().__init__(context)
        self.token = "a-token"
        self.allowed = True
        self.deleted_at: datetime | None = None
        self.grace = 0.0

    def answer(self, method, path, headers):
        if headers.get("Authorization") != f"Bearer {self.token}":
            return 401, json.dumps({"kind": "Status", "reason": "Unauthorized"})
        if not self.allowed:
            return 403, json.dumps({"kind": "Status", "reason": "Forbidden"})
        if path.partition("?")[0] != "/api/v1/namespaces/team/pods/trainer-0":
            return 404, json.dumps({"kind": "Status", "reason": "NotFound"})
        metadata: dict[str, Any] = {"name": "trainer-0", "namespace": "team"}
        if self.deleted_at is not None:
            metadata["deletionTimestamp"] = f"{self.deleted_at:%Y-%m-%dT%H:%M:%SZ}"
            metadata["deletionGracePeriodSeconds"] = self.grace
        return 200, json.dumps({"kind": "PartialObjectMetadata", "metadata": metadata})

    def announce(self, seconds=30.0):
        """Delete the pod."""
        self.grace = seconds
        self.deleted_at = self.time_in(seconds)
