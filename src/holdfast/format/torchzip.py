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

from holdfast.types import ALIGNMENT, KIB

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


@dataclass(frozen=True, slots=True)
class Archive:
    """The layout of an archive.

    Each record has a name, a length in bytes, the offset of its header (``header_offsets``), and
    the offset of its data (``data_offsets``). ``length`` is the length of the file in bytes.
    """

    names: tuple[bytes, ...]
    lengths: tuple[int, ...]
    header_offsets: tuple[int, ...]
    data_offsets: tuple[int, ...]
    length: int

    def encode_headers(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return the parts of the file that are not data of a record, with their offsets.

        ``checksums``: the CRC-32 of each record.
        """
        parts = [
            (header_offset, _local_header(name, size, data_offset - header_offset, crc))
            for name, size, header_offset, data_offset, crc in zip(
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
        start, count = _data_end(self.data_offsets, self.lengths), len(self.names)
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


def plan_archive(records: Iterable[tuple[str, int]]) -> Archive:
    """Lay out an archive of these records, each a name and a length in bytes, in this order."""
    names, lengths, header_offsets, data_offsets = [], [], [], []
    position = 0
    for text, length in records:
        name = (ROOT + text).encode()
        extra_size = 4 + (20 if length >= _ZIP32_LIMIT else 0)
        header_end = position + _LOCAL_HEADER.size + len(name) + extra_size
        names.append(name)
        lengths.append(length)
        header_offsets.append(position)
        alignment = _SMALL_ALIGNMENT if length < _LARGE_RECORD_SIZE else ALIGNMENT
        data_offsets.append(-(-header_end // alignment) * alignment)
        position = data_offsets[-1] + length
    archive = Archive(tuple(names), tuple(lengths), tuple(header_offsets), tuple(data_offsets), 0)
    file_length = position + len(archive._central_directory([0] * len(names)))
    return Archive(
        archive.names, archive.lengths, archive.header_offsets, archive.data_offsets, file_length
    )


def _data_end(data_offsets: Sequence[int], lengths: Sequence[int]) -> int:
    return data_offsets[-1] + lengths[-1] if data_offsets else 0


def _local_header(name: bytes, size: int, header_size: int, crc: int) -> bytes:
    """Return the header of a record, padded to ``header_size`` bytes."""
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _ZIP32_LIMIT else b""
    padding = header_size - _LOCAL_HEADER.size - len(name) - len(extra) - 4
    extra += b"FB" + struct.pack("<H", padding) + bytes(padding)
    size32 = min(size, _ZIP32_LIMIT)
    fields = (45, _UTF8_FLAG, 0, 0, _DATE, crc, size32, size32, len(name), len(extra))
    return _LOCAL_HEADER.pack(b"PK\3\4", *fields) + name + extra


def _directory_entry(name: bytes, size: int, header_offset: int, crc: int) -> bytes:
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
