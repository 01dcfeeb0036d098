"""A server on loopback with the part of the API of S3 that the libraries use, as fast as a socket.

It shows what a client costs by itself. Objects are in memory. The parts of uploads to the bucket
"discard" are not even copied out of the kernel (MSG_TRUNC), so reading them returns zeros. It
checks no signature and no checksum; like AWS, it returns the CRC-32C that it was sent.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

DISCARD = "discard"
_BLOCK = 1 << 20
_ZEROS = memoryview(bytes(_BLOCK))
Views = list[memoryview]


class Objects:
    """The objects by ``/bucket/key``, and the parts of unfinished uploads by id.

    ``rate``: the bytes per second that the server sends at most on all connections; 0: unlimited.
    """

    def __init__(self, rate: int = 0) -> None:
        self.rate, self._sent_until, self._sending = rate, 0.0, threading.Lock()
        self.lock = threading.Lock()
        self.stored: dict[str, Views] = {}
        self.uploads: dict[str, tuple[str, dict[int, Views]]] = {}
        self.ids = itertools.count(1)

    def wait_to_send(self, size: int) -> None:
        """Wait until a network with the rate would have sent what was sent so far."""
        if self.rate:
            with self._sending:
                now = time.monotonic()
                self._sent_until = max(now, self._sent_until) + size / self.rate
                delay = self._sent_until - now
            time.sleep(delay)


class Request:
    """One request, with its connection: ``method``, ``path``, ``query``, and ``headers``."""

    def __init__(
        self,
        connection: socket.socket,
        head: bytes,
        rest: bytes,
        wait_to_send: Callable[[int], None],
    ) -> None:
        self.connection, self._rest, self._wait_to_send = connection, rest, wait_to_send
        first, *lines = head.decode("latin1").split("\r\n")
        self.method, target, _ = first.split(" ")
        url = urlsplit(target)
        self.path = unquote(url.path)
        self.query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        self.length = int(self.headers.get("content-length", 0))
        if self.length and "expect" in self.headers:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    def receive(self) -> memoryview:
        """Return the body."""
        body = memoryview(bytearray(self.length))
        at = len(self._rest)
        body[:at] = self._rest
        while at < self.length:
            count = self.connection.recv_into(body[at : at + _BLOCK])
            if not count:
                raise ConnectionError
            at += count
        return body

    def discard(self) -> Views:
        """Drop the body in the kernel. Return as many zeros."""
        at, unused = len(self._rest), bytearray(_BLOCK)
        while at < self.length:
            most = min(_BLOCK, self.length - at)
            count = self.connection.recv_into(unused, most, socket.MSG_TRUNC)
            if not count:
                raise ConnectionError
            at += count
        return [_ZEROS[: min(_BLOCK, self.length - i)] for i in range(0, self.length, _BLOCK)]

    def answer(self, status: str, body: Views | str = "", **headers: object) -> None:
        views = [memoryview(body.encode())] if isinstance(body, str) else body
        length = headers.pop("content_length", sum(map(len, views)))
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {length}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.connection.sendall("\r\n".join([*lines, "\r\n"]).encode())
        for view in views if self.method != "HEAD" else ():
            for at in range(0, len(view), _BLOCK):
                block = view[at : at + _BLOCK]
                self._wait_to_send(len(block))
                self.connection.sendall(block)


def _tag(views: Views) -> str:
    """Return the entity tag: the MD5 of a small object, as on S3."""
    if len(views) == 1 and len(views[0]) < _BLOCK:
        return f'"{hashlib.md5(views[0], usedforsecurity=False).hexdigest()}"'
    return f'"{sum(map(len, views)):x}-{len(views)}"'


def _error(request: Request, status: str, code: str) -> None:
    request.answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")


def _write(objects: Objects, request: Request) -> None:
    query, path = request.query, request.path
    if "uploads" in query:
        with objects.lock:
            upload_id = str(next(objects.ids))
            objects.uploads[upload_id] = path, {}
        algorithm = request.headers.get("x-amz-checksum-algorithm", "")
        reply = _xml("InitiateMultipartUploadResult", UploadId=upload_id)
        request.answer("200 OK", reply, x_amz_checksum_algorithm=algorithm)
    elif "partNumber" in query:
        is_discarded = path.split("/")[1] == DISCARD
        part = request.discard() if is_discarded else [request.receive()]
        objects.uploads[query["uploadId"]][1][int(query["partNumber"])] = part
        name = "x-amz-checksum-crc32c"
        crc = {name: request.headers[name]} if name in request.headers else {}
        request.answer("200 OK", ETag='"part"', **crc)
    elif "delete" in query:
        for key in re.findall("<Key>(.*?)</Key>", bytes(request.receive()).decode()):
            objects.stored.pop(f"{path}/{unescape(key)}", None)
        request.answer("200 OK", _xml("DeleteResult"))
    else:
        data = [request.receive()] if request.length else []
        with objects.lock:
            if "if-none-match" in request.headers and path in objects.stored:
                _error(request, "412 Precondition Failed", "PreconditionFailed")
                return
            result = ""
            if "uploadId" in query:
                parts = objects.uploads.pop(query["uploadId"])[1]
                data = [view for _, part in sorted(parts.items()) for view in part]
                result = "CompleteMultipartUploadResult"
            elif "x-amz-copy-source" in request.headers:
                source = unquote(request.headers["x-amz-copy-source"])
                data = objects.stored["/" + source.lstrip("/")]
                result = "CopyObjectResult"
            objects.stored[path] = data
        text = _xml(result, ETag=_tag(data)) if result else ""
        request.answer("200 OK", text, ETag=_tag(data))


def _read(objects: Objects, request: Request) -> None:
    views = objects.stored.get(request.path)
    if views is None:
        _error(request, "404 Not Found", "NoSuchKey")
        return
    length = sum(map(len, views))
    headers = {"ETag": _tag(views), "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
    if request.method == "HEAD":
        request.answer("200 OK", content_length=length, **headers)
    elif "range" not in request.headers:
        request.answer("200 OK", views, **headers)
    else:
        first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, length)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{length}"
        request.answer("206 Partial Content", _cut(views, start, stop), **headers)


def _cut(views: Views, start: int, stop: int) -> Views:
    found = []
    for view in views:
        if part := view[max(0, start) : max(0, stop)]:
            found.append(part)
        start, stop = start - len(view), stop - len(view)
    return found


def _list(objects: Objects, request: Request) -> None:
    bucket = request.path.strip("/")
    prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter", "")
    when = datetime(2024, 1, 1, tzinfo=UTC).isoformat()
    entries, folders = [], dict[str, None]()
    for path in sorted(objects.stored):
        key = path.removeprefix(f"/{bucket}/")
        if key == path or not key.startswith(prefix):
            continue
        name, slash, _ = key[len(prefix) :].partition(delimiter or "\0")
        if slash:
            folders[prefix + name + delimiter] = None
        else:
            size = sum(map(len, objects.stored[path]))
            entries.append(_xml("Contents", Key=key, Size=size, LastModified=when))
    common = "".join(_xml("CommonPrefixes", Prefix=folder) for folder in folders)
    kind = "ListMultipartUploadsResult" if "uploads" in request.query else "ListBucketResult"
    text = "<IsTruncated>false</IsTruncated>" + "".join(entries) + common
    request.answer("200 OK", f"<{kind}>{text}</{kind}>")


def _xml(tag: str, **fields: object) -> str:
    inner = "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in fields.items())
    return f"<{tag}>{inner}</{tag}>"


def _handle(objects: Objects, request: Request) -> None:
    if request.method in ("PUT", "POST"):
        _write(objects, request)
    elif request.method == "DELETE":
        objects.uploads.pop(request.query.get("uploadId", ""), None)
        objects.stored.pop(request.path, None)
        request.answer("204 No Content")
    elif "list-type" in request.query or "uploads" in request.query:
        _list(objects, request)
    else:
        _read(objects, request)


def _serve(objects: Objects, connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = b""
    with connection:
        while True:
            while b"\r\n\r\n" not in data:
                received = connection.recv(8192)
                if not received:
                    return
                data += received
            head, _, rest = data.partition(b"\r\n\r\n")
            try:
                _handle(objects, Request(connection, head, rest, objects.wait_to_send))
            except OSError:
                return
            data = b""


def main() -> None:
    objects, listener = (
        Objects(int(sys.argv[1])),
        socket.create_server(("127.0.0.1", 0), backlog=256),
    )
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(objects, connection), daemon=True).start()


@contextmanager
def running_sink(rate: int = 0) -> Iterator[str]:
    """Start the server in a process of its own, and yield its URL. ``rate``: see ``Objects``."""
    command = [sys.executable, "-m", "bench.s3_sink", str(rate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # noqa: S101  (for the type checker)
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


if __name__ == "__main__":
    main()
