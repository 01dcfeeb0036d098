"""A store in a container of Azure or a bucket of Google.

The commit is one conditional PUT, which never replaces an object. Large objects are streams.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from limpet.errors import NotFound, StoreError
from limpet.storage.buffered_upload import BufferedUpload
from limpet.storage.checks import refuse_partial
from limpet.storage.cloud.container import CloudContainer, to_stat
from limpet.storage.cloud.endpoint import AzureOptions, CloudOptions, GoogleOptions
from limpet.storage.cloud.upload import StreamAppender
from limpet.storage.sequential_upload import SequentialUpload
from limpet.storage.store import Entry, Stat, Upload
from limpet.text import hide_secrets

_CONTAINER = re.compile(r"[a-z0-9$][a-z0-9._-]{1,221}")


class CloudStore(CloudContainer):
    """A store in a folder of a container, or in a whole container. Creating it sends no request."""

    def put(self, key: str, length: int, head: int = 0) -> Upload:
        refuse_partial(key, self.url)
        self.object_name(key)
        self.require_credentials("write", key)
        if length > self.options.part_size:
            return SequentialUpload(self.url, key, length, StreamAppender(self, key, length))

        def create(data: bytes) -> Stat:
            self.create_object(key, data, accept_equal=False)
            return self.require_stat(key, length)

        return BufferedUpload(self.url, key, length, create)

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        self.require_credentials("write", key)
        return super().put_if_absent(key, data)

    def delete(self, key: str) -> None:
        import obstore

        name = self.object_name(key)
        self.require_credentials("delete", key)
        try:
            self.for_cleanup().call(
                "DeleteObject", "delete", key, lambda c: obstore.delete(c, name)
            )
        except NotFound:
            return

    def list(self, prefix: str) -> Iterator[Stat]:
        pages = _Pages(self._folder_name(prefix))
        while (page := self.call_list(prefix, pages.read)) is not None:
            yield from self._stats(page)

    def list_level(self, folder: str, prefix: str = "") -> Iterator[Entry]:
        """See the function."""
        import obstore

        start = self._folder_name(folder)
        if "/" in prefix:
            return
        reply = self.call_list(folder, lambda c: obstore.list_with_delimiter(c, start))
        for common in reply["common_prefixes"]:
            name = common.rstrip("/").rpartition("/")[2]
            if name.startswith(prefix):
                yield Entry(name, "folder")
        for stat in self._stats(reply["objects"]):
            name = stat.key.rpartition("/")[2]
            if name.startswith(prefix):
                yield Entry(name, "object", stat)

    def partials(self, prefix: str) -> Iterator[Stat]:
        """Yield nothing: obstore cannot list what an unfinished upload has sent. Azure removes it
        after 7 days; a bucket of Google needs a lifecycle rule (``docs/stores.md``)."""
        if prefix:
            self.object_name(prefix)
        return iter(())

    def _folder_name(self, folder: str) -> str | None:
        """Return the name of a folder in the container, as obstore wants it."""
        name = self.object_name(folder) if folder else self.prefix.rstrip("/")
        return name or None

    def _stats(self, page: Any) -> Iterator[Stat]:
        """Yield the objects of a page.

        Other tools create "folders" as empty objects whose names end with a slash. obstore leaves
        out the slash, so an empty object counts only if there is one with exactly its name.
        """
        for found in page:
            path = found["path"]
            if path.startswith(self.prefix):
                stat = to_stat(found, path.removeprefix(self.prefix))
                with suppress(NotFound):
                    yield stat if stat.length or self._refuses(stat.key) else self.stat(stat.key)

    def _refuses(self, key: str) -> bool:
        """Return True for the key of another program that cannot be looked up."""
        try:
            self.object_name(key)
        except StoreError:
            return True
        return False


class _Pages:
    """The pages of a listing. After a failure, or with another client, whose requests may take
    another time, it goes on behind what has arrived.

    It asks the server for the names from there on. Azure includes the first of them, and other
    servers ignore that.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._position: str | None = None
        self._client: Any = None
        self._stream: Iterator[Any] | None = None

    def read(self, client: Any) -> Any:
        """Return the next page, or None."""
        import obstore

        stream = self._stream
        if stream is None or client is not self._client:
            stream = iter(
                obstore.list(client, self._folder, offset=self._position, chunk_size=1000)
            )
        self._stream = None
        page = next(stream, None)
        self._client, self._stream = client, stream
        if page and self._position is not None:
            position = self._position
            page = [found for found in page if found["path"] > position]
        if page:
            self._position = page[-1]["path"]
        return page


def open_azure(url: str, **options: Any) -> CloudStore:
    """Return the store at ``az://CONTAINER/folder``. For the options, see ``AzureOptions``.

    Characters such as ``%`` and ``+`` stand for themselves. Raises ``StoreError`` if the URL or an
    option is invalid, or if obstore is not installed.
    """
    return _open(url, AzureOptions.from_mapping(options))


def open_google(url: str, **options: Any) -> CloudStore:
    """Return the store at ``gs://BUCKET/folder``. For the options, see ``GoogleOptions``.

    Experimental: it is tested on Ceph, not on Google. Otherwise, see ``open_azure``.
    """
    return _open(url, GoogleOptions.from_mapping(options))


def _open(url: str, options: CloudOptions) -> CloudStore:
    container, _, folder = url.removeprefix(f"{options.scheme}://").partition("/")
    has_credentials = hide_secrets(url) != url  # a SAS, or a user
    if has_credentials or not _CONTAINER.fullmatch(container):
        raise StoreError(
            "The URL does not name a container and a folder",
            expected=f"{options.scheme}://CONTAINER/folder, with a name of at least two lowercase"
            " letters, digits, dots, hyphens, and underscores",
            found=None if "@" in url or "?" in url else repr(url),  # they precede credentials
            todo="The account, credentials, and other options are not part of the URL: see"
            " docs/stores.md",
        )
    return CloudStore(container, folder.rstrip("/"), options)
