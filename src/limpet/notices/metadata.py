"""Requests to metadata servers, whose replies are short."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import IO, TYPE_CHECKING, Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

import msgspec

from limpet.errors import LimpetError

if TYPE_CHECKING:
    from ssl import SSLContext

T = TypeVar("T")

LINK_LOCAL = "http://169.254.169.254"
"""Where the metadata servers of AWS, Google Cloud, and Azure answer. It is never routed."""

REQUEST_SECONDS = 2.0
"""The longest time to connect, and for each part of the reply; ``BoundedSource`` bounds all."""

MAX_BYTES = 64 * 1024
"""The longest body of a reply."""

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
        """Return the seconds until a time, 0.0 if it has passed, by the clock of the server. Raises
        ``OSError`` if ``when`` or the ``Date`` header is no time (RFC 3339 or RFC 5322)."""
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


def server_url(base_url: str) -> str:
    """Return the URL without a slash at the end. Raises ``LimpetError`` unless it is
    ``http://HOST`` or ``https://HOST``, without a password."""
    try:
        url = urlsplit(base_url)
        is_valid = url.port is None or url.port > 0
    except (ValueError, AttributeError, TypeError):
        url, is_valid = urlsplit(""), False
    is_web = url.scheme in ("http", "https") and url.hostname and base_url.isprintable()
    if not (is_valid and is_web) or url.username or url.password or url.query or " " in base_url:
        raise LimpetError(
            "Invalid address of a metadata server: it must be http://HOST or https://HOST, without"
            f" a password, not {base_url!r}"
        )
    return base_url.rstrip("/")


def fetch(
    url: str,
    headers: Mapping[str, str],
    *,
    method: str = "GET",
    allow: Collection[int] = (200,),
    context: SSLContext | None = None,
) -> Reply:
    """Send a request without a proxy, which might receive tokens, and follow no redirect. Raises
    ``OSError`` for no complete reply, over ``MAX_BYTES``, or a status not in ``allow``."""
    opener = build_opener(ProxyHandler({}), _NoRedirects, HTTPSHandler(context=context))
    request = Request(url, headers=dict(headers), method=method)
    try:
        try:
            response = opener.open(request, timeout=REQUEST_SECONDS)
        except HTTPError as e:  # a status of 300 or more
            response = e
        with response:
            body = response.read(MAX_BYTES + 1)
            if len(body) > MAX_BYTES:
                raise OSError(f"the reply is longer than {MAX_BYTES} bytes")
            # unlike ``read()``, ``read(n)`` does not raise if bytes are missing
            if len(body) < int(response.headers.get("Content-Length", len(body))):
                raise OSError("the reply is not complete")
        reply = Reply(url, response.status, response.headers, body)
    except (OSError, HTTPException, ValueError) as e:  # ValueError: not a host name
        cause = e.reason if isinstance(e, URLError) else e
        if isinstance(cause, TimeoutError):
            raise TimeoutError(f"{url} has not answered for {REQUEST_SECONDS:g} seconds") from e
        raise OSError(f"Cannot read {url}: {cause!r}") from e
    if reply.status not in allow:
        raise OSError(_describe_status(reply, allow))
    return reply


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        """Follow no redirect: the reply has its status."""


def _describe_status(reply: Reply, allow: Collection[int]) -> str:
    expected = " or ".join(map(str, allow))
    if 300 <= reply.status < 400:
        return (
            f"{reply.url} redirects to {reply.headers.get('Location')!r}, which is refused. "
            "A metadata server does not redirect: find out which server answers there."
        )
    text = reply.body[:_SHOWN_BYTES].decode(errors="replace")
    return f"{reply.url} answered with status {reply.status}. Expected {expected}. It says {text!a}"
