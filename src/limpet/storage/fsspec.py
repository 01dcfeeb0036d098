"""A store in any file system of fsspec. What it guarantees is unknown, so it is weak.

fsspec's interface has neither an atomic creation nor a way to make a file durable. An object is
written under another name, moved, and looked up. ``exists``, ``isfile``, ``find``, and ``walk``
report errors as missing files. The text of an error may show credentials: messages show its type.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

from limpet.deadline import Call, Deadline, call_within
from limpet.errors import AlreadyExists, Denied, NoSpace, NotFound, StoreError, Unavailable
from limpet.storage.options import Options, switch
from limpet.storage.retry import BlockReply, Remote, RemoteUpload, Reply, RetryStore, Server
from limpet.storage.store import (
    Entry,
    Stat,
    Traits,
    check_written_length,
    exists_error,
    weak_store_error,
)

_PASSWORD_OR_QUERY = re.compile(r"(?![^/]*:\d+/)[^/:]*:[^@]*@|[^/]*:[^/]*@|[^?]*\?[^/?=]*=")
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
_ERRORS_BY_NAME = (
    ("FileNotFound|NotADirectory|IsADirectory", NotFound),
    ("Permission|Auth", Denied),
    ("ENOSPC|EDQUOT|EFBIG", NoSpace),
    ("Timeout|Conn|EOFError|EHOSTUNREACH|ENETUNREACH|EHOSTDOWN|ENOTCONN", Unavailable),
)
_RACES = (FileNotFoundError, NotADirectoryError, FileExistsError)
_RMDIR_KEEPS_FILES = {f"fsspec.implementations.{n}" for n in ("local", "memory", "sftp", "ftp")}


@dataclass(frozen=True, slots=True)
class FsspecOptions(Options):
    """The options of ``open_fsspec`` that are not those of fsspec."""

    allow_weak: bool = switch()


class FsspecFolder(Remote):
    """A folder of a file system. Many connections serve one call at a time: each has its own."""

    has_conditional_put: ClassVar[bool] = False
    server: Server = Server(1, 1.0)
    traits = Traits("fsspec", 1, durable=False, ordered=True, atomic=False, upload_memory=64 << 20)

    def __init__(self, url: str, top: str, connect: Any, is_allowed: bool, timeout: float) -> None:
        super().__init__(url if url.endswith("://") else url.rstrip("/"), "")
        self._top = top.rstrip("/") + "/" if top else ""
        self.connect, self._is_allowed, self.server = connect, is_allowed, Server(32, timeout)
        self._unused: dict[int, list[Any]] = {}  # per process: a fork cannot share connections
        self._made_by = url, top, connect, is_allowed, timeout

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_by, {"prefix": self.prefix}

    def __copy__(self) -> FsspecFolder:  # each request copies it: with the same connections
        view = object.__new__(type(self))
        vars(view).update(vars(self))
        return view

    def path(self, key: str) -> str:
        return self._top + self.object_name(key)

    def call(self, action: str, key: str, work: Callable[[Any], Any], final: bool = False) -> Any:
        """Return ``work(fs)``. Raises ``StoreError``."""

        def borrow() -> Any:
            fs, is_intact = self.borrow(), False
            try:
                if not self.deadline.seconds_left:  # late: it could delete what came after it
                    raise TimeoutError
                result, is_intact = work(fs), True
                return result
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
                is_intact = True  # any other error may have broken the connection
                raise
            finally:
                self.give_back(fs, is_intact)

        try:
            return call_within(self.deadline, borrow)
        except Exception as e:  # noqa: BLE001  (the cause is left out: it may show credentials)
            code = errno.errorcode.get(getattr(e, "errno", None) or 0, "")
            names = " ".join([code, *(c.__name__ for c in type(e).__mro__)])
            kind = next((k for part, k in _ERRORS_BY_NAME if re.search(part, names)), StoreError)
            what = f"Cannot {action} {key} in {self.url}: {type(e).__name__} {code}".rstrip()
            raise kind(what, key=key, store=self.url, is_final=final) from None

    def borrow(self) -> Any:
        unused = self._unused.setdefault(os.getpid(), [])
        fs = unused.pop() if unused else self.connect()[0]
        fs.invalidate_cache()  # other processes change the files
        return fs

    def give_back(self, fs: Any, is_intact: bool) -> None:
        client = getattr(fs, "client", getattr(fs, "ftp", None))
        if is_intact:
            self._unused.setdefault(os.getpid(), []).append(fs)
        elif client is not None:  # its threads and sockets would remain
            Call(client.close, "limpet-close")

    def stat(self, key: str) -> Stat:
        path = self.path(key)
        info = self.call("look up", key, lambda fs: fs.info(path))
        if info["type"] == "directory":
            raise NotFound(f"There is no {key} in {self.url}", key=key, store=self.url)
        if info.get("size") is not None:
            return Stat(key, int(info["size"]), _modified(info))
        raise StoreError(f"The length of {key} is unknown", key=key, store=self.url)

    def open(self, key: str, offset: int, length: int | None, tag: str) -> Reply:
        path, found = self.path(key), max(0, self.stat(key).length - offset)

        def read(deadline: Deadline, at: int, size: int) -> bytes:
            self.deadline = deadline
            return bytes(self.call("read", key, lambda fs: fs.cat_file(path, at, at + size)))

        found = found if length is None else min(length, found)
        return BlockReply(key, self.url, read, offset, found)

    def page(
        self, folder: str, prefix: str, marker: Any, *, deep: bool, partial: bool
    ) -> tuple[Sequence[Entry], Any]:
        path = self.path(folder) if folder else (self._top + self.prefix).rstrip("/") or self._top
        entries: list[Entry] = []
        for info in self.call("list", folder or ".", lambda fs: fs.ls(path, detail=True)):
            found, is_link = info["name"].strip("/"), info.get("islink") or info["type"] == "link"
            kind: Any = "folder" if info["type"] == "directory" else "link" if is_link else "object"
            if found != path.strip("/"):  # a file is listed as its own content
                entries.append(Entry(found.rpartition("/")[2], kind))
        return entries, None

    def begin(self, key: str, length: int, head: int) -> RemoteUpload:
        self._refuse_weak(key)
        return _FsspecFile(key, length)

    def delete(self, key: str) -> None:
        path = folder = self.path(key)
        self._refuse_weak(key)

        def remove(fs: Any) -> None:
            nonlocal folder
            if fs.info(path)["type"] == "directory":
                return  # some file systems delete a whole folder
            fs.rm_file(path)
            with suppress(OSError):  # an empty folder may remain
                while (
                    getattr(type(getattr(fs, "fs", fs)), "rmdir", fs).__module__
                    in _RMDIR_KEEPS_FILES
                ):
                    folder = folder.rpartition("/")[0]
                    if not folder.startswith(self._top) or fs.ls(folder):
                        return
                    fs.rmdir(folder)

        self.call("delete", key, remove)

    def _refuse_weak(self, key: str) -> None:
        if not self._is_allowed:
            found = "fsspec, which guarantees none of this"
            raise weak_store_error(key, self.url, "durable files, one writer each", found)


class _FsspecFile:
    """Writes a file under another name, then moves it. A failure on the way is final."""

    def __init__(self, key: str, length: int) -> None:
        self._key, self._length = key, length
        parent, slash, name = key.rpartition("/")
        self._partial = f"{parent}{slash}.{name[:48]}.{secrets.token_hex(8)}.partial"
        self._file: Any = None
        self._fs: Any = None  # its connection, while it is open

    def write(self, folder: FsspecFolder, offset: int, views: Sequence[memoryview]) -> None:
        def open_file(_: Any) -> Any:
            path, self._fs = folder.path(self._partial), folder.borrow()
            for tries_left in reversed(range(5)):
                try:
                    self._fs.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)
                    file = self._fs.open(path, "wb")
                    break
                except OSError as e:  # another writer has just created the folder, or removed it
                    if not tries_left or not (e.errno is None or isinstance(e, _RACES)):
                        raise
            if not folder.deadline.seconds_left:
                file._closed = True  # see ``abort``
            return file

        if self._file is None:
            self._file = folder.call("create", self._key, open_file)
        data = b"".join(views)  # a copy: a call that is late may still read it
        folder.call("write", self._key, lambda _: self._file.write(data), final=True)

    def commit(self, folder: FsspecFolder) -> None:
        if self._file is None:
            self.write(folder, 0, ())
        folder.call("write", self._key, lambda _: self._file.close(), final=True)
        self._fs = folder.give_back(self._fs, is_intact=True)  # type: ignore[func-returns-value]
        written = folder.stat(self._partial).length
        check_written_length(self._key, folder.url, self._length, written)
        self._require_absent(folder, self._key)
        source, target = folder.path(self._partial), folder.path(self._key)
        try:
            folder.call("move", self._key, lambda fs: _move(fs, source, target))
            self._require_absent(folder, self._partial)  # some do not report a failed move
        except AlreadyExists:
            raise
        except StoreError as e:
            raise e.with_advice(outcome="unknown", is_final=True) from e

    def _require_absent(self, folder: FsspecFolder, key: str) -> None:
        with suppress(NotFound):
            folder.stat(key)
            raise exists_error(self._key, folder.url)

    def abort(self, folder: FsspecFolder) -> None:
        if self._file is not None:  # its finalizer must not write the rest, and wait for a server
            self._file._closed = True  # the name in fsspec and in paramiko
        if self._fs is not None:
            folder.give_back(self._fs, is_intact=False)
        folder.delete(self._partial)


def _move(fs: Any, source: str, target: str) -> None:
    from fsspec import AbstractFileSystem

    if getattr(type(getattr(fs, "fs", fs)), "mv", None) is not AbstractFileSystem.mv:
        fs.mv(source, target)
    else:  # the same, but "*" and "?" stand for themselves
        fs.cp_file(source, target)
        fs.rm_file(source)


def _modified(info: Any) -> float:
    """Return when a file was written, or now if that is unknown, so that ``sweep`` keeps it."""
    found: Any = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    with suppress(ValueError, TypeError):
        found = datetime.fromisoformat(found) if isinstance(found, str) else found
        if isinstance(found, datetime):
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
        return float(found)
    return time.time()


def open_fsspec(
    url: str, *, allow_weak: bool = False, timeout: float = 300.0, **options: Any
) -> RetryStore:
    """Return the store at ``fsspec+PROTOCOL://REST``; the other ``options`` are those of fsspec."""
    own = FsspecOptions.from_mapping({"timeout": timeout, "allow_weak": allow_weak})
    protocol, _, rest = (inner := url.removeprefix("fsspec+")).partition("://")
    if not protocol or "::" in inner:
        raise StoreError(f"{url} does not name one file system")
    if ".." in rest.split("/"):  # some file systems edit it as text
        raise StoreError(f"{url} has a level '..'; write the path of the folder itself")
    if _PASSWORD_OR_QUERY.match(rest):
        raise StoreError("A URL must not contain a password or a query: pass it as an option")
    try:
        import fsspec

        top = fsspec.get_filesystem_class(protocol)._strip_protocol(inner)
    except (ImportError, ValueError) as e:
        todo = "Install fsspec and the package for this protocol, or check the spelling"
        raise StoreError(f"Cannot open {url}", found=str(e), todo=todo) from None

    connect = partial(fsspec.core.url_to_fs, inner, skip_instance_cache=True, **options)
    return RetryStore(FsspecFolder(url, top, connect, allow_weak, own.timeout), own.timeout)
