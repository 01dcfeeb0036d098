"""The connections of this process to HDFS, and a limit of the time of each call.

If a NameNode is away, hdfs-native waits for minutes, and no call of it has a timeout. So each call
runs in a thread of its own, which is abandoned if the call takes too long. It ends when hdfs-native
gives up. (The asynchronous client can be cancelled, but version 0.14.7 panics when it has to wait
before it connects again.)
"""

from __future__ import annotations

import io
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from limpet.deadline import Deadline, call_within
from limpet.errors import StoreError
from limpet.storage.checks import Rule, make_options, switch
from limpet.storage.throttle import Throttle

T = TypeVar("T")

INSTALL = "Install it: pip install 'limpet[hdfs]'"

LONGEST_CALL = 60.0
"""Seconds after which a call is abandoned, and repeated where this is possible."""

_READER_SECONDS = 5.0
"""Seconds for which the places of a file's blocks are used without asking the NameNode again."""

_MAX_READERS = 64

_DEFAULTS = {
    # go on with the remaining DataNodes if one fails and there is no other one
    "dfs.client.block.write.replace-datanode-on-failure.best-effort": "true",
}


_INT = (int, type(None))
_SCALAR = (str, int, float)


@dataclass(frozen=True, slots=True)
class HdfsOptions:
    """The options of ``limpet.open_store("hdfs://...", **options)``.

    What is not given comes from the files ``core-site.xml`` and ``hdfs-site.xml`` in the folder
    that ``HADOOP_CONF_DIR`` or ``HADOOP_HOME`` names. ``config``: properties of Hadoop that take
    precedence over them. ``replication``: the number of copies of a block. ``block_size``: in
    bytes. ``concurrency``: the largest number of calls of this process in progress. ``timeout``:
    seconds for which a call is repeated while HDFS is unreachable or busy. ``allow_weak``: write
    even if HDFS cannot make the bytes durable.
    """

    config: tuple[tuple[str, str], ...] = ()
    replication: int | None = None
    block_size: int | None = None
    concurrency: int = 32
    timeout: float = 300.0
    allow_weak: bool = False

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> HdfsOptions:
        """Return the options. Raises ``StoreError`` for an unknown name or an invalid value."""
        values = dict(options)
        values["config"] = _config_items(values.get("config", {}))
        rules: tuple[Rule, ...] = (
            ("config", tuple, lambda c: True, "a dict of properties of Hadoop"),
            ("replication", _INT, lambda n: n is None or 1 <= n < 1 << 15, "1 to 32767"),
            ("block_size", _INT, lambda n: n is None or 1 << 20 <= n <= 1 << 40, "1 MiB to 1 TiB"),
            switch("allow_weak"),
        )
        return make_options(cls, "an HDFS store", values, rules)


def _config_items(config: Any) -> tuple[tuple[str, str], ...]:
    """Return the properties in order. Raises ``StoreError``, without them: one may be a token."""
    if isinstance(config, Mapping):
        config = tuple(config.items())
    is_valid = isinstance(config, tuple) and all(
        isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in config
    )
    if not is_valid or not all(isinstance(value, _SCALAR) for _, value in config):
        raise StoreError(
            "Invalid value for config=",
            expected="a dict of properties of Hadoop: names, and texts or numbers",
            found="something else, which is not shown because it may be secret",
        )
    return tuple(sorted((name, str(value)) for name, value in config))


class Readers:
    """The readers of files, which know where the blocks of the files are.

    Without them, each read of 4 MiB would ask the NameNode.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._readers: OrderedDict[str, tuple[Any, float]] = OrderedDict()

    def forget(self, path: str) -> None:
        with self._lock:
            self._readers.pop(path, None)

    def read(self, client: Any, path: str, offset: int, length: int) -> tuple[bytes | None, int]:
        """Return bytes of a file, None if it is too short for them, and its length."""
        reader, opened_at = self._readers.get(path, (None, 0.0))
        if reader is None or time.monotonic() - opened_at > _READER_SECONDS:
            reader = client.read(path)
            with self._lock:
                self._readers[path] = reader, time.monotonic()
                while len(self._readers) > _MAX_READERS:
                    self._readers.popitem(last=False)
        file_length = len(reader)
        if file_length < offset + length:
            self.forget(path)  # it may have grown
            return None, file_length
        try:
            return reader.read_range(offset, length), file_length
        except BaseException:
            self.forget(path)
            raise


class Connection:
    """The client of one HDFS with certain options, and the throttle of its calls."""

    def __init__(self, server: str, options: HdfsOptions) -> None:
        self.server = server
        self.options = options
        self.throttle = Throttle(options.concurrency, options.timeout)
        self.readers = Readers()
        self._lock = Lock()
        self._client: Any = None

    def call(self, request: Callable[[Any], T], deadline: Deadline) -> T:
        """Return what ``request(client)`` returns by the deadline.

        Raises ``TimeoutError`` and the errors of hdfs-native.
        """
        if self._client is None:
            with self._lock:
                if self._client is None:
                    self._client = self._create_client()
        client = self._client
        return call_within(deadline, lambda: request(client))

    def _create_client(self) -> Any:
        from hdfs_native import Client

        class ClientOfWriters(Client):
            """Its writers are closed only by a call of ``close``.

            They are Python file objects, which Python closes when nothing refers to them any more.
            That runs in any thread, such as the training, and waits for a NameNode that is away.
            """

            def create(self, *args: Any) -> Any:
                return _without_finalizer(super().create(*args))

            def append(self, *args: Any) -> Any:
                return _without_finalizer(super().append(*args))

        return ClientOfWriters(self.server, {**_DEFAULTS, **dict(self.options.config)})


def _without_finalizer(writer: io.RawIOBase) -> io.RawIOBase:
    io.RawIOBase.close(writer)  # marks the file object as closed; hdfs-native ignores the mark
    return writer


_connections: dict[tuple[int, str, HdfsOptions], Connection] = {}


def shared_connection(server: str, options: HdfsOptions) -> Connection:
    """Return the connection with these options that all stores of this process share.

    Raises ``StoreError`` if hdfs-native is not installed.
    """
    try:
        import hdfs_native  # noqa: F401
    except ImportError as e:
        raise StoreError("An hdfs:// store needs the package hdfs-native", todo=INSTALL) from e
    key = (os.getpid(), server, options)
    found = _connections.get(key)
    return _connections.setdefault(key, Connection(server, options)) if found is None else found
