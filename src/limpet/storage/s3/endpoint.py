"""The clients of one S3 endpoint, and what this process has learned about it."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from limpet.deadline import Call, Deadline
from limpet.errors import StoreError, Unavailable
from limpet.settings import aws_variables
from limpet.storage.checks import (
    ENDPOINT,
    OPTIONAL_TEXT,
    SPREAD,
    WEB_URL,
    Rule,
    is_web_url,
    make_options,
    switch,
)
from limpet.storage.remote import Server
from limpet.storage.s3.pace import IN_FLIGHT, Pace
from limpet.types import MIB
from limpet.version import __version__

INSTALL = "Install it: pip install 'limpet[cloud]'"

TIMEOUTS = (1, 4, 15, 60)
"""The timeouts of the clients, in seconds: for a connection, and for each wait for bytes. A request
uses the longest one that its deadline allows."""

CREDENTIALS_TIMEOUT = 5
"""The same for the services that issue credentials (STS, SSO), which a request may wait for. It is
tried twice."""

_LAST_MINUTES = 11 * 60
"""Seconds before credentials expire from which on a request waits for other ones. (boto3 waits from
10 minutes before on, and without a limit.)"""

MAX_REQUESTS = 32
"""The default of the largest number of requests in progress."""

MIN_PART = 5 * MIB
"""The least length of a part other than the last one."""

READ_SIZE = 64 * MIB
"""The largest range to read with one request, in bytes. Its bytes need no memory at once."""

Variables = frozenset[tuple[str, str]]

CHECKSUMS = ("auto", "crc32c", "md5", "none")
_ADDRESSING = (None, "path", "virtual")
_TEXTS = ("region", "profile", "access_key_id", "secret_access_key", "session_token")
_SWITCHES = ("anonymous", "equal_parts")


@dataclass(frozen=True, slots=True)
class S3Options:
    """The options of ``limpet.open_store("s3://...", **options)``.

    What is None comes from the environment variables and files of the AWS tools: ``endpoint`` (the
    URL of a server with the API of S3), ``region``, ``profile``, and the credentials.
    ``anonymous``: send no credentials. ``addressing``: "path" or "virtual"; by default "path" for
    an endpoint other than that of AWS. ``part_size``: the length of the parts of uploads, in
    bytes; by default, it adapts (see ``Pace``). ``equal_parts``: make all parts but the last
    equal in length, as Cloudflare R2 requires; this takes another copy in memory. ``concurrency``:
    the largest number of requests of this process in progress, and of parts that a save sends at
    once; by default, 32, and as many parts as have ``IN_FLIGHT`` bytes, but at least 2.
    ``timeout``: seconds for which a call is repeated while the server is unreachable or busy.
    ``checksum``: what the server checks on arrival: "crc32c"; "md5"; "auto": CRC-32C, and also MD5
    if the server ignores it and the connection is not encrypted; "none". ``spread``: save the
    shards of a version in so many folders, 2 to 256; 0: in its own folder.
    """

    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    anonymous: bool = False
    addressing: str | None = None
    part_size: int | None = None
    equal_parts: bool = False
    concurrency: int | None = None
    timeout: float = 300.0
    checksum: str = "auto"
    spread: int = 0

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> S3Options:
        """Return the options. Raises ``StoreError`` for an unknown name or an invalid value."""
        whole = (int, type(None))
        rules: tuple[Rule, ...] = (
            ("part_size", whole, lambda n: not n or n >= MIN_PART, f"at least {MIN_PART} bytes"),
            ("concurrency", whole, lambda n: n is None or 1 <= n <= 1024, "1 to 1024"),
            ("checksum", str, CHECKSUMS.__contains__, " or ".join(CHECKSUMS)),
            ("addressing", OPTIONAL_TEXT, _ADDRESSING.__contains__, "'path' or 'virtual'"),
            ENDPOINT,
            SPREAD,
            *((name, OPTIONAL_TEXT, lambda value: True, "text") for name in _TEXTS),
            *map(switch, _SWITCHES),
        )
        found = make_options(cls, "an S3 store", options, rules)
        if (found.access_key_id is None) != (found.secret_access_key is None):
            raise StoreError(
                "An S3 store got one of access_key_id= and secret_access_key=",
                expected="both or neither",
            )
        return found


class Clients:
    """The clients of a server with the credentials that were found at one time.

    A program or a service that issues credentials may never answer, and boto3 would wait for it in
    the middle of a request. So they are fetched in a thread, for which each request waits until its
    deadline.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._clients: dict[int, Any] = {}
        self._session: Any = None
        self._credentials: Any = None
        self._found: Any = None  # what they were when they were fetched
        self.url = ""
        self._addresses = 1  # of the server: each may take the timeout of a connection
        self._fetching: Call[None] | None = None
        self._fetched_at = 0.0  # when the last thread began
        self._lock = Lock()

    def client(self, deadline: Deadline, longest: int) -> Any:
        """Return a client whose timeouts are at most ``longest``, and end by the deadline.

        Raises ``Unavailable`` if the credentials do not arrive in time, and errors of boto3.
        """
        self._await_credentials(deadline)
        seconds = min(deadline.seconds_left, longest)
        timeout = max(t for t in TIMEOUTS if t <= max(TIMEOUTS[0], seconds))
        client = self._clients.get(timeout)
        if client is None:
            with self._lock:  # the creation of clients is not thread-safe
                client = self._clients.get(timeout) or self._create_client(timeout)
                self._clients[timeout] = client
        return client

    def has_other_credentials(self, others: Clients, deadline: Deadline) -> bool:
        """Return True if these clients have found other credentials than those of ``others``."""
        try:
            self._await_credentials(deadline)
            return self._found is not None and self._found != others._found
        except Exception:  # noqa: BLE001  (they cannot be found now)
            return False

    def _await_credentials(self, deadline: Deadline) -> None:
        """Wait until there are credentials that are valid for some minutes, or none at all.

        boto3 renews credentials 15 minutes before they expire. If that takes long, requests go on
        with those that are still valid.
        """
        is_due = getattr(self._credentials, "refresh_needed", None)
        if self._session is not None and (is_due is None or not is_due()):
            return
        with self._lock:
            if self._fetching is None or self._fetching.wait(0):
                self._fetching = Call(self._fetch, "limpet-credentials")
                self._fetched_at = time.monotonic()
            fetching = self._fetching
        seconds = deadline.seconds_left
        has_time = self._session is not None and is_due is not None and not is_due(_LAST_MINUTES)
        if has_time:
            seconds = min(seconds, self._fetched_at + CREDENTIALS_TIMEOUT - time.monotonic())
        if fetching.wait(seconds):
            fetching.result()
        elif not has_time:
            raise Unavailable(
                "The credentials did not arrive in time",
                todo="Check credential_process, STS, or SSO in the configuration of AWS",
            )

    def _fetch(self) -> None:
        """Find the credentials, or renew those that expire soon."""
        if self._session is None:
            session, options = self._create_session(), self._options
            credentials = None if options.anonymous else session.get_credentials()
            self.url = session.client("s3", endpoint_url=options.endpoint).meta.endpoint_url
            if not is_web_url(self.url):
                raise StoreError(
                    "The endpoint in the environment variables or files of AWS is invalid",
                    expected=WEB_URL,
                )
            self._addresses = count_addresses(self.url)
            self._credentials = credentials
            self._session = session  # it keeps the description of the service, which takes 0.3 s
        if self._credentials is not None:
            self._found = self._credentials.get_frozen_credentials()

    def _create_session(self) -> Any:
        import boto3
        import botocore.session
        from botocore.config import Config

        options, wait = self._options, CREDENTIALS_TIMEOUT
        inner = botocore.session.get_session()
        inner.set_default_client_config(
            Config(connect_timeout=wait, read_timeout=wait, retries={"total_max_attempts": 2})
        )
        return boto3.session.Session(
            aws_access_key_id=options.access_key_id,
            aws_secret_access_key=options.secret_access_key,
            aws_session_token=options.session_token,
            region_name=options.region,
            profile_name=options.profile,
            botocore_session=inner,
        )

    def _create_client(self, timeout: int) -> Any:
        options = self._options
        client = self._create_addressing(timeout, options.addressing or "auto")
        if options.addressing is None and not _AWS.search(client.meta.endpoint_url):
            # most servers have one name, to which "auto" would prepend that of the bucket
            client = self._create_addressing(timeout, "path")
        return client

    def _create_addressing(self, timeout: int, addressing: str) -> Any:
        import boto3
        import botocore
        from botocore.config import Config

        options = self._options
        return self._session.client(
            "s3",
            endpoint_url=options.endpoint,
            config=Config(
                signature_version=botocore.UNSIGNED if options.anonymous else None,
                connect_timeout=max(TIMEOUTS[0], min(timeout, 15) / self._addresses),
                read_timeout=timeout,
                max_pool_connections=options.concurrency or MAX_REQUESTS,
                retries={"total_max_attempts": 1, "mode": "standard"},  # the throttle repeats
                tcp_keepalive=True,
                # botocore builds its own anew for each request, which takes a fifth of the time
                user_agent=f"limpet/{__version__} boto3/{boto3.__version__}",
                # the parts have checksums of their own: signing them takes five times as long
                s3={"addressing_style": addressing, "payload_signing_enabled": False},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


_AWS = re.compile(r"\.amazonaws\.com(\.cn)?(:|/|$)")


def count_addresses(url: str) -> int:
    """Return the number of IP addresses of a server; 1 if it is unknown."""
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return 1
    return max(1, len(found))


class Endpoint(Server):
    """The clients with certain options in this process, and what it has learned of the server.

    ``variables``: those of the environment for which it was made. ``clients``: those with the
    credentials that were found last. ``checks_crc``: whether the server checks CRC-32C, None if
    that is not known yet. ``pace``: what the uploads have shown.
    """

    def __init__(self, options: S3Options, variables: Variables) -> None:
        super().__init__(options.concurrency or MAX_REQUESTS, options.timeout)
        self.options = options
        self.variables = variables
        self.pace = Pace()
        self.checks_crc: bool | None = None
        self.clients = Clients(options)
        self._lock = Lock()

    def adopt(self, variables: Variables) -> bool:
        """Use other environment variables from now on. Return False if the server may differ."""
        if {name for name, _ in variables ^ self.variables} - _CREDENTIALS:
            return False
        with self._lock:
            if variables != self.variables:
                self.clients, self.variables = Clients(self.options), variables
        return True

    def renew(self, refused: Clients) -> Clients:
        """Return clients that look for credentials again, after those of some were refused.

        Of several threads with the same clients, the first one creates the others.
        """
        with self._lock:
            if self.clients is refused:
                self.clients = Clients(self.options)
            return self.clients

    @property
    def part_size(self) -> int:
        """The largest length of the parts of the next upload, in bytes."""
        return self.options.part_size or self.pace.part_size

    @property
    def connections(self) -> int:
        """The number of parts that a save sends at once."""
        options = self.options
        if options.part_size and not options.concurrency:
            return max(2, IN_FLIGHT // options.part_size)
        return options.concurrency or self.pace.connections

    @property
    def url(self) -> str:
        """The URL of the server, for messages. It is known from the first request on."""
        return self.clients.url or "the endpoint"

    @property
    def is_encrypted(self) -> bool:
        return self.url.startswith("https:")


_CREDENTIALS = {
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"),
    "AWS_CREDENTIAL_EXPIRATION",
}
_endpoints: dict[tuple[int, S3Options], Endpoint] = {}


def shared_endpoint(options: S3Options) -> Endpoint:
    """Return the endpoint with these options that all stores of this process share.

    A forked process gets its own: connections cannot be shared. So does a process that has changed
    the environment variables of AWS; if only those of the credentials differ, it keeps what it has
    learned of the server. Raises ``StoreError`` if boto3 is not installed.
    """
    try:
        import boto3  # noqa: F401
    except ImportError as e:
        raise StoreError("An s3:// store needs the package boto3", todo=INSTALL) from e
    key, variables = (os.getpid(), options), aws_variables()
    found = _endpoints.get(key)  # each request asks for it
    if found is None or found.variables != variables:
        with _lock:
            found = _endpoints.get(key)
            if found is None or not found.adopt(variables):
                found = _endpoints[key] = Endpoint(options, variables)
    return found


_lock = Lock()
