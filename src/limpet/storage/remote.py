"""What the stores on a server share: folders, deadlines, and the creation of a small object.

``RemoteStore`` is the base of all of them. ``BucketStore`` is that of the servers that create an
object by one request with a condition. Their subclasses say how one request is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any, ClassVar, Self, TypeVar

from limpet.deadline import Deadline
from limpet.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable
from limpet.storage.checks import check_written_length, exists_error, refuse_partial
from limpet.storage.store import Stat, check_key
from limpet.storage.throttle import Statistics, Throttle

T = TypeVar("T")


@contextmanager
def outcome_unknown() -> Iterator[None]:
    """Add to an error of the block that the object may have been created."""
    try:
        yield
    except StoreError as e:
        raise e.with_advice(outcome="unknown") from e


class RemoteStore(ABC):
    """A folder on a server. ``at(folder)`` and ``within(deadline)`` return views.

    ``root``: the URL of what the folder is in; ``prefix``: the path of the folder in it, with a
    slash at its end unless it is empty; ``timeout``: seconds for which a call is repeated.
    """

    _longest_name: ClassVar[int] = 1024
    """The largest length of the name of an object, in bytes. (Azure counts characters.)"""

    def __init__(self, root: str, folder: str, timeout: float) -> None:
        self.root = root
        self.prefix = check_key(folder, root) + "/" if folder else ""
        self.timeout = timeout
        self.deadline: Deadline | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @property
    def url(self) -> str:
        return f"{self.root}/{self.prefix}"[:-1]

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

    def for_cleanup(self) -> Self:
        """Return a view whose calls end within ``CLEANUP_SECONDS`` of the deadline."""
        view = copy(self)
        view.deadline = None if self.deadline is None else self.deadline.for_cleanup()
        return view

    def deadline_for(self, action: str, key: str) -> Deadline:
        """Return the time by which a call must end. ``action``: "read", for messages."""
        purpose = f"at most {self.timeout:g} s to {action} {key}"
        return Deadline.after(self.timeout, purpose).earlier(self.deadline)

    def object_name(self, key: str) -> str:
        """Return the name of an object for the server. Raises ``StoreError`` for an invalid key."""
        name = self.prefix + check_key(key, self.url)
        try:
            length = len(name.encode())
        except UnicodeEncodeError:
            length = -1
        if not 0 <= length <= self._longest_name:
            raise StoreError(
                f"Invalid key {key[:200]!r} for {self.url}",
                expected=f"at most {self._longest_name} bytes, with the folder of the store",
                found=f"{length} bytes" if length > 0 else "characters that UTF-8 does not have",
                key=key,
                store=self.url,
            )
        return name

    @abstractmethod
    def stat(self, key: str) -> Stat: ...

    @abstractmethod
    def get(self, key: str, limit: int) -> bytes: ...

    @outcome_unknown()
    def require_stat(self, key: str, length: int) -> Stat:
        """Return the status of an object that was just written. Raises ``StoreError`` if the server
        shows another length."""
        stat = self.stat(key)
        check_written_length(key, self.url, length, stat.length)
        return stat

    def require_equal(self, key: str, data: bytes, error: BaseException) -> Stat:
        """Return the status of an object if it has exactly these bytes. Otherwise, raise ``error``.

        ``error``: that of its creation, after which the object may be of this process: it exists,
        or the outcome is unknown.
        """
        try:
            with outcome_unknown():
                stat = self.stat(key)
                if stat.length == len(data) and self.get(key, len(data)) == data:
                    return stat
        except NotFound as e:
            if isinstance(error, AlreadyExists):
                raise Unavailable(
                    f"{key} in {self.url} was created and deleted by another process",
                    todo="Try again",
                    key=key,
                    store=self.url,
                ) from e
        raise error


class Server:
    """What all stores of a process on one server share, if their options are equal.

    ``throttle`` limits their requests. ``known``: the URLs of the buckets that have answered;
    ``conditional``: of those in which the server has refused to replace an object.
    """

    def __init__(self, concurrency: int, timeout: float) -> None:
        self.throttle = Throttle(concurrency, timeout)
        self.known: set[str] = set()
        self.conditional: set[str] = set()


class BucketStore(RemoteStore):
    """A folder in a bucket, whose server can create an object only if its name is free.

    A server that ignores this condition could let two writers both commit, so each process checks
    once that it does not. ``statistics()`` shows the requests of all stores on the server.
    """

    _longest_put: ClassVar[int] = 15
    """The longest wait for the reply to a PUT, in seconds, as for ``call``."""

    @property
    @abstractmethod
    def endpoint(self) -> Server:
        """The server. All stores of a process with equal options share it."""

    @abstractmethod
    def _send(
        self, action: str, key: str, request: Callable[[Any], T], deadline: Deadline, longest: int
    ) -> T:
        """Return what ``request(client)`` returns. Raises ``StoreError`` for each failure."""

    @abstractmethod
    def _try_to_create(self, client: Any, name: str, key: str, data: bytes) -> bool:
        """Send one conditional PUT. Return False if the server refuses it: the object exists."""

    @abstractmethod
    def _head(self, client: Any, name: str, key: str) -> Stat:
        """Send one HEAD. Raises ``StoreError``, with the status of the reply."""

    @abstractmethod
    def _get_first_byte(self, client: Any, name: str, key: str) -> None:
        """Send a GET, whose reply has the reason of a failure. Raises ``StoreError``."""

    @abstractmethod
    def _list_any(self, client: Any) -> None:
        """List something in the bucket. Raises ``StoreError``."""

    def statistics(self) -> Statistics:
        """Return the statistics of all requests of this process with these options."""
        return self.endpoint.throttle.statistics()

    def call(
        self,
        operation: str,
        action: str,
        key: str,
        request: Callable[[Any], T],
        longest: int = 15,
    ) -> T:
        """Return what ``request(client)`` returns. Repeat it while the server is unavailable.

        ``longest``: the longest timeout of the client, in seconds. Raises ``StoreError``.
        """
        deadline = self.deadline_for(action, key)
        return self.endpoint.throttle.call(
            operation, deadline, lambda: self._send(action, key, request, deadline, longest)
        )

    def stat(self, key: str) -> Stat:
        name = self.object_name(key)

        def head(client: Any) -> Stat:
            try:
                return self._head(client, name, key)
            except StoreError as e:  # the reply to a HEAD has no reason
                if isinstance(e, NotFound):
                    self._require_bucket(client)
                elif isinstance(e, Denied) or e.fields.get("status") == 400:
                    self._get_first_byte(client, name, key)
                raise

        return self.call("HeadObject", "look up", key, head)

    def _require_bucket(self, client: Any) -> None:
        """Raise ``StoreError`` if the bucket is missing."""
        if self.root not in self.endpoint.known:
            with suppress(Denied):  # it may be there
                self._list_any(client)
            self.endpoint.known.add(self.root)

    # -- creating ------------------------------------------------------------------------------

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        refuse_partial(key, self.url)
        self.create_object(key, data, accept_equal=True)
        if self.root not in self.endpoint.conditional:
            self.require_conditional_put(key, data)
        return self.require_stat(key, len(data))

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

        if self.call("PutObject", "write", key, put, self._longest_put):
            return
        self.endpoint.conditional.add(self.root)
        error = exists_error(key, self.url)
        if not may_be_own:
            raise error
        self.require_equal(key, data, error)

    @outcome_unknown()
    def require_conditional_put(self, key: str, data: bytes) -> None:
        """Check that the server does not replace an object that this process has created.

        Repeat the PUT, which must fail. If it succeeds, the object has the same bytes as before.
        """
        name = self.object_name(key)

        def put(client: Any) -> bool:
            return self._try_to_create(client, name, key, data)

        if self.call("PutObject", "write", key, put, self._longest_put):
            raise StoreError(
                f"{self.url} cannot hold a run: its server replaces objects",
                expected="a server that refuses to create an object that exists",
                found="one that ignores the condition, so that two writers could both commit",
                todo=self._other_server(),
                key=key,
                store=self.url,
            )
        self.endpoint.conditional.add(self.root)

    def _other_server(self) -> str:
        """Return the advice for a server that ignores the condition."""
        return "Use another server"
