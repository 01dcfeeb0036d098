"""Files of others, mapped: their bytes are read when they are looked at, and never written.

Python's ``mmap`` keeps a file descriptor for each mapping, and a checkpoint may have thousands of
files; a private mapping that can be written to, as ``torch.load(mmap=True)`` makes it, is refused
for a file larger than memory. So the system's own call is made, shared and read-only.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import stat
import weakref
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from holdfast.errors import FormatError, NotFound, Unsupported
from holdfast.text import with_article
from holdfast.types import MIB

Advance = Callable[[int], object]
"""Is told of bytes done, from any thread."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value

_LOCAL_HEADER_SIZE = 30
_COMPRESSED_RECORDS = "its records are compressed, which PyTorch does not do"


class MappedFile:
    """A file in memory; ``view`` is all of it, read-only. Unmapped when nothing refers to it.

    Raises ``NotFound``, ``Unsupported`` for what is no plain file, and ``OSError``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as e:
            raise NotFound(f"There is no file {path}", todo="Check the path", key=path) from e
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise Unsupported(f"{path} is no plain file", todo="Name a file or a folder")
            self.length = about.st_size
            self._memory: Any = (
                _mmap_readonly(fd, self.length) if self.length else (ctypes.c_ubyte * 0)()
            )
        finally:
            os.close(fd)
        self.view = memoryview(self._memory).cast("B").toreadonly()

    def tensor(self, dtype: str, shape: tuple[int, ...], start: int) -> Any:
        """The row-major tensor whose bytes begin at ``start``, which need not be aligned. Nothing
        may be written to it. The caller has seen that it lies within the file."""
        import torch

        kind = getattr(torch, dtype)
        if 0 in shape:
            return torch.empty(shape, dtype=kind)
        flat = torch.frombuffer(self._memory, dtype=kind, count=prod(shape), offset=start)
        return flat.view(shape)

    def format_error(self, expected: str, found: str, offset: int = 0) -> FormatError:
        """The error for what is not as its format has it."""
        return FormatError(
            f"{self.path} is damaged, or not what it seems, at offset {offset}",
            expected=expected,
            found=found[:300],
            todo="Take another copy of it",
            file=self.path,
            offset=offset,
        )


def _mmap_readonly(fd: int, length: int) -> Any:
    address = _LIBC.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, length)
    return memory


class _MemoryViewIO(io.RawIOBase):
    """A part of a mapped file as a file of its own."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._position = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._view)}[whence]
        if begin + offset < 0:
            raise OSError("before the beginning")
        self._position = begin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = self._view[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A record of a zip file as ``torch.save`` writes it: bytes ``start`` to ``stop`` of the mapped
    file, as they are; ``crc`` is 0 where none was made (``set_crc32_options(False)``)."""

    name: str
    start: int
    stop: int
    crc: int


def read_zip_records(
    file: MappedFile, start: int = 0, stop: int | None = None
) -> dict[str, ZipRecord]:
    """The records of the zip file that lies from ``start`` to ``stop``, by their names below its
    top folder. Raises ``FormatError``, and ``Unsupported`` if they are compressed."""
    window = file.view[start : file.length if stop is None else stop]
    try:
        with zipfile.ZipFile(_MemoryViewIO(window)) as opened:
            found = opened.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as e:
        raise file.format_error(
            "a whole zip file", str(e) or with_article(type(e).__name__), start
        ) from e
    records = {}
    for entry in found:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise Unsupported(
                f"{file.path} cannot be imported: {_COMPRESSED_RECORDS}", found=entry.filename
            )
        at = entry.header_offset
        header = bytes(window[at : at + _LOCAL_HEADER_SIZE])
        if len(header) < _LOCAL_HEADER_SIZE or header[:4] != b"PK\3\4":
            raise file.format_error("a record", f"{header[:4]!r}", start + at)
        skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        begin = start + at + _LOCAL_HEADER_SIZE + skipped
        end = begin + entry.file_size
        if end > start + len(window):
            raise file.format_error(
                f"{entry.filename} up to byte {end}", "the end of the file", begin
            )
        name = entry.filename.partition("/")[2]
        records[name] = ZipRecord(name, begin, end, entry.CRC)
    return records


def check_crc(file: MappedFile, record: ZipRecord, advance: Advance) -> None:
    """Read a record and compare its CRC, which PyTorch makes and never looks at. Raises
    ``FormatError``."""
    crc = 0
    for at in range(record.start, record.stop, 16 * MIB):
        part = file.view[at : min(at + 16 * MIB, record.stop)]
        crc = zlib.crc32(part, crc)
        advance(len(part))
    if record.crc not in (0, crc):
        raise file.format_error(
            f"bytes of CRC {record.crc:08x}", f"{crc:08x} in {record.name}", record.start
        )
