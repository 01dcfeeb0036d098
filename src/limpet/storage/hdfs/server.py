"""The options of ``hdfs://``, and the client of one HDFS, each call of which has a limit of time.

If a NameNode is away, hdfs-native waits for minutes, and no call of it has a timeout. So each call
runs in a thread of its own, which is abandoned if the call takes too long. It ends when hdfs-native
gives up. (The asynchronous client can be cancelled, but version 0.14.7 panics when it has to wait
before it connects again.)
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from limpet.deadline import Call, Deadline, call_within
from limpet.errors import StoreError
from limpet.storage.retry import Server
from limpet.storage.store import Rule, make_options, switch

T = TypeVar("T")

INSTALL = "Install it: pip install 'limpet[hdfs]'"

_CLOSE_PAUSES = (0.004, 0.008, 0.016, 0.032, 0.064, 0.128)
"""Seconds before each look at whether the last block of a file that is closed was reported."""

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


class HdfsServer(Server):
    """The client of one HDFS with certain options. ``step_seconds``: see ``HdfsFile``."""

    def __init__(self, server: str, options: HdfsOptions) -> None:
        super().__init__(options.concurrency, options.timeout)
        self.name = server
        self.options = options
        self.step_seconds = 0.0
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

        return ClientOfWriters(self.name, {**_DEFAULTS, **dict(self.options.config)})


def _without_finalizer(writer: io.RawIOBase) -> io.RawIOBase:
    io.RawIOBase.close(writer)  # marks the file object as closed; hdfs-native ignores the mark
    return writer


_servers: dict[tuple[int, str, HdfsOptions], HdfsServer] = {}


def shared_server(server: str, options: HdfsOptions) -> HdfsServer:
    """Return the server with these options that all stores of this process share.

    Raises ``StoreError`` if hdfs-native is not installed.
    """
    try:
        import hdfs_native  # noqa: F401
    except ImportError as e:
        raise StoreError("An hdfs:// store needs the package hdfs-native", todo=INSTALL) from e
    key = (os.getpid(), server, options)
    found = _servers.get(key)
    return _servers.setdefault(key, HdfsServer(server, options)) if found is None else found


def close_file(client: Any, path: str, writer: Any) -> None:
    """Close a file without the pause of hdfs-native. Raises its errors.

    The NameNode closes a file once a DataNode has reported its last block. hdfs-native often asks
    too early, and then asks again after 500 ms: in a save of four small files, almost all of the
    time.

    ``writer.close`` runs in another thread. If the last block was reported in the meantime, this
    closes the file with a request of its own, and leaves that thread to end.
    """
    call = Call(writer.close, "limpet-close")
    for pause in _CLOSE_PAUSES:
        if call.wait(pause):
            break
        with suppress(Exception):  # the other thread finds out what is wrong
            if _is_reported(client, path) and client.recover_lease(path):
                return
    call.result()


def _is_reported(client: Any, path: str) -> bool:
    """Return True if the NameNode knows that a DataNode has the whole last block of a file.

    Then, no lease has to be recovered, and ``recover_lease`` only closes the file. Before that, the
    NameNode counts the space of a full block. (If the block is full, this returns False.)
    """
    status = client.get_file_info(path)
    if not status.length % status.blocksize:
        return False
    space = client.get_content_summary(path).space_consumed
    return bool(space == status.length * status.replication)
