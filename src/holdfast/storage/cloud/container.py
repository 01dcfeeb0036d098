"""The requests to one container: reads and conditional creation.

An object is created by one PUT that never replaces another (``If-None-Match: *``; for Google,
``x-goog-if-generation-match: 0``). A server that ignores the condition could let two writers both
commit, so each process checks once that it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any, Self, TypeVar

from holdfast.buffers import as_byte_view
from holdfast.errors import Denied, NotFound, StoreError, Unavailable
from holdfast.storage.checks import (
    check_range,
    check_written_length,
    exists_error,
    short_read_error,
    too_long_error,
)
from holdfast.storage.cloud.endpoint import TIMEOUTS, CloudOptions, Endpoint, shared_endpoint
from holdfast.storage.cloud.failures import replaced_error, translated
from holdfast.storage.deadline import Deadline
from holdfast.storage.store import Stat, Traits, check_key
from holdfast.storage.throttle import Statistics
from holdfast.types import MIB

T = TypeVar("T")

MAX_KEY = 1024
"""The largest length of a name: characters in Azure, bytes in Google."""


class CloudContainer:
    """The requests that ``CloudStore`` and ``StreamAppender`` share, for objects below ``prefix``.

    ``at(folder)`` and ``within(deadline)`` return views. All stores of a process with equal options
    share the limit of their requests. ``statistics()`` shows them, other than the parts of uploads.
    """

    def __init__(self, container: str, prefix: str, options: CloudOptions) -> None:
        self.container = container
        self._root = f"{options.scheme}://{container}"
        self.prefix = check_key(prefix, self._root) + "/" if prefix else ""
        self.options = options
        self.deadline: Deadline | None = None
        shared_endpoint(options)  # raises if obstore is missing

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
        options = self.options
        return Traits(
            options.scheme, 1, durable=True, ordered=True, hidden_uploads=options.hidden_uploads
        )

    @property
    def url(self) -> str:
        return f"{self._root}/{self.prefix}".rstrip("/")

    def object_name(self, key: str) -> str:
        """Return the name of an object in the container. Raises ``StoreError`` for a key that
        Azure or Google would refuse or change."""
        name = self.prefix + check_key(key, self.url)
        try:
            length = len(name.encode())
        except UnicodeEncodeError:
            length = -1
        is_changed = "\\" in name or any(s.endswith(".") for s in name.split("/"))
        if (
            not 0 <= length <= MAX_KEY
            or is_changed
            or any(ord(c) < 32 or c == "\x7f" for c in name)
        ):
            raise StoreError(
                f"Invalid key {key[:200]!r} for {self.url}",
                expected=f"at most {MAX_KEY} bytes, with the folder in the container, without"
                " control characters, backslashes, and names that end with a dot",
                found=f"{length} bytes" if length > MAX_KEY else repr(key[:200]),
                key=key,
                store=self.url,
            )
        return name

    # -- creating ------------------------------------------------------------------------------

    def create_object(self, key: str, data: bytes, *, accept_equal: bool) -> None:
        """Create an object with one conditional PUT.

        If a reply is lost, the next try finds the object, and this succeeds if it has exactly these
        bytes. ``accept_equal``: the same for an object that was there before. Raises
        ``AlreadyExists``.
        """
        name, may_be_own = self.object_name(key), accept_equal

        def put(client: Any) -> bool:
            nonlocal may_be_own
            try:
                return self._try_to_create(client, name, key, data)
            except StoreError as e:
                may_be_own |= e.is_outcome_unknown
                raise

        if self.call("Put", "write", key, put, TIMEOUTS[-1]):
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
        self.endpoint.conditional_containers.add(self.container)
        raise exists_error(key, self.url)

    def _try_to_create(self, client: Any, name: str, key: str, data: bytes) -> bool:
        """Send one conditional PUT. Return False if the server refuses it: the object exists."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with translated("write", key, self.url):
            try:
                obstore.put(client, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def require_conditional_put(self, key: str, data: bytes) -> None:
        """Check that the server does not replace an object that this process has created.

        Repeat the PUT, which must fail. If it succeeds, the object has the same bytes as before.
        """
        name = self.object_name(key)

        def put(client: Any) -> bool:
            return self._try_to_create(client, name, key, data)

        if self.call("Put", "write", key, put, TIMEOUTS[-1]):
            raise StoreError(
                f"{self.url} cannot hold a run: its server replaces objects",
                expected="a server that refuses to create an object that exists",
                found="one that ignores the condition, so that two writers could both commit",
                todo="Use another server",
                key=key,
                store=self.url,
            )
        self.endpoint.conditional_containers.add(self.container)

    def _object_equals(self, key: str, data: bytes) -> bool:
        return self.stat(key).length == len(data) and self.get(key, len(data)) == data

    def require_stat(self, key: str, length: int) -> Stat:
        """Return the status of an object that was just written. Raises ``StoreError`` if the server
        shows another length."""
        stat = self.stat(key)
        check_written_length(key, self.url, length, stat.length)
        return stat

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

        return self.call("Get", "read", key, read)

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

        self.call("Get", "read", key, read)

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

    def stat(self, key: str) -> Stat:
        import obstore

        name = self.object_name(key)

        def head(client: Any) -> Stat:
            try:
                with translated("look up", key, self.url):
                    return to_stat(obstore.head(client, name), key)
            except NotFound:
                self._require_container(client)
                raise
            except Denied:  # the reply to a HEAD has no reason
                with translated("look up", key, self.url):
                    obstore.get(client, name, options={"range": (0, 1)})
                raise

        return self.call("Head", "look up", key, head)

    def _require_container(self, client: Any) -> None:
        """Raise ``StoreError`` if the container is missing. The reply to a HEAD does not tell."""
        import obstore

        known = self.endpoint.known_containers
        if self.container not in known:
            with suppress(Denied), translated("list", "", self.url):  # it may be there if denied
                next(iter(obstore.list(client, "holdfast-looks-for-the-container")), None)
            known.add(self.container)

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

        ``longest``: the longest time of one try, in seconds. Raises ``StoreError``.
        """
        endpoint = self.endpoint
        deadline = self.deadline_of(action, key)

        def attempt() -> T:
            try:
                with translated(action, key, self.url):
                    return request(endpoint.client(self.container, deadline.seconds_left, longest))
            except Denied:
                endpoint.forget_clients()  # they keep credentials, and that there were none
                raise

        return endpoint.throttle.call(operation, deadline, attempt)

    def deadline_of(self, action: str, key: str) -> Deadline:
        """Return the time by which a call must end."""
        seconds = self.options.timeout
        longest = Deadline.after(seconds, f"at most {seconds:g} s to {action} {key}")
        return longest if self.deadline is None else self.deadline


def to_stat(found: Any, key: str) -> Stat:
    return Stat(key, int(found["size"]), int(found["last_modified"].timestamp()))
