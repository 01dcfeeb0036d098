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

_SMALL = 64
_LARGE_FROM = 64 * KIB
_LIMIT = 0xFFFFFFFF
"""What does not fit into 32 bits stands in an extra field (zip64)."""
_UTF8 = 0x0800
_DATE = 0x21
"""1980-01-01, the first day that zip knows: the same state makes the same file."""

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")


@dataclass(frozen=True, slots=True)
class Archive:
    """Where everything lies in the file: of each record its ``names`` and ``lengths``, where its
    header (``heads``) and its bytes (``begins``) begin; and the file's ``length``."""

    names: tuple[bytes, ...]
    lengths: tuple[int, ...]
    heads: tuple[int, ...]
    begins: tuple[int, ...]
    length: int

    def frame(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """All of the file that is no record's bytes: pieces and their offsets. ``checksums``: the
        CRC-32 of each record."""
        parts = [
            (head, _local(name, size, begin - head, crc))
            for name, size, head, begin, crc in zip(
                self.names, self.lengths, self.heads, self.begins, checksums, strict=True
            )
        ]
        parts.append((_end_of(self.begins, self.lengths), self._directory(checksums)))
        return parts

    def _directory(self, checksums: Sequence[int]) -> bytes:
        rows = zip(self.names, self.lengths, self.heads, checksums, strict=True)
        entries = b"".join(_entry(*row) for row in rows)
        at, count = _end_of(self.begins, self.lengths), len(self.names)
        end64 = (b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, len(entries), at)
        few, size, offset = min(count, 0xFFFF), min(len(entries), _LIMIT), min(at, _LIMIT)
        return b"".join(
            (
                entries,
                _END64.pack(*end64),
                _LOCATOR.pack(b"PK\6\7", 0, at + len(entries), 1),
                _END.pack(b"PK\5\6", 0, 0, few, few, size, offset, 0),
            )
        )


def lay_out(records: Iterable[tuple[str, int]]) -> Archive:
    """The archive of these records, each a name and a length in bytes, in their order."""
    names, lengths, heads, begins = [], [], [], []
    at = 0
    for text, length in records:
        name = (ROOT + text).encode()
        bare = at + _LOCAL.size + len(name) + 4 + (20 if length >= _LIMIT else 0)
        names.append(name)
        lengths.append(length)
        heads.append(at)
        unit = _SMALL if length < _LARGE_FROM else ALIGNMENT
        begins.append(-(-bare // unit) * unit)
        at = begins[-1] + length
    made = Archive(tuple(names), tuple(lengths), tuple(heads), tuple(begins), 0)
    whole = at + len(made._directory([0] * len(names)))
    return Archive(made.names, made.lengths, made.heads, made.begins, whole)


def _end_of(begins: Sequence[int], lengths: Sequence[int]) -> int:
    return begins[-1] + lengths[-1] if begins else 0


def _local(name: bytes, size: int, room: int, crc: int) -> bytes:
    """A record's header, filled up to ``room`` bytes."""
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LIMIT else b""
    fill = room - _LOCAL.size - len(name) - len(extra) - 4
    extra += b"FB" + struct.pack("<H", fill) + bytes(fill)
    told = min(size, _LIMIT)
    fields = (45, _UTF8, 0, 0, _DATE, crc, told, told, len(name), len(extra))
    return _LOCAL.pack(b"PK\3\4", *fields) + name + extra


def _entry(name: bytes, size: int, head: int, crc: int) -> bytes:
    """A record in the directory at the end of the file."""
    large = [size, size] if size >= _LIMIT else []
    large += [head] if head >= _LIMIT else []
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    told = min(size, _LIMIT)
    fields = (45, 45, _UTF8, 0, 0, _DATE, crc, told, told, len(name), len(extra), 0, 0, 0, 0)
    return _CENTRAL.pack(b"PK\1\2", *fields, min(head, _LIMIT)) + name + extra


# -- checksums of parts ---------------------------------------------------------------------------

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of bytes, from the lengths and the CRC-32s of their parts, in order.

    A part's checksum moves by ``n`` bytes to the left when multiplied by x^8n modulo the
    polynomial. (As zlib's ``crc32_combine`` does it, which Python does not offer.)
    """
    made = 0
    for length, crc in parts:
        made = _times(_shift(length), made) ^ crc
    return made


@lru_cache(4096)
def _shift(nbytes: int) -> int:
    """x^8n modulo the polynomial."""
    made, power, bits = _ONE, _ONE >> 1, 8 * nbytes
    while bits:
        if bits & 1:
            made = _times(power, made)
        power = _times(power, power)
        bits >>= 1
    return made


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo the polynomial; the highest bit is x^0."""
    made, bit = 0, _ONE
    while bit:
        if a & bit:
            made ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return made
