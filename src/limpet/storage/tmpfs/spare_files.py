"""The mapped files of one store in one process: those of its objects, and spare ones.

To allocate a page of tmpfs and to map it takes six times as long as to copy into it. A file whose
object was deleted therefore becomes a spare file, with its pages and its mapping, and the next
upload writes into it. The object itself is gone: its name is, before anything is overwritten, and
nobody else has the file open (``MappedFile.is_unused_elsewhere``).
"""

from __future__ import annotations

import errno
import os
import secrets
import weakref
from collections.abc import Callable
from contextlib import suppress
from threading import Lock

from limpet.buffers import Buffer
from limpet.machine import after_fork
from limpet.storage.local.os_calls import Fs
from limpet.storage.tmpfs.mapped_file import MappedFile
from limpet.types import MIB

SUFFIX = "mapped.partial"
"""The end of the names of spare files and of unfinished uploads."""

MIN_SPARE_BYTES = MIB
"""The smallest file that becomes a spare one. To allocate it takes 0.5 ms."""

_all: weakref.WeakSet[SpareFiles] = weakref.WeakSet()


class SpareFiles:
    """The mapped files below the folder ``root``.

    ``max_files``: the largest number of spare files; ``on_map`` is called with the memory of each
    file when it is mapped. The methods raise ``OSError``.
    """

    def __init__(
        self, root: str, fs: Fs, max_files: int, on_map: Callable[[Buffer], object]
    ) -> None:
        self.on_map = on_map
        self._root, self._fs, self._max_files = root, fs, max_files
        self._forget()
        _all.add(self)

    def _forget(self) -> None:
        """Drop all files. A forked process must: it has neither their mappings nor the lock."""
        self._lock = Lock()
        self._committed: dict[str, MappedFile] = {}
        self._spares: dict[str, MappedFile] = {}

    @property
    def spare_bytes(self) -> int:
        """The size of all spare files."""
        with self._lock:
            return sum(file.length for file in self._spares.values())

    def allocate(self, fd: int, start: int, stop: int) -> None:
        """Allocate the pages of a file from one offset up to another."""
        if start:
            os.posix_fallocate(fd, start, stop - start)
        elif not self._fs.fallocate(fd, stop):
            raise OSError(errno.EOPNOTSUPP, "the file system cannot reserve memory; use tmpfs")

    def add_committed(self, path: str, file: MappedFile) -> None:
        """Keep the file of an object, so that it can become a spare file."""
        if file.length >= MIN_SPARE_BYTES and self._max_files:
            with self._lock:
                self._committed[path] = file

    def take(self, length: int, move: Callable[[str], object]) -> MappedFile | None:
        """Return the spare file whose length is the most similar, or None.

        ``move`` gets the path of the file, and must rename it. Files that another process has
        deleted, or that it has open, are not used; their memory is released.
        """
        if length < MIN_SPARE_BYTES:
            return None
        with self._lock:
            for path in [p for p, file in self._committed.items() if file.is_deleted()]:
                self._committed.pop(path).close()
        while True:
            with self._lock:
                if not self._spares:
                    return None
                path = min(self._spares, key=lambda p: abs(self._spares[p].length - length))
                file = self._spares.pop(path)
            is_taken = False
            try:
                if file.is_unused_elsewhere():
                    move(path)
                    is_taken = True
                    return file
            finally:
                if not is_taken:
                    self._discard(path, file)

    def recycle(self, path: str) -> bool:
        """Make the file of an object that is deleted a spare file. Return False if it is none."""
        with self._lock:
            file = self._committed.pop(path, None)
            if file is None:
                return False
            is_kept = False
            try:
                # otherwise, another process has replaced the object
                is_own = self._fs.stat(path, follow=False).inode == self._fs.fstat(file.fd).inode
                if is_own and len(self._spares) < self._max_files:
                    spare_path = self._new_path()
                    self._fs.rename_noreplace(path, spare_path)
                    self._spares[spare_path] = file
                    is_kept = True
            finally:
                if not is_kept:
                    file.close()
        return is_kept

    def preallocate(self, length: int) -> None:
        """Create a spare file of ``length`` bytes, unless there are enough. Any thread may call
        this, also while others use the store."""
        if len(self._spares) >= self._max_files:
            return
        path = self._new_path()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        file = MappedFile(self._fs.open(path, flags), self.on_map)
        try:
            file.resize(length, lambda start, stop: self.allocate(file.fd, start, stop))
            file.populate()
        except BaseException:
            self._discard(path, file)
            raise
        with self._lock:
            is_kept = len(self._spares) < self._max_files  # meanwhile, others may have added some
            if is_kept:
                self._spares[path] = file
        if not is_kept:
            self._discard(path, file)

    def release(self) -> None:
        """Delete all spare files, and keep none of the later ones."""
        self._max_files = 0
        with self._lock:
            spares, committed = self._spares, self._committed
            self._spares, self._committed = {}, {}
        for file in committed.values():
            file.close()
        for path, file in spares.items():
            self._discard(path, file)

    def _discard(self, path: str, file: MappedFile) -> None:
        """Delete a spare file, and release its memory."""
        file.close()
        with suppress(FileNotFoundError):
            self._fs.unlink(path)

    def _new_path(self) -> str:
        return f"{self._root}/.spare.{secrets.token_hex(8)}.{SUFFIX}"


def _forget_in_child() -> None:
    for spares in list(_all):
        spares._forget()


after_fork(_forget_in_child)
