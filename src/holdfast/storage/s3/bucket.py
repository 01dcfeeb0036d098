"""The requests to one bucket: reads, conditional creation, and the ends of uploads.

The server is asked to create an object only if the key does not exist (``If-None-Match: *``). A
server that ignores this could let two writers both commit, so each process checks once that it
does not. (AWS announced the condition in August 2024; Ceph, MinIO, and R2 have it too.)
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from copy import copy
from typing import Any, Self, TypeVar

from holdfast.buffers import as_byte_view
from holdfast.errors import Denied, NotFound, StoreError, Unavailable
from holdfast.storage.checks import (
    check_range,
    check_written_length,
    exists_error,
    short_read_error,
    take_views,
    too_long_error,
)
from holdfast.storage.deadline import Deadline
from holdfast.storage.s3.endpoint import TIMEOUTS, Endpoint, S3Options, shared_endpoint
from holdfast.storage.s3.failures import has_other_md5, no_tag_error, require_field, translate
from holdfast.storage.store import Stat, Traits, check_key
from holdfast.storage.throttle import Statistics
from holdfast.threads import no_op
from holdfast.types import MIB

T = TypeVar("T")

MAX_KEY = 1024
"""The largest length of a key of S3, in bytes."""

_PERMISSION = ("AccessDenied", "403")
"""The codes of a server that has accepted the credentials."""


class S3Bucket:
    """The requests that ``S3Store`` and ``S3Upload`` share, for the objects below ``prefix``.

    ``at(folder)`` and ``within(deadline)`` return views. All stores of a process with equal options
    share their clients and the limit of their requests. ``statistics()`` shows these.
    """

    def __init__(self, bucket: str, prefix: str, options: S3Options) -> None:
        self.bucket = bucket
        self.prefix = check_key(prefix, f"s3://{bucket}") + "/" if prefix else ""
        self.options = options
        self.deadline: Deadline | None = None
        shared_endpoint(options)  # raises if boto3 is missing

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    def at(self, folder: str) -> Self:
        """Return a store for the keys below ``folder``."""
        view = copy(self)
        view.prefix += check_key(folder, self.url) + "/"
        return view

    def within(self, deadline: Deadline) -> Self:
        """Return a view whose calls end by ``deadline``."""
        view = copy(self)
        view.deadline = deadline.earlier(self.deadline)
        return view

    def statistics(self) -> Statistics:
        """Return the statistics of all requests of this process with these options."""
        return self.endpoint.throttle.statistics()

    @property
    def endpoint(self) -> Endpoint:
        return shared_endpoint(self.options)

    @property
    def traits(self) -> Traits:
        return Traits("s3", 1, durable=True, part_size=self.options.part_size, retry_after=True)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def object_name(self, key: str) -> str:
        """Return the name of an object in the bucket. Raises ``StoreError`` for an invalid key."""
        name = self.prefix + check_key(key, self.url)
        try:
            length = len(name.encode())
        except UnicodeEncodeError as e:
            raise StoreError(f"Invalid key {key!r} for {self.url}", key=key, store=self.url) from e
        if length > MAX_KEY:
            raise StoreError(
                f"The key {key[:200]!r} is too long for {self.url}",
                expected=f"at most {MAX_KEY} bytes, with the prefix in the bucket",
                found=f"{length} bytes",
                key=key,
                store=self.url,
            )
        return name

    # -- writing -------------------------------------------------------------------------------

    def create_object(self, key: str, data: bytes | bytearray, *, accept_equal: bool) -> None:
        """Create an object with one conditional PUT.

        If a reply is lost, the next try finds the object, and this succeeds if it has exactly these
        bytes. ``accept_equal``: the same for an object that was there before. Raises
        ``AlreadyExists``.
        """
        may_be_own = accept_equal

        def put(client: Any) -> bool:
            nonlocal may_be_own
            try:
                return self._try_to_create(client, key, data)
            except StoreError as e:
                may_be_own |= e.is_outcome_unknown
                raise

        if self.call("PutObject", "write", key, put):
            return
        try:
            if may_be_own and self._object_equals(key, data):
                return
        except NotFound as e:  # it was deleted meanwhile
            raise Unavailable(
                f"{key} in {self.url} was created and deleted by another process",
                todo="Try again",
                key=key,
                store=self.url,
            ) from e
        self.endpoint.conditional_buckets.add(self.bucket)
        raise exists_error(key, self.url)

    def _try_to_create(self, client: Any, key: str, data: bytes | bytearray) -> bool:
        """Send one conditional PUT. Return False if the server refuses it: the object exists."""
        checksum = hashlib.md5(data, usedforsecurity=False).digest()
        try:
            reply = client.put_object(
                Bucket=self.bucket,
                Key=self.object_name(key),
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

    def require_conditional_put(self, key: str, data: bytes) -> None:
        """Check that the server does not replace an object that this process has created.

        Repeat the PUT, which must fail. If it succeeds, the object has the same bytes as before.
        """

        if self.call("PutObject", "write", key, lambda c: self._try_to_create(c, key, data)):
            raise StoreError(
                f"{self.url} cannot hold a run: {self.endpoint.url} replaces objects there",
                expected="a server that refuses a PUT with If-None-Match: * if the object exists",
                found="one that ignores the condition, so that two writers could both commit",
                todo="Use a server with conditional writes, such as AWS, Ceph, MinIO, or R2. Ceph"
                " ignores the condition in a bucket with versioning: use one without",
                key=key,
                store=self.url,
            )
        self.endpoint.conditional_buckets.add(self.bucket)

    def _object_equals(self, key: str, data: bytes | bytearray) -> bool:
        return self.stat(key).length == len(data) and self.get(key, len(data)) == data

    def require_stat(self, key: str, length: int) -> Stat:
        """Return the status of an object that was just written. Raises ``StoreError`` if the server
        shows another length."""
        stat = self.stat(key)
        check_written_length(key, self.url, length, stat.length)
        return stat

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
                require_field(reply, "ETag", self.endpoint.url, self.url)
                length = int(reply["ContentLength"])
                if length > limit:
                    raise too_long_error(key, self.url, limit, length)
                data = bytearray(length)
                self._read_body(body, [memoryview(data)], key, no_op)
            if has_other_md5(reply, data):
                raise Unavailable(
                    f"{key} changed on its way from {self.url}",
                    expected=f"the MD5 {reply['ETag']}",
                    key=key,
                    store=self.url,
                )
            return bytes(data)

        return self.call("GetObject", "read", key, read)

    def get_range(
        self, key: str, offset: int, length: int, into: memoryview, *more: memoryview
    ) -> None:
        views = [*map(as_byte_view, (into, *more))]
        check_range(key, self.url, offset, length, sum(map(len, views)))
        name, done = self.object_name(key), 0
        tag: dict[str, str] = {}  # a replaced object is an error
        if not length:
            self.stat(key)
            return

        def advance(count: int) -> None:
            nonlocal done
            done += count

        def read(client: Any) -> None:
            # after a failure, go on behind the bytes that have arrived
            wanted = f"bytes={offset + done}-{offset + length - 1}"
            try:
                reply = client.get_object(Bucket=self.bucket, Key=name, Range=wanted, **tag)
            except Exception as e:
                error = self.translate(e, "read", key)
                if error.fields.get("status") == 416:
                    raise short_read_error(key, self.url, offset, length, done) from e
                raise error from e
            with closing(reply["Body"]) as body:
                self._require_range(reply, key, offset + done)
                found = int(reply["ContentLength"])
                if done + found != length:
                    raise short_read_error(key, self.url, offset, length, done + found)
                tag.update({"IfMatch": reply["ETag"]} if reply.get("ETag") else {})
                self._read_body(body, take_views(views, done, length), key, advance)

        self.call("GetObject", "read", key, read)

    def _require_range(self, reply: Any, key: str, first: int) -> None:
        """Raise ``StoreError`` if the server has not sent the range that begins at ``first``."""
        found = reply.get("ContentRange", "the whole object")
        if not found.startswith(f"bytes {first}-"):
            raise StoreError(
                f"{self.endpoint.url} does not answer requests for a part of an object",
                expected=f"bytes {first}- of {key}",
                found=found,
                todo="Check the endpoint",
                key=key,
                store=self.url,
            )

    def _read_body(
        self, body: Any, views: Iterable[memoryview], key: str, advance: Callable[[int], object]
    ) -> None:
        """Fill the views, one behind the other. Raises ``Unavailable`` if the reply ends before."""
        for view in views:
            done = 0
            while done < len(view):
                if self.deadline is not None and not self.deadline.seconds_left:
                    raise Unavailable(
                        f"Reading {key} in {self.url} is too slow", store=self.url, key=key
                    )
                count = body.readinto(view[done : done + MIB])
                if not count:
                    raise Unavailable(
                        f"The reply for {key} in {self.url} is incomplete", store=self.url
                    )
                done += count
                advance(count)

    def stat(self, key: str) -> Stat:
        name = self.object_name(key)

        def head(client: Any) -> Stat:
            try:
                reply = client.head_object(Bucket=self.bucket, Key=name)
            except Exception as e:
                error = self.translate(e, "look up", key)
                if isinstance(error, NotFound):
                    self._require_bucket(client)
                elif error.fields.get("status") in (400, 403):
                    self._explain(client, name, key)  # the reply to a HEAD has no reason
                raise error from e
            return Stat(key, int(reply["ContentLength"]), int(reply["LastModified"].timestamp()))

        return self.call("HeadObject", "look up", key, head)

    def _require_bucket(self, client: Any) -> None:
        """Raise ``StoreError`` if the bucket is missing. The reply to a HEAD does not tell."""
        if self.bucket not in self.endpoint.known_buckets:
            try:
                client.list_objects_v2(Bucket=self.bucket, MaxKeys=1, Prefix=self.prefix)
            except Exception as e:
                error = self.translate(e, "look up", "")
                if not isinstance(error, Denied):  # the bucket may be there
                    raise error from e
            self.endpoint.known_buckets.add(self.bucket)

    def _explain(self, client: Any, name: str, key: str) -> None:
        """Raise the error of a GET, which says more than that of a HEAD."""
        try:
            client.get_object(Bucket=self.bucket, Key=name, Range="bytes=0-0")["Body"].close()
        except Exception as e:
            raise self.translate(e, "look up", key) from e

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

    def call(
        self,
        operation: str,
        action: str,
        key: str,
        request: Callable[[Any], T],
        longest: int = TIMEOUTS[-2],
    ) -> T:
        """Return what ``request(client)`` returns. Repeat it while the server is unavailable.

        ``longest``: the longest wait for bytes of the reply, in seconds. Raises ``StoreError``.
        """
        endpoint = self.endpoint
        deadline = self.deadline
        if deadline is None:
            seconds = self.options.timeout
            deadline = Deadline.after(seconds, f"at most {seconds:g} s to {action} {key}")

        def attempt() -> T:
            try:
                return request(endpoint.client(deadline.seconds_left, longest))
            except StoreError:
                raise
            except Exception as e:
                raise self.translate(e, action, key) from e

        return endpoint.throttle.call(operation, deadline, attempt)

    def translate(self, error: Exception, action: str, key: str) -> StoreError:
        """Return the error of this store for an error of boto3."""
        if isinstance(error, StoreError):
            return error
        try:
            server = self.endpoint.url
        except Exception:  # noqa: BLE001  (the client cannot be created, which is the error)
            server = "the endpoint"
        found = translate(error, action, key, self.url, server)
        if isinstance(found, Denied) and found.fields.get("code") not in _PERMISSION:
            self.endpoint.forget_clients()  # they keep credentials, and that there were none
        return found
