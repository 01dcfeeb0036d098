"""Small JSON files that carry their own digest: manifests, branches, pins.

A sealed file is one JSON object whose first two members are, byte for byte,
``{"format":N,"digest":"<32 hex digits>",``. The digest is over the whole file with the 32 digits
replaced by zeros, compared exactly: a file that was changed in any byte does not open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import TypeVar

import msgspec

from holdfast.errors import DigestMismatch, FormatTooNew, ManifestInvalid
from holdfast.format.digest import HEX_LENGTH, digest

FORMAT = 2
"""The newest format number that this build writes and reads."""

_HEAD = re.compile(rb'\{"format":([1-9][0-9]{0,8}),"digest":"([0-9a-f]{32})",')

T = TypeVar("T", bound=msgspec.Struct)

_encoder = msgspec.json.Encoder()


def seal(content: msgspec.Struct, format_number: int = 1) -> tuple[bytes, str]:
    """``content`` as a sealed file of a format number, and its digest."""
    body = _encoder.encode(content)[1:]
    head = b'{"format":%d,"digest":"' % format_number
    made = digest(b"".join((head, b"0" * HEX_LENGTH, b'",', body)))
    return b"".join((head, made.encode(), b'",', body)), made


def unseal(
    raw: bytes, struct_type: type[T], file: str, newer_types: Mapping[int, type[T]] = {}
) -> tuple[T, str]:
    """The content of a sealed file and its digest, fully checked.

    ``kind``: what it is in number 1; ``later``: in other numbers, where there are any. Raises
    ``ManifestInvalid`` if the file is not of the form, ``DigestMismatch`` if a byte is not as it
    was written, ``FormatTooNew`` if it is of a later format. ``file`` names it in messages.
    """
    head = _HEAD.match(raw)
    if head is None:
        raise ManifestInvalid(
            f"{file} is damaged",
            expected='a file that begins with {"format":N,"digest":"..."',
            found=repr(raw[:40]),
            todo="Take another version; `holdfast verify` shows which are intact",
            file=file,
            offset=0,
        )
    start, stop = head.span(2)
    claimed = raw[start:stop].decode()
    found = digest(b"".join((raw[:start], b"0" * HEX_LENGTH, raw[stop:])))
    if found != claimed:
        raise DigestMismatch(
            f"{file} is damaged",
            expected=f"digest {claimed}",
            found=found,
            todo="Take another version; `holdfast verify` shows which are intact",
            file=file,
            offset=0,
        )
    number = int(head.group(1))
    if number > FORMAT:
        raise FormatTooNew(
            f"{file} was written by a later Holdfast",
            expected=f"format {FORMAT} or earlier",
            found=f"format {number}",
            todo="Install a newer Holdfast to read it",
            file=file,
        )
    kinds = {1: struct_type, **newer_types}
    make_require(file)(
        number in kinds, f"format {' or '.join(map(str, kinds))}", f"format {number}"
    )
    return decode_struct(b"{" + raw[head.end() :], kinds[number], file), claimed


def decode_struct(raw: bytes, struct_type: type[T], file: str) -> T:
    """JSON bytes as a struct of ``kind``. Raises ``ManifestInvalid``."""
    try:
        return msgspec.json.decode(raw, type=struct_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ManifestInvalid(
            f"{file} breaks the format",
            expected="the fields that docs/format.md has",
            found=str(e),
            file=file,
        ) from e


def make_require(file: str) -> Callable[[bool, str, object], None]:
    """A check for the fields of a file: raises ``ManifestInvalid`` unless ``good``."""

    def demand(good: bool, expected: str, found: object) -> None:
        if not good:
            raise ManifestInvalid(
                f"{file} breaks the format", expected=expected, found=str(found)[:300], file=file
            )

    return demand


def is_utc_time(text: str) -> bool:
    """Whether it is a time of day in UTC, as ISO 8601 has it."""
    try:
        return len(text) < 40 and datetime.fromisoformat(text).utcoffset() == timedelta(0)
    except ValueError:
        return False
