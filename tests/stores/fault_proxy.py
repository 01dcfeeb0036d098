"""An HTTP proxy on loopback that injects faults between a client and a storage server.

The Host header stays as it is, so that signatures remain valid.
"""

import re
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

HEAD_END = b"\r\n\r\n"


@dataclass
class Fault:
    """What to do with the requests that match.

    ``method`` and ``path`` (patterns) select requests; the first ``skip`` of them pass, and the
    next ``count`` fail (-1: all). ``action``:

    - "status": answer with ``code`` and the error ``reason``, without forwarding;
    - "ok_error": the same with status 200;
    - "reset": reset the connection without forwarding;
    - "lose_reply": forward, then reset the connection instead of the reply;
    - "truncate": send the head of the reply and ``after`` bytes of its body, then close;
    - "cut": the same, but reset the connection;
    - "stall": forward nothing and answer nothing for ``seconds``;
    - "stall_reply": send ``after`` bytes of the body of the reply, then nothing for ``seconds``;
    - "slow": pass the body of the reply at ``rate`` bytes per second;
    - "flip": invert a bit at ``after`` of the body of the request;
    - "flip_reply": the same for the reply.
    """

    action: str
    method: str = ".*"
    path: str = ".*"
    skip: int = 0
    count: int = 1
    code: int = 503
    reason: str = "SlowDown"
    retry_after: str | None = None
    after: int = 0
    seconds: float = 3600.0
    rate: int = 1 << 20
    seen: int = 0
    hits: int = 0

    def takes(self, method, target):
        if not (re.fullmatch(self.method, method) and re.search(self.path, target)):
            return False
        self.seen += 1
        if self.seen <= self.skip or 0 <= self.count <= self.hits:
            return False
        self.hits += 1
        return True


@dataclass
class Record:
    """A request that the proxy has seen, with the action and the status of the reply."""

    time: float
    method: str
    target: str
    action: str | None = None
    status: int = 0


@dataclass
class Message:
    start: str
    headers: dict[str, str]
    head: bytes
    body: bytes = b""


class Closed(Exception):
    """The other side has closed the connection."""


@dataclass
class FaultProxy:
    upstream: int
    faults: list[Fault] = field(default_factory=list)
    log: list[Record] = field(default_factory=list)

    def __post_init__(self):
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self):
        self._stopped.set()
        self._listener.close()

    def inject(self, *faults):
        """Replace the faults, and forget the requests that were seen."""
        with self._lock:
            self.faults, self.log = list(faults), []

    def targets(self, method=".*"):
        return [r.target for r in self.log if re.fullmatch(method, r.method)]

    def translate(self, head):
        """Return the head of a request in the dialect of the server."""
        return head

    def _accept(self):
        while not self._stopped.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        server = None
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server = socket.create_connection(("127.0.0.1", self.upstream))
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                self._exchange(client, server)
        except (Closed, OSError):
            return
        finally:
            client.close()
            if server is not None:
                server.close()

    def _exchange(self, client, server):
        request = _receive(client, answer_continue=client)
        method, target, _ = request.start.split(" ", 2)
        record = Record(time.time(), method, target)
        with self._lock:
            fault = next((f for f in self.faults if f.takes(method, target)), None)
            self.log.append(record)
        action = record.action = fault.action if fault else None
        if fault and action in ("status", "ok_error"):
            record.status = fault.code if action == "status" else 200
            client.sendall(_error_reply(record.status, fault, method))
            return
        if fault and action == "stall":
            self._stopped.wait(fault.seconds)
            raise Closed
        if action == "reset":
            _reset(client)
        body = _flipped(request.body, fault.after) if fault and action == "flip" else request.body
        server.sendall(self.translate(request.head) + body)
        reply = _receive(server, is_head=method == "HEAD")
        record.status = int(reply.start.split(" ")[1])
        if action == "lose_reply":
            _reset(client)
        self._answer(client, reply, fault)
        if reply.headers.get("connection", "").lower() == "close":
            raise Closed

    def _answer(self, client, reply, fault):
        action = fault.action if fault else None
        if fault is None or action not in ("truncate", "cut", "stall_reply", "slow", "flip_reply"):
            client.sendall(reply.head + reply.body)
        elif action == "flip_reply":
            client.sendall(reply.head + _flipped(reply.body, fault.after))
        elif action == "slow":
            client.sendall(reply.head)
            step = max(1, fault.rate // 10)
            for start in range(0, len(reply.body), step):
                client.sendall(reply.body[start : start + step])
                self._stopped.wait(0.1)
        else:
            client.sendall(reply.head + reply.body[: fault.after])
            if action == "stall_reply":
                self._stopped.wait(fault.seconds)
            if action == "cut":
                _reset(client)
            raise Closed


def _receive(sender, *, answer_continue=None, is_head=False):
    """Receive a whole request or reply, with its body."""
    data = b""
    while True:
        while HEAD_END not in data:
            data += _recv(sender)
        head, _, rest = data.partition(HEAD_END)
        lines = head.decode("latin1").split("\r\n")
        if not lines[0].startswith("HTTP/1.1 100"):
            break
        data = rest
    pairs = (line.partition(":") for line in lines[1:])
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if answer_continue is not None and "expect" in headers:
        answer_continue.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        kept = [line for line in lines if not line.lower().startswith("expect:")]
        head = "\r\n".join(kept).encode("latin1")
    message = Message(lines[0], headers, head + HEAD_END, rest)
    if is_head or " 204 " in lines[0] + " ":
        return message
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while not message.body.endswith(b"0\r\n\r\n"):
            message.body += _recv(sender)
        return message
    length = int(headers.get("content-length", "0"))
    parts, have = [message.body], len(message.body)
    while have < length:
        parts.append(_recv(sender))
        have += len(parts[-1])
    message.body = b"".join(parts)
    return message


def _recv(sender):
    data = sender.recv(1 << 20)
    if not data:
        raise Closed
    return data


def _reset(client):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    raise Closed


def _flipped(body, at):
    changed = bytearray(body)
    changed[at] ^= 1
    return bytes(changed)


def _error_reply(status, fault, method):
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{fault.reason}</Code>'
        "<Message>injected</Message><RequestId>1</RequestId></Error>"
    ).encode()
    if method == "HEAD":
        body = b""
    extra = f"Retry-After: {fault.retry_after}\r\n" if fault.retry_after is not None else ""
    head = f"HTTP/1.1 {status} Injected\r\nContent-Type: application/xml\r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
