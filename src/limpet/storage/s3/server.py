"""The options of ``s3://``, and the clients of one server with its credentials."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from threading import Lock
from typing import Any, ClassVar

from limpet.deadline import Call, Deadline
from limpet.errors import StoreError, Unavailable
from limpet.settings import BOTO3_VARIABLES, find_variables
from limpet.storage.options import (
    INSTALL,
    WEB_URL,
    BucketOptions,
    fit_timeout,
    is_web_url,
    option,
    part_option,
    switch,
    text,
)
from limpet.storage.retry import Server
from limpet.types import MIB
from limpet.version import __version__

CREDENTIALS_TIMEOUT = 5
"""Seconds for each of two tries of a service that issues credentials (STS, SSO)."""

_LAST_MINUTES = 11 * 60
"""Seconds before credentials expire from which on a request waits for other ones. (boto3 waits from
10 minutes before on, and without a limit.)"""

MAX_REQUESTS = 32
"""The default of the largest number of requests in progress."""


@dataclass(frozen=True, slots=True)
class S3Options(BucketOptions):
    """The options of ``limpet.open_store("s3://...", **options)``. See also ``BucketOptions``.

    What is None comes from the environment variables and files of the AWS tools: ``endpoint`` (the
    URL of a server with the API of S3), ``region``, ``profile``, and the credentials.
    ``addressing``: "path" or "virtual"; by default "path" for an endpoint other than that of AWS.
    ``equal_parts``: make all parts but the last equal in length, as Cloudflare R2 requires; this
    takes another copy in memory. ``part_size``: by default, 28 MiB: a request takes 1 to 2 ms of a
    processor. ``concurrency``: also the number of parts for which a save takes memory at once; by
    default, 32, and as many parts as have 56 MiB, but at least 2.
    """

    region: str | None = text()
    profile: str | None = text()
    access_key_id: str | None = text(is_secret=True)
    secret_access_key: str | None = text(is_secret=True)
    session_token: str | None = text(is_secret=True)
    addressing: str | None = text("'path' or 'virtual'", ("path", "virtual").__contains__)
    equal_parts: bool = switch()
    part_size: int = part_option(28 * MIB)
    concurrency: int | None = option(  # type: ignore[assignment]
        None, (int, type(None)), "1 to 1024", lambda n: n is None or 1 <= n <= 1024
    )

    kind: ClassVar[str] = "an S3 store"

    def check_combination(self) -> None:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise StoreError(
                "An S3 store got one of access_key_id= and secret_access_key=",
                expected="both or neither",
            )


_AWS = re.compile(r"\.amazonaws\.com(\.cn)?(:|/|$)")


class S3Server(Server):
    """The clients with certain options and environment variables. One thread fetches credentials,
    for which each request waits until its deadline: boto3 would wait forever within a request."""

    def __init__(self, options: S3Options, variables: frozenset[tuple[str, str]]) -> None:
        super().__init__(options.concurrency or MAX_REQUESTS, options.timeout)
        self.variables = variables
        self.url = "the endpoint"
        self._options = options
        self._lock = Lock()
        self._fetching: Call[None] | None = None
        self._refused: Any = None  # the last credentials that the server has refused
        self._forget_credentials()

    def client(self, deadline: Deadline, longest: int) -> Any:
        """Return a client with timeouts of at most ``longest``, by the deadline; ``Unavailable`` if
        the credentials do not arrive in time."""
        self._await_credentials(deadline)
        timeout = fit_timeout(min(deadline.seconds_left, longest))
        with self._lock:  # the creation of clients is not thread-safe
            client = self._clients.get(timeout) or self._create_client(timeout)
            self._clients[timeout] = client
        return client

    def look_for_credentials(self, client: Any) -> bool:
        """Look for credentials again, because a client's were refused; return whether that may
        help. boto3 keeps expired ones, unless it knows when they expire."""
        with self._lock:
            if client is not None and client not in self._clients.values():
                return True  # another thread has done this
            known, self._refused = self._refused, self._found
            self._forget_credentials()
            return bool(self._refused != known)

    def _forget_credentials(self) -> None:
        self._session: Any = None
        self._credentials: Any = None
        self._found: Any = None  # what they were when they were fetched
        self._clients: dict[int, Any] = {}

    def _await_credentials(self, deadline: Deadline) -> None:
        """Wait for credentials that are valid for some minutes, or none at all. boto3 renews them
        15 minutes before they expire; until ``_LAST_MINUTES``, requests do not wait for that."""
        is_due = getattr(self._credentials, "refresh_needed", None)
        if self._session is not None and (is_due is None or not is_due()):
            return
        with self._lock:
            if self._fetching is None or self._fetching.wait(0):
                self._fetching = Call(self._fetch, "limpet-credentials")
            fetching = self._fetching
        if self._session is not None and is_due is not None and not is_due(_LAST_MINUTES):
            return
        if not fetching.wait(deadline.seconds_left):
            raise Unavailable(
                "The credentials did not arrive in time",
                todo="Check credential_process, STS, or SSO in the configuration of AWS",
            )
        fetching.result()

    def _fetch(self) -> None:
        """Find the credentials, or renew those that expire soon."""
        if self._session is None:
            session, options = self._create_session(), self._options
            credentials = None if options.anonymous else session.get_credentials()
            url = session.client("s3", endpoint_url=options.endpoint).meta.endpoint_url
            if not is_web_url(url):
                raise StoreError(
                    "The endpoint in the environment variables or files of AWS is invalid",
                    expected=WEB_URL,
                )
            self.url = url
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
        import boto3
        import botocore
        from botocore.config import Config

        options = self._options
        # most servers have one name, to which "auto" would prepend that of the bucket
        addressing = options.addressing or ("auto" if _AWS.search(self.url) else "path")
        return self._session.client(
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
                user_agent=f"limpet/{__version__} boto3/{boto3.__version__}",
                # the parts have checksums of their own: signing them takes five times as long
                s3={"addressing_style": addressing, "payload_signing_enabled": False},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


_servers: dict[tuple[int, S3Options], S3Server] = {}
_lock = Lock()


def shared_server(options: S3Options) -> S3Server:
    """Return the server that all stores of this process with these options and AWS variables share.
    A fork gets its own: connections cannot be shared."""
    try:
        import boto3  # noqa: F401
    except ImportError as e:
        raise StoreError("An s3:// store needs the package boto3", todo=INSTALL) from e
    key, variables = (os.getpid(), options), find_variables(BOTO3_VARIABLES)
    with _lock:
        found = _servers.get(key)
        if found is None or found.variables != variables:
            found = _servers[key] = S3Server(options, variables)
    return found
