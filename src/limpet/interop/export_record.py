"""The record of an exported file: where it is from, and the CRC-32 of its bytes.

A safetensors file has the record in its ``__metadata__``, and the index of a Hugging Face folder in
its ``metadata``. A file for ``torch.load`` has it in a small JSON file next to it, because a zip
file cannot contain its own checksum. The CRC-32 covers the whole file; the digits of the CRC itself
count as zeros. (Pieces of an export are written in any order. A CRC-32 of a file can be combined
from those of its pieces, and an XXH3 cannot.)
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

from limpet.errors import DigestMismatch, FormatError, NotFound, StoreError
from limpet.format.safetensors import decode_entries
from limpet.format.strict_json import DECODE_ERRORS
from limpet.format.torchzip import combine_crc32
from limpet.interop.mmap_files import Advance
from limpet.interop.read_safetensors import INDEX_SUFFIX, SAFE_WEIGHTS_NAME
from limpet.interop.stored_files import ForeignFile, ForeignFolder, is_safetensors, locate_foreign
from limpet.snapshot.location import Location
from limpet.threads import Workers, no_op
from limpet.types import BLOCK_SIZE

RECORD, CRC = "limpet", "limpet.crc32"
"""The names of the members with the record and with the CRC-32 of the file."""

NO_CRC = "00000000"
SIDECAR_SUFFIX = ".limpet.json"
_CRC = re.compile(rb'"limpet\.crc32": ?"([0-9a-f]{8})"')
_PART = re.compile(r"-[0-9]{5,}-of-[0-9]{5,}\.safetensors\Z")
_MAX_TEXT = 1 << 28


def format_crc(crc: int) -> str:
    return f"{crc:08x}"


def encode_record(record: Mapping[str, Any]) -> str:
    """Return a record as JSON. Numbers that JSON cannot represent become text, such as "nan"."""
    return json.dumps(_to_json(record))


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _to_json(inner) for name, inner in value.items()}
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value


def find_crc(text: bytes) -> int | None:
    """Return the offset of the eight digits of the CRC-32 in a header or a JSON text."""
    match = _CRC.search(text)
    return None if match is None else match.start(1)


def insert_crc(text: bytes, at: int, crc: int) -> bytes:
    return text[:at] + format_crc(crc).encode() + text[at + len(NO_CRC) :]


def seal_text(text: bytes) -> bytes:
    """Insert the CRC-32 of a JSON text that has ``NO_CRC`` in its place."""
    at = find_crc(text)
    return text if at is None else insert_crc(text, at, zlib.crc32(text))


# -- checking ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """The result for one exported file: its name, its bytes, and the error if it is damaged."""

    name: str
    url: str
    nbytes: int
    error: FormatError | StoreError | None


def check_export(path: str | Location, advance: Advance = no_op) -> list[ExportCheck]:
    """Compare the exported files at a path or URL of a file or a folder with their records.

    The result is empty if no file there has a record. ``advance(nbytes)`` is called from several
    threads as bytes are read. Raises ``NotFound``, ``FormatError`` for a header that cannot be
    read, and ``StoreError``.
    """
    path, location = locate_foreign(path)
    if location is None and os.path.isdir(path):
        return _check_folder(ForeignFolder(path, None), None, advance)
    parent, _, name = (path if location is None else location.folder).rpartition("/")
    if location is None:
        root = parent or ("/" if path.startswith("/") else ".")
        return _check_folder(ForeignFolder(root, None), name, advance)
    if location.folder:
        above = Location(location.store, parent)
        with suppress(NotFound):
            return _check_folder(ForeignFolder(above.url, above), name, advance)
    return _check_folder(ForeignFolder(location.url, location), None, advance)


def require_intact(path: str | Location) -> None:
    """Raise the first error of ``check_export``: ``DigestMismatch`` for damage."""
    for check in check_export(path):
        if check.error is not None:
            raise check.error


@dataclass(frozen=True, slots=True)
class _Text:
    """A header or a JSON text with a record: its bytes, and its members by name."""

    raw: bytes
    members: Mapping[str, Any]

    @property
    def record(self) -> Mapping[str, Any]:
        record = self.members.get(RECORD)
        return record if isinstance(record, dict) else {}


def _check_folder(folder: ForeignFolder, only: str | None, advance: Advance) -> list[ExportCheck]:
    """Check the files with records in a folder, or the one named ``only``.

    The index of a Hugging Face folder stands for the whole folder.
    """
    only = None if only is not None and only.endswith(INDEX_SUFFIX) else only
    names = folder.names() if only is None else [only, only + SIDECAR_SUFFIX]
    texts: dict[str, tuple[ForeignFile, _Text]] = {}
    for name in names:
        if name.endswith((".safetensors", INDEX_SUFFIX, SIDECAR_SUFFIX)) or name == only:
            try:
                file = folder.open(name)
            except NotFound:
                if name == only:
                    raise
                continue
            text = _read_text(file, name)
            if text is not None:
                texts[name] = file, text
    expected: dict[str, str] = {}  # the CRC-32 of files, by records in other files
    for _, text in texts.values():
        files = text.record.get("files")
        expected |= files if isinstance(files, dict) else {}
    checks = [_check(folder, name, expected.get(name), texts, advance) for name in texts]
    rest = [name for name in expected if name not in texts and only in (None, name)]
    checks += [_check(folder, name, expected[name], texts, advance) for name in rest]
    has_index = any(name.endswith(INDEX_SUFFIX) for name in names)
    if only is None and not has_index and any(map(_PART.search, texts)):
        checks.append(_missing_index(folder))
    return sorted(checks, key=lambda check: check.name)


def _missing_index(folder: ForeignFolder) -> ExportCheck:
    """Return the result for parts of an export that was killed: the index is written last."""
    name = SAFE_WEIGHTS_NAME + INDEX_SUFFIX
    error = FormatError(
        f"{folder.join(name)} is missing, so the parts in this folder are not all of the export",
        todo="Delete them, and export the version again",
        file=name,
    )
    return ExportCheck(name, folder.join(name), 0, error)


def _check(
    folder: ForeignFolder,
    name: str,
    expected: str | None,
    texts: Mapping[str, tuple[ForeignFile, _Text]],
    advance: Advance,
) -> ExportCheck:
    """Check one file. ``expected``: its CRC-32 by the record in another file."""
    nbytes = 0
    error: FormatError | StoreError | None = None
    try:
        file, text = texts[name] if name in texts else (folder.open(name), None)
        nbytes = file.length
        at = None if text is None else find_crc(text.raw)
        found = format_crc(_read_crc(file, at, advance))
        own = None if text is None or at is None else text.raw[at : at + len(NO_CRC)].decode()
        for crc in {own, expected} - {None}:
            if found != crc:
                error = _mismatch(file, crc, found)
        if error is None and text is not None and name.endswith(INDEX_SUFFIX):
            error = _check_weight_map(file, text, texts)
    except NotFound as e:
        error = FormatError(
            f"{folder.join(name)} is missing, but another file of the export lists it",
            todo="Export the version again",
            file=name,
        )
        error.__cause__ = e
    return ExportCheck(name, folder.join(name), nbytes, error)


def _mismatch(file: ForeignFile, expected: str | None, found: str) -> DigestMismatch:
    return DigestMismatch(
        f"{file.path} differs from what was exported",
        expected=f"CRC-32 {expected}",
        found=found,
        todo="Use another copy, or export the version again",
        file=file.path,
    )


def _check_weight_map(
    file: ForeignFile, text: _Text, texts: Mapping[str, tuple[ForeignFile, _Text]]
) -> FormatError | None:
    """Compare the files of the tensors in an index with the headers of these files."""
    stored = {
        name: part
        for part, (_, header) in texts.items()
        if part.endswith(".safetensors")
        for name in header.members.get("tensors", ())
    }
    listed = text.members.get("weight_map")
    if not isinstance(listed, dict) or any(stored.get(n) != part for n, part in listed.items()):
        return file.format_error("the files in which the tensors are", "other files")
    return None


def _read_text(file: ForeignFile, name: str) -> _Text | None:
    """Return the header or the JSON text of a file if it has a record, else None.

    Raises ``FormatError`` if the record has no CRC-32, and if the text cannot be decoded although
    it seems to have a record.
    """
    if is_safetensors(file):
        size = int.from_bytes(file.read(0, 8), "little")
        raw, decode = file.read(0, 8 + size), _decode_header
    elif name.endswith((INDEX_SUFFIX, SIDECAR_SUFFIX)) and file.length <= _MAX_TEXT:
        raw, decode = file.read(0, file.length), _decode_json
    else:
        return None
    try:
        members = decode(raw)
    except (*DECODE_ERRORS, ValueError, AttributeError, TypeError, RecursionError) as e:
        if f'"{RECORD}'.encode() in raw:
            raise file.format_error("the header or the JSON of an export", str(e)[:200]) from e
        return None
    has_digits = find_crc(raw) is not None
    if not has_digits and members.keys().isdisjoint((RECORD, CRC)):
        return None
    if not has_digits or CRC not in members:
        raise file.format_error(f"{CRC}, eight digits", "none in its place")
    return _Text(raw, members)


def _decode_header(raw: bytes) -> dict[str, Any]:
    entries, metadata = decode_entries(raw[8:])
    record = {RECORD: json.loads(metadata[RECORD])} if RECORD in metadata else {}
    return {**metadata, "tensors": list(entries), **record}


def _decode_json(raw: bytes) -> dict[str, Any]:
    decoded = json.loads(raw)
    return {**decoded.get("metadata", decoded), "weight_map": decoded.get("weight_map")}


def _read_crc(file: ForeignFile, at: int | None, advance: Advance) -> int:
    """Return the CRC-32 of a file. ``at``: the offset of the digits that count as zeros."""
    parts: dict[int, tuple[int, int]] = {}

    def read(start: int) -> None:
        data = file.read(start, min(start + BLOCK_SIZE, file.length))
        if at is not None and start < at + len(NO_CRC) and at < start + len(data):
            block = bytearray(data)
            for i in range(max(at, start), min(at + len(NO_CRC), start + len(data))):
                block[i - start] = NO_CRC.encode()[0]
            data = bytes(block)
        parts[start] = len(data), zlib.crc32(data)
        advance(len(data))

    Workers.create().each(range(0, file.length, BLOCK_SIZE), read)
    return combine_crc32(parts[start] for start in sorted(parts))
