"""The requests to one bucket: reads, conditional creation, and the ends of uploads.

The server is asked to create an object only if the key does not exist (``If-None-Match: *``). A
server that ignores this could let two writers both commit, so each process checks once that it
does not. (AWS announced the condition in August 2024; Ceph, MinIO, and R2 have it too.)
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

from holdfast.deadline import Deadline
from holdfast.errors import Denied, NotFound, StoreError, Unavailable
from holdfast.storage.checks import too_long_error
from holdfast.storage.remote import BucketStore
from holdfast.storage.s3.endpoint import (
    MIN_PART,
    READ_SIZE,
    Clients,
    Endpoint,
    S3Options,
    shared_endpoint,
)
from holdfast.storage.s3.failures import has_other_md5, no_tag_error, require_field, translate
from holdfast.storage.store import Stat, Traits
from holdfast.storage.throttle import Statistics
from holdfast.threads import no_op
from holdfast.types import MIB

T = TypeVar("T")

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
        )

    # -- writing -------------------------------------------------------------------------------

    def _try_to_create(self, client: Any, name: str, key: str, data: bytes) -> bool:
        checksum = hashlib.md5(data, usedforsecurity=False).digest()
        try:
            reply = client.put_object(
                Bucket=self.bucket,
                Key=name,
                Body=data,
                ContentMD5=base64.b64encode(checksum).decode(),
                IfNoneMatch="*",
            )
        except Exception as e:
            error = self.translate(e, "write", key)
            if error.fields.get("status") == 412:
                return False
            raise error from e
        if not reply.get("ETag"):
            raise no_tag_error(key, self.url)
        return True

    def _other_server(self) -> str:
        return (
            f"Use a server other than {self.endpoint.url}, with conditional writes, such as AWS,"
            " Ceph, MinIO, or R2. Ceph ignores the condition in a bucket with versioning: use one"
            " without"
        )

    def abort_others(self, key: str, upload_id: str) -> None:
        """Abort the uploads of an object other than one: those whose ids a lost reply had."""
        name = self.object_name(key)
        for found_key, found_id, _ in list(self.uploads(name)):
            if found_key == key and found_id != upload_id:
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

        def read(client: Any) -> bytes:
            reply = client.get_object(Bucket=self.bucket, Key=name)
            with closing(reply["Body"]) as body:
                require_field(reply, "ETag", self.endpoint.url, self.url, key)
                length = int(reply["ContentLength"])
                if length > limit:
                    raise too_long_error(key, self.url, limit, length)
                data = bytearray(length)
                self.read_body(body, memoryview(data), key, no_op)
            if has_other_md5(reply, data):
                raise Unavailable(
                    f"{key} changed on its way from {self.url}",
                    expected=f"the MD5 {reply['ETag']}",
                    key=key,
                    store=self.url,
                )
            return bytes(data)

        return self.call("GetObject", "read", key, read)

    def read_body(
        self, body: Any, view: memoryview, key: str, advance: Callable[[int], object]
    ) -> None:
        """Fill the view. Raises ``Unavailable`` if the reply ends before."""
        done = 0
        while done < len(view):
            if self.deadline is not None and not self.deadline.seconds_left:
                raise Unavailable(
                    f"Reading {key} in {self.url} is too slow", store=self.url, key=key
                )
            count = body.readinto(view[done : done + MIB])
            if not count:
                raise Unavailable(
                    f"The reply for {key} in {self.url} is incomplete", store=self.url, key=key
                )
            done += count
            advance(count)

    def _head(self, client: Any, name: str, key: str) -> Stat:
        try:
            reply = client.head_object(Bucket=self.bucket, Key=name)
        except Exception as e:
            raise self.translate(e, "look up", key) from e
        return Stat(key, int(reply["ContentLength"]), int(reply["LastModified"].timestamp()))

    def _get_first_byte(self, client: Any, name: str, key: str) -> None:
        try:
            client.get_object(Bucket=self.bucket, Key=name, Range="bytes=0-0")["Body"].close()
        except Exception as e:
            raise self.translate(e, "look up", key) from e

    def _list_any(self, client: Any) -> None:
        try:
            client.list_objects_v2(Bucket=self.bucket, MaxKeys=1, Prefix=self.prefix)
        except Exception as e:
            raise self.translate(e, "look up", "") from e

    def uploads(self, start: str) -> Iterator[tuple[str, str, Any]]:
        """Yield the key, the id, and the time of each upload of an object whose name begins so."""
        position: dict[str, str] = {}
        while True:

            def read(client: Any, position: dict[str, str] = position) -> Any:
                return client.list_multipart_uploads(Bucket=self.bucket, Prefix=start, **position)

            page = self.call("ListMultipartUploads", "list the uploads of", start, read)
            for found in page.get("Uploads", ()):
                yield found["Key"][len(self.prefix) :], found["UploadId"], found["Initiated"]
            if not page.get("IsTruncated"):
                return
            position = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

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
            if not (e.fields.get("code") and renewed.has_other_credentials(clients)):
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
        try:
            return request(clients.client(deadline.seconds_left, longest))
        except StoreError:
            raise
        except Exception as e:
            raise self.translate(e, action, key) from e

    def translate(self, error: Exception, action: str, key: str) -> StoreError:
        """Return the error of this store for an error of boto3."""
        if isinstance(error, StoreError):
            return error
        try:
            server = self.endpoint.url
        except Exception:  # noqa: BLE001  (the client cannot be created, which is the error)
            server = "the endpoint"
        return translate(error, action, key, self.url, server)
