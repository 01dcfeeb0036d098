"""A store in a folder of HDFS, through hdfs-native. The commit is a rename, which replaces no file.

Terms: the *NameNode* keeps the names and lengths of files, and *DataNodes* keep their blocks. The
*lease* of a file belongs to the client that writes it, until the file is closed.

A file is written under a temporary name, made durable, and renamed. That a file exists proves
nothing: one whose writer died is visible, and can be renamed. So the length is compared before.
No call of hdfs-native has a timeout, and it waits for minutes for a NameNode that is away. So each
runs in a thread of its own, and may be abandoned.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from threading import Lock
from typing import Any, ClassVar, TypeVar

from limpet.deadline import CLEANUP_SECONDS, Call, Deadline, call_within
from limpet.errors import AlreadyExists, Denied, NoSpace, NotFound, StoreError, Unavailable
from limpet.storage.options import Options, option, switch
from limpet.storage.retry import BlockReply, Remote, RemoteUpload, Reply, RetryStore, Server
from limpet.storage.store import (
    Entry,
    Stat,
    Traits,
    check_written_length,
    exists_error,
    lost_upload_error,
    weak_store_error,
)
from limpet.text import advise_install
from limpet.types import BLOCK_SIZE, MIB

T = TypeVar("T")

_CLOSE_PAUSES = (0.004, 0.008, 0.016, 0.032, 0.064, 0.128)
"""Seconds before each look at whether the last block of a file that is closed was reported."""

_DEFAULTS = {
    # go on with the remaining DataNodes if one fails and there is no other one
    "dfs.client.block.write.replace-datanode-on-failure.best-effort": "true",
}


@dataclass(frozen=True, slots=True)
class HdfsOptions(Options):
    """The options of ``limpet.open_store("hdfs://...", **options)``.

    What is not given comes from the files ``core-site.xml`` and ``hdfs-site.xml`` in the folder
    that ``HADOOP_CONF_DIR`` or ``HADOOP_HOME`` names. ``config``: properties of Hadoop that take
    precedence over them. ``replication``: the number of copies of a block. ``block_size``: in
    bytes. ``concurrency``: the largest number of calls of this process in progress. ``allow_weak``:
    write even if HDFS cannot make the bytes durable. See also ``Options``.
    """

    config: tuple[tuple[str, str], ...] = option((), tuple, "", is_secret=True)
    replication: int | None = option(
        None, (int, type(None)), "1 to 32767", lambda n: n is None or 1 <= n < 1 << 15
    )
    block_size: int | None = option(
        None, (int, type(None)), "1 MiB to 1 TiB", lambda n: n is None or 1 << 20 <= n <= 1 << 40
    )
    concurrency: int = option(32, int, "1 to 1024", lambda n: 1 <= n <= 1024)
    allow_weak: bool = switch()

    kind: ClassVar[str] = "an HDFS store"


def _config_items(config: Any) -> tuple[tuple[str, str], ...]:
    """Return the properties in order. Raises ``StoreError``, without them: one may be a token."""
    if not isinstance(config, Mapping) or not all(
        isinstance(name, str) and isinstance(value, str | int | float)
        for name, value in config.items()
    ):
        raise StoreError(
            "Invalid value for config=",
            expected="a dict of properties of Hadoop: names, and texts or numbers",
            found="something else, which is not shown because it may be secret",
        )
    return tuple(sorted((name, str(value)) for name, value in config.items()))


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
        """Return what ``request(client)`` returns by the deadline, or raise ``TimeoutError``."""
        with self._lock:
            self._client = client = self._client or self._create_client()
        return call_within(deadline, lambda: request(client))

    def _create_client(self) -> Any:
        from hdfs_native import Client

        class ClientOfWriters(Client):
            """Its writers are closed only by ``close``: Python closes file objects, which they are,
            in any thread, such as the training, and that waits for a NameNode that is away."""

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
    """Return the server with these options that all stores of this process share."""
    try:
        import hdfs_native  # noqa: F401
    except ImportError as e:
        raise StoreError(
            "An hdfs:// store needs the package hdfs-native", todo=advise_install("hdfs")
        ) from e
    key = (os.getpid(), server, options)
    found = _servers.get(key)
    return _servers.setdefault(key, HdfsServer(server, options)) if found is None else found


def close_file(client: Any, path: str, writer: Any) -> None:
    """Close a file without hdfs-native's pause: it often asks before a DataNode has reported the
    last block, and again after 500 ms, almost all of the time of a save of small files.

    ``writer.close`` runs in another thread. If the block was reported in the meantime, this closes
    the file with a request of its own, and leaves that thread to end.
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
    """Return True if the NameNode knows of a DataNode with the last block: then, ``recover_lease``
    only closes the file. Before, it counts a full block (of a full one, this is False)."""
    status = client.get_file_info(path)
    if not status.length % status.blocksize:
        return False
    space = client.get_content_summary(path).space_consumed
    return bool(space == status.length * status.replication)


_URL = re.compile(r"(hdfs://[^/?#@]*)((?:/.*)?)", re.DOTALL)

LONGEST_CALL = 60.0
"""Seconds after which a call is abandoned, and repeated where this is possible."""

FIRST_STEP = 10.0
"""Seconds after which a step of a write is abandoned, and the bytes are written in another way.
When a DataNode is gone that is not the first one of a new block, hdfs-native waits for ever."""

_PROMISE = "a file whose bytes are on disk when its upload is committed (hsync)"

_IN_FLIGHT = 16 * MIB
"""A little more than what hdfs-native accepts before a DataNode confirms it, in bytes."""

_RECOVERY_PAUSES = (1, 2, 4, 8, 16, 24, 0)
"""Seconds after each question whether the NameNode has closed a file. Less than a heartbeat of the
DataNodes (3 s by default) may be too short for them to do it."""


class HdfsFolder(Remote):
    """A folder of HDFS."""

    longest_name: ClassVar[int] = 8000  # the NameNode counts characters
    has_conditional_put: ClassVar[bool] = False

    def __init__(self, server: str, folder: str, options: HdfsOptions) -> None:
        super().__init__(server, folder.strip("/"))
        self.options = options
        self._top = self.folder
        shared_server(server, options)  # raises if hdfs-native is missing

    @property
    def server(self) -> HdfsServer:
        return shared_server(self.root, self.options)

    @property
    def traits(self) -> Traits:
        return Traits(
            "hdfs",
            1,
            durable=not self.options.allow_weak,
            read_size=64 * MIB,
            ordered=True,
            upload_memory=40 * MIB,  # of HdfsFile and of hdfs-native
        )

    @property
    def folder(self) -> str:
        """The absolute path of the folder; "" for the root."""
        return f"/{self.prefix}"[:-1]

    def path(self, key: str) -> str:
        """Return the absolute path of a key. Raises ``StoreError`` for an invalid key."""
        return f"/{self.object_name(key)}"

    # -- reading -------------------------------------------------------------------------------

    def stat(self, key: str) -> Stat:
        status = self.look_up(self.path(key), key)
        if status is None or status.isdir:
            raise NotFound(f"There is no {key} in {self.url}", key=key, store=self.url)
        return _to_stat(key, status)

    def look_up(self, path: str, key: str) -> Any:
        """Return the status of a file or folder as hdfs-native has it; None if there is none."""
        try:
            return self.call("get_file_info", "look up", key, lambda c: c.get_file_info(path))
        except NotFound:
            return None

    def open(self, key: str, offset: int, length: int | None, tag: str) -> Reply:
        path = self.path(key)
        # it knows where the blocks of the file are, so a read does not ask the NameNode again
        reader = self.call("open", "read", key, lambda client: client.read(path))
        found = max(0, len(reader) - offset)

        def read(deadline: Deadline, at: int, size: int) -> bytes:
            self.deadline = deadline
            return self.call("read", "read", key, lambda _: bytes(reader.read_range(at, size)))

        found = found if length is None else min(length, found)
        return BlockReply(key, self.url, read, offset, found)

    def page(
        self, folder: str, prefix: str, marker: Any, *, deep: bool, partial: bool
    ) -> tuple[Sequence[Entry], Any]:
        # Each folder is a request of its own: one that is deleted meanwhile must not end the list.
        path = self.path(folder) if folder else self.folder or "/"

        def read(client: Any) -> list[Any]:
            found = []
            for status in client.list_status(path):
                if not self.deadline.seconds_left:
                    raise TimeoutError  # a list without an end must not go on in an abandoned call
                found.append(status)
            return found

        entries: list[Entry] = []
        for status in self.call("list_status", "list", folder, read):
            if status.path == path:
                continue  # the path is that of a file
            key = str(status.path[len(self.folder) + 1 :])
            name = key.rpartition("/")[2]
            kind_of_file = Entry(name, "object", _to_stat(key, status))
            entries.append(Entry(name, "folder") if status.isdir else kind_of_file)
        return entries, None

    # -- writing -------------------------------------------------------------------------------

    def begin(self, key: str, length: int, head: int) -> RemoteUpload:
        self.path(key)
        return HdfsFile(key, length)

    def delete(self, key: str) -> None:
        path = self.path(key)
        # first a question: of a server that does not answer, nothing is left that deletes it later
        status = self.look_up(path, key)
        if status is not None and not status.isdir:
            self.delete_file(path, key)

    def delete_file(self, path: str, key: str) -> None:
        """Delete a file if it exists, and then empty folders, whose errors do not matter."""
        if self.call("delete", "delete", key, lambda c: c.delete(path, recursive=False)):
            with suppress(StoreError):
                self.for_cleanup(key)._delete_empty_folders(path.rpartition("/")[0], key)

    def for_cleanup(self, key: str) -> HdfsFolder:
        """Return a view whose calls end within ``CLEANUP_SECONDS``."""
        view = copy(self)
        purpose = f"{CLEANUP_SECONDS:g} s for the cleanup of {key}"
        view.deadline = Deadline.after(CLEANUP_SECONDS, purpose).earlier(self.deadline)
        return view

    def _delete_empty_folders(self, path: str, key: str) -> None:
        """Delete a folder and those above it, up to the first one that is not empty. Each path must
        be a folder: the request would also delete a file of that name."""
        if len(path) <= len(self._top):
            return
        status = self.look_up(path, key)
        if status is not None and status.isdir:
            self.call("delete", "delete", key, lambda c: c.delete(path, recursive=False))
            self._delete_empty_folders(path.rpartition("/")[0], key)

    # -- calls ---------------------------------------------------------------------------------

    def call(
        self,
        operation: str,
        action: str,
        key: str,
        request: Callable[..., T],
        *arguments: Any,
        seconds: float = LONGEST_CALL,
    ) -> T:
        """Return ``request(client, *arguments)``, one call of hdfs-native, which is abandoned after
        ``seconds``, if not at the deadline."""
        server = self.server
        limit = Deadline.after(seconds, self.deadline.purpose).earlier(self.deadline)
        server.throttle.count(operation)
        try:
            return server.call(lambda client: request(client, *arguments), limit)
        except StoreError:
            raise
        except Exception as e:
            raise translate(e, action, key, self.url) from e


def _to_stat(key: str, status: Any) -> Stat:
    return Stat(key, status.length, status.modification_time / 1000)


class HdfsFile:
    """A file under a temporary name, which is then renamed to its key. Each call is a step of its
    own, abandoned early enough for more tries. After a slow one, the next ones get more time."""

    def __init__(self, key: str, length: int) -> None:
        self._key, self._length = key, length
        self.paths: list[str] = []  # of all files that may exist
        self._path = ""
        self._writer: Any = None
        self._position = 0
        self._tail: deque[bytes] = deque()  # the last bytes, which no DataNode may have yet
        self._is_broken = False  # the writer has failed
        self._is_closing = False  # the file is synced, and an attempt to close it has failed
        self._status: Any = None  # of the file, once it is closed

    def write(self, folder: HdfsFolder, offset: int, views: Sequence[memoryview]) -> None:
        block = b"".join(views)  # hdfs-native copies other buffers one element at a time
        self._require_file(folder)
        if self._is_broken:
            self._go_on(folder, block)
        else:
            self._try(folder, "write", self._writer.write, block)
        self._position += len(block)
        self._tail.append(block)
        while sum(map(len, self._tail)) - len(self._tail[0]) >= _IN_FLIGHT:
            self._tail.popleft()

    def commit(self, folder: HdfsFolder) -> None:
        if self._status is None:
            self._require_file(folder)
            try:
                self._status = self._finish(folder)
            except NotFound as e:
                raise lost_upload_error(self._key, folder.url) from e
            if self._status is None:
                raise lost_upload_error(self._key, folder.url)
            check_written_length(self._key, folder.url, self._length, self._status.length)
        self._rename(folder)

    def abort(self, folder: HdfsFolder) -> None:
        """Delete the files, which also ends their leases. ``sweep`` deletes those that remain."""
        self._writer = None
        folder = folder.for_cleanup(self._key)
        while self.paths:
            folder.delete_file(self.paths[-1], self._key)
            self.paths.pop()

    def _finish(self, folder: HdfsFolder) -> Any:
        """Make the bytes durable, close the file, and return its status."""
        path, writer = self._path, self._writer
        if self._is_closing:
            self._recover_lease(folder)
        else:
            if self._is_broken:
                self._go_on(folder, b"")
                path, writer = self._path, self._writer
            elif self._length:
                self._try(folder, "write", _sync, folder, self._key, writer)
            self._is_closing = True
            self._step(folder, "close", lambda client: close_file(client, path, writer))
        return folder.look_up(path, self._key)

    def _require_file(self, folder: HdfsFolder) -> None:
        if self._writer is None:
            self._path, self._writer = self._step(folder, "write", self._create, folder)

    def _create(self, client: Any, folder: HdfsFolder) -> tuple[str, Any]:
        """Create a file with a new name: an earlier try, whose reply was lost, may have created
        one. Return its path and its writer. Raises the errors of hdfs-native."""
        from hdfs_native import WriteOptions

        parent, _, name = folder.path(self._key).rpartition("/")
        path = f"{parent}/.{name[:48]}.{secrets.token_hex(8)}.partial"
        self.paths.append(path)
        options = WriteOptions(
            block_size=folder.options.block_size,
            replication=folder.options.replication,
            create_parent=True,
        )
        return path, client.create(path, options)

    def _try(
        self, folder: HdfsFolder, action: str, request: Callable[..., object], *arguments: Any
    ) -> None:
        """Let the writer do something. If it fails, the next try goes on with another one."""
        try:
            self._step(folder, action, lambda _: request(*arguments))
        except Unavailable:
            self._is_broken = True
            raise

    def _step(
        self, folder: HdfsFolder, action: str, request: Callable[..., T], *arguments: Any
    ) -> T:
        seconds, began = self._step_seconds(folder), time.monotonic()
        try:
            return folder.call(action, action, self._key, request, *arguments, seconds=seconds)
        except Unavailable:
            if time.monotonic() - began >= seconds:
                folder.server.step_seconds = min(1.5 * seconds, LONGEST_CALL)
            raise

    def _step_seconds(self, folder: HdfsFolder) -> float:
        """Return the seconds after which the next step is abandoned."""
        longest = max(FIRST_STEP, folder.server.step_seconds)
        return min(longest, max(1.0, folder.deadline.seconds_left / 4))

    def _go_on(self, folder: HdfsFolder, data: bytes) -> None:
        """Write ``data``, of which DataNodes may have a part, after an error of the writer: a
        DataNode is gone at the beginning of a block, which the client does not replace.

        If all bytes are known, they go to a new file. Else this one is closed with what DataNodes
        have, and opened again. They are synced, which has an effect only on a block that gets
        bytes: without more of them, and a last block that may be in memory only, the file is
        copied.
        """
        rest = b"".join([*self._tail, data])
        begin = self._position + len(data) - len(rest)
        path, missing, goes_on = self._path, rest, False
        if begin:
            found = self._recover(folder, begin, rest)
            goes_on = found.length < begin + len(rest) and found.length % found.blocksize > 0
            missing = rest[found.length - begin :] if goes_on else rest
        if goes_on:
            limit = Deadline.after(self._step_seconds(folder), folder.deadline.purpose)
            writer = self._step(folder, "write", _append, path, limit)
        else:
            path, writer = self._step(folder, "write", self._create, folder)
            self._copy(folder, begin, writer)
        if missing:
            self._step(folder, "write", lambda _: writer.write(missing))
            self._step(folder, "write", lambda _: _sync(folder, self._key, writer))
        self._path, self._writer, self._is_broken = path, writer, False

    def _copy(self, folder: HdfsFolder, length: int, writer: Any) -> None:
        """Write the first bytes of the closed file to another one."""
        source = self._path
        for start in range(0, length, BLOCK_SIZE):

            def copy(client: Any, start: int = start) -> None:
                size = min(BLOCK_SIZE, length - start)
                writer.write(bytes(client.read(source).read_range(start, size)))

            self._step(folder, "write", copy)

    def _recover(self, folder: HdfsFolder, begin: int, rest: bytes) -> Any:
        """Let the NameNode close the file, and return its status. ``rest``, which begins at
        ``begin``, has what it lacks."""
        self._recover_lease(folder)
        found = folder.look_up(self._path, self._key)
        if found is None:
            raise lost_upload_error(self._key, folder.url)
        if not begin <= found.length <= begin + len(rest):
            raise StoreError(
                f"{folder.url} has lost bytes of {self._key} with the DataNodes that had them",
                expected=f"{begin} to {begin + len(rest)} bytes",
                found=f"{found.length} bytes",
                todo="Save again; more copies of each block (replication=) make this rare",
                key=self._key,
                store=folder.url,
            )
        return found

    def _recover_lease(self, folder: HdfsFolder) -> None:
        """Let the NameNode close the file with what the DataNodes have; ``Unavailable`` if that
        takes too long. Each question makes the DataNodes begin anew, so the pauses grow."""
        path = self._path
        for pause in _RECOVERY_PAUSES:
            if folder.call("recover_lease", "close", self._key, lambda c: c.recover_lease(path)):
                return
            time.sleep(min(pause, folder.deadline.seconds_left))
        raise Unavailable(
            f"Cannot close {self._key} in {folder.url}: the NameNode does not get its last block",
            todo="Check that the DataNodes run that have it",
            key=self._key,
            store=folder.url,
        )

    def _rename(self, folder: HdfsFolder) -> None:
        """Rename the file to its key, which keeps the time of its change; delete the others."""
        path, target, key = self._path, folder.path(self._key), self._key
        status = self._status
        try:
            folder.call("rename", "commit", key, lambda c: c.rename(path, target, overwrite=False))
        except NotFound as e:  # an earlier try has renamed it, or ``sweep`` has deleted it
            try:
                found = folder.look_up(target, key)
            except StoreError as error:
                raise error.with_advice(outcome="unknown") from error
            if found is None or (found.length, found.modification_time) != (
                status.length,
                status.modification_time,
            ):
                raise lost_upload_error(self._key, folder.url) from e
        except AlreadyExists as e:
            found = folder.look_up(target, key)
            if found is not None and found.isdir:  # it is in the way for ever
                raise StoreError(
                    f"Cannot create {key} in {folder.url}: a folder has this name",
                    todo="Move the folder away, then try again. Nothing was changed",
                    key=key,
                    store=folder.url,
                ) from e
            raise
        self.paths.remove(path)
        with suppress(StoreError):
            self.abort(folder)


def _append(client: Any, path: str, limit: Deadline) -> Any:
    """Open a closed file again, and return its writer. Raises the errors of hdfs-native."""
    writer = client.append(path)
    if not limit.seconds_left:
        writer.close()  # this call was abandoned, and nobody else would end the lease
    return writer


def _sync(folder: HdfsFolder, key: str, writer: Any) -> None:
    """Make all bytes durable, as the client has done for each completed block."""
    found = "an hdfs-native without it: install 0.14.7 or a later version"
    if hasattr(writer, "hsync"):
        try:
            writer.hsync()
            return
        except NotImplementedError:
            found = "a file without it, such as one in an erasure-coded folder"
    if not folder.options.allow_weak:
        raise weak_store_error(key, folder.url, _PROMISE, found)


def open_hdfs(url: str, **options: Any) -> RetryStore:
    """Return the store at ``hdfs://NAMENODE:PORT/folder`` or ``hdfs://NAMESERVICE/folder``, or in
    the default file system (``hdfs:///folder``), with ``HdfsOptions``."""
    match = _URL.fullmatch(url)
    if match is None:
        raise StoreError(
            f"{url} does not name a folder in HDFS",
            expected="hdfs://NAMENODE:PORT/folder",
            todo="Users and other options are not part of the URL",
        )
    config = {"config": _config_items(options["config"])} if "config" in options else {}
    found = HdfsOptions.from_mapping({**options, **config})
    return RetryStore(HdfsFolder(match[1], match[2], found), found.timeout)


_REMOTE = re.compile(r'(?:Fatal)?RPCError\("([\w.$]+)", "(.*)"\)', re.DOTALL)
_NOT_FOUND = "FileNotFoundException"
_FILE_ABOVE = ("ParentNotDirectoryException", " is not a directory")
"""What a NameNode says of a path below a file. The exception depends on its method and version."""
_DENIED = {"AccessControlException", "AuthorizationException", "InvalidToken"}
_NO_SPACE = {"DSQuotaExceededException", "NSQuotaExceededException", "QuotaExceededException"}
_TRY_AGAIN = {
    "SafeModeException", "StandbyException", "RetriableException", "RetryStartFileException",
    "NotReplicatedYetException", "ServerTooBusyException",
}  # fmt: skip
_REPLICAS = ("could only be replicated to", "could only be written to")
"""The beginning of the message of a NameNode that knows no DataNode with space for a block."""
_NO_COPY = "All DataNodes failed"
_DATANODE = re.compile(r'host_name: \\?"([^"\\]*)\\?".*?xfer_port: ([0-9]+)', re.DOTALL)


def translate(error: BaseException, action: str, key: str, url: str) -> StoreError:
    """Return the store's error for one of hdfs-native, or for a call that was too slow, without
    stack traces of the server. After the ``action`` "commit", the outcome may be unknown."""
    what = f"Cannot {action} {key or 'the folder'} in {url}"
    fields: dict[str, Any] = {"key": key, "store": url}
    unknown = {"outcome": "unknown"} if action == "commit" else {}
    missing = f"There is no {key} in {url}"
    if isinstance(error, TimeoutError):
        todo = "Check that the NameNode and the DataNodes run"
        return Unavailable(f"{what}: no answer", todo=todo, **unknown, **fields)
    text = str(error)
    if any(words in text for words in _FILE_ABOVE):
        if action not in ("write", "commit"):
            return NotFound(missing, **fields)
        todo = "Move the file away, or save elsewhere. Nothing was changed"
        return StoreError(f"{what}: a file is in the way", todo=todo, **fields)
    if isinstance(error, FileNotFoundError | IsADirectoryError):
        return NotFound(missing, **fields)
    if isinstance(error, FileExistsError):
        return exists_error(key, url)
    if isinstance(error, OSError):
        return Unavailable(f"{what}: {error}", **unknown, **fields)
    if isinstance(error, TypeError | ValueError | OverflowError):  # a value of this process
        return StoreError(f"{what}: {text[:300]}", todo="Check the options of the store", **fields)
    if (remote := _REMOTE.search(text)) is None:
        return _translate_client(text, what, fields, unknown)
    name = remote[1].rpartition(".")[2].rpartition("$")[2]
    message = remote[2].partition("\\n")[0]
    what = f"{what}: {name}: {message}"
    if name == _NOT_FOUND:
        return NotFound(missing, **fields)
    if name == "FileAlreadyExistsException":
        return exists_error(key, url)
    if name in _DENIED:
        todo = "Check the owner and permissions of the folder, and HADOOP_USER_NAME"
        return Denied(what, todo=todo, **fields)
    if name in _NO_SPACE:
        return NoSpace(what, todo="Raise the quota of the folder, or save elsewhere", **fields)
    if name in _TRY_AGAIN:
        return Unavailable(what, **fields)
    if any(text in message for text in _REPLICAS):
        todo = "Check that the DataNodes run, and that they have space"
        return Unavailable(what, todo=todo, **fields)
    return StoreError(what, **fields)


def _translate_client(
    text: str, what: str, fields: dict[str, Any], unknown: dict[str, str]
) -> StoreError:
    """Return the error for one that no server has sent. ``text`` describes it."""
    is_url = text.startswith(("InvalidArgument", "UrlParseError", "InvalidPath"))
    if is_url or "No NameNode hosts found" in text:
        return StoreError(
            f"{what}: {text}",
            expected="hdfs://NAMENODE:PORT/folder, or a name service of hdfs-site.xml",
            todo="Add the port, or set HADOOP_CONF_DIR to the folder of hdfs-site.xml",
            **fields,
        )
    if text.startswith(("SASL", "GSSAPI", "NoSASL")):
        todo = "Renew the Kerberos ticket (kinit)"
        return Denied(f"{what}: {text}", todo=todo, **fields)
    if _NO_COPY in text:
        # hdfs-native does not tell a DataNode that is away from one whose copy is damaged
        nodes = ", ".join(":".join(found) for found in _DATANODE.findall(text))
        todo = (
            "Check that these DataNodes run. If they do, every copy of a block is damaged:"
            " see hdfs fsck, and go back to another version"
        )
        what = f"{what}: no DataNode that has a copy returned the bytes"
        return Unavailable(what, found=nodes, todo=todo, **fields)
    return Unavailable(f"{what}: {text[:300]}", **unknown, **fields)
