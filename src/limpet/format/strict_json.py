"""JSON files, decoded strictly: no object may have two members of one name.

JSON leaves open which of the two counts, so two readers could see two contents in one file, and
``msgspec`` keeps the last one. Every decoder is created when its module is imported: ``msgspec``
describes a type at its first use, and two threads that do so at once crash the process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions of ``StrictDecoder.decode``."""

_DUPLICATE = "Object has two members with the same name"
_encoder = msgspec.json.Encoder()
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_NOT_QUOTE_OR_COLON = bytes(set(range(256)) - {*b'":'})


@dataclass(frozen=True, slots=True, eq=False)
class StrictDecoder(Generic[T]):
    """A ``msgspec.json.Decoder`` that rejects objects with two members of one name."""

    decoder: msgspec.json.Decoder[T]

    def decode(self, raw: bytes) -> T:
        """Return the value. Raises one of ``DECODE_ERRORS``."""
        value = self.decoder.decode(raw)
        require_unique_names(raw, value)
        return value


def require_unique_names(raw: bytes, value: object) -> None:
    """Raise ``msgspec.ValidationError`` unless each name in JSON text occurs once in its object:
    exactly then the text has no more members than ``value``, to which it was decoded."""
    encoded = _encoder.encode(value)
    if encoded != raw and _count_members(encoded) != _count_members(raw):
        raise msgspec.ValidationError(_DUPLICATE)


def unique_members(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's members, an ``object_pairs_hook``; ``ValueError`` for a repeated name."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError(_DUPLICATE)
    return members


def _count_members(text: bytes) -> int:
    """Count the members in valid JSON text: the colons outside strings. No loop in Python."""
    if b"\\" in text:
        text = _ESCAPE.sub(b"", text)  # then every quote begins or ends a string
    marks = np.frombuffer(text.translate(None, _NOT_QUOTE_OR_COLON), np.uint8)
    is_quote = marks == ord('"')
    quotes_before = np.cumsum(is_quote, dtype=np.uint8)  # modulo 256, which keeps the parity
    return int(np.count_nonzero(~is_quote & (quotes_before % 2 == 0)))
