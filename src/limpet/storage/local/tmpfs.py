"""A store in memory that outlives the process: files in a folder on tmpfs, such as ``/dev/shm``.

A ``LocalStore`` can read them. An upload is memory (``put_mapped``): a save stages into the file
itself, and the state is not in memory twice. Nothing survives the machine or its container.

To allocate and map pages of tmpfs takes six times as long as to copy into them (1 GiB by 2 threads:
44 ms into a used file, 190 ms into a new one, after 250 ms to allocate it). So the file of a
deleted object becomes a *spare file*, with its pages and its mapping, for the next upload. Its name
goes before anything is overwritten, and nobody else has the file open.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import signal
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from threading import Lock

from limpet.buffers import Buffer, address_of
from limpet.errors import StoreError
from limpet.machine import after_fork
from limpet.storage.local.os_calls import Fs, map_file, populate
from limpet.storage.local.store import LocalStore, LocalUpload
from limpet.storage.store import Stat, Traits, Upload
from limpet.types import ALIGNMENT, MIB

if sys.platform != "win32":  # where nothing uses this module
    import fcntl

SUFFIX = "mapped.partial"
"""The end of the names of spare files and of unfinished uploads."""

MIN_SPARE_BYTES = MIB
"""The smallest file that becomes a spare one. To allocate it takes 0.5 ms."""

_POPULATE_BYTES = 64 * MIB
"""The bytes that one call maps, so that a thread that ends the process does not wait for long."""

_F_SETSIG = 10
_IGNORED_SIGNAL: int = getattr(signal, "SIGURG", 0)
"""The signal of a broken lease. By default, it is SIGIO, which ends the process."""

_in_use: weakref.WeakSet[MappedFile | TmpfsStore] = weakref.WeakSet()


class MappedFile:
    """A file that is mapped into memory, with all its pages allocated: on a full file system, a
    write to a page that does not exist ends the process with SIGBUS.

    This object closes ``fd``. A fork gets neither it nor the mapping: the worker of a data loader
    would keep the memory of a deleted file.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.length = 0
        self.buffer = Buffer.over(memoryview(b""))
        self._close_fd = weakref.finalize(self, os.close, fd)
        _in_use.add(self)
        # a process that finds the file locked knows that another one uses it
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def resize(self, length: int, fs: Fs) -> None:
        """Set the length and map the file; its pages stay. No other thread may use it."""
        if length > self.length:
            if self.length:
                # only the new bytes: to allocate those that exist takes seven times as long
                os.posix_fallocate(self.fd, self.length, length - self.length)
            elif not fs.fallocate(self.fd, length):
                text = "the file system cannot reserve memory; use tmpfs"
                raise OSError(errno.EOPNOTSUPP, text)
            memory = map_file(self.fd, length, writable=True)
            self.buffer = Buffer.over(memoryview(memory).cast("B"))
        elif length < self.length:
            self.buffer = Buffer.over(self.buffer.view[:length])
            os.ftruncate(self.fd, length)
        self.length = length

    def populate(self) -> None:
        """Map all pages now: the first access to each takes most of the time of a copy."""
        for start in range(0, self.length, _POPULATE_BYTES):
            populate(self.buffer.address + start, min(_POPULATE_BYTES, self.length - start))

    def close(self) -> None:
        """Close the file, and release its memory once no view of it is left."""
        self._close_fd()
        self.buffer = Buffer.over(memoryview(b""))

    def is_unused_elsewhere(self) -> bool:
        """Return True if nobody else has the file, of one name, open or mapped, as far as is known:
        only then, the kernel grants a write lease."""
        with suppress(OSError):
            fcntl.fcntl(self.fd, _F_SETSIG, _IGNORED_SIGNAL)
            try:
                fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            finally:
                fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return os.fstat(self.fd).st_nlink == 1
        return False


class TmpfsStore(LocalStore):
    """A store on tmpfs. ``spare_files``: how many files of deleted objects wait for new uploads.

    Only files that this process wrote and deleted become spare; if another process deletes one, its
    memory is released at the next upload.
    """

    space_advice = (
        "See what else is in this file system (df -h, ls -la); other programs may have left files"
        " there. Or give it more memory"
    )

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        spare_files: int = 1,
        fs: Fs | None = None,
    ) -> None:
        super().__init__(root, fs=fs, direct=False)
        self._max_spares = spare_files
        self.close()
        _in_use.add(self)

    def close(self) -> None:
        """Drop all files. A forked process must: it has neither their mappings nor the lock."""
        self._lock = Lock()
        self._committed: dict[str, MappedFile] = {}
        self._spares: dict[str, MappedFile] = {}

    @property
    def traits(self) -> Traits:
        return Traits(name="tmpfs", alignment=ALIGNMENT, durable=False, in_memory=True)

    @property
    def spare_bytes(self) -> int:
        """The size of the spare files, in bytes."""
        with self._lock:
            return sum(file.length for file in self._spares.values())

    def put(self, key: str, length: int, head: int = 0) -> Upload:
        return self.put_mapped(key, length)

    def put_mapped(self, key: str, length: int) -> TmpfsUpload:
        """Begin to write an object into memory, all allocated; ``NoSpace`` if it is full."""
        return TmpfsUpload(self, key, length)

    def delete(self, key: str) -> None:
        path = self.path(key, to_change=True)
        with suppress(OSError):  # then the file is deleted as any other one
            if self._recycle(path):
                self.remove_empty_folders(os.path.dirname(path))
                return
        super().delete(key)

    def remove_leftovers(self) -> int:
        """Delete unfinished uploads and spare files of ended processes; return their bytes."""
        removed = 0
        for stat in self.partials(""):
            if stat.key.endswith(SUFFIX) and stat.length and self._is_abandoned(stat.key):
                super().delete(stat.key)
                removed += stat.length
        return removed

    def _is_abandoned(self, key: str) -> bool:
        """Return True if no process has a mapped file locked. Only an empty one is not locked."""
        with suppress(OSError):
            fd = self.fs.open(self.path(key), os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            finally:
                self.fs.close(fd)
        return False

    # -- the files that are used in turn: their methods raise ``OSError`` ------------------------

    def keep(self, path: str, file: MappedFile) -> None:
        """Keep the file of an object, so that it can become a spare file."""
        if file.length >= MIN_SPARE_BYTES and self._max_spares:
            with self._lock:
                self._committed[path] = file

    def take(self, length: int, move: Callable[[str], object]) -> MappedFile | None:
        """Return the spare file of the most similar length, or None. ``move`` must rename its path.
        Those that another process deleted or has open are released, not used."""
        if length < MIN_SPARE_BYTES:
            return None
        with self._lock:
            for path in [p for p, f in self._committed.items() if not os.fstat(f.fd).st_nlink]:
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

    def _recycle(self, path: str) -> bool:
        """Make the file of an object that is deleted a spare file. Return False if it is none."""
        with self._lock:
            file = self._committed.pop(path, None)
            if file is None:
                return False
            is_kept = False
            try:
                # otherwise, another process has replaced the object
                is_own = self.fs.stat(path, follow=False).inode == self.fs.fstat(file.fd).inode
                if is_own and len(self._spares) < self._max_spares:
                    spare_path = self._spare_path()
                    self.fs.rename_noreplace(path, spare_path)
                    self._spares[spare_path] = file
                    is_kept = True
            finally:
                if not is_kept:
                    file.close()
        return is_kept

    def preallocate(self, length: int) -> None:
        """Create a spare file of about ``length`` bytes, unless there are enough: in a background
        thread, half a second per GiB."""
        if len(self._spares) >= self._max_spares:
            return
        with self.translate_errors("allocate", "a spare file", writing=True):
            self.make_folders(self.url)
            path = self._spare_path()
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            file, is_kept = MappedFile(self.fs.open(path, flags)), False
            try:
                file.resize(length, self.fs)
                file.populate()
                with self._lock:
                    if len(self._spares) < self._max_spares:  # others may have added some
                        self._spares[path], is_kept = file, True
            finally:
                if not is_kept:
                    self._discard(path, file)

    def release_memory(self) -> None:
        """Delete the spare files, and keep no more. The objects stay."""
        self._max_spares = 0
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
            self.fs.unlink(path)

    def _spare_path(self) -> str:
        return f"{self.url}/.spare.{secrets.token_hex(8)}.{SUFFIX}"


class TmpfsUpload(LocalUpload):
    """A mapped file, spare or new, without its final name: a ``storage.store.MappedUpload``."""

    _suffix = SUFFIX
    _access = os.O_RDWR
    _file: MappedFile | None = None
    _is_committed = False

    def __init__(self, store: TmpfsStore, key: str, length: int) -> None:
        self._tmpfs = store
        super().__init__(store, key, length, direct=False)

    def view(self, offset: int, length: int) -> memoryview:
        self._written.check(offset, length)
        with self._using_descriptors("map"):
            return self._open_file().buffer.view[offset : offset + length]

    def commit(self, *, accept_existing: bytes | None = None) -> Stat:
        file = self._file
        stat = super().commit(accept_existing=accept_existing)
        self._is_committed = True
        if file is not None:
            self._tmpfs.keep(self._path, file)
        return stat

    def abort(self) -> None:
        super().abort()
        file, self._file = self._file, None
        if file is not None and not self._is_committed:
            file.close()  # not a spare file: another thread may be copying into it

    def _open_file(self) -> MappedFile:
        file = self._file
        if file is None:
            raise StoreError(
                f"The upload of {self._key} was aborted", key=self._key, store=self._tmpfs.url
            )
        return file

    def _create(self) -> int:
        def move(path: str) -> None:
            self._in_folder(self._fs.rename_noreplace, path, self._temp_path)

        self._file = self._tmpfs.take(self._length, move)
        if self._file is None:
            self._file = MappedFile(super()._create())
        # The upload closes its descriptor when it ends. The file stays open, to become a spare one.
        return os.dup(self._file.fd)

    def _reserve(self, length: int) -> None:
        """Allocate the pages that a spare file lacks, or all pages of a new file."""
        self._open_file().resize(length, self._fs)

    def _write(self, offset: int, data: memoryview) -> int:
        """Copy the data, unless it was staged here (see ``view``)."""
        buffer = self._open_file().buffer  # keeps the memory, also if another thread aborts
        source, target = address_of(data), buffer.address + offset
        if source != target:
            ctypes.memmove(target, source, len(data))
        return len(data)


def _close_in_child() -> None:
    for each in list(_in_use):
        each.close()


after_fork(_close_in_child)
