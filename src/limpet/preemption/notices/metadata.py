"""A small HTTP client for metadata servers. Every request is bounded in time and in bytes."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

from limpet.deadline import Deadline
from limpet.errors import LimpetError
from limpet.text import hide_secrets

if TYPE_CHECKING:
    from ssl import SSLContext

T = TypeVar("T")

LINK_LOCAL = "http://169.254.169.254"
"""Where the metadata servers of AWS, Google Cloud, and Azure answer. It is never routed."""

REQUEST_SECONDS = 2.0
"""The longest time for connecting, sending a request, and reading the whole reply."""

_MAX_HEADER_BYTES = 16 * 1024
_SHOWN_BYTES = 80


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request. ``url``: what was requested, for messages."""

    url: str
    status: int
    headers: Message
    body: bytes

    @property
    def text(self) -> str:
        """The body without surrounding white space. Raises ``OSError`` if it is not UTF-8."""
        try:
            return self.body.decode().strip()
        except UnicodeDecodeError as e:
            raise self.unclear("text in UTF-8") from e

    def decode(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Return the JSON value in the body. Raises ``OSError`` if it is invalid."""
        try:
            return decoder.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise self.unclear(f"another JSON document ({e})") from e

    def seconds_until(self, when: str) -> float:
        """Return the seconds from the reply until a time of the same server; 0.0 if it has passed.

        Both times are those of the server's clock, because the clock of this machine may be wrong.
        Raises ``OSError`` if the ``Date`` header or ``when`` is not a time (RFC 3339 or RFC 5322).
        """
        left = self._parse_time(when) - self._parse_time(self.headers.get("Date", ""))
        return max(0.0, left.total_seconds())

    def unclear(self, expected: str) -> OSError:
        """Return the error for a reply that is not understood."""
        found = ascii(self.body[:_SHOWN_BYTES].decode(errors="replace"))
        kind = self.headers.get("Content-Type", "no content type")
        return OSError(
            f"Cannot understand the reply of {self.url}. Expected {expected}, found {found} "
            f"({kind}). Find out which server answers there."
        )

    def _parse_time(self, text: str) -> datetime:
        try:
            if text[:4].isdecimal() and text[4:5] == "-":
                when = datetime.fromisoformat(text)
            else:
                when = parsedate_to_datetime(text)
        except (ValueError, OverflowError) as e:
            raise self.unclear(f"a time where it has {text[:_SHOWN_BYTES]!r}") from e
        return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


class MetadataClient:
    """Sends requests to one server.

    It uses no proxy, because a proxy would answer for another machine or receive the tokens. It
    follows no redirect, because these servers send none. ``limit``: the most bytes of a body.
    ``context``: that of TLS, for an ``https`` address.
    """

    def __init__(
        self, base_url: str, *, limit: int = 64 * 1024, context: SSLContext | None = None
    ) -> None:
        """Raises ``LimpetError`` unless ``base_url`` is the URL of a server."""
        self._url = split_base_url(base_url)
        self._limit = limit
        self._context = context

    def get(self, path: str, headers: Mapping[str, str], allow: Collection[int] = (200,)) -> Reply:
        """Return the reply to a GET request. See ``request``."""
        return self.request("GET", path, headers, allow)

    def request(
        self, method: str, path: str, headers: Mapping[str, str], allow: Collection[int] = (200,)
    ) -> Reply:
        """Send a request, and return the reply.

        Raises ``OSError`` if there is no complete reply after ``REQUEST_SECONDS``, if it is too
        long or not HTTP, or if its status is not in ``allow``.
        """
        scheme, host, port, root = self._url
        url = f"{scheme}://{host if ':' not in host else f'[{host}]'}:{port}{root}{path}"
        connection = _BoundedConnection(host, port, self._limit + _MAX_HEADER_BYTES)
        try:
            if scheme == "https":
                connection.use_tls(self._context)
            connection.request(method, root + path, headers={**headers, "Connection": "close"})
            reply = self._read(connection.getresponse(), url)
        except TimeoutError as e:
            raise TimeoutError(f"{url} has not answered for {REQUEST_SECONDS:g} seconds") from e
        except HTTPException as e:
            raise OSError(f"The reply of {url} is not complete HTTP: {e!r}") from e
        except (OSError, UnicodeError) as e:  # UnicodeError: not a host name
            raise OSError(f"Cannot read {url}: {e}") from e
        finally:
            connection.end()
        if reply.status not in allow:
            raise OSError(_describe_status(reply, allow))
        return reply

    def _read(self, response: HTTPResponse, url: str) -> Reply:
        # ``read()`` would allocate as many bytes as the header says
        if response.length is not None and response.length <= self._limit:
            body = response.read()  # unlike ``read(n)``, it raises if bytes are missing
        else:
            body = response.read(self._limit + 1)
        if (response.length or 0) + len(body) > self._limit:
            raise OSError(f"the reply is longer than {self._limit} bytes")
        return Reply(url, response.status, response.headers, body)


def split_base_url(base_url: str) -> tuple[str, str, int, str]:
    """Return the scheme, host, port, and path of a URL, which has no slash at the end.

    Raises ``LimpetError`` unless it is ``http://HOST`` or ``https://HOST``, without a password.
    """
    try:
        url = urlsplit(base_url)
        port = url.port or (443 if url.scheme == "https" else 80)
    except (ValueError, AttributeError, TypeError):
        url, port = urlsplit(""), 0
    is_web = url.scheme in ("http", "https") and url.hostname and base_url.isprintable()
    if not is_web or url.username or url.password or url.query or " " in base_url:
        raise LimpetError(
            "Invalid address of a metadata server",
            expected="http://HOST or https://HOST, without a password",
            found=hide_secrets(repr(base_url)),
        )
    return url.scheme, cast(str, url.hostname), port, url.path.rstrip("/")


def _describe_status(reply: Reply, allow: Collection[int]) -> str:
    expected = " or ".join(map(str, allow))
    if 300 <= reply.status < 400:
        return (
            f"{reply.url} redirects to {reply.headers.get('Location')!r}, which is refused. "
            "A metadata server does not redirect: find out which server answers there."
        )
    text = reply.body[:_SHOWN_BYTES].decode(errors="replace")
    return f"{reply.url} answered with status {reply.status}. Expected {expected}. It says {text!a}"


class _BoundedConnection(HTTPConnection):
    """A connection that ends at a deadline, and after a number of bytes.

    The timeout of a socket applies to each ``recv``, so that a server that sends one byte per
    second would never exceed it.
    """

    def __init__(self, host: str, port: int, limit: int) -> None:
        self._deadline = Deadline.after(REQUEST_SECONDS, "a request", time.monotonic)
        self._byte_limit = limit
        self._tls: SSLContext | None = None
        self._connected: socket.socket | None = None
        super().__init__(host, port, timeout=REQUEST_SECONDS)

    def use_tls(self, context: SSLContext | None) -> None:
        """Use TLS, with the certificates of the system if ``context`` is None."""
        if context is None:
            import ssl

            context = ssl.create_default_context()
        self._tls = context

    def connect(self) -> None:
        connected = socket.create_connection((self.host, self.port), self._left())
        try:
            connected.settimeout(self._left())
            if self._tls is not None:
                connected = self._tls.wrap_socket(connected, server_hostname=self.host)
        except BaseException:
            connected.close()
            raise
        self._connected = connected
        self.sock = cast(Any, _BoundedSocket(connected, self._deadline, self._byte_limit))

    def end(self) -> None:
        """Close the connection, once the reply has been read."""
        self.close()
        if self._connected is not None:
            self._connected.close()

    def _left(self) -> float:
        if not self._deadline.seconds_left:
            raise TimeoutError
        return self._deadline.seconds_left


class _BoundedSocket:
    """What ``http.client`` uses of a socket."""

    def __init__(self, sock: socket.socket, deadline: Deadline, limit: int) -> None:
        self._sock = sock
        self._stream = _BoundedStream(sock, deadline, limit)

    def sendall(self, data: bytes) -> None:
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._stream, 4096)

    def close(self) -> None:
        """Do nothing: ``_BoundedConnection.end`` closes the socket.

        ``http.client`` calls this before it reads the body of a reply with ``Connection: close``. A
        socket of Python stays open then, until the file of ``makefile`` is closed.
        """


class _BoundedStream(io.RawIOBase):
    """The received bytes of a socket."""

    def __init__(self, sock: socket.socket, deadline: Deadline, limit: int) -> None:
        self._sock = sock
        self._deadline = deadline
        self._bytes_left = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline.seconds_left
        if not left:
            raise TimeoutError
        if self._bytes_left <= 0:
            raise OSError("the reply does not end")
        self._sock.settimeout(left)
        count = self._sock.recv_into(buffer)
        self._bytes_left -= count
        return count
