"""Reads a range of an object, with one request if no failure ends it early."""

from __future__ import annotations

from typing import Any, Self

from limpet.buffers import as_byte_view
from limpet.errors import StoreError
from limpet.storage.checks import short_read_error
from limpet.storage.s3.bucket import FIRST_BLOCK, S3Bucket
from limpet.storage.store import RangeReader


class S3Range(RangeReader):
    """The bytes of a range. The request is sent with the first call of ``read_into``.

    Between two calls, the reply waits in the connection, so memory is needed for one view only.
    Only the calls count as requests in progress: whoever uses the bytes may send requests, too.
    """

    def __init__(self, store: S3Bucket, key: str, offset: int, length: int) -> None:
        self._store, self._key = store, key
        self._name = store.object_name(key)
        self._offset, self._length = offset, length
        self._done = 0
        self._body: Any = None
        self._block = FIRST_BLOCK
        self._tag: dict[str, str] = {}  # a replaced object is an error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()

    def read_into(self, view: memoryview) -> None:
        view, start = as_byte_view(view), self._done
        store, key = self._store, self._key
        store = store.within(store.deadline_for("read", key))  # one deadline for all tries
        if start + len(view) > self._length:
            raise self._too_short(self._length)

        def advance(count: int) -> None:
            self._done += count

        def read(client: Any) -> None:
            try:
                if self._body is None:
                    self._open(client)
                left = view[self._done - start :]
                self._block = store.read_body(self._body, left, key, advance, self._block)
            except BaseException:
                self.__exit__()  # the next try goes on behind the bytes that have arrived
                raise

        if view:
            store.call("", "read", key, read)

    def _open(self, client: Any) -> None:
        """Request what has not arrived."""
        store, key = self._store, self._key
        first = self._offset + self._done
        wanted = f"bytes={first}-{self._offset + self._length - 1}"
        store.endpoint.throttle.count("GetObject")
        try:
            with store.translated("read", key):
                reply = client.get_object(
                    Bucket=store.bucket, Key=self._name, Range=wanted, **self._tag
                )
        except StoreError as e:
            if e.fields.get("status") == 416:
                raise self._too_short(self._done) from e
            raise
        self._body = reply["Body"]
        found = reply.get("ContentRange", "the whole object")
        if not found.startswith(f"bytes {first}-"):
            raise StoreError(
                f"{store.endpoint.url} does not answer requests for a part of an object",
                expected=f"bytes {first}- of {key}",
                found=found,
                todo="Check the endpoint",
                key=key,
                store=store.url,
            )
        arriving = self._done + int(reply["ContentLength"])
        if arriving != self._length:
            raise self._too_short(arriving)
        self._tag = {"IfMatch": reply["ETag"]} if reply.get("ETag") else self._tag

    def _too_short(self, found: int) -> StoreError:
        return short_read_error(self._key, self._store.url, self._offset, self._length, found)
