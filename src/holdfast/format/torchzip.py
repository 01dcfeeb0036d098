"""The file that ``torch.save`` writes: a zip archive, nothing compressed. No data passes here.

``archive/data.pkl`` is the pickled object, ``archive/data/N`` the bytes of storage N. Each record
begins at a multiple of 64, so that ``torch.load(mmap=True)`` gives aligned tensors, a larger one
of 4,096, so that it can be written past the page cache; what fills up is an extra field of the
record's header, as in PyTorch's own files. Where a record's bytes lie is known before there are
any, so they can be written in any order by any thread; only the headers, which hold checksums,
come last. (PyTorch, notes on serialization; the zip format: PKWARE's APPNOTE.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.types import ALIGNMENT, KIB

ROOT = "archive/"

_SMALL_ALIGNMENT = 64
_LARGE_RECORD_SIZE = 64 * KIB
_ZIP32_LIMIT = 0xFFFFFFFF
"""What does not fit into 32 bits stands in an extra field (zip64)."""
_UTF8_FLAG = 0x0800
_DATE = 0x21
"""1980-01-01, the first day that zip knows: the same state makes the same file."""

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL_HEADER = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")


@dataclass(frozen=True, slots=True)
class Archive:
    """Where everything lies in the file: of each record its ``names`` and ``lengths``, where its
    header (``heads``) and its bytes (``begins``) begin; and the file's ``length``."""

    names: tuple[bytes, ...]
    lengths: tuple[int, ...]
    header_offsets: tuple[int, ...]
    data_offsets: tuple[int, ...]
    length: int

    def encode_headers(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """All of the file that is no record's bytes: pieces and their offsets. ``checksums``: the
        CRC-32 of each record."""
        parts = [
            (head, _local_header(name, size, begin - head, crc))
            for name, size, head, begin, crc in zip(
                self.names,
                self.lengths,
                self.header_offsets,
                self.data_offsets,
                checksums,
                strict=True,
            )
        ]
        parts.append(
            (_data_end(self.data_offsets, self.lengths), self._central_directory(checksums))
        )
        return parts

    def _central_directory(self, checksums: Sequence[int]) -> bytes:
        rows = zip(self.names, self.lengths, self.header_offsets, checksums, strict=True)
        entries = b"".join(_directory_entry(*row) for row in rows)
        at, count = _data_end(self.data_offsets, self.lengths), len(self.names)
        end64 = (b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, len(entries), at)
        few, size, offset = (
            min(count, 0xFFFF),
            min(len(entries), _ZIP32_LIMIT),
            min(at, _ZIP32_LIMIT),
        )
        return b"".join(
            (
                entries,
                _END64.pack(*end64),
                _LOCATOR.pack(b"PK\6\7", 0, at + len(entries), 1),
                _END.pack(b"PK\5\6", 0, 0, few, few, size, offset, 0),
            )
        )


def plan_archive(records: Iterable[tuple[str, int]]) -> Archive:
    """The archive of these records, each a name and a length in bytes, in their order."""
    names, lengths, heads, begins = [], [], [], []
    at = 0
    for text, length in records:
        name = (ROOT + text).encode()
        bare = at + _LOCAL_HEADER.size + len(name) + 4 + (20 if length >= _ZIP32_LIMIT else 0)
        names.append(name)
        lengths.append(length)
        heads.append(at)
        unit = _SMALL_ALIGNMENT if length < _LARGE_RECORD_SIZE else ALIGNMENT
        begins.append(-(-bare // unit) * unit)
        at = begins[-1] + length
    made = Archive(tuple(names), tuple(lengths), tuple(heads), tuple(begins), 0)
    whole = at + len(made._central_directory([0] * len(names)))
    return Archive(made.names, made.lengths, made.header_offsets, made.data_offsets, whole)


def _data_end(data_offsets: Sequence[int], lengths: Sequence[int]) -> int:
    return data_offsets[-1] + lengths[-1] if data_offsets else 0


def _local_header(name: bytes, size: int, header_size: int, crc: int) -> bytes:
    """A record's header, filled up to ``room`` bytes."""
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _ZIP32_LIMIT else b""
    fill = header_size - _LOCAL_HEADER.size - len(name) - len(extra) - 4
    extra += b"FB" + struct.pack("<H", fill) + bytes(fill)
    told = min(size, _ZIP32_LIMIT)
    fields = (45, _UTF8_FLAG, 0, 0, _DATE, crc, told, told, len(name), len(extra))
    return _LOCAL_HEADER.pack(b"PK\3\4", *fields) + name + extra


def _directory_entry(name: bytes, size: int, header_offset: int, crc: int) -> bytes:
    """A record in the directory at the end of the file."""
    large = [size, size] if size >= _ZIP32_LIMIT else []
    large += [header_offset] if header_offset >= _ZIP32_LIMIT else []
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    told = min(size, _ZIP32_LIMIT)
    fields = (45, 45, _UTF8_FLAG, 0, 0, _DATE, crc, told, told, len(name), len(extra), 0, 0, 0, 0)
    return _CENTRAL_HEADER.pack(b"PK\1\2", *fields, min(header_offset, _ZIP32_LIMIT)) + name + extra


# -- checksums of parts ---------------------------------------------------------------------------

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combine_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of bytes, from the lengths and the CRC-32s of their parts, in order.

    A part's checksum moves by ``n`` bytes to the left when multiplied by x^8n modulo the
    polynomial. (As zlib's ``crc32_combine`` does it, which Python does not offer.)
    """
    made = 0
    for length, crc in parts:
        made = _multiply_polynomials(_x_power(length), made) ^ crc
    return made


@lru_cache(4096)
def _x_power(nbytes: int) -> int:
    """x^8n modulo the polynomial."""
    made, power, bits = _ONE, _ONE >> 1, 8 * nbytes
    while bits:
        if bits & 1:
            made = _multiply_polynomials(power, made)
        power = _multiply_polynomials(power, power)
        bits >>= 1
    return made


def _multiply_polynomials(a: int, b: int) -> int:
    """The product of two polynomials modulo the polynomial; the highest bit is x^0."""
    made, bit = 0, _ONE
    while bit:
        if a & bit:
            made ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return made
