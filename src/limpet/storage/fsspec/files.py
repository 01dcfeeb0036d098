"""The files of one file system of fsspec. Each call is bounded, and fails with a ``StoreError``."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus

from limpet.deadline import call_within
from limpet.errors import Denied, NoSpace, NotFound, StoreError, Unavailable
from limpet.storage.checks import weak_store_error
from limpet.storage.remote import RemoteStore
from limpet.storage.store import Stat, check_key
from limpet.text import hide_secrets
from limpet.threads import start_thread

T = TypeVar("T")

MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "modificationTime")
_RMDIR_KEEPS_FILES = {f"fsspec.implementations.{n}" for n in ("local", "memory", "sftp", "ftp")}
"""The modules whose ``rmdir`` refuses a folder with files. Others delete the files, too."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SECRET_OPTION = re.compile(r"pass|secret|token|key|auth|cred|sas|sig|cookie|conn", re.IGNORECASE)
_FILE_OPTION = re.compile(r"(file|filename|path)$", re.IGNORECASE)
_AWAY = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENOTCONN}


class FsspecFiles(RemoteStore):
    """The files of the file system that ``connect`` returns, in the folder ``root``.

    Many file systems use one connection that serves one call at a time, so each call borrows its
    own. Each call ends within ``timeout`` seconds. No message contains one of ``secrets``.
    """

    def __init__(
        self,
        url: str,
        root: str,
        connect: Callable[[], Any],
        allow_weak: bool,
        timeout: float,
        secrets: tuple[str, ...] = (),
    ) -> None:
        super().__init__(url if url.endswith("://") else url.rstrip("/"), "", timeout)
        self._root = root if not root else root.rstrip("/") + "/"
        self._connect = connect
        self._secrets = secrets
        self._allow_weak = allow_weak
        self._unused: dict[int, list[Any]] = {}  # per process: a fork cannot share connections

    def refuse_weak(self, key: str) -> None:
        if not self._allow_weak:
            raise weak_store_error(
                key,
                self.url,
                "files that survive a crash once they are written, that one writer at most can"
                " create, and that are listed from then on",
                "a file system behind fsspec, which guarantees none of this",
            )

    def delete(self, key: str) -> None:
        path = self.path(key)
        self.refuse_weak(key)

        def remove(fs: Any) -> None:
            if fs.info(path)["type"] != "directory":  # some file systems delete a whole folder
                fs.rm_file(path)

        with suppress(NotFound):
            self.for_cleanup().call("delete", key, remove)
        with suppress(StoreError):  # an empty folder may remain
            self.call("delete the empty folder of", key, lambda fs: self._remove_empty(fs, path))

    def _remove_empty(self, fs: Any, path: str) -> None:
        """Remove the folders of a file up to the first that is not empty."""
        rmdir = getattr(wrapped_kind(fs), "rmdir", None)
        if getattr(rmdir, "__module__", None) not in _RMDIR_KEEPS_FILES:
            return
        while path := path.rpartition("/")[0]:
            if not path.startswith(self._root) or fs.ls(path, detail=True):
                return
            fs.rmdir(path)

    def stat(self, key: str) -> Stat:
        path = self.path(key)
        info = self.call("look up", key, lambda fs: fs.info(path))
        if info["type"] == "directory":
            raise NotFound(f"There is no {key} in {self.url}", key=key, store=self.url)
        return self.stat_of(key, info)

    def stat_of(self, key: str, info: Any) -> Stat:
        if info.get("size") is None:
            raise StoreError(
                f"{self.url} does not tell the length of {key}", key=key, store=self.url
            )
        return Stat(key, int(info["size"]), _modified(info))

    # -- calls ---------------------------------------------------------------------------------

    def path(self, key: str) -> str:
        return self._root + self.prefix + check_key(key, self.url)

    def call(self, action: str, key: str, work: Callable[[Any], T]) -> T:
        """Return ``work(fs)``. Raises ``StoreError``."""
        borrowed: list[Any] = []
        is_over = False

        def work_on_connection() -> T:
            borrowed.append(self.borrow())
            with self.giving_back(borrowed):
                if is_over:  # a late deletion could remove what was written after it
                    raise TimeoutError("the connection came too late")
                return work(borrowed[0])

        try:
            return self.bounded(action, key, work_on_connection)
        finally:  # the deadline has passed: let the thread that waits for the connection end
            is_over = True
            self.close(borrowed)

    @contextmanager
    def giving_back(self, borrowed: list[Any]) -> Iterator[None]:
        """Give back the borrowed connection, or close it if an error of the block may have broken
        it. Another thread may close it before."""
        is_intact = False
        try:
            yield
            is_intact = True
        except (*MISSING, PermissionError):
            is_intact = True
            raise
        finally:
            if is_intact:
                with suppress(IndexError):
                    self.give_back(borrowed.pop())
            self.close(borrowed)

    def bounded(self, action: str, key: str, function: Callable[[], T]) -> T:
        """Return ``function()``. Raises ``Unavailable`` when the deadline passes."""
        try:
            return call_within(self.deadline_for(action, key), function)
        except StoreError:
            raise
        except Exception as e:  # noqa: BLE001  (the cause is left out: it may show credentials)
            raise self._translate(e, action, key) from None

    def borrow(self) -> Any:
        try:
            fs = self._unused.setdefault(os.getpid(), []).pop()
        except IndexError:
            fs = self._connect()
        fs.invalidate_cache()
        return fs

    def give_back(self, fs: Any) -> None:
        self._unused.setdefault(os.getpid(), []).append(fs)

    def close(self, borrowed: list[Any]) -> None:
        """Close the borrowed connection, if there is one. Does not wait, because that may hang.

        The file systems leave that to the garbage collector, which does not end the threads and the
        sockets of some clients.
        """
        with suppress(IndexError):
            fs = borrowed.pop()
            fs = getattr(fs, "fs", fs)
            owners = (getattr(fs, "client", None), getattr(fs, "ftp", None), fs)
            found = [getattr(owner, "close", None) for owner in owners]
            if closers := [close for close in found if callable(close)]:
                start_thread(Thread(target=_close, args=closers, daemon=True, name="limpet-close"))

    def _translate(self, error: Exception, action: str, key: str) -> StoreError:
        """Return the error of this store for an error of a file system."""
        text = shown(error, self._secrets)
        what = f"Cannot {action} {key} in {self.url}: {type(error).__name__}: {text}"
        fields = {"key": key, "store": self.url}
        code = getattr(error, "errno", None)
        kinds = " ".join(c.__name__ for c in type(error).__mro__)
        if isinstance(error, MISSING):
            return NotFound(f"There is no {key} in {self.url}", **fields)
        # each file system has errors of its own, such as requests.ConnectionError
        if isinstance(error, PermissionError) or "Auth" in kinds:
            return Denied(what, todo="Check the permissions and the credentials", **fields)
        if code in _FULL:
            return NoSpace(what, todo="Free space or raise the quota, or save elsewhere", **fields)
        if code in _AWAY or isinstance(error, EOFError) or "Timeout" in kinds or "Conn" in kinds:
            return Unavailable(what, **fields)
        return StoreError(what, **fields)


def _close(*closers: Callable[[], object]) -> None:
    for close in closers:
        with suppress(Exception):
            close()


def secrets_in(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts in the options of a file system that may be credentials, by their names."""
    found = {
        text
        for name, value in options.items()
        for whole in _texts_in(value, _is_secret(name))
        for text in (whole, whole.rpartition(" ")[2])  # "Bearer" precedes a token
        if len(text) >= 4  # a shorter one would hide parts of words
    }
    as_sent = {f(text) for text in found for f in (str, quote, lambda t: quote(t, ""), quote_plus)}
    return tuple(sorted(as_sent, key=len, reverse=True))  # one may contain another


def _is_secret(name: object) -> bool:
    text = str(name)
    return _SECRET_OPTION.search(text) is not None and _FILE_OPTION.search(text) is None


def _texts_in(value: Any, is_secret: bool) -> Iterator[str]:
    """Yield the texts in a value, or those with the name of a secret in a dict in it."""
    if isinstance(value, str) and is_secret:
        yield value
    elif isinstance(value, bytes) and is_secret:
        yield value.decode(errors="replace")
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts_in(inner, is_secret or _is_secret(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts_in(inner, is_secret)


def shown(error: object, secrets: tuple[str, ...] = ()) -> str:
    """Return the text of an error of a library, without credentials."""
    text = str(error)
    for secret in secrets:
        text = text.replace(secret, "...")
    return hide_secrets(text)


def wrapped_kind(fs: Any) -> type:
    """Return the class of a file system, or of the one that it passes its calls on to ("dir")."""
    return type(getattr(fs, "fs", fs))


def _modified(info: Any) -> float:
    """Return the time when a file was written, or the current time if that is unknown.

    The current time makes ``sweep`` keep the file.
    """
    times = (info.get(name) for name in (*_TIMES, "modify", "created"))
    found = next((time for time in times if time is not None), None)
    with suppress(ValueError):
        if isinstance(found, str):
            is_ftp = found[:14].isdecimal()
            found = (
                datetime.strptime(found[:14], "%Y%m%d%H%M%S")
                if is_ftp
                else (datetime.fromisoformat(found))
            )
        if isinstance(found, datetime):
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
        if isinstance(found, int | float):
            return found / 1000 if "modificationTime" in info else float(found)
    return time.time()
