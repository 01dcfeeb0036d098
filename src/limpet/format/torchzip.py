"""Headers of the uncompressed zip archive that ``torch.save`` writes.

This module does not handle the data. ``archive/data.pkl`` is the pickled object, and
``archive/data/N`` contains the bytes of storage N. Each record begins at a multiple of 64 bytes, so
that ``torch.load(mmap=True)`` returns aligned tensors. A large record begins at a multiple of 4,096
bytes, so that it can be written with direct I/O. The padding is an extra field in the record's
header, as in PyTorch's own files.

The offset of each record is known before its data exists. Any thread can therefore write the
records in any order. Only the headers, which contain checksums, are written last. (Sources:
PyTorch's notes on serialization; for the zip format, PKWARE's APPNOTE.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from limpet.types import ALIGNMENT, KIB

ROOT = "archive/"

_SMALL_ALIGNMENT = 64
_LARGE_RECORD_SIZE = 64 * KIB
_ZIP32_LIMIT = 0xFFFFFFFF
"""A value that does not fit into 32 bits is stored in an extra field (zip64)."""
_UTF8_FLAG = 0x0800
_DATE = 0x21
"""1980-01-01, the earliest date in zip. A fixed date makes the files of equal states equal."""

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL_HEADER = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")


class Record(NamedTuple):
    """A record: its name, its length in bytes, and the offsets of its header and its data."""

    name: bytes
    length: int
    header_offset: int
    data_offset: int


@dataclass(frozen=True, slots=True)
class Archive:
    """The layout of an archive. ``length`` is the length of the file in bytes."""

    records: tuple[Record, ...]
    length: int

    def encode_headers(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return the parts of the file that are not data of a record, with their offsets.

        ``checksums``: the CRC-32 of each record.
        """
        headers = [self.encode_header(n, crc) for n, crc in enumerate(checksums)]
        return [*headers, self.encode_directory(checksums)]

    def encode_header(self, number: int, checksum: int) -> tuple[int, bytes]:
        """Return the header of a record, with its offset."""
        record = self.records[number]
        return record.header_offset, _local_header(*record, checksum)

    def encode_directory(self, checksums: Sequence[int]) -> tuple[int, bytes]:
        """Return what follows the data of the last record, with its offset."""
        return _data_end(self.records), _central_directory(self.records, checksums)


def plan_archive(records: Iterable[tuple[str, int]]) -> Archive:
    """Lay out an archive of these records, each a name and a length in bytes, in this order."""
    planned: list[Record] = []
    position = 0
    for text, length in records:
        name = (ROOT + text).encode()
        extra_size = 4 + (20 if length >= _ZIP32_LIMIT else 0)
        header_end = position + _LOCAL_HEADER.size + len(name) + extra_size
        alignment = _SMALL_ALIGNMENT if length < _LARGE_RECORD_SIZE else ALIGNMENT
        data_offset = -(-header_end // alignment) * alignment
        planned.append(Record(name, length, position, data_offset))
        position = data_offset + length
    directory = _central_directory(planned, [0] * len(planned))
    return Archive(tuple(planned), position + len(directory))


def _data_end(records: Sequence[Record]) -> int:
    return records[-1].data_offset + records[-1].length if records else 0


def _central_directory(records: Sequence[Record], checksums: Sequence[int]) -> bytes:
    entries = b"".join(_directory_entry(*r, crc) for r, crc in zip(records, checksums, strict=True))
    start, count = _data_end(records), len(records)
    end64 = (b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, len(entries), start)
    count16 = min(count, 0xFFFF)
    size32, start32 = min(len(entries), _ZIP32_LIMIT), min(start, _ZIP32_LIMIT)
    return b"".join(
        (
            entries,
            _END64.pack(*end64),
            _LOCATOR.pack(b"PK\6\7", 0, start + len(entries), 1),
            _END.pack(b"PK\5\6", 0, 0, count16, count16, size32, start32, 0),
        )
    )


def _local_header(name: bytes, size: int, header_offset: int, data_offset: int, crc: int) -> bytes:
    """Return the header of a record, padded up to its data."""
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _ZIP32_LIMIT else b""
    padding = data_offset - header_offset - _LOCAL_HEADER.size - len(name) - len(extra) - 4
    extra += b"FB" + struct.pack("<H", padding) + bytes(padding)
    size32 = min(size, _ZIP32_LIMIT)
    fields = (45, _UTF8_FLAG, 0, 0, _DATE, crc, size32, size32, len(name), len(extra))
    return _LOCAL_HEADER.pack(b"PK\3\4", *fields) + name + extra


def _directory_entry(name: bytes, size: int, header_offset: int, _: int, crc: int) -> bytes:
    """Return the entry of a record in the directory at the end of the file."""
    values64 = [size, size] if size >= _ZIP32_LIMIT else []
    values64 += [header_offset] if header_offset >= _ZIP32_LIMIT else []
    count = len(values64)
    extra = struct.pack(f"<HH{count}Q", 1, 8 * count, *values64) if values64 else b""
    size32, offset32 = min(size, _ZIP32_LIMIT), min(header_offset, _ZIP32_LIMIT)
    fields = (45, 45, _UTF8_FLAG, 0, 0, _DATE, crc, size32, size32, len(name), len(extra))
    return _CENTRAL_HEADER.pack(b"PK\1\2", *fields, 0, 0, 0, 0, offset32) + name + extra


# -- checksums of parts ---------------------------------------------------------------------------

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combine_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of concatenated parts, from the length and the CRC-32 of each part.

    Multiplying a checksum by x^8n modulo the polynomial shifts it to the left by n bytes. (The
    algorithm of zlib's ``crc32_combine``, which Python does not provide.)
    """
    combined = 0
    for length, crc in parts:
        combined = _multiply_polynomials(_x_power(length), combined) ^ crc
    return combined


@lru_cache(4096)
def _x_power(nbytes: int) -> int:
    """Return x^8n modulo the polynomial, where n is ``nbytes``."""
    result, power, bits = _ONE, _ONE >> 1, 8 * nbytes
    while bits:
        if bits & 1:
            result = _multiply_polynomials(power, result)
        power = _multiply_polynomials(power, power)
        bits >>= 1
    return result


def _multiply_polynomials(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the polynomial. The highest bit is x^0."""
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product
