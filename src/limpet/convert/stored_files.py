"""Foreign files in any store: read in ranges, or fetched into an unnamed temporary file.

A safetensors file is read in ranges while it is saved, without a local copy. The other formats need
a file that can be mapped. Their temporary files have no name: of a killed process, nothing remains.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from limpet.convert.mmap_files import ForeignFile, MappedFile
from limpet.errors import NoSpace, NotFound, StoreError
from limpet.format.safetensors import MAX_HEADER
from limpet.snapshot.location import Location, locate
from limpet.state.arrays.own import Source
from limpet.storage.local.os_calls import Fs
from limpet.storage.local.store import LocalStore
from limpet.storage.open import check_url
from limpet.storage.store import Stat, list_level
from limpet.threads import Workers, no_op
from limpet.types import BLOCK_SIZE, Advance


class StoredFile(ForeignFile):
    """An object of ``length`` bytes in a store; ``path`` is its URL. Raises ``NotFound``."""

    def __init__(self, location: Location) -> None:
        self.path = location.url
        self._store, self._key = location.store, location.folder
        self._stat = self._read_stat()
        self.length = self._stat.length

    def _read_stat(self) -> Stat:
        try:
            return self._store.stat(self._key)
        except NotFound as e:
            raise NotFound(
                f"There is no file {self.path}", todo="Check the URL", key=self.path
            ) from e

    def read(self, start: int, stop: int) -> bytes:
        data = bytearray(max(0, min(stop, self.length) - start))
        if data:
            self.read_into(start, memoryview(data))
        return bytes(data)

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``start``. Raises ``StoreError``."""
        self._store.get_range(self._key, start, len(view), view)

    def tensor(self, dtype: str, shape: tuple[int, ...], start: int) -> Any:
        """Return a tensor whose bytes are read when they are saved."""
        if 0 in shape:
            import torch

            return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        return StoredTensor(self, dtype, shape, start)

    def mapped(self, advance: Advance = no_op) -> MappedFile:
        """Fetch the whole object into a temporary file, which lasts as long as the result;
        ``NoSpace`` if ``TMPDIR`` is too small. Several threads call ``advance(nbytes)``."""
        require_space([self])
        with tempfile.TemporaryFile() as file:
            fd = file.fileno()
            try:
                if self.length and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(fd, 0, self.length)
            except OSError as e:
                raise _no_space_error([self], str(e)) from e
            workers = Workers.create()

            def fetch(start: int) -> None:
                with workers.buffer() as buffer:
                    view = buffer.view[: min(BLOCK_SIZE, self.length - start)]
                    self._store.get_range(self._key, start, len(view), view)
                    written = 0
                    while written < len(view):
                        written += Fs().pwrite(fd, view[written:], start + written)
                    advance(len(view))

            workers.each(range(0, self.length, BLOCK_SIZE), fetch)
            return MappedFile(self.path, os.dup(fd))

    def require_unchanged(self) -> None:
        """Raise ``StoreError`` if the object was replaced since it was opened."""
        stat = self._read_stat()
        if stat != self._stat:
            raise StoreError(
                f"{self.path} was replaced while it was imported; nothing was committed",
                expected=f"{self.length} bytes of {self._stat.modified}",
                found=f"{stat.length} bytes of {stat.modified}",
                todo="Import it again",
                key=self.path,
            )


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor(Source):
    """A tensor in a stored file."""

    file: StoredFile
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of the tensor from ``start``. Raises ``StoreError``."""
        self.file.read_into(self.start + start, view)


def require_space(files: Sequence[ForeignFile]) -> None:
    """Raise ``NoSpace`` unless the temporary folder has space for all stored files among these."""
    stored = [f for f in files if isinstance(f, StoredFile)]
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if sum(f.length for f in stored) > free:
        raise _no_space_error(stored, f"{free} bytes")


def _no_space_error(files: Sequence[StoredFile], found: str) -> NoSpace:
    return NoSpace(
        f"The files cannot be fetched into {tempfile.gettempdir()}: {files[0].path}"
        + (f" and {len(files) - 1} others" if files[1:] else ""),
        expected=f"{sum(f.length for f in files)} bytes of free space",
        found=found,
        todo="Set TMPDIR to a folder on a larger disk, or copy the files there and import them",
    )


class ForeignFolder:
    """The folder of a foreign checkpoint, local or in a store. ``opened``: the stored files."""

    def __init__(self, path: str, location: Location | None) -> None:
        self.path, self._location = path, location
        self.opened: list[StoredFile] = []

    def names(self) -> list[str]:
        """Return the names directly in the folder, sorted."""
        if self._location is None:
            with LocalStore(self.path).translate_errors("list", "."):
                return sorted(os.listdir(self.path))
        return sorted(e.name for e in list_level(self._location.store, self._location.folder))

    def is_folder(self) -> bool:
        """Return True unless the path is that of a file, or of nothing."""
        if self._location is None:
            return os.path.isdir(self.path)
        if not self._location.folder:
            return True
        with suppress(NotFound):
            self._location.store.stat(self._location.folder)
            return False
        return bool(self.names())

    def join(self, name: str) -> str:
        return os.path.join(self.path, name)

    def has(self, name: str) -> bool:
        """Return True if there is a file of that name."""
        if self._location is None:
            return os.path.isfile(self.join(name))
        with suppress(NotFound):
            self._location.store.stat(self._location.key(name))
            return True
        return False

    def open(self, name: str) -> ForeignFile:
        """Open a file. Raises ``NotFound`` if it does not exist."""
        if self._location is None:
            if not os.path.isfile(self.join(name)):
                raise NotFound(f"There is no file {self.join(name)}", key=name)
            return MappedFile(self.join(name))
        file = StoredFile(Location(self._location.store, self._location.key(name)))
        self.opened.append(file)
        return file


def locate_foreign(path: str | Location) -> tuple[str, Location | None]:
    """Return the path and None if it is local, else the URL and the location in a store."""
    if isinstance(path, str):
        path = check_url(path) if path else path  # of "", the caller says what is wrong
        if "://" not in path:
            return path.rstrip("/") or path, None
        path = locate(path)
    if isinstance(path.store, LocalStore):
        return os.path.join(path.store.url, path.folder), None
    return path.url, path


def size_of_foreign(path: str, *, all_files: bool = False) -> int:
    """Return the bytes of the file at a path or URL, or of the files directly in a folder. A
    safetensors file in a store, which is read while it is saved, counts only with ``all_files``."""
    path, location = locate_foreign(path)
    if location is not None:
        if location.folder:
            with suppress(NotFound):
                file = StoredFile(location)
                return file.length if all_files or not is_safetensors(file) else 0
        found = [e.stat for e in list_level(location.store, location.folder)]
        counted = [s for s in found if s and (all_files or not s.key.endswith(".safetensors"))]
        return sum(s.length for s in counted)
    if not os.path.isdir(path):
        return os.path.getsize(path) if os.path.exists(path) else 0
    with LocalStore(path).translate_errors("list", "."), os.scandir(path) as entries:
        return sum(e.stat().st_size for e in entries if e.is_file())


def is_safetensors(file: ForeignFile) -> bool:
    """Return True if a file begins like a safetensors file. The header may begin with spaces."""
    head = file.read(0, 9)
    size = int.from_bytes(head[:8], "little")
    if not 2 <= size <= min(MAX_HEADER, file.length - 8):
        return False
    first = file.read(8, 8 + size).lstrip(b" ")[:1] if head[8:] == b" " else head[8:]
    return first == b"{"
