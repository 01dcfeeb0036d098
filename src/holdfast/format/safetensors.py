"""The safetensors file format: header out, header in. No data passes through here.

``[8 bytes: length of the header, little endian][header: JSON][data, packed without holes]``.
The header is padded with spaces until the data begins at a multiple of 4,096 bytes, so that data
can be written and read past the page cache. (https://github.com/huggingface/safetensors, format.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import msgspec

from holdfast.errors import ManifestInvalid, Unsupported
from holdfast.types import ALIGNMENT, DTYPES, DType

MAX_HEADER = 100_000_000
"""The safetensors library's own limit on a header, in bytes."""

STORED_ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1} | {
    d.stored_dtype: d.itemsize for d in DTYPES.values() if d.stored_per_element == 1
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a shard: its name in the header, stored dtype and shape, and where it lies.

    ``start`` and ``stop`` are counted from the beginning of the data, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _HeaderEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def stored_shape(dtype: DType, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape under which a box of ``sizes`` elements stands in a shard."""
    return sizes if dtype.stored_per_element == 1 else (*sizes, dtype.stored_per_element)


def entry_name(
    key: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> str:
    """What a box is called in the header: the leaf's key, and for a part where it begins. Where
    that is taken, ``~`` is added until it is not."""
    return key if sizes == shape else f"{key}@{','.join(map(str, offsets))}"


def build_header(entries: Iterable[tuple[str, str, tuple[int, ...], int, int]]) -> bytes:
    """The file's beginning up to its data. Entries: name, stored dtype, shape, start, stop.

    Raises ``Unsupported`` for so many that the safetensors library would refuse the header.
    """
    tensors = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": (start, stop)}
        for name, dtype, shape, start, stop in entries
    }
    text = msgspec.json.encode({"__metadata__": {"format": "pt"}} | tensors)
    padded = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    if padded > MAX_HEADER:
        raise Unsupported(
            f"The {len(tensors)} tensors of a shard are too many for one safetensors header",
            expected=f"at most {MAX_HEADER} bytes",
            found=f"{padded} bytes",
            todo="Keep small values in fewer, larger tensors",
        )
    return padded.to_bytes(8, "little") + text.ljust(padded)


def parse_header(raw: bytes, length: int, file: str) -> tuple[int, list[TensorEntry]]:
    """Where the data begins, and the entries in order of their data, fully checked.

    ``raw`` holds at least the whole header, ``length`` is the file's length in bytes. Raises
    ``ManifestInvalid`` unless every byte of the data belongs to exactly one tensor.
    """
    begin = header_length(raw[:8], length, file)
    try:
        tensors = msgspec.json.decode(raw[8:begin], type=dict[str, msgspec.Raw])
        tensors.pop("__metadata__", None)
        parsed = {n: msgspec.json.decode(r, type=_HeaderEntry) for n, r in tensors.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise _header_error(file, 8, "a JSON header as safetensors has it", str(e)) from e
    entries = sorted(
        (TensorEntry(n, t.dtype, tuple(t.shape), *t.data_offsets) for n, t in parsed.items()),
        key=lambda e: (e.start, e.stop),
    )
    at = 0
    for entry in entries:
        size = STORED_ITEMSIZE.get(entry.dtype)
        if (
            size is None
            or any(n < 0 for n in entry.shape)
            or entry.stop - entry.start != size * prod(entry.shape)
        ):
            raise _header_error(file, 8, "a dtype and shape that fit the data's length", str(entry))
        if entry.start != at:
            raise _header_error(
                file, begin + at, "tensors packed without holes or overlap", str(entry)
            )
        at = entry.stop
    if begin + at != length:
        raise _header_error(file, begin + at, f"a file of {begin + at} bytes", f"{length} bytes")
    return begin, entries


def header_length(prefix: bytes, length: int, file: str) -> int:
    """Where the data begins, from a file's first 8 bytes and its length. Raises
    ``ManifestInvalid`` if the header would not fit into the file."""
    size = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or size > MAX_HEADER or 8 + size > length:
        raise _header_error(file, 0, f"a header within the file's {length} bytes", f"{size} bytes")
    return 8 + size


def _header_error(file: str, offset: int, expected: str, found: str) -> ManifestInvalid:
    return ManifestInvalid(
        f"{file} is not a sound safetensors file at offset {offset}",
        expected=expected,
        found=found[:300],
        todo="Take another version; `holdfast verify` shows which are intact",
        file=file,
        offset=offset,
    )
