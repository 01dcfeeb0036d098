"""A store in an S3 bucket. The commit is one conditional PUT, which never replaces an object."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from limpet.buffers import as_byte_view
from limpet.errors import NotFound, StoreError
from limpet.storage.checks import check_range, is_partial, refuse_partial
from limpet.storage.s3.bucket import S3Bucket
from limpet.storage.s3.endpoint import S3Options
from limpet.storage.s3.ranges import S3Range
from limpet.storage.s3.upload import S3Upload, object_of_partial, partial_key
from limpet.storage.store import Entry, RangeReader, Stat, Upload
from limpet.text import hide_secrets

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


class S3Store(S3Bucket):
    """A store in a folder of a bucket, or in a whole bucket. Creating it sends no request."""

    def put(self, key: str, length: int, head: int = 0) -> Upload:
        refuse_partial(key, self.url)
        self.object_name(key)
        return S3Upload(self, key, length, 0 if self.options.equal_parts else head)

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        view = as_byte_view(into)
        check_range(key, self.url, offset, length, len(view))
        if not length:
            self.stat(key)
            return
        with self.open_range(key, offset, length) as reader:
            reader.read_into(view[:length])

    def open_range(self, key: str, offset: int, length: int) -> RangeReader:
        """Return a reader of a range. It sends no request yet."""
        check_range(key, self.url, offset, length, length)
        return S3Range(self, key, offset, length)

    def delete(self, key: str) -> None:
        if is_partial(key.rpartition("/")[2]):
            self._abort_partial(key)
            return
        name = self.object_name(key)

        def delete(client: Any) -> None:
            client.delete_object(Bucket=self.bucket, Key=name)

        with suppress(NotFound):  # S3 reports success, and some servers that there was none
            self.for_cleanup().call("DeleteObject", "delete", key, delete)

    def _abort_partial(self, key: str) -> None:
        object_key = object_of_partial(key)
        for found_key, upload_id, _ in list(self.uploads(self.object_name(object_key))):
            if partial_key(found_key, upload_id) == key:
                self.abort_upload(object_key, upload_id)

    def list(self, prefix: str) -> Iterator[Stat]:
        for page in self._pages(self._folder_name(prefix), ""):
            yield from self._stats(page)

    def list_level(self, folder: str, prefix: str = "") -> Iterator[Entry]:
        """See the function."""
        start = self._folder_name(folder) + prefix
        if "/" in prefix:
            return
        for page in self._pages(start, "/"):
            for common in page.get("CommonPrefixes", ()):
                yield Entry(common["Prefix"][:-1].rpartition("/")[2], "folder")
            for stat in self._stats(page):
                yield Entry(stat.key.rpartition("/")[2], "object", stat)

    def partials(self, prefix: str) -> Iterator[Stat]:
        found = [
            Stat(partial_key(key, upload_id), 0, int(initiated.timestamp()))
            for key, upload_id, initiated in self.uploads(self._folder_name(prefix))
        ]
        return iter(sorted(found, key=lambda stat: stat.key))

    def _folder_name(self, folder: str) -> str:
        return self.object_name(folder) + "/" if folder else self.prefix

    def _stats(self, page: Any) -> Iterator[Stat]:
        for found in page.get("Contents", ()):
            key = found["Key"][len(self.prefix) :]
            if key and not key.endswith("/"):  # the console creates "folders" as empty objects
                modified = int(found["LastModified"].timestamp())
                yield Stat(key, int(found["Size"]), modified)

    def _pages(self, start: str, delimiter: str) -> Iterator[Any]:
        """Yield the replies that list the objects whose names begin with ``start``."""
        return self.pages(
            "ListObjectsV2",
            start,
            {"ContinuationToken": "NextContinuationToken"},
            lambda client, at: client.list_objects_v2(
                Bucket=self.bucket, Prefix=start, Delimiter=delimiter, **at
            ),
        )


def open_s3(url: str, **options: Any) -> S3Store:
    """Return the store at ``s3://BUCKET/folder``. For the options, see ``S3Options``.

    Characters such as ``%`` and ``+`` stand for themselves. Raises ``StoreError`` if the URL or an
    option is invalid, or if boto3 is not installed.
    """
    bucket, _, folder = url.removeprefix("s3://").partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise StoreError(
            f"{hide_secrets(url)} does not name a bucket",
            expected="s3://BUCKET/folder",
            found=None if "@" in bucket or "=" in bucket else repr(bucket),
            todo="Credentials and other options are not part of the URL",
        )
    return S3Store(bucket, folder.rstrip("/"), S3Options.from_mapping(options))
