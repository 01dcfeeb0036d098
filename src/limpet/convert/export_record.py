"""The record of an export: a small file beside it, written last.

It says where the export is from, and has the length of each file and the digest of each piece. The
pieces of a file are the ranges in which it was written, so that no byte is read a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from limpet.convert.stored_files import ForeignFolder, locate_foreign
from limpet.errors import DigestMismatch, FormatError, NotFound, StoreError
from limpet.format.digest import Digest
from limpet.format.sealed import seal, unseal
from limpet.format.strict_json import StrictDecoder
from limpet.snapshot.location import Location
from limpet.text import to_json_value
from limpet.threads import Workers, no_op
from limpet.types import BLOCK_SIZE, Advance

RECORD_SUFFIX = ".limpet.json"
_MAX_RECORD = 1 << 28


class ExportedFile(msgspec.Struct, frozen=True):
    """A file of an export: its length, and the length and digest of each piece, in order."""

    length: int
    pieces: list[tuple[int, Digest]]


class ExportRecord(msgspec.Struct, frozen=True):
    """``origin``: the version that was exported. ``files``: by name."""

    origin: dict[str, Any]
    files: dict[str, ExportedFile]


_DECODER = StrictDecoder(msgspec.json.Decoder(ExportRecord))


def encode_record(origin: Mapping[str, Any], files: Mapping[str, ExportedFile]) -> bytes:
    """Return the content of a record. Numbers that JSON lacks become text, such as "nan"."""
    return seal(ExportRecord(to_json_value(origin, limit=None), dict(files)))[0]


def find_record(location: Location, name: str) -> ExportRecord | None:
    """Return the record of an earlier export, or None if there is none, or another file."""
    with suppress(NotFound, FormatError):
        raw = location.store.get(location.key(name), _MAX_RECORD)
        return unseal(raw, _DECODER, location.key(name))[0]
    return None


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """The result for one exported file: its name, its bytes, and the error if it is damaged."""

    name: str
    url: str
    nbytes: int
    error: FormatError | StoreError | None


def check_export(path: str | Location, advance: Advance = no_op) -> list[ExportCheck]:
    """Compare the exported files at a path or URL of a file or folder with their records: an empty
    result if no record lists one. ``advance(nbytes)`` is called from several threads."""
    folder, only = _find_folder(path)
    checks, damaged = [], []
    for name in _record_names(folder, only):
        try:
            record = _read_record(folder, name)
        except FormatError as e:
            damaged.append(ExportCheck(name, folder.join(name), 0, e))
            continue
        checks += [
            _check_file(folder, file_name, file, advance)
            for file_name, file in record.files.items()
            if only in (None, name, file_name)
        ]
    is_unclear = only is None or not checks
    return [*checks, *(damaged if is_unclear else [])]


def _record_names(folder: ForeignFolder, only: str | None) -> list[str]:
    """Return the names of the records in a folder; none if it does not exist."""
    try:
        names = folder.names()
    except OSError:  # such as a folder that may be entered, but not listed
        names = [] if only is None else [only + RECORD_SUFFIX]
    return [n for n in names if n.endswith(RECORD_SUFFIX) and folder.has(n)]


def require_intact(path: str | Location) -> None:
    """Raise the first error of ``check_export``: ``DigestMismatch`` for damage."""
    for check in check_export(path):
        if check.error is not None:
            raise check.error


def _find_folder(path: str | Location) -> tuple[ForeignFolder, str | None]:
    """Return the folder to check, and the name of the one file in it, if the path names a file."""
    path, location = locate_foreign(path)
    folder = ForeignFolder(path, location)
    if folder.is_folder():
        return folder, None
    parent, _, name = (path if location is None else location.folder).rpartition("/")
    if location is None:
        return ForeignFolder(parent or ("/" if path.startswith("/") else "."), None), name
    above = Location(location.store, parent)
    return ForeignFolder(above.url, above), name


def _read_record(folder: ForeignFolder, name: str) -> ExportRecord:
    """Return a record. Raises ``FormatError`` if it is damaged."""
    file = folder.open(name)
    if file.length > _MAX_RECORD:
        raise file.format_error("the record of an export", f"{file.length} bytes")
    record, _ = unseal(file.read(0, file.length), _DECODER, folder.join(name))
    for file_name, listed in record.files.items():
        lengths = [length for length, _ in listed.pieces]
        if "/" in file_name or sum(lengths) != listed.length or min(lengths, default=0) < 0:
            raise file.format_error(f"the pieces of {file_name}", f"{sum(lengths)} bytes")
    return record


def _check_file(
    folder: ForeignFolder, name: str, expected: ExportedFile, advance: Advance
) -> ExportCheck:
    """Compare a file with its entry in a record."""
    path, error = folder.join(name), None
    try:
        file = folder.open(name)
    except NotFound as e:
        error = FormatError(
            f"{path} is missing, but the record of the export lists it",
            todo="Export the version again",
            file=name,
        )
        error.__cause__ = e
        return ExportCheck(name, path, 0, error)
    if file.length != expected.length:
        found = f"{file.length} bytes"
        error = _damage(path, f"{expected.length} bytes", found)
        return ExportCheck(name, path, file.length, error)
    errors: dict[int, FormatError] = {}

    def check(piece: tuple[int, int, str]) -> None:
        start, length, digest = piece
        hasher = xxhash.xxh3_128()
        for at in range(start, start + length, BLOCK_SIZE):
            data = file.read(at, min(at + BLOCK_SIZE, start + length))
            hasher.update(data)
            advance(len(data))
        if hasher.hexdigest() != digest:
            errors[start] = _damage(path, f"digest {digest}", hasher.hexdigest(), start)

    pieces, at = [], 0
    for length, digest in expected.pieces:
        pieces.append((at, length, digest))
        at += length
    Workers.create().each(pieces, check)
    return ExportCheck(name, path, file.length, errors[min(errors)] if errors else None)


def _damage(path: str, expected: str, found: str, offset: int = 0) -> DigestMismatch:
    return DigestMismatch(
        f"{path} differs from what was exported",
        expected=expected,
        found=found,
        todo="Use another copy, or export the version again",
        file=path,
        offset=offset,
    )
