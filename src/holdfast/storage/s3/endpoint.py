"""The clients of one S3 endpoint, and what this process has learned about it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from holdfast.errors import StoreError
from holdfast.settings import aws_variables
from holdfast.storage.checks import Rule, make_options
from holdfast.storage.remote import Server
from holdfast.storage.s3.pace import IN_FLIGHT, Pace
from holdfast.types import MIB
from holdfast.version import __version__

INSTALL = "Install it: pip install 'holdfast[cloud]'"

TIMEOUTS = (1, 4, 15, 60)
"""The timeouts of the clients, in seconds: for a connection, and for each wait for bytes. A request
uses the longest one that its deadline allows."""

CREDENTIALS_TIMEOUT = 5
"""The same for the services that issue credentials (STS, SSO), which a request may wait for. It is
tried twice."""

MAX_REQUESTS = 32
"""The default of the largest number of requests in progress."""

MIN_PART = 5 * MIB
"""The least length of a part other than the last one."""

READ_SIZE = 64 * MIB
"""The largest range to read with one request, in bytes. Its bytes need no memory at once."""

CHECKSUMS = ("auto", "crc32c", "md5", "none")
_ADDRESSING = (None, "path", "virtual")


@dataclass(frozen=True, slots=True)
class S3Options:
    """The options of ``holdfast.open_store("s3://...", **options)``.

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
    if the server ignores it and the connection is not encrypted; "none".
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

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> S3Options:
        """Return the options. Raises ``StoreError`` for an unknown name or an invalid value."""
        whole = (int, type(None))
        rules: tuple[Rule, ...] = (
            ("part_size", whole, lambda n: not n or n >= MIN_PART, f"at least {MIN_PART} bytes"),
            ("concurrency", whole, lambda n: n is None or 1 <= n <= 1024, "1 to 1024"),
            ("checksum", str, CHECKSUMS.__contains__, " or ".join(CHECKSUMS)),
            ("addressing", (str, type(None)), _ADDRESSING.__contains__, "'path' or 'virtual'"),
        )
        return make_options(cls, "an S3 store", options, rules)


class Clients:
    """The clients of a server with the credentials that were found at one time."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._clients: dict[int, Any] = {}
        self._session: Any = None
        self._lock = Lock()

    def client(self, seconds_left: float, longest: int) -> Any:
        """Return a client whose timeouts are at most ``seconds_left`` and ``longest``."""
        timeout = max(t for t in TIMEOUTS if t <= max(TIMEOUTS[0], min(seconds_left, longest)))
        client = self._clients.get(timeout)
        if client is None:
            with self._lock:  # the creation of clients is not thread-safe
                client = self._clients.get(timeout) or self._create_client(timeout)
                self._clients[timeout] = client
        return client

    def has_other_credentials(self, others: Clients) -> bool:
        """Return True if these clients have found other credentials than those of ``others``."""
        try:
            return self._credentials() != others._credentials()
        except Exception:  # noqa: BLE001  (they cannot be found now)
            return False

    def _credentials(self) -> object:
        """Return what requests are signed with. None if they are not signed."""
        if self._options.anonymous:
            return None
        self.client(TIMEOUTS[0], TIMEOUTS[0])  # it creates the session
        found = self._session.get_credentials()
        return None if found is None else found.get_frozen_credentials()

    def _create_client(self, timeout: int) -> Any:
        options = self._options
        client = self._create_addressing(timeout, options.addressing or "auto")
        if options.addressing is None and not _AWS.search(client.meta.endpoint_url):
            # most servers have one name, to which "auto" would prepend that of the bucket
            client = self._create_addressing(timeout, "path")
        return client

    def _create_addressing(self, timeout: int, addressing: str) -> Any:
        import boto3
        import botocore.session
        from botocore.config import Config

        options = self._options
        session = self._session
        if session is None:  # it keeps the description of the service, which takes 0.3 s to read
            inner = botocore.session.get_session()
            wait = CREDENTIALS_TIMEOUT  # by default, botocore waits for five minutes
            inner.set_default_client_config(
                Config(connect_timeout=wait, read_timeout=wait, retries={"total_max_attempts": 2})
            )
            session = self._session = boto3.session.Session(
                aws_access_key_id=options.access_key_id,
                aws_secret_access_key=options.secret_access_key,
                aws_session_token=options.session_token,
                region_name=options.region,
                profile_name=options.profile,
                botocore_session=inner,
            )
        return session.client(
            "s3",
            endpoint_url=options.endpoint,
            config=Config(
                signature_version=botocore.UNSIGNED if options.anonymous else None,
                connect_timeout=min(timeout, 15),
                read_timeout=timeout,
                max_pool_connections=options.concurrency or MAX_REQUESTS,
                retries={"total_max_attempts": 1, "mode": "standard"},  # the throttle repeats
                tcp_keepalive=True,
                # botocore builds its own anew for each request, which takes a fifth of the time
                user_agent=f"holdfast/{__version__} boto3/{boto3.__version__}",
                # the parts have checksums of their own: signing them takes five times as long
                s3={"addressing_style": addressing, "payload_signing_enabled": False},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


class Endpoint(Server):
    """The clients with certain options in this process, and what it has learned of the server.

    ``clients``: those with the credentials that were found last. ``checks_crc``: whether the server
    checks CRC-32C, None if that is not known yet. ``pace``: what the uploads have shown.
    """

    def __init__(self, options: S3Options) -> None:
        super().__init__(options.concurrency or MAX_REQUESTS, options.timeout)
        self.options = options
        self.pace = Pace()
        self.checks_crc: bool | None = None
        self.clients = Clients(options)
        self._lock = Lock()

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
        """The URL of the server."""
        return str(self.clients.client(1, 1).meta.endpoint_url)

    @property
    def is_encrypted(self) -> bool:
        return self.url.startswith("https:")


_AWS = re.compile(r"\.amazonaws\.com(\.cn)?(:|/|$)")
_endpoints: dict[tuple[int, S3Options, frozenset[tuple[str, str]]], Endpoint] = {}


def shared_endpoint(options: S3Options) -> Endpoint:
    """Return the endpoint with these options that all stores of this process share.

    A forked process gets its own: connections cannot be shared. So does a process that has changed
    its environment variables. Raises ``StoreError`` if boto3 is not installed.
    """
    try:
        import boto3  # noqa: F401
    except ImportError as e:
        raise StoreError("An s3:// store needs the package boto3", todo=INSTALL) from e
    key = (os.getpid(), options, aws_variables())
    found = _endpoints.get(key)  # each request asks for it
    return _endpoints.setdefault(key, Endpoint(options)) if found is None else found
