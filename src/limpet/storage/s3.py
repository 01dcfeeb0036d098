"""A store in a folder of an S3 bucket, or of a server with its API, through boto3.

Terms: a *part* of a multipart upload; an *endpoint* is one server, with the limits of its requests.

The server is asked to create an object only if the key does not exist (``If-None-Match: *``).
(AWS announced the condition in August 2024; Ceph, MinIO, and R2 have it, too.)
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from threading import Lock
from typing import Any, ClassVar

from limpet.deadline import Call, Deadline, call_within
from limpet.errors import Denied, NoSpace, NotFound, StoreError, Unavailable
from limpet.settings import BOTO3_VARIABLES, find_variables
from limpet.storage.options import (
    LONGEST_TIMEOUT,
    WEB_URL,
    BucketOptions,
    fit_timeout,
    is_web_url,
    option,
    part_option,
    switch,
    text,
)
from limpet.storage.retry import LEAST_RATE, Remote, RemoteUpload, Reply, RetryStore, Server
from limpet.storage.store import (
    Entry,
    Stat,
    Traits,
    exists_error,
    is_partial,
    lost_upload_error,
    part_length,
    replaced_error,
    short_read_error,
)
from limpet.text import advise_install, hide_secrets
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
        raise StoreError(
            "An s3:// store needs the package boto3", todo=advise_install("cloud")
        ) from e
    key, variables = (os.getpid(), options), find_variables(BOTO3_VARIABLES)
    with _lock:
        found = _servers.get(key)
        if found is None or found.variables != variables:
            found = _servers[key] = S3Server(options, variables)
    return found


# -- the tries of a store -------------------------------------------------------------------------

READ_SIZE = 64 * MIB
"""The largest range to read with one request, in bytes. Its bytes need no memory at once."""

IN_FLIGHT = 56 * MIB
"""The bytes of parts for which a save takes memory at once, besides what is staged."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PERMISSION = ("AccessDenied", "403")
"""The codes of a server that has accepted the credentials."""


class S3Folder(Remote):
    """A folder of a bucket, or a whole bucket."""

    def __init__(self, bucket: str, folder: str, options: S3Options) -> None:
        super().__init__(f"s3://{bucket}", folder)
        self.bucket = bucket
        self.options = options
        shared_server(options)  # raises if boto3 is missing

    @property
    def server(self) -> S3Server:
        return shared_server(self.options)

    @property
    def traits(self) -> Traits:
        return Traits(
            "s3",
            1,
            durable=True,
            part_size=self.options.part_size,
            connections=self.options.concurrency or max(2, IN_FLIGHT // self.options.part_size),
            read_size=READ_SIZE,
            upload_memory=2 * self.options.part_size,
            spread=self.options.spread,
        )

    # -- reading -------------------------------------------------------------------------------

    def stat(self, key: str) -> Stat:
        name = self.object_name(key)
        try:
            reply = self.send("head_object", "look up", key, Key=name)
        except NotFound:  # the reply to a HEAD has no reason
            self._require_bucket()
            raise
        except StoreError as e:
            if isinstance(e, Denied) or e.fields.get("status") == 400:
                self.send("get_object", "look up", key, Key=name, Range="bytes=0-0")["Body"].close()
            raise
        if "LastModified" not in reply:
            self._require_bucket()  # raises if this is a web server
        with self.translated("look up", key):  # without one of these, ``Unavailable``
            return Stat(key, int(reply["ContentLength"]), int(reply["LastModified"].timestamp()))

    def _require_bucket(self) -> None:
        """Raise ``StoreError`` if the bucket is missing."""
        if self.root not in self.server.known:
            with suppress(Denied):  # it may be there
                page = self.send("list_objects_v2", "look up", "", Prefix=self.prefix, MaxKeys=1)
                self._require_field(page, "IsTruncated")
            self.server.known.add(self.root)

    def open(self, key: str, offset: int, length: int | None, tag: str) -> Reply:
        fields: dict[str, Any] = {"IfMatch": tag} if tag else {}
        if length is not None:
            fields["Range"] = f"bytes={offset}-{offset + length - 1}"
        try:
            reply = self.send("get_object", "read", key, Key=self.object_name(key), **fields)
        except StoreError as e:
            if e.fields.get("status") == 416:
                raise short_read_error(key, self.url, offset, length or 0, 0) from e
            raise
        if length is None:
            self._require_field(reply, "ETag", key)
        where = reply.get("ContentRange", "the whole object")
        if length is not None and not where.startswith(f"bytes {offset}-"):
            raise StoreError(
                f"{self.server.url} does not answer requests for a part of an object",
                expected=f"bytes {offset}- of {key}",
                found=where,
                todo="Check the endpoint",
                key=key,
                store=self.url,
            )
        return _S3Reply(self, key, reply)

    def page(
        self, folder: str, prefix: str, marker: Any, *, deep: bool, partial: bool
    ) -> tuple[Sequence[Entry], Any]:
        start = self.object_name(folder) + "/" if folder else self.prefix
        if partial:
            uploads, marker = self._upload_page(start, marker)
            entries = []
            for name, upload_id, initiated in uploads:
                above, slash, last = name.rpartition("/")
                key = f"{above}{slash}.{_tag(upload_id)}.{last}.partial"
                stat = Stat(key[len(self.prefix) :], 0, int(initiated.timestamp()))
                entries.append(Entry(key[len(start) :], "object", stat))
            return entries, marker
        fields = {} if deep else {"Delimiter": "/"}
        if marker is not None:
            fields["ContinuationToken"] = marker
        page = self._list("list_objects_v2", Prefix=start + prefix, **fields)
        found: list[Entry] = [
            Entry(common["Prefix"][len(start) : -1], "folder")
            for common in page.get("CommonPrefixes", ())
        ]
        for item in page.get("Contents", ()):
            name, modified = item["Key"][len(start) :], int(item["LastModified"].timestamp())
            if name and not name.endswith("/"):  # the console creates "folders" as empty objects
                stat = Stat(item["Key"][len(self.prefix) :], int(item["Size"]), modified)
                found.append(Entry(name, "object", stat))
        after = page["NextContinuationToken"] if page["IsTruncated"] else None
        return found, self._next(after, marker)

    def _upload_page(self, start: str, marker: Any) -> tuple[list[tuple[str, str, Any]], Any]:
        """Return the name, the id, and the time of some uploads whose names begin so."""
        fields = {} if marker is None else dict(zip(_MARKERS, marker, strict=True))
        page = self._list("list_multipart_uploads", Prefix=start, **fields)
        after = tuple(page[f"Next{name}"] for name in _MARKERS) if page["IsTruncated"] else None
        found = [(u["Key"], u["UploadId"], u["Initiated"]) for u in page.get("Uploads", ())]
        return found, self._next(after, marker)

    def uploads(self, name: str) -> Iterator[str]:
        """Yield the ids of the uploads of an object. All pages are one try."""
        marker = None
        while True:
            found, marker = self._upload_page(name, marker)
            yield from (upload_id for found_name, upload_id, _ in found if found_name == name)
            if marker is None:
                return

    def _list(self, method: str, **fields: Any) -> Any:
        try:
            page = self.send(method, "list", "", **fields)
        except NotFound as e:
            raise self._no_list_error() from e
        self._require_field(page, "IsTruncated")
        names = ["ContinuationToken"] if method == "list_objects_v2" else _MARKERS
        for name in names if page["IsTruncated"] else ():
            self._require_field(page, f"Next{name}")
        self.server.known.add(self.root)
        return page

    def _next(self, marker: Any, before: Any) -> Any:
        if marker is not None and marker == before:
            raise self._no_list_error()
        return marker

    def _no_list_error(self) -> StoreError:
        """Return the error for a server that has no list, or one that does not end."""
        return StoreError(
            f"Cannot list {self.url}: {self.server.url} does not answer as S3 does",
            todo="Check the endpoint, which must not contain the name of the bucket",
            store=self.url,
        )

    def _require_field(self, reply: Any, name: str, key: str = "") -> None:
        """Raise ``StoreError`` if a reply lacks what every S3 server sends: a web server answers
        any request, and an empty list would be an empty run."""
        if name not in reply:
            raise StoreError(
                f"Cannot use {self.url}: {self.server.url} does not answer as S3 does",
                expected=f"a reply with {name}",
                todo="Check the endpoint",
                key=key,
                store=self.url,
            )

    # -- writing -------------------------------------------------------------------------------

    def create(self, key: str, data: bytes | memoryview) -> bool:
        body = PartBody([memoryview(data)], self.deadline)
        fields: dict[str, Any] = {
            "Key": self.object_name(key),
            "Body": body,
            "ContentMD5": md5([data]),
        }
        try:
            reply = self.send("put_object", "write", key, IfNoneMatch="*", **fields)
        except StoreError as e:
            if e.fields.get("status") == 412:
                return False
            raise
        finally:
            body.release()
        if not reply.get("ETag"):
            raise no_tag_error(key, self.url)
        return True

    def begin(self, key: str, length: int, head: int) -> RemoteUpload | None:
        head = 0 if self.options.equal_parts else head
        part = part_length(self.traits, length)
        if length <= head + part:
            return None
        name = self.object_name(key)
        reply = self.send(
            "create_multipart_upload", "write", key, Key=name, ChecksumAlgorithm="CRC32C"
        )
        if not reply.get("UploadId"):
            raise no_tag_error(key, self.url)
        # a server that does not know this checksum also gets an MD5, unless TLS protects the bytes
        has_crc = "ChecksumAlgorithm" in reply or self.server.url.startswith("https:")
        return S3Parts(key, name, str(reply["UploadId"]), head, part, length, has_crc)

    def delete(self, key: str) -> None:
        folder, slash, name = key.rpartition("/")
        if not is_partial(name):
            self.send("delete_object", "delete", key, Key=self.object_name(key))
            return
        object_name = self.object_name(folder + slash + name.removesuffix(".partial")[18:])
        for upload_id in [*self.uploads(object_name)]:
            if name.startswith(f".{_tag(upload_id)}."):
                self.abort_upload(key, object_name, upload_id)

    def abort_upload(self, key: str, name: str, upload_id: str) -> None:
        """Abort a multipart upload, and delete its parts. It may be gone already."""
        with suppress(NotFound):
            action = "abort the upload of"
            self.send("abort_multipart_upload", action, key, Key=name, UploadId=upload_id)

    # -- requests ------------------------------------------------------------------------------

    def send(self, method: str, action: str, key: str, longest: int = 15, **fields: Any) -> Any:
        """Send one request, with a timeout of at most ``longest`` seconds for each packet, and four
        times as long for all of it. ``Unavailable``: other credentials may help, too."""
        server, client = self.server, None
        seconds = 4 * longest + getattr(fields.get("Body"), "length", 0) / LEAST_RATE
        limit = Deadline.after(seconds, f"{action} {key}").earlier(self.deadline)
        try:
            with self.translated(action, key):
                client = server.client(self.deadline, longest)
                server.throttle.count(method.title().replace("_", ""))
                request = partial(getattr(client, method), Bucket=self.bucket, **fields)
                return call_within(limit, request)  # a packet now and then renews boto3's timeout
        except Denied as e:
            code = e.fields.get("code")
            if code not in _PERMISSION and server.look_for_credentials(client) and code:
                raise Unavailable(f"{e} (trying again with other credentials)", **e.fields) from e
            raise

    @contextmanager
    def translated(self, action: str, key: str) -> Iterator[None]:
        """Raise an error of boto3 in the block as that of this store."""
        try:
            yield
        except StoreError as e:  # of the credentials, or of the endpoint
            what = f"Cannot {action} {key or 'the bucket'} in {self.url}: {e}"
            raise type(e)(what, key=key, store=self.url) from e
        except Exception as e:  # noqa: BLE001  (raised as an error of the store)
            error = translate(e, action, key, self.url, self.server.url)
            raise error from (None if shows_credentials(e) else e)


_MARKERS = ("KeyMarker", "UploadIdMarker")


def _tag(upload_id: str) -> str:
    return hashlib.sha256(upload_id.encode()).hexdigest()[:16]


class _S3Reply(Reply):
    def __init__(self, folder: S3Folder, key: str, reply: Any) -> None:
        length, tag = int(reply["ContentLength"]), reply.get("ETag", "")
        super().__init__(key, folder.url, length, tag, stated_md5(reply))
        self._folder, self._body = folder, reply["Body"]

    def receive(self, most: int, deadline: Deadline) -> bytes:
        """See ``Reply``. boto3 would return when a block is full, however slowly it arrives."""
        with self._folder.translated("read", self._key):
            data: bytes = self._body._raw_stream.read1(min(MIB, most))
        return data

    def close(self) -> None:
        self._body.close()


@dataclass(eq=False)
class S3Parts:
    """A multipart upload, whose part ``n`` is a fixed range. The server checks each part's CRC-32C,
    or its MD5 without ``has_crc``."""

    key: str
    name: str
    id: str
    head: int
    part: int
    length: int
    has_crc: bool
    _lock: Any = field(default_factory=Lock)
    _parts: dict[int, dict[str, Any]] = field(default_factory=dict)
    _condition: dict[str, str] = field(default_factory=lambda: {"IfNoneMatch": "*"})
    _may_be_complete: bool = False

    def write(self, folder: S3Folder, offset: int, views: Sequence[memoryview]) -> None:
        number = max(0, offset - self.head) // self.part + 1
        crc: dict[str, Any] = {"ChecksumCRC32C": crc32c(views)}
        other: dict[str, Any] = {} if self.has_crc else {"ContentMD5": md5(views)}
        body = PartBody(views, folder.deadline)
        fields: dict[str, Any] = {
            "Key": self.name,
            "UploadId": self.id,
            "PartNumber": number,
            "Body": body,
        }
        try:
            reply = folder.send("upload_part", "write", self.key, **fields, **crc, **other)
        except NotFound as e:
            raise lost_upload_error(self.key, folder.url) from e
        finally:
            body.release()
        if not reply.get("ETag"):
            raise no_tag_error(self.key, folder.url)
        part = {"PartNumber": number, "ETag": reply["ETag"]}
        if "ChecksumCRC32C" in reply:
            part |= crc
        with self._lock:
            self._parts[number] = part

    def commit(self, folder: S3Folder) -> None:
        parts = [self._parts[number] for number in sorted(self._parts)]
        fields = {"Key": self.name, "UploadId": self.id, "MultipartUpload": {"Parts": parts}}
        method, longest = "complete_multipart_upload", LONGEST_TIMEOUT
        try:
            folder.send(method, "complete", self.key, longest, **fields, **self._condition)
        except StoreError as e:
            status = e.fields.get("status")
            if status == 501 and self._condition:
                self._condition = {}  # the key is unique, so the condition is not essential
                self.commit(folder)
            elif status not in (404, 412):
                self._may_be_complete |= isinstance(e, Unavailable)
                raise
            elif not (self._may_be_complete and self._is_complete(folder)):
                error = exists_error(self.key, folder.url)
                raise (error if status == 412 else lost_upload_error(self.key, folder.url)) from e

    def _is_complete(self, folder: S3Folder) -> bool:
        """Return True if the object is this one, after a lost reply: the upload is gone. If it is
        still there, another writer has created the object."""
        try:
            if self.id in folder.uploads(self.name):
                return False
            return folder.stat(self.key).length == self.length
        except NotFound:
            return False
        except StoreError as e:
            raise e.with_advice(outcome="unknown") from e

    def abort(self, folder: S3Folder) -> None:
        folder.abort_upload(self.key, self.name, self.id)


class PartBody:
    """The bytes of a part or an object, as the file that boto3 wants: the caller's memory.

    urllib3 asks for 16 KiB, too many turns under the interpreter's lock, and sends what it gets. A
    block must be sent before a timeout, on a slow network, too.
    """

    def __init__(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        self._views = views
        self.length = sum(map(len, views))
        self._deadline = deadline
        self._at = 0

    def read(self, size: int = -1) -> memoryview | bytes:
        if not self._deadline.seconds_left:
            raise TimeoutError("the deadline has passed")
        start = self._at
        for view in self._views:
            if start < len(view):
                block = view[start : start + MIB]
                self._at += len(block)
                return block
            start -= len(view)
        return b""

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def release(self) -> None:
        """Drop the memory: reference cycles of botocore keep this object for a while."""
        self._views = ()


def crc32c(views: Sequence[memoryview]) -> str:
    """Return the CRC-32C of bytes in several places, as S3 writes it."""
    try:
        from awscrt.checksums import crc32c as update
    except ImportError as e:
        raise StoreError(
            "An s3:// store needs the package awscrt", todo=advise_install("cloud")
        ) from e
    value = reduce(lambda crc, view: update(view, crc), views, 0)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def md5(views: Sequence[memoryview | bytes]) -> str:
    """Return the MD5 of bytes in several places, as S3 writes it."""
    value = hashlib.md5(usedforsecurity=False)
    for view in views:
        value.update(view)
    return base64.b64encode(value.digest()).decode()


def open_s3(url: str, **options: Any) -> RetryStore:
    """Return the store at ``s3://BUCKET/folder``, with ``S3Options``. Characters such as ``%`` and
    ``+`` stand for themselves."""
    bucket, _, folder = url.removeprefix("s3://").partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise StoreError(
            f"{url} does not name a bucket", expected="s3://BUCKET/folder", found=repr(bucket)
        )
    found = S3Options.from_mapping(options)
    return RetryStore(S3Folder(bucket, folder.rstrip("/"), found), found.timeout)


_THROTTLED = {
    "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded",
    "TooManyRequestsException", "ServiceUnavailable", "503", "429",
}  # fmt: skip
"""The codes with which a server asks for fewer requests. It has done nothing, except for "503"."""

_TRY_AGAIN = {
    "InternalError", "RequestTimeout", "OperationAborted", "ConditionalRequestConflict", "Busy",
    "BadDigest", "XAmzContentChecksumMismatch", "IncompleteBody", "InvalidDigest",
    "XAmzContentSHA256Mismatch", "408", "409", "500", "502", "504",
}  # fmt: skip
"""The codes of failures that may be gone at the next try."""

_DENIED = {
    "InvalidAccessKeyId": "The server does not know the access key: check the credentials",
    "SignatureDoesNotMatch": "Check the secret key of the credentials, and the endpoint",
    "ExpiredToken": "The credentials have expired: renew them",
    "ExpiredTokenException": "The credentials have expired: renew them",
    "InvalidToken": "The session token is invalid: renew the credentials",
    "RequestTimeTooSkewed": "The clock of this machine is wrong: synchronize it (NTP)",
    "AccessDenied": "Allow s3:GetObject, PutObject, DeleteObject, ListBucket,"
    " AbortMultipartUpload, and ListBucketMultipartUploads; without ListBucket, S3 also denies"
    " access to objects that do not exist",
}

_CREDENTIALS = (
    "Tried: the options access_key_id and profile of limpet.open_store, the variables"
    " AWS_ACCESS_KEY_ID, AWS_PROFILE, and AWS_WEB_IDENTITY_TOKEN_FILE, the files ~/.aws/config and"
    " ~/.aws/credentials (with credential_process, or SSO after `aws sso login`), and the metadata"
    " services of ECS and EC2."
    " For a public bucket, use limpet.open_store(url, anonymous=True)"
)


_NO_TLS = re.compile(
    "WRONG_VERSION_NUMBER|CERTIFICATE_VERIFY_FAILED|UNKNOWN_CA|UNSUPPORTED_PROTOCOL|HANDSHAKE_FAILURE"
)
"""The reasons of OpenSSL that are not gone at the next try."""


_BAD_VALUES = ("Invalid header value", "Invalid endpoint", "Failed to parse: ")
_NO_PROXY = "Failed to connect to proxy"


def shows_credentials(error: Exception) -> bool:
    """Return True if the text of an error of boto3 may contain a header or a password."""
    return any(words in str(error) for words in (*_BAD_VALUES, _NO_PROXY))


def translate(error: Exception, action: str, key: str, url: str, server: str) -> StoreError:
    """Return the store's error, without credentials, for one of boto3 or of reading a reply."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    what = f"Cannot {action} {key or 'the bucket'} in {url}"
    fields: dict[str, Any] = {"key": key, "store": url}
    if isinstance(error, boto.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if action == "read" and status == 412:
            return replaced_error(key, url)
        return _translate_reply(error, what, server, fields)
    if isinstance(error, boto.ProfileNotFound | boto.PartialCredentialsError):
        return Denied(f"{what}: {error}", todo=_CREDENTIALS, **fields)
    if isinstance(
        error,
        boto.NoCredentialsError
        | boto.CredentialRetrievalError
        | boto.TokenRetrievalError
        | boto.SSOError
        | json.JSONDecodeError,
    ):  # the text may be what a program for credentials has printed
        what = f"{what}: there are no credentials ({type(error).__name__})"
        return Denied(what, todo=_CREDENTIALS, **fields)
    if isinstance(error, ResponseParserError):
        todo = "Check the endpoint"
        return StoreError(f"{what}: {server} does not answer as S3 does", todo=todo, **fields)
    return _translate_unanswered(error, what, server, fields)


def _translate_unanswered(
    error: Exception, what: str, server: str, fields: dict[str, Any]
) -> StoreError:
    """Return the error for a request without a reply, or with one that ended early."""
    import urllib3
    from botocore import exceptions as boto

    text = hide_secrets(str(error).strip())
    if any(words in text for words in _BAD_VALUES):  # it may be a password
        what = f"{what}: the endpoint, the URL of the proxy, or a credential is invalid"
        todo = (
            "Check that the endpoint is http://HOST or https://HOST, that HTTP_PROXY and"
            ' HTTPS_PROXY have "/" as %2F and "#" as %23 in a password, and that no credential'
            " contains a line break"
        )
        return StoreError(what, todo=todo, **fields)
    if _NO_PROXY in text:
        todo = "Check HTTP_PROXY, HTTPS_PROXY, and NO_PROXY"
        return Unavailable(f"{what}: the proxy cannot be reached", todo=todo, **fields)
    if isinstance(error, boto.SSLError) and _NO_TLS.search(text):
        todo = f"Check the endpoint, {server}, and the certificate (AWS_CA_BUNDLE)"
        return StoreError(f"{what}: {text}", todo=todo, **fields)
    if isinstance(error, boto.ParamValidationError | ValueError):
        todo = "Check the URL, the region, and the endpoint (http://HOST or https://HOST)"
        return StoreError(f"{what}: {text}", todo=todo, **fields)
    broken = boto.ConnectionError | boto.HTTPClientError | boto.IncompleteReadError | OSError
    if isinstance(error, broken | urllib3.exceptions.HTTPError):
        is_unsent = isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError)
        if not is_unsent:
            fields["outcome"] = "unknown"
        return Unavailable(f"{what}: {text}", **fields)
    if isinstance(error, KeyError):
        return Unavailable(f"{what}: the reply lacks {error}", outcome="unknown", **fields)
    return StoreError(f"{what}: {type(error).__name__}: {error}", **fields)


def _translate_reply(error: Any, what: str, server: str, fields: dict[str, Any]) -> StoreError:
    """Return the error for a reply with an error code."""
    metadata = error.response.get("ResponseMetadata", {})
    headers = metadata.get("HTTPHeaders", {})
    status = metadata.get("HTTPStatusCode", 0)
    details = error.response.get("Error", {})
    code = str(details.get("Code", status))
    fields |= {"code": code, "status": status}
    message = details.get("Message") or code
    what = f"{what}: {code}" if message in (code, "Unknown") else f"{what}: {code}: {message}"
    if code in _THROTTLED or status in (429, 503):
        asked = headers.get("retry-after", "").strip()
        pause = float(asked) if asked.isdecimal() else None  # a date: as if it did not say
        if code == "503":  # not of S3, but of a proxy, which may have passed the request on
            fields["outcome"] = "unknown"
        return Unavailable(what, throttled=True, retry_after=pause, **fields)
    if code in _TRY_AGAIN or status >= 500:
        if status == 501:
            return StoreError(what, todo="The server lacks what Limpet needs", **fields)
        return Unavailable(what, outcome="unknown", **fields)
    if code == "NoSuchBucket":
        todo = f"Create the bucket, or check its name and the endpoint, {server}"
        return StoreError(what, todo=todo, **fields)
    if code in ("NoSuchKey", "NotFound", "404", "NoSuchUpload"):
        return NotFound(f"There is no {fields['key']} in {fields['store']}", **fields)
    if code in _DENIED or status in (401, 403):
        return Denied(what, todo=_DENIED.get(code, _DENIED["AccessDenied"]), **fields)
    if region := headers.get("x-amz-bucket-region") or details.get("Region"):
        todo = f"The bucket is in the region {region}: set AWS_DEFAULT_REGION, or region="
        return StoreError(what, todo=todo, **fields)
    if code in ("QuotaExceeded", "EntityTooLarge"):
        return NoSpace(what, todo="Raise the quota, or save elsewhere", **fields)
    return StoreError(what, todo=f"Check the endpoint, {server}", **fields)


def no_tag_error(key: str, url: str) -> Unavailable:
    """Return the error for a reply without the tag of what was written: a server may report success
    before it finds an error, which is then in the body."""
    return Unavailable(
        f"The reply to the write of {key} to {url} lacks the entity tag",
        outcome="unknown",
        key=key,
        store=url,
    )


def stated_md5(reply: Any) -> str:
    """Return the MD5 of an object by its entity tag, or "": an object of one PUT that is not
    encrypted with a key has it. Some tags only look like it."""
    tag = str(reply.get("ETag", "")).strip('"')
    is_md5 = re.fullmatch("[0-9a-f]{32}", tag) is not None
    encryption = (reply.get("ServerSideEncryption") or "AES256", reply.get("SSECustomerAlgorithm"))
    return tag if is_md5 and encryption == ("AES256", None) else ""
