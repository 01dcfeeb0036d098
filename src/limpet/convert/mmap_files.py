"""Read-only memory maps of foreign files. The kernel reads bytes when they are accessed.

The mapping is shared and read-only, and needs no descriptor (``map_file``), for two reasons. A
checkpoint may have thousands of files. The kernel refuses a private, writable mapping, as
``torch.load(mmap=True)`` makes it, if the file is larger than memory.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import stat
import sys
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from limpet.errors import FormatError, NotFound, Unsupported
from limpet.machine import IS_LINUX, OPEN_FLAGS
from limpet.storage.local.os_calls import CAN_MAP, map_file
from limpet.storage.local.store import LocalStore
from limpet.text import with_article
from limpet.threads import no_op
from limpet.types import MIB, Advance

_LOCAL_HEADER_SIZE = 30


class ForeignFile(ABC):
    """A file of a foreign checkpoint, with ``length`` bytes at the path or URL ``path``."""

    path: str
    length: int

    @abstractmethod
    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` to ``stop``, or to the end of the file."""

    @abstractmethod
    def tensor(self, dtype: str, shape: tuple[int, ...], start: int) -> Any:
        """Return the row-major tensor at byte ``start``, which the caller has checked."""

    @abstractmethod
    def mapped(self, advance: Advance = no_op) -> MappedFile:
        """Return the file as a mapped one."""

    def format_error(self, expected: str, found: str, offset: int = 0) -> FormatError:
        """Return the error for content that violates the format of the file."""
        return FormatError(
            f"{self.path} is damaged or has another format, at offset {offset}",
            expected=expected,
            found=found[:300],
            todo="Use another copy of the file",
            file=self.path,
            offset=offset,
        )


class MappedFile(ForeignFile):
    """A memory-mapped file, read-only, unmapped when nothing refers to its memory. ``fetched``: a
    descriptor that this object owns, if the file was fetched from the URL ``path``."""

    def __init__(self, path: str, fetched: int | None = None) -> None:
        self.path = path
        self.is_fetched = fetched is not None
        folder, name = os.path.split(path)
        with LocalStore(folder or ".").translate_errors("read", name):
            self._map(path, fetched)
        self.view = memoryview(self._memory).cast("B").toreadonly()

    def _map(self, path: str, fetched: int | None) -> None:
        try:
            flags = os.O_RDONLY | OPEN_FLAGS | getattr(os, "O_NONBLOCK", 0)
            fd = os.open(path, flags) if fetched is None else fetched
        except FileNotFoundError as e:
            raise NotFound(f"There is no file {path}", todo="Check the path", key=path) from e
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Unsupported(f"{path} is not a regular file", todo="Give a file or a folder")
            self.length = status.st_size
            self._memory: Any = (ctypes.c_ubyte * 0)()
            if self.length and not CAN_MAP:
                # private, not read-only: torch warns of a tensor over memory that nobody may write
                self._memory = mmap.mmap(fd, self.length, access=mmap.ACCESS_COPY)
            elif self.length:
                self._memory = map_file(fd, self.length, writable=False)
            if self.is_fetched:
                # the file has no name, so ``open_path`` needs the descriptor
                self._fetched = os.fdopen(os.dup(fd), "rb")
        finally:
            os.close(fd)

    def read(self, start: int, stop: int) -> bytes:
        return bytes(self.view[start:stop])

    def mapped(self, advance: Advance = no_op) -> MappedFile:
        return self

    @contextmanager
    def open_path(self) -> Iterator[str]:
        """Yield a path from which the file can be opened, and which does not end in a suffix that
        a reader could take for its format."""
        if not IS_LINUX:
            if self.is_fetched:
                raise Unsupported(
                    f"{self.path} can only be read on Linux: {sys.platform} lacks /proc/self/fd",
                    todo="Download the file, and name its path",
                )
            yield self.path
            return
        if self.is_fetched:
            yield f"/proc/self/fd/{self._fetched.fileno()}"
            return
        with open(self.path, "rb") as opened:
            yield f"/proc/self/fd/{opened.fileno()}"

    def release_descriptor(self) -> None:
        """Close the descriptor of a fetched file. The file stays mapped."""
        if self.is_fetched:
            self._fetched.close()

    def tensor(self, dtype: str, shape: tuple[int, ...], start: int) -> Any:
        """See ``ForeignFile``. ``start`` need not be aligned. Nobody may write to the tensor."""
        import torch

        torch_dtype = getattr(torch, dtype)
        if 0 in shape:
            return torch.empty(shape, dtype=torch_dtype, device="cpu")
        flat = torch.frombuffer(self._memory, dtype=torch_dtype, count=prod(shape), offset=start)
        return flat.view(shape)


class _MemoryViewIO(io.RawIOBase):
    """A file object over a part of a mapped file, with the methods that ``zipfile`` calls."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._position = view, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._view)}[whence]
        if begin + offset < 0:
            raise OSError("negative position")
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = self._view[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """An uncompressed record of a zip file, at bytes ``start`` to ``stop``. ``crc``: 0 if
    ``torch.save`` wrote none (``torch.serialization.set_crc32_options(False)``)."""

    name: str
    start: int
    stop: int
    crc: int


def read_zip_records(
    file: MappedFile, start: int = 0, stop: int | None = None
) -> dict[str, ZipRecord]:
    """Return the records of a zip file at these bytes, by name without the top folder. Raises
    ``FormatError``, and ``Unsupported`` if one is compressed or encrypted."""
    window = file.view[start : file.length if stop is None else stop]
    try:
        with zipfile.ZipFile(_MemoryViewIO(window)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as e:
        raise file.format_error(
            "a complete zip file", str(e) or with_article(type(e).__name__), start
        ) from e
    records: dict[str, ZipRecord] = {}
    end = 0
    # in the order of the file, in which no record may begin before the end of another: the time to
    # check overlapping ones could grow with the square of the file's length
    for entry in sorted(entries, key=lambda e: e.header_offset):
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise Unsupported(
                f"{file.path} cannot be imported: its records are compressed, which PyTorch does"
                " not do",
                found=entry.filename,
            )
        offset = entry.header_offset
        if offset < end:
            raise file.format_error("records that do not overlap", entry.filename, start + offset)
        header = bytes(window[offset : offset + _LOCAL_HEADER_SIZE])
        if len(header) < _LOCAL_HEADER_SIZE or header[:4] != b"PK\3\4":
            raise file.format_error("a record", f"{header[:4]!r}", start + offset)
        skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        begin = start + offset + _LOCAL_HEADER_SIZE + skipped
        end = offset + _LOCAL_HEADER_SIZE + skipped + entry.file_size
        if end > len(window):
            raise file.format_error(
                f"{entry.filename} up to byte {start + end}", "the end of the file", begin
            )
        name = entry.filename.partition("/")[2]
        if (
            records.setdefault(name, record := ZipRecord(name, begin, start + end, entry.CRC))
            is not record
        ):
            raise file.format_error("one record of each name", f"two named {name}", begin)
    return records


def check_crc(file: MappedFile, record: ZipRecord, advance: Advance) -> None:
    """Raise ``FormatError`` unless a record has its CRC, which PyTorch writes but never checks."""
    crc = 0
    for at in range(record.start, record.stop, 16 * MIB):
        part = file.view[at : min(at + 16 * MIB, record.stop)]
        crc = zlib.crc32(part, crc)
        advance(len(part))
    if record.crc not in (0, crc):
        raise file.format_error(
            f"bytes with CRC {record.crc:08x}", f"{crc:08x} in {record.name}", record.start
        )
