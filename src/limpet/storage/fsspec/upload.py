"""Writes one file, from its first byte to its last, under another name."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from limpet.errors import AlreadyExists, NotFound, StoreError, Unavailable
from limpet.storage.checks import check_written_length, exists_error, refuse_partial
from limpet.storage.fsspec.files import MISSING, FsspecFiles, wrapped_kind
from limpet.storage.store import Stat
from limpet.types import BLOCK_SIZE

T = TypeVar("T")

_MAX_TRIES = 16


class FileAppender:
    """Writes a file under another name, then moves it to the name of the object.

    File systems without a rename copy it, and few tell whether they have one.
    """

    def __init__(self, store: FsspecFiles, key: str, length: int) -> None:
        self._store, self._key, self._length = store, key, length
        self._path = store.path(key)
        store.refuse_weak(key)
        refuse_partial(key, store.url)
        folder, slash, name = key.rpartition("/")
        self._partial = f"{folder}{slash}.{name[:48]}.{secrets.token_hex(8)}.partial"
        self._partial_path = store.path(self._partial)
        self._file: Any = None
        self._borrowed: list[Any] = []  # the connection of the file, while the file is open
        self._is_busy = self._is_ended = False

    def append(self, data: memoryview) -> None:
        self._require_file()
        for start in range(0, len(data), BLOCK_SIZE):
            # a copy: some files take nothing else, and a call that is late may still read it
            block = bytes(data[start : start + BLOCK_SIZE])
            self._bounded("write", partial(self._file.write, block))

    def commit(self) -> Stat:
        store, key = self._store, self._key
        self._require_file()
        self._bounded("write", self._close)
        check_written_length(key, store.url, self._length, store.stat(self._partial).length)
        self._require_absent()
        try:
            store.call("move", key, lambda fs: _move(fs, self._partial_path, self._path))
            self._require_moved()
            stat = store.stat(key)
            check_written_length(key, store.url, self._length, stat.length)
        except AlreadyExists:
            raise
        except StoreError as e:
            if not isinstance(e, Unavailable) and self._is_absent():
                raise
            raise e.with_advice(outcome="unknown") from e  # the move may still be going on
        return stat

    def abort(self) -> None:
        """Close the file, unless a call of it hangs, and remove it."""
        self._is_ended = True
        if self._file is None:
            return
        store, self._store = self._store, self._store.for_cleanup()
        if self._borrowed and not self._is_busy:
            with suppress(StoreError):
                self._bounded("close", self._close)
        self._discard()
        with suppress(StoreError):  # sweep removes a file that remains
            store.delete(self._partial)

    def _require_moved(self) -> None:
        """Check the move: some file systems do not report that it failed."""
        store, key = self._store, self._key
        try:
            store.stat(self._partial)
        except NotFound:
            return
        self._require_absent()
        raise StoreError(
            f"{store.url} has not moved a file to {key}, and reported success",
            key=key,
            store=store.url,
        )

    def _require_absent(self) -> None:
        with suppress(NotFound):
            self._store.stat(self._key)
            raise exists_error(self._key, self._store.url)

    def _is_absent(self) -> bool:
        try:
            self._require_absent()
        except StoreError:
            return False
        return True

    def _require_file(self) -> None:
        if self._file is None:
            self._bounded("create", self._open)

    def _open(self) -> None:
        borrowed = [self._store.borrow()]
        fs, folder = borrowed[0], self._partial_path.rpartition("/")[0]
        with self._store.giving_back(borrowed):
            for last in [False] * _MAX_TRIES + [True]:
                try:
                    if folder:
                        fs.makedirs(folder, exist_ok=True)
                    self._file = fs.open(self._partial_path, "wb")
                    break
                except OSError as e:
                    # A delete has removed the empty folder. Or another process has just created a
                    # folder: the server of SFTP then reports an error without a number.
                    is_failure = type(e) is OSError and e.errno is None
                    if last or not (is_failure or isinstance(e, (*MISSING, FileExistsError))):
                        raise
            self._borrowed.append(borrowed.pop())
        if self._is_ended:  # the deadline has passed
            self._discard()

    def _close(self) -> None:
        with self._store.giving_back(self._borrowed):
            self._file.close()

    def _discard(self) -> None:
        """Give up the file, if it is still open. Its finalizer must not write the rest: it would do
        so in any thread, for as long as the server hangs."""
        with suppress(AttributeError):
            self._file._closed = True  # the name in fsspec and in paramiko
        self._store.close(self._borrowed)

    def _bounded(self, action: str, function: Callable[[], T]) -> T:
        def run() -> T:
            self._is_busy = True
            try:
                return function()
            finally:
                self._is_busy = False

        return self._store.bounded(action, self._key, run)


def _move(fs: Any, source: str, target: str) -> None:
    from fsspec import AbstractFileSystem

    if getattr(wrapped_kind(fs), "mv", None) is not AbstractFileSystem.mv:
        fs.mv(source, target)
    else:  # the same, but "*" and "?" stand for themselves
        fs.cp_file(source, target)
        fs.rm_file(source)
