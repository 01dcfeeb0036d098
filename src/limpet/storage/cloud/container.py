"""The requests to one container: reads and conditional creation.

An object is created by one PUT that never replaces another (``If-None-Match: *``; for Google,
``x-goog-if-generation-match: 0``). A server that ignores the condition could let two writers both
commit, so each process checks once that it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from limpet.buffers import as_byte_view
from limpet.deadline import Deadline, call_within
from limpet.errors import Denied, StoreError, Unavailable
from limpet.storage.checks import (
    check_range,
    replaced_error,
    short_read_error,
    too_long_error,
)
from limpet.storage.cloud.endpoint import TIMEOUTS, CloudOptions, Endpoint, shared_endpoint
from limpet.storage.cloud.failures import translated
from limpet.storage.remote import BucketStore
from limpet.storage.store import Stat, Traits
from limpet.text import hide_secrets
from limpet.types import MIB

T = TypeVar("T")


class CloudContainer(BucketStore):
    """The requests that ``CloudStore`` and ``StreamAppender`` share, for objects below ``prefix``.

    ``statistics()`` does not count the parts of uploads.
    """

    _longest_put = TIMEOUTS[-1]  # it is for the whole request

    def __init__(self, container: str, prefix: str, options: CloudOptions) -> None:
        super().__init__(f"{options.scheme}://{container}", prefix, options.timeout)
        self.container = container
        self.options = options
        shared_endpoint(options)  # raises if obstore is missing

    @property
    def endpoint(self) -> Endpoint:
        return shared_endpoint(self.options)

    @property
    def traits(self) -> Traits:
        options = self.options
        return Traits(
            options.scheme,
            1,
            durable=True,
            ordered=True,
            hidden_uploads=options.hidden_uploads,
            upload_memory=6 * options.part_size + 8 * MIB,  # see StreamAppender
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

    def require_credentials(self, action: str, key: str) -> None:
        """Raise ``Denied`` if the store was opened without credentials, which suffice to read only.

        For a write to Google, obstore would look for credentials all the same.
        """
        if self.options.anonymous:
            raise Denied(
                f"Cannot {action} {key} in {self.url}: it was opened with anonymous=True",
                expected="a store with credentials",
                todo="Open it without this option",
                key=key,
                store=self.url,
            )

    def _try_to_create(self, client: Any, name: str, key: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with translated("write", key, self.url):
            try:
                obstore.put(client, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    # -- reading -------------------------------------------------------------------------------

    def get(self, key: str, limit: int) -> bytes:
        import obstore

        name = self.object_name(key)

        def read(client: Any) -> bytes:
            reply = obstore.get(client, name)
            length = int(reply.meta["size"])
            if length > limit:
                raise too_long_error(key, self.url, limit, length)
            data = bytearray(length)
            self._read_body(reply, memoryview(data), key, lambda count: None)
            return bytes(data)

        return self.call("GetObject", "read", key, read)

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        import obstore

        into = as_byte_view(into)
        check_range(key, self.url, offset, length, len(into))
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
            wanted: Any = {"range": (offset + done, offset + length), **tag}
            try:
                with translated("read", key, self.url):
                    reply = obstore.get(client, name, options=wanted)
            except StoreError as e:
                if e.fields.get("status") == 416:
                    raise short_read_error(key, self.url, offset, length, done) from None
                if e.fields.get("status") == 412:
                    raise replaced_error(key, self.url) from None
                raise
            found = reply.range[1] - offset
            if found != length:
                raise short_read_error(key, self.url, offset, length, found)
            if e_tag := reply.meta["e_tag"]:
                tag["if_match"] = e_tag
            self._read_body(reply, into[done:length], key, advance)

        self.call("GetObject", "read", key, read)

    def _read_body(
        self, reply: Any, into: memoryview, key: str, advance: Callable[[int], None]
    ) -> None:
        """Read exactly the bytes of ``into``. Raises ``Unavailable`` if the reply ends before."""
        done = 0
        for chunk in reply.stream(min_chunk_size=MIB):
            if self.deadline is not None and not self.deadline.seconds_left:
                raise Unavailable(
                    f"Reading {key} in {self.url} is too slow", store=self.url, key=key
                )
            count = min(len(chunk), len(into) - done)
            into[done : done + count] = memoryview(chunk)[:count]
            done += count
            advance(count)
        if done < len(into):
            raise Unavailable(
                f"The reply for {key} in {self.url} is incomplete", key=key, store=self.url
            )

    def _head(self, client: Any, name: str, key: str) -> Stat:
        import obstore

        with translated("look up", key, self.url):
            return to_stat(obstore.head(client, name), key)

    def _get_first_byte(self, client: Any, name: str, key: str) -> None:
        import obstore

        with translated("look up", key, self.url):
            obstore.get(client, name, options={"range": (0, 1)})

    def _list_any(self, client: Any) -> None:
        import obstore

        def first() -> None:
            next(iter(obstore.list(client, "limpet-looks-for-the-container")), None)

        with translated("list", "", self.url):
            self._list_within(self.deadline_for("list", ""), "", first)

    def _list_within(self, deadline: Deadline, folder: str, function: Callable[[], T]) -> T:
        """Return ``function()``, one call of obstore that sends requests until a listing ends."""
        try:
            return call_within(deadline, function)
        except TimeoutError:
            raise Unavailable(
                f"Listing {folder or self.url} in {self.root} is too slow",
                key=folder,
                store=self.url,
            ) from None

    def call_list(self, folder: str, request: Callable[[Any], T]) -> T:
        """Return ``request(client)``, which sends any number of requests, by the deadline."""
        deadline = self.deadline_for("list", folder)
        return self.within(deadline).call(
            "ListObjects",
            "list",
            folder,
            lambda client: self._list_within(deadline, folder, lambda: request(client)),
        )

    def _send(
        self, action: str, key: str, request: Callable[[Any], T], deadline: Deadline, longest: int
    ) -> T:
        endpoint = self.endpoint
        try:
            with translated(action, key, self.url):
                result = request(endpoint.client(self.container, deadline.seconds_left, longest))
        except Denied:
            endpoint.forget_clients()  # they keep credentials, and that there were none
            raise
        except Unavailable as e:
            if "foreign" in e.fields and self.root not in endpoint.known:
                if self.root in endpoint.suspect:
                    raise self._foreign_server_error(e) from None
                endpoint.suspect.add(self.root)  # one reply may be damaged
            raise
        endpoint.known.add(self.root)
        return result

    def _foreign_server_error(self, error: Unavailable) -> StoreError:
        """Return the error for a server none of whose replies has been valid: a web server."""
        name = {"az": "Azure", "gs": "Google Cloud Storage"}[self.options.scheme]
        return StoreError(
            f"The server of {self.root} does not answer as {name} does",
            todo="Check the endpoint",
            **error.fields,
        )


def to_stat(found: Any, key: str) -> Stat:
    return Stat(key, int(found["size"]), int(found["last_modified"].timestamp()))
