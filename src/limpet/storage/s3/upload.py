"""Writes one object to a bucket: by one conditional PUT if it is small, else in parts.

Part ``n`` is a fixed range of the object. A write of exactly one part is sent from the caller's
memory. Other writes are collected, until they fill a part.
"""

from __future__ import annotations

import base64
import hashlib
import mmap
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from threading import Lock
from typing import Any

from limpet.buffers import as_byte_view
from limpet.deadline import CLEANUP_SECONDS, Deadline
from limpet.errors import NotFound, StoreError, Unavailable
from limpet.storage.checks import WrittenRanges, exists_error
from limpet.storage.remote import outcome_unknown
from limpet.storage.s3.bucket import S3Bucket
from limpet.storage.s3.endpoint import INSTALL, TIMEOUTS
from limpet.storage.s3.failures import no_tag_error
from limpet.storage.store import Stat, Upload, part_length
from limpet.types import BLOCK_SIZE, MIB

COLLECTED_PART = 16 * MIB
"""The length of parts that are collected, in bytes. Each thread of a caller that does not write
whole parts, and therefore has no ``head``, keeps one or two of them in memory."""


def partial_key(key: str, upload_id: str) -> str:
    """Return the key that stands for an unfinished upload of an object."""
    folder, slash, name = key.rpartition("/")
    tag = hashlib.sha256(upload_id.encode()).hexdigest()[:16]
    return f"{folder}{slash}.{tag}.{name}.partial"


def object_of_partial(key: str) -> str:
    """Return the key of the object that an unfinished upload would have created."""
    folder, slash, name = key.rpartition("/")
    return folder + slash + name.removesuffix(".partial")[18:]


class S3Upload(Upload):
    """An object that is being written to ``store``.

    ``head``: see ``Store.put``. The object becomes visible when the upload is completed.
    """

    def __init__(self, store: S3Bucket, key: str, length: int, head: int) -> None:
        self._store = store
        self._key = key
        self._length = length
        self._written = WrittenRanges(key, store.url, length)
        self._head = head
        traits = store.traits
        if not (head or store.options.part_size):
            traits = replace(traits, part_size=COLLECTED_PART, max_part=0)
        self._part = part_length(traits, length)
        self._lock = Lock()
        self._is_open = True
        self._active = 0
        self._collected: dict[int, tuple[memoryview, int]] = {}
        self._parts: dict[int, dict[str, Any]] = {}
        self._began = time.monotonic()
        self._upload_id = "" if length <= head + self._part else self._create()

    # -- writing -------------------------------------------------------------------------------

    def write_at(self, offset: int, *data: memoryview) -> None:
        views = [*map(as_byte_view, data)]
        size = sum(map(len, views))
        self._begin_call()
        try:
            with self._written.adding(offset, size):
                number = self._number(offset)
                if self._upload_id and self._bounds(number) == (offset, offset + size):
                    self._send(number, views)
                else:
                    for view in views:
                        self._collect(offset, view)
                        offset += len(view)
        finally:
            with self._lock:
                self._active -= 1

    def _number(self, offset: int) -> int:
        """Return the number of the part that contains an offset, from 0."""
        return max(0, offset - self._head) // self._part if self._upload_id else 0

    def _bounds(self, number: int) -> tuple[int, int]:
        """Return the first offset of a part and its end."""
        if not self._upload_id:
            return 0, self._length
        start = self._head + number * self._part if number else 0
        return start, min(self._head + (number + 1) * self._part, self._length)

    def _collect(self, offset: int, view: memoryview) -> None:
        """Copy bytes into the parts to which they belong, and send the parts that are complete."""
        while view:
            number = self._number(offset)
            start, stop = self._bounds(number)
            count = min(len(view), stop - offset)
            with self._lock:
                if number not in self._collected:
                    # not a bytearray: the allocator would keep its memory, once per thread
                    memory = mmap.mmap(-1, stop - start, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                    self._collected[number] = (memoryview(memory), 0)
                buffer = self._collected[number][0]
            buffer[offset - start : offset - start + count] = view[:count]
            with self._lock:
                filled = self._collected[number][1] + count
                self._collected[number] = (buffer, filled)
                is_complete = bool(self._upload_id) and filled == stop - start
                if is_complete:
                    del self._collected[number]
            if is_complete:
                self._send(number, [buffer])
            offset, view = offset + count, view[count:]

    def _send(self, number: int, views: Sequence[memoryview]) -> None:
        """Send one part. The server checks its bytes, unless ``checksum="none"``."""
        store, endpoint = self._store, self._store.endpoint
        name = store.object_name(self._key)
        checksum = store.options.checksum

        def send(client: Any) -> dict[str, Any]:
            sums: dict[str, str] = {}
            if checksum in ("auto", "crc32c"):
                sums["ChecksumCRC32C"] = crc32c(views)
            if checksum == "md5" or (
                checksum == "auto" and endpoint.checks_crc is False and not endpoint.is_encrypted
            ):
                sums["ContentMD5"] = _md5(views)
            body = PartBody(views, store.deadline)
            try:
                with store.translated("write", self._key):
                    reply = client.upload_part(
                        Bucket=store.bucket,
                        Key=name,
                        UploadId=self._upload_id,
                        PartNumber=number + 1,
                        Body=body,
                        **sums,
                    )
            except NotFound as e:
                raise self._refused(e) from e
            finally:
                body.release()
            if not reply.get("ETag"):
                raise no_tag_error(self._key, store.url)
            part = {"PartNumber": number + 1, "ETag": reply["ETag"]}
            if "ChecksumCRC32C" in sums:
                endpoint.checks_crc = "ChecksumCRC32C" in reply
                if endpoint.checks_crc:
                    part["ChecksumCRC32C"] = sums["ChecksumCRC32C"]
                elif checksum == "auto" and not ("ContentMD5" in sums or endpoint.is_encrypted):
                    return send(client)  # nobody has checked the bytes: again, with MD5
            return part

        try:
            part = store.call("UploadPart", "write", self._key, send)
        finally:
            views = ()  # ``send`` refers to itself, so it lives until the next garbage collection
        with self._lock:
            self._parts[number] = part

    # -- beginning and ending ------------------------------------------------------------------

    def commit(self) -> Stat:
        self._begin_call(last=True)
        try:
            self._written.require_complete()
            if self._upload_id:
                self._complete()
            else:
                data = bytes(self._collected[0][0]) if self._collected else b""
                self._store.create_object(self._key, data, accept_equal=False)
            stat = self._store.require_stat(self._key, self._length)
            if self._upload_id:
                seconds = time.monotonic() - self._began
                self._store.endpoint.pace.note(self._part, self._length, seconds)
            self._upload_id = ""
            return stat
        finally:
            with self._lock:
                self._active -= 1
            self._release()

    def abort(self) -> None:
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._release()

    def _begin_call(self, *, last: bool = False) -> None:
        with self._lock:
            if not self._is_open or (last and self._active):
                raise StoreError(
                    f"Cannot write or commit {self._key}: its upload is finished or in use",
                    expected="an upload that is not committed or aborted, without active writes",
                    found=f"active writes: {self._active}"
                    if self._is_open
                    else "a finished upload",
                    key=self._key,
                    store=self._store.url,
                )
            self._is_open = not last
            self._active += 1

    def _release(self) -> None:
        """Free the memory, and abort an upload that was not completed."""
        self._collected = {}
        if self._upload_id:
            with suppress(StoreError):  # the error of the upload counts
                _cleaning(self._store).abort_upload(self._key, self._upload_id)

    def _create(self) -> str:
        store = self._store
        name = store.object_name(self._key)
        algorithm: dict[str, str] = {}
        if store.options.checksum in ("auto", "crc32c"):
            algorithm["ChecksumAlgorithm"] = "CRC32C"

        tries = 0

        def create(client: Any) -> str:
            nonlocal tries
            tries += 1
            reply = client.create_multipart_upload(Bucket=store.bucket, Key=name, **algorithm)
            if not reply.get("UploadId"):
                raise no_tag_error(self._key, store.url)
            return str(reply["UploadId"])

        upload_id = store.call("CreateMultipartUpload", "write", self._key, create)
        if tries > 1:
            with suppress(StoreError):  # ``sweep`` finds what remains
                seconds = time.monotonic() - self._began + 1  # servers may round the time
                _cleaning(store).abort_others(self._key, upload_id, seconds)
        return upload_id

    def _complete(self) -> None:
        store = self._store
        name = store.object_name(self._key)
        parts = [self._parts[number] for number in sorted(self._parts)]
        condition = {"IfNoneMatch": "*"}
        is_repeated = False

        def complete(client: Any) -> StoreError | None:
            nonlocal is_repeated
            try:
                with store.translated("complete", self._key):
                    client.complete_multipart_upload(
                        Bucket=store.bucket,
                        Key=name,
                        UploadId=self._upload_id,
                        MultipartUpload={"Parts": parts},
                        **condition,
                    )
                    return None
            except StoreError as e:
                status = e.fields.get("status")
                if condition and status == 501:
                    condition.clear()  # the key is unique, so the condition is not essential
                    return complete(client)
                if status in (404, 412):
                    return e  # it is looked up when this request no longer counts as running
                is_repeated |= isinstance(e, Unavailable)
                raise

        refusal = store.call(
            "CompleteMultipartUpload", "complete", self._key, complete, TIMEOUTS[-1]
        )
        if refusal is not None and not (is_repeated and self._is_complete()):
            raise self._refused(refusal) from refusal

    @outcome_unknown()
    def _is_complete(self) -> bool:
        """Return True if the object is this one: the reply to an earlier try was lost.

        Then, the upload is gone. If it is still there, another writer has created the object.
        """
        store = self._store
        uploads = store.uploads(store.object_name(self._key))
        if any(upload_id == self._upload_id for _, upload_id, _ in uploads):
            return False
        try:
            return store.stat(self._key).length == self._length
        except NotFound:
            return False

    def _refused(self, error: StoreError) -> StoreError:
        key, url = self._key, self._store.url
        if error.fields.get("status") == 412:
            return exists_error(key, url)
        return StoreError(
            f"The upload of {key} to {url} was aborted by another process",
            todo="Check the lifecycle rules of the bucket, and who runs `limpet sweep`",
            key=key,
            store=url,
        )


def _cleaning(store: S3Bucket) -> S3Bucket:
    """Return a view for the abort of an upload. ``sweep`` finds an upload that remains."""
    deadline = Deadline.after(CLEANUP_SECONDS, f"{CLEANUP_SECONDS:g} s to abort an upload")
    return store.for_cleanup().within(deadline)


class PartBody:
    """The bytes of a part, as the file that boto3 wants. Blocks are views of the caller's memory.

    urllib3 asks for blocks of 16 KiB; a loop over so many would hold the interpreter's lock. It
    sends what it gets. A block must be sent before a timeout ends, so the shorter parts of a slow
    network have shorter blocks: 1 MiB of 8, and 4 MiB of 28.
    """

    def __init__(self, views: Sequence[memoryview], deadline: Deadline | None) -> None:
        self._views = views
        self._length = sum(map(len, views))
        self._block = min(BLOCK_SIZE, max(MIB, self._length // 7))
        self._deadline = deadline
        self._at = 0

    def read(self, size: int = -1) -> memoryview | bytes:
        if self._deadline is not None and not self._deadline.seconds_left:
            raise TimeoutError("the deadline has passed")
        start = self._at
        for view in self._views:
            if start < len(view):
                block = view[start : start + self._block]
                self._at += len(block)
                return block
            start -= len(view)
        return b""

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
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
        raise StoreError("An s3:// store needs the package awscrt", todo=INSTALL) from e
    value = reduce(lambda crc, view: update(view, crc), views, 0)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def _md5(views: Sequence[memoryview]) -> str:
    value = hashlib.md5(usedforsecurity=False)
    for view in views:
        value.update(view)
    return base64.b64encode(value.digest()).decode()
