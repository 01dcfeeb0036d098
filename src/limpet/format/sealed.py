"""Small JSON files that contain their own digest: manifests, branches, pins, and evaluations.

A sealed file begins with exactly ``{"limpet":N,"digest":"<32 hex digits>",``, where N is the format
number. The digest covers the whole file, with zeros for the 32 digits, so any changed byte counts.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Annotated, TypeVar

import msgspec

from limpet.errors import DigestMismatch, FormatTooNew, ManifestInvalid, Unsupported
from limpet.format.digest import HEX_LENGTH, digest
from limpet.format.strict_json import DECODE_ERRORS, StrictDecoder
from limpet.text import VERIFY_ADVICE

FORMAT = 1
"""The format number that this version of Limpet writes and reads."""

_HEAD = re.compile(rb'\{"limpet":([1-9][0-9]{0,8}),"digest":"([0-9a-f]{32})",')

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

_FORMER_HEAD = b'{"format":'
"""The beginning of the sealed files that the package wrote under its former name."""

T = TypeVar("T", bound=msgspec.Struct)

_encoder = msgspec.json.Encoder()


def seal(content: msgspec.Struct) -> tuple[bytes, str]:
    """Return ``content`` as a sealed file, and the digest of the file."""
    body = _encoder.encode(content)[1:]
    head = b'{"limpet":%d,"digest":"' % FORMAT
    file_digest = digest(b"".join((head, b"0" * HEX_LENGTH, b'",', body)))
    return b"".join((head, file_digest.encode(), b'",', body)), file_digest


def unseal(raw: bytes, decoder: StrictDecoder[T], file: str) -> tuple[T, str]:
    """Check a sealed file; return its content and digest. Raises ``ManifestInvalid``,
    ``DigestMismatch``, or, for another format than ``FORMAT``, ``FormatTooNew``."""
    head = _check_digest(raw, file)
    number = int(head.group(1))
    if number > FORMAT:
        raise FormatTooNew(
            f"{file} was written by a newer version of Limpet",
            expected=f"format {FORMAT}",
            found=f"format {number}",
            todo="Install a newer version of Limpet to read it",
            file=file,
        )
    return decode_struct(b"{" + raw[head.end() :], decoder, file), head[2].decode()


def sealed_digest(raw: bytes, file: str) -> str:
    """Return the digest of a sealed file without decoding it. Raises like ``unseal``, but
    not for invalid content."""
    return _check_digest(raw, file)[2].decode()


def _check_digest(raw: bytes, file: str) -> re.Match[bytes]:
    """Return the beginning of a sealed file whose bytes have the digest that it states."""
    if raw.startswith(_FORMER_HEAD):
        raise FormatTooNew(
            f"{file} was written by Holdfast, as Limpet was called before its first release",
            expected=f"a file of Limpet, in format {FORMAT}",
            found=repr(raw[:12]),
            todo="Limpet cannot read runs from before its first release: choose another location,"
            " or read this one with the version that wrote it",
            file=file,
        )
    head = _HEAD.match(raw)
    if head is None:
        raise ManifestInvalid(
            f"{file} is damaged",
            expected='a file that begins with {"limpet":N,"digest":"..."',
            found=repr(raw[:40]),
            todo=VERIFY_ADVICE,
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
            todo=VERIFY_ADVICE,
            file=file,
            offset=0,
        )
    return head


def decode_struct(raw: bytes, decoder: StrictDecoder[T], file: str) -> T:
    """Decode the JSON bytes of a file. Raises ``ManifestInvalid``."""
    try:
        return decoder.decode(raw)
    except DECODE_ERRORS as e:
        raise ManifestInvalid(
            f"{file} violates the format",
            expected="the fields that docs/format.md specifies",
            found=str(e),
            file=file,
        ) from e


def require(file: str, condition: bool, expected: str, found: object) -> None:
    """Raise ``ManifestInvalid`` for ``file`` unless the condition is true."""
    if not condition:
        raise ManifestInvalid(
            f"{file} violates the format", expected=expected, found=str(found)[:300], file=file
        )


def check_length(file: str, raw: bytes, limit: int, todo: str) -> None:
    """Raise ``Unsupported`` before a file is written that readers would refuse as too long."""
    if len(raw) > limit:
        raise Unsupported(
            f"{file} would be longer than a reader accepts; it was not written",
            expected=f"at most {limit} bytes",
            found=f"{len(raw)} bytes",
            todo=todo,
            file=file,
        )


def is_utc_time(text: str) -> bool:
    """Return True if ``text`` is a date and time in UTC in the form of ISO 8601."""
    try:
        return len(text) < 40 and datetime.fromisoformat(text).utcoffset() == timedelta(0)
    except ValueError:
        return False
