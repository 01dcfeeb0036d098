"""The requests to one bucket: reads, conditional creation, and the ends of uploads.

The server is asked to create an object only if the key does not exist (``If-None-Match: *``). A
server that ignores this could let two writers both commit, so each process checks once that it
does not. (AWS announced the condition in August 2024; Ceph, MinIO, and R2 have it too.)
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from limpet.deadline import Deadline
from limpet.errors import Denied, NotFound, StoreError, Unavailable
from limpet.storage.checks import too_long_error
from limpet.storage.remote import BucketStore
from limpet.storage.s3.endpoint import (
    MIN_PART,
    READ_SIZE,
    Clients,
    Endpoint,
    S3Options,
    shared_endpoint,
)
from limpet.storage.s3.failures import (
    find_other_md5,
    no_tag_error,
    shows_credentials,
    translate,
)
from limpet.storage.store import Stat, Traits
from limpet.storage.throttle import Statistics
from limpet.threads import no_op
from limpet.types import MIB

T = TypeVar("T")

FIRST_BLOCK, _FAST = 64 << 10, 0.1
"""The length of the first block of a reply, in bytes, and the seconds in which a block is fast."""

_SLOWEST = 20_000
"""Bytes per second from which on a block that has become slow still ends by the deadline."""

_PERMISSION = ("AccessDenied", "403")
"""The codes of a server that has accepted the credentials."""


class S3Bucket(BucketStore):
    """The requests that ``S3Store`` and ``S3Upload`` share, for the objects below ``prefix``."""

    def __init__(self, bucket: str, prefix: str, options: S3Options) -> None:
        super().__init__(f"s3://{bucket}", prefix, options.timeout)
        self.bucket = bucket
        self.options = options
        shared_endpoint(options)  # raises if boto3 is missing

    def statistics(self) -> Statistics:
        """Return the statistics of all requests of this process with these options."""
        found, endpoint = super().statistics(), self.endpoint
        return replace(found, part_size=endpoint.part_size, connections=endpoint.connections)

    @property
    def endpoint(self) -> Endpoint:
        return shared_endpoint(self.options)

    @property
    def traits(self) -> Traits:
        endpoint, part_size = self.endpoint, self.options.part_size
        return Traits(
            "s3",
            1,
            durable=True,
            part_size=part_size or MIN_PART,
            max_part=part_size or endpoint.part_size,
            connections=endpoint.connections,
            read_size=READ_SIZE,
            retry_after=True,
            upload_memory=2 * (part_size or 16 * MIB),  # see COLLECTED_PART
            spread=self.options.spread,
        )

    # -- writing -------------------------------------------------------------------------------

    def _try_to_create(self, client: Any, name: str, key: str, data: bytes) -> bool:
        checksum = hashlib.md5(data, usedforsecurity=False).digest()
        try:
            with self.translated("write", key):
                reply = client.put_object(
                    Bucket=self.bucket,
                    Key=name,
                    Body=data,
                    ContentMD5=base64.b64encode(checksum).decode(),
                    IfNoneMatch="*",
                )
        except StoreError as e:
            if e.fields.get("status") == 412:
                return False
            raise
        if not reply.get("ETag"):
            raise no_tag_error(key, self.url)
        return True

    def _other_server(self) -> str:
        return (
            f"Use a server other than {self.endpoint.url}, with conditional writes, such as AWS,"
            " Ceph, MinIO, or R2. Ceph ignores the condition in a bucket with versioning: use one"
            " without"
        )

    def abort_others(self, key: str, upload_id: str, seconds: float) -> None:
        """Abort the uploads of an object whose ids a lost reply had.

        ``upload_id``: the upload that goes on. ``seconds``: the time before it in which the others
        were begun. Older ones belong to another process, such as a copy of the same version.
        """
        found = [u for u in self.uploads(self.object_name(key)) if u[0] == key]
        own = next((begun for _, found_id, begun in found if found_id == upload_id), None)
        for _, found_id, begun in found:
            if own and found_id != upload_id and begun >= own - timedelta(seconds=seconds):
                self.abort_upload(key, found_id)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort a multipart upload, and delete its parts. It may be gone already."""
        name = self.object_name(key)

        def abort(client: Any) -> None:
            client.abort_multipart_upload(Bucket=self.bucket, Key=name, UploadId=upload_id)

        try:
            self.call("AbortMultipartUpload", "abort the upload of", key, abort)
        except NotFound:
            return

    # -- reading -------------------------------------------------------------------------------

    def get(self, key: str, limit: int) -> bytes:
        name = self.object_name(key)
        store = self.within(self.deadline_for("read", key))  # one deadline for all tries
        arrived: set[str] = set()

        def read(client: Any) -> bytes:
            reply = client.get_object(Bucket=self.bucket, Key=name)
            with closing(reply["Body"]) as body:
                self.require_field(reply, "ETag", key)
                length = int(reply["ContentLength"])
                if length > limit:
                    raise too_long_error(key, self.url, limit, length)
                data = bytearray(length)
                store.read_body(body, memoryview(data), key, no_op)
            md5 = find_other_md5(reply, data)
            # the same bytes twice have not changed on their way: the tag is of another kind
            if md5 is not None and md5 not in arrived:
                arrived.add(md5)
                raise Unavailable(
                    f"{key} changed on its way from {self.url}",
                    expected=f"the MD5 {reply['ETag']}",
                    key=key,
                    store=self.url,
                )
            return bytes(data)

        return store.call("GetObject", "read", key, read)

    def read_body(
        self,
        body: Any,
        view: memoryview,
        key: str,
        advance: Callable[[int], object],
        size: int = FIRST_BLOCK,
    ) -> int:
        """Fill the view. Raises ``Unavailable`` if the reply ends before, or is too slow.

        boto3 returns when a block is full. The blocks begin small and grow as long as they arrive
        fast, so that the deadline is checked in time. Near the deadline, they are small: a reply
        may become slow. ``size``: that of the first block. Returns that of the next one, for more
        of the same reply.
        """
        deadline, done = self.deadline_for("read", key), 0
        while done < len(view):
            before = deadline.clock()
            block = max(FIRST_BLOCK // 16, int(min(size, _SLOWEST * deadline.seconds_left)))
            count = body.readinto(view[done : done + block])
            if not count:
                raise Unavailable(
                    f"The reply for {key} in {self.url} is incomplete", store=self.url, key=key
                )
            done += count
            advance(count)
            if done < len(view) and not deadline.seconds_left:
                raise Unavailable(
                    f"Reading {key} in {self.url} is too slow", store=self.url, key=key
                )
            is_fast = deadline.clock() - before < _FAST
            size = min(2 * size, MIB) if is_fast else max(size // 2, FIRST_BLOCK // 16)
        return size

    def _head(self, client: Any, name: str, key: str) -> Stat:
        with self.translated("look up", key):
            reply = client.head_object(Bucket=self.bucket, Key=name)
        for field in ("ContentLength", "LastModified"):
            if field not in reply:
                with suppress(Denied):
                    self._list_any(client)  # raises if this is a web server, not a lost header
                raise Unavailable(
                    f"The reply for {key} in {self.url} lacks {field}", key=key, store=self.url
                )
        return Stat(key, int(reply["ContentLength"]), int(reply["LastModified"].timestamp()))

    def _get_first_byte(self, client: Any, name: str, key: str) -> None:
        with self.translated("look up", key):
            client.get_object(Bucket=self.bucket, Key=name, Range="bytes=0-0")["Body"].close()

    def _list_any(self, client: Any) -> None:
        with self.translated("look up", ""):
            page = client.list_objects_v2(Bucket=self.bucket, MaxKeys=1, Prefix=self.prefix)
        self.require_field(page, "IsTruncated")

    def uploads(self, start: str) -> Iterator[tuple[str, str, Any]]:
        """Yield the key, the id, and the time of each upload of an object whose name begins so."""
        pages = self.pages(
            "ListMultipartUploads",
            start,
            {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"},
            lambda client, at: client.list_multipart_uploads(
                Bucket=self.bucket, Prefix=start, **at
            ),
        )
        for page in pages:
            for found in page.get("Uploads", ()):
                yield found["Key"][len(self.prefix) :], found["UploadId"], found["Initiated"]

    def pages(
        self,
        operation: str,
        start: str,
        markers: Mapping[str, str],
        request: Callable[[Any, dict[str, str]], Any],
    ) -> Iterator[Any]:
        """Yield the replies that list what begins with ``start``.

        ``markers``: the parameters that continue a list, and the fields of the reply before that
        have their values. Raises ``StoreError``, also when the deadline of a view has passed.
        """
        at: dict[str, str] = {}
        while True:

            def read(client: Any, at: dict[str, str] = at) -> Any:
                try:
                    with self.translated("list", start):
                        page = request(client, at)
                except NotFound as e:
                    raise self._no_list_error() from e
                self.require_field(page, "IsTruncated")
                for field in markers.values() if page["IsTruncated"] else ():
                    self.require_field(page, field)
                return page

            page = self.call(operation, "list", start.rstrip("/"), read)
            self.endpoint.known.add(self.root)
            yield page
            if not page["IsTruncated"]:
                return
            before, at = at, {name: page[field] for name, field in markers.items()}
            if at == before:
                raise self._no_list_error()
            if self.deadline is not None:
                self.deadline.check()

    def _no_list_error(self) -> StoreError:
        """Return the error for a server that has no list, or one that does not end."""
        return StoreError(
            f"Cannot list {self.url}: {self.endpoint.url} does not answer as S3 does",
            todo="Check the endpoint, which must not contain the name of the bucket",
            store=self.url,
        )

    def require_field(self, reply: Any, name: str, key: str = "") -> None:
        """Raise ``StoreError`` if a reply lacks what every server with the API of S3 sends.

        A web server answers any request, and an empty list of objects would be an empty run.
        """
        if name not in reply:
            raise StoreError(
                f"Cannot use {self.url}: {self.endpoint.url} does not answer as S3 does",
                expected=f"a reply with {name}",
                todo="Check the endpoint",
                key=key,
                store=self.url,
            )

    # -- requests ------------------------------------------------------------------------------

    def _send(
        self, action: str, key: str, request: Callable[[Any], T], deadline: Deadline, longest: int
    ) -> T:
        clients = self.endpoint.clients
        try:
            return self._send_once(clients, action, key, request, deadline, longest)
        except Denied as e:
            if e.fields.get("code") in _PERMISSION:
                raise
            # They keep credentials that the server has refused, or that there were none.
            renewed = self.endpoint.renew(clients)
            if not (e.fields.get("code") and renewed.has_other_credentials(clients, deadline)):
                raise
        return self._send_once(renewed, action, key, request, deadline, longest)

    def _send_once(
        self,
        clients: Clients,
        action: str,
        key: str,
        request: Callable[[Any], T],
        deadline: Deadline,
        longest: int,
    ) -> T:
        with self.translated(action, key):
            return request(clients.client(deadline, longest))

    @contextmanager
    def translated(self, action: str, key: str) -> Iterator[None]:
        """Raise an error of boto3 in the block as that of this store."""
        try:
            yield
        except StoreError:
            raise
        except Exception as e:  # noqa: BLE001  (raised as an error of the store)
            error = translate(e, action, key, self.url, self.endpoint.url)
            raise error from (None if shows_credentials(e) else e)
