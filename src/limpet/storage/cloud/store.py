"""The tries of a store in a container of Azure or a bucket of Google: requests and streams.

A small object is created by one PUT that never replaces another (``If-None-Match: *``; for Google,
``x-goog-if-generation-match: 0``). A large one is a stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from limpet.deadline import Deadline, call_within
from limpet.errors import Denied, NotFound, StoreError, Unavailable
from limpet.storage.cloud.server import (
    AzureOptions,
    CloudOptions,
    CloudServer,
    GoogleOptions,
    shared_server,
    translated,
)
from limpet.storage.options import LONGEST_TIMEOUT
from limpet.storage.retry import Remote, RemoteUpload, Reply, RetryStore
from limpet.storage.store import (
    Entry,
    Stat,
    Traits,
    exists_error,
    part_length,
    replaced_error,
    short_read_error,
)
from limpet.text import hide_secrets
from limpet.types import BLOCK_SIZE, MIB

T = TypeVar("T")

PARALLEL_PARTS = 4
"""How many parts of one upload are sent at once."""

_CONTAINER = re.compile(r"[a-z0-9$][a-z0-9._-]{1,221}")


class CloudFolder(Remote):
    """A folder of a container, or all of it. ``statistics`` does not count parts of uploads."""

    def __init__(self, container: str, folder: str, options: CloudOptions) -> None:
        super().__init__(f"{options.scheme}://{container}", folder)
        self.container = container
        self.options = options
        shared_server(options)  # raises if obstore is missing

    @property
    def server(self) -> CloudServer:
        return shared_server(self.options)

    @property
    def traits(self) -> Traits:
        options = self.options
        return Traits(
            options.scheme,
            1,
            durable=True,
            ordered=True,
            hidden_uploads=options.hidden_uploads,
            upload_memory=6 * options.part_size + 8 * MIB,  # see CloudStream
            spread=options.spread,
        )

    def object_name(self, key: str) -> str:
        """Also refuse a key that Azure or Google would refuse or change, and one with a query: it
        may be a SAS, in a part of a URL that ``open_azure`` does not see."""
        name = super().object_name(key)
        shown = hide_secrets(name)
        is_changed = "\\" in name or any(s.endswith(".") for s in name.split("/"))
        if is_changed or shown != name or any(ord(c) < 32 or c == "\x7f" for c in name):
            raise StoreError(
                f"Invalid key {hide_secrets(key[:200])!r} for {self.url}",
                expected="no control characters, backslashes, queries (?a=b), or"
                " names that end with a dot",
                found=repr(shown),  # the folder of the store may be what is invalid
                key=hide_secrets(key),
                store=self.url,
            )
        return name

    # -- reading -------------------------------------------------------------------------------

    def stat(self, key: str) -> Stat:
        import obstore

        name = self.object_name(key)
        try:
            return _to_stat(self._send("HeadObject", "look up", key, obstore.head, name), key)
        except NotFound:  # the reply to a HEAD has no reason
            self._require_container()
            raise
        except StoreError as e:
            if isinstance(e, Denied) or e.fields.get("status") == 400:
                first = {"range": (0, 1)}
                self._send("GetObject", "look up", key, obstore.get, name, options=first)
            raise

    def _require_container(self) -> None:
        """Raise ``StoreError`` if the container is missing."""
        import obstore

        if self.root in self.server.known:
            return
        name = "limpet-looks-for-the-container"
        with suppress(Denied):  # it may be there
            self._list("", lambda client: next(iter(obstore.list(client, name)), None))
        self.server.known.add(self.root)

    def open(self, key: str, offset: int, length: int | None, tag: str) -> Reply:
        import obstore

        wanted: Any = {} if length is None else {"range": (offset, offset + length)}
        if tag:
            wanted["if_match"] = tag
        name = self.object_name(key)
        try:
            return _CloudReply(
                self, key, self._send("GetObject", "read", key, obstore.get, name, options=wanted)
            )
        except StoreError as e:
            if e.fields.get("status") == 416:
                raise short_read_error(key, self.url, offset, length or 0, 0) from None
            if e.fields.get("status") == 412:
                raise replaced_error(key, self.url) from None
            raise

    def page(
        self, folder: str, prefix: str, marker: Any, *, deep: bool, partial: bool
    ) -> tuple[Sequence[Entry], Any]:
        """See ``Remote``. obstore cannot list what an unfinished upload has sent. Azure removes it
        after 7 days; a bucket of Google needs a lifecycle rule (``docs/stores.md``)."""
        import asyncio

        import obstore

        if partial:
            return [], None
        name = (self.object_name(folder) if folder else self.prefix.rstrip("/")) or None
        start = f"{folder}/" if folder else ""
        if deep:
            pages = read = marker or _read_pages(name)
        else:

            def read(client: Any) -> Any:
                async def read_level() -> Any:  # which ends with its timeout, unlike a thread
                    level = obstore.list_with_delimiter_async(client, name)
                    return await asyncio.wait_for(level, self.deadline.seconds_left)

                return asyncio.run(read_level())

        page = self._list(folder, read)
        if page is None:
            return [], None
        found: list[Entry] = []
        if not deep:
            names = (common.rstrip("/").rpartition("/")[2] for common in page["common_prefixes"])
            found += [Entry(name, "folder") for name in names]
            pages, page = None, page["objects"]
        for stat in self._stats(page):
            found.append(Entry(stat.key.removeprefix(start), "object", stat))
        return found, pages

    def _list(self, folder: str, request: Callable[[Any], T]) -> T:
        """Return ``request(client)``, a call of obstore that sends any number of requests."""
        with translated("list", folder, self.url):
            return call_within(
                self.deadline, lambda: self._send("ListObjects", "list", folder, request)
            )

    def _stats(self, page: Any) -> Iterator[Stat]:
        """Yield the objects of a page. "Folders" of other tools are empty objects, of whose names
        obstore leaves out the slash: an empty object counts only if one has exactly its name."""
        for found in page:
            path = found["path"]
            if path.startswith(self.prefix):
                stat = _to_stat(found, path.removeprefix(self.prefix))
                with suppress(NotFound):
                    yield stat if stat.length or self._refuses(stat.key) else self.stat(stat.key)

    def _refuses(self, key: str) -> bool:
        """Return True for the key of another program that cannot be looked up."""
        try:
            self.object_name(key)
        except StoreError:
            return True
        return False

    # -- writing -------------------------------------------------------------------------------

    def create(self, key: str, data: bytes | memoryview) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        self._require_credentials("write", key)
        name = self.object_name(key)

        def put(client: Any) -> bool:
            try:
                obstore.put(client, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

        # a timeout is for the whole request
        return self._send("PutObject", "write", key, put, longest=LONGEST_TIMEOUT)

    def begin(self, key: str, length: int, head: int) -> RemoteUpload | None:
        self._require_credentials("write", key)
        part_size = self.options.part_size
        if length <= part_size:
            return None
        return CloudStream(key, length, max(part_size, part_length(self.traits, length)))

    def delete(self, key: str) -> None:
        import obstore

        self._require_credentials("delete", key)
        self._send("DeleteObject", "delete", key, obstore.delete, self.object_name(key))

    def _require_credentials(self, action: str, key: str) -> None:
        """Raise ``Denied`` if the store has no credentials, and can only read. For a write to
        Google, obstore would look for some all the same."""
        if self.options.anonymous:
            raise Denied(
                f"Cannot {action} {key} in {self.url}: it was opened with anonymous=True",
                expected="a store with credentials",
                todo="Open it without this option",
                key=key,
                store=self.url,
            )

    # -- requests ------------------------------------------------------------------------------

    def _send(
        self,
        operation: str,
        action: str,
        key: str,
        request: Callable[..., T],
        *arguments: Any,
        longest: int = 15,
        **options: Any,
    ) -> T:
        """Return ``request(client, ...)``, which sends one request; ``longest``: the client's
        longest timeout, in seconds."""
        server = self.server
        try:
            with translated(action, key, self.url):
                client = server.client(self.container, self.deadline.seconds_left, longest)
                server.throttle.count(operation)
                result = request(client, *arguments, **options)
        except Denied:
            server.forget_clients()  # they keep credentials, and that there were none
            raise
        server.known.add(self.root)
        return result


def _to_stat(found: Any, key: str) -> Stat:
    return Stat(key, int(found["size"]), int(found["last_modified"].timestamp()))


class _CloudReply(Reply):
    """The chunks of a reply."""

    def __init__(self, folder: CloudFolder, key: str, reply: Any) -> None:
        length = reply.range[1] - reply.range[0]
        super().__init__(key, folder.url, length, reply.meta["e_tag"] or "")
        self._chunks, self._rest = reply.stream(min_chunk_size=MIB), memoryview(b"")

    def receive(self, most: int, deadline: Deadline) -> memoryview:
        if not self._rest:
            with translated("read", self._key, self._url):
                self._rest = memoryview(next(self._chunks, b""))
        data, self._rest = self._rest[:most], self._rest[most:]
        return data


def _read_pages(folder: str | None) -> Callable[[Any], Any]:
    """Return a function that returns the next page of a listing, or None.

    After a failure, or with another client, it asks for names behind those that have arrived. Azure
    includes the first of them, and other servers ignore that.
    """
    import obstore

    position: str | None = None
    known: tuple[Any, Iterator[Any] | None] = None, None

    def read(client: Any) -> Any:
        nonlocal position, known
        owner, stream = known
        known = None, None  # until this succeeds
        if stream is None or client is not owner:
            stream = iter(obstore.list(client, folder, offset=position, chunk_size=1000))
        page = next(stream, None)
        known = client, stream
        if page and position is not None:
            page = [found for found in page if found["path"] > position]
        if page:
            position = page[-1]["path"]
        return page

    return read


class CloudStream:
    """Writes a large object by obstore's writer, in parts of ``part`` bytes. Each call runs in a
    thread, to end by the deadline. Parts of an upload that fails stay, and nobody sees them.

    The writer repeats a part that fails, because nobody else has the bytes, without ``Retry-After``
    and the throttle, in pauses of up to 5 s. So its failures are final.
    """

    def __init__(self, key: str, length: int, part: int) -> None:
        self._key, self._length, self._part = key, length, part
        self._first: list[bytes] = []  # until the server has begun the upload
        self._position = 0  # the end of these
        self._writer: Any = None
        self._seconds = 0.0  # for which a part is repeated
        self._is_checked = False

    def write(self, folder: CloudFolder, offset: int, views: Sequence[memoryview]) -> None:
        """Copy the bytes, because the writer refers to them until they are sent."""
        pieces = [
            bytes(view[start : start + BLOCK_SIZE])
            for view in views
            for start in range(0, len(view), BLOCK_SIZE)
        ]
        if self._writer is not None:
            for piece in pieces:
                self._final(folder, "write", lambda piece=piece: self._writer.write(piece))  # type: ignore[misc]
            return
        if offset == self._position:  # otherwise, this is another try to begin
            self._first += pieces
            self._position += sum(map(len, pieces))
        if self._position > self._part:
            self._begin(folder)

    def _begin(self, folder: CloudFolder) -> None:
        """Get a writer with more than one part, so that the upload has begun: obstore does not
        repeat Google's request for that if the connection breaks."""
        import obstore

        self._seconds = folder.deadline.seconds_left
        name = folder.object_name(self._key)

        def begin() -> Any:
            client = folder.server.streaming_client(folder.container, self._seconds)
            writer = obstore.open_writer(
                client, name, buffer_size=self._part, max_concurrency=PARALLEL_PARTS
            )
            for piece in self._first:
                writer.write(piece)
            return writer

        self._writer = self._bounded(folder, "write", begin)
        self._first = []

    def commit(self, folder: CloudFolder) -> None:
        """Complete the object, unless the key is taken. Azure accepts that once, and obstore gets
        an error if it repeats it. So after a failure, an object of the right length is this one."""
        if self._writer is None:
            self._begin(folder)
        if not self._is_checked:
            if self._length_found(folder) is not None:
                raise exists_error(self._key, folder.url)
            self._is_checked = True
        try:
            self._final(folder, "complete", self._writer.close)
        except StoreError as e:
            is_unknown = isinstance(e, Unavailable)
            try:
                is_visible = self._length_found(folder) == self._length
            except StoreError:  # that of the completion counts
                is_visible, is_unknown = False, True
            if not is_visible:
                raise e.with_advice(**({"outcome": "unknown"} if is_unknown else {})) from None

    def abort(self, folder: CloudFolder) -> None:
        self._writer, self._first = None, []

    def _length_found(self, folder: CloudFolder) -> int | None:
        with suppress(NotFound):
            return folder.stat(self._key).length
        return None

    def _final(self, folder: CloudFolder, action: str, function: Callable[[], object]) -> None:
        """Call the writer, which repeats its requests itself."""
        try:
            self._bounded(folder, action, function)
        except Unavailable as e:
            advice = f"Gave up after repeating it for up to {self._seconds:g} s. Check the network"
            raise e.with_advice(f"{advice} and the server, then try again", is_final=True) from None

    def _bounded(self, folder: CloudFolder, action: str, function: Callable[[], T]) -> T:
        with translated(action, self._key, folder.url):
            return call_within(folder.deadline, function)


def open_azure(url: str, **options: Any) -> RetryStore:
    """Return the store at ``az://CONTAINER/folder``, with ``AzureOptions``. Characters such as
    ``%`` and ``+`` stand for themselves."""
    return _open(url, AzureOptions.from_mapping(options))


def open_google(url: str, **options: Any) -> RetryStore:
    """Return the store at ``gs://BUCKET/folder``, with ``GoogleOptions``. Experimental: it is
    tested on Ceph, not on Google."""
    return _open(url, GoogleOptions.from_mapping(options))


def _open(url: str, options: CloudOptions) -> RetryStore:
    container, _, folder = url.removeprefix(f"{options.scheme}://").partition("/")
    if not _CONTAINER.fullmatch(container):
        raise StoreError(
            "The URL does not name a container and a folder",
            expected=f"{options.scheme}://CONTAINER/folder, with a name of at least two lowercase"
            " letters, digits, dots, hyphens, and underscores",
            found=repr(url),
            todo="The account and other options are not part of the URL: see docs/stores.md",
        )
    return RetryStore(CloudFolder(container, folder.rstrip("/"), options), options.timeout)
