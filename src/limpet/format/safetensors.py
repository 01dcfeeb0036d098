"""Headers of the safetensors file format. This module does not handle the data.

A file has the form
``[8 bytes: length of the header, little endian][header: JSON][data, packed without gaps]``.
The header is padded with spaces so that the data begins at a multiple of 4,096 bytes. The data can
then be written and read with direct I/O. (Format: https://github.com/huggingface/safetensors.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import msgspec

from limpet.errors import ManifestInvalid, Unsupported
from limpet.format.strict_json import DECODE_ERRORS, require_unique_names
from limpet.text import VERIFY_ADVICE
from limpet.types import ALIGNMENT, DTYPES, DType

MAX_HEADER = 100_000_000
"""The maximum length of a header in bytes, a limit of the safetensors library."""

STORED_ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1} | {
    d.stored_dtype: d.itemsize for d in DTYPES.values() if d.stored_per_element == 1
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a shard. ``start`` and ``stop``: bytes from the beginning of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class HeaderEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor as a header describes it. ``data_offsets``: where it starts and stops."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA = msgspec.json.Decoder(dict[str, str])
_ENTRY = msgspec.json.Decoder(HeaderEntry)


def decode_entries(header: bytes) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Return the entries of a header by name, and its metadata. Only types, and that no name occurs
    twice, are checked. Raises one of ``DECODE_ERRORS``."""
    members = _MEMBERS.decode(header)
    encoded = members.pop("__metadata__", None)
    metadata = None if encoded is None else _METADATA.decode(encoded)
    entries = {name: _ENTRY.decode(raw) for name, raw in members.items()}
    first = {} if metadata is None else {"__metadata__": metadata}
    require_unique_names(header.strip(b" "), {**first, **entries})
    return entries, metadata or {}


def stored_shape(dtype: DType, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a box of ``sizes`` elements has in a shard."""
    return sizes if dtype.stored_per_element == 1 else (*sizes, dtype.stored_per_element)


def entry_name(
    key: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> str:
    """Return the name of a box: the key, and the offsets unless the box is the whole leaf. The
    caller appends ``~`` until it is unique."""
    return key if sizes == shape else f"{key}@{','.join(map(str, offsets))}"


def build_header(
    entries: Iterable[tuple[str, str, tuple[int, ...], int, int]],
) -> bytes:
    """Return a file up to its data. Entries: (name, stored dtype, shape, start, stop). Raises
    ``Unsupported`` if the safetensors library would refuse the length."""
    members: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, dtype, shape, start, stop in entries:
        members[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, stop)}
    text = msgspec.json.encode(members)
    padded_length = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    if padded_length > MAX_HEADER:
        raise Unsupported(
            f"A shard has {len(members) - 1} tensors, too many for one safetensors header",
            expected=f"at most {MAX_HEADER} bytes",
            found=f"{padded_length} bytes",
            todo="Store small values in fewer, larger tensors",
        )
    return padded_length.to_bytes(8, "little") + text.ljust(padded_length)


def parse_header(raw: bytes, length: int, file: str) -> tuple[int, list[TensorEntry]]:
    """Return the offset of the data, and the entries in its order, fully checked: every byte of the
    data belongs to exactly one tensor. ``length``: of the file, in bytes."""
    data_start = header_length(raw[:8], length, file)
    try:
        parsed, _ = decode_entries(raw[8:data_start])
    except DECODE_ERRORS as e:
        raise _header_error(file, 8, "a safetensors header in JSON", str(e)) from e
    entries = sorted(
        (TensorEntry(n, t.dtype, t.shape, *t.data_offsets) for n, t in parsed.items()),
        key=lambda e: (e.start, e.stop),
    )
    position = 0
    for entry in entries:
        size = STORED_ITEMSIZE.get(entry.dtype)
        if (
            size is None
            or any(n < 0 for n in entry.shape)
            or entry.stop - entry.start != size * prod(entry.shape)
        ):
            raise _header_error(
                file, 8, "a dtype and shape that match the length of the data", str(entry)
            )
        if entry.start != position:
            raise _header_error(
                file, data_start + position, "tensors packed without gaps or overlap", str(entry)
            )
        position = entry.stop
    if data_start + position != length:
        raise _header_error(
            file,
            data_start + position,
            f"a file of {data_start + position} bytes",
            f"{length} bytes",
        )
    return data_start, entries


def header_length(prefix: bytes, length: int, file: str) -> int:
    """Return the offset of the data, from the first 8 bytes of a file of ``length`` bytes."""
    size = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or size > MAX_HEADER or 8 + size > length:
        raise _header_error(file, 0, f"a header within the file's {length} bytes", f"{size} bytes")
    return 8 + size


def _header_error(file: str, offset: int, expected: str, found: str) -> ManifestInvalid:
    return ManifestInvalid(
        f"{file} is not a valid safetensors file at offset {offset}",
        expected=expected,
        found=found[:300],
        todo=VERIFY_ADVICE,
        file=file,
        offset=offset,
    )
