"""XXH3-128, the digest of every byte that Limpet writes.

It runs at about 10 GiB/s per core, so disabling it is never worthwhile. It detects damage, not
tampering: anyone who can rewrite a snapshot can also rewrite its digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any

import xxhash
from msgspec import Meta

HEX_LENGTH = 32

Digest = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{HEX_LENGTH}}}\Z")]
"""A digest as text: 32 lowercase hexadecimal digits."""

digest: Callable[[Any], str] = xxhash.xxh3_128_hexdigest
"""Returns the XXH3-128 of a buffer as 32 hexadecimal digits."""


def digest_parts(parts: Iterable[Any]) -> str:
    """Return the digest of the concatenation of several buffers."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def pack_digests(hex_digests: Sequence[str]) -> bytes | None:
    """Concatenate texts of 32 characters as digests of 16 bytes. Return None if one is none."""
    joined = "".join(hex_digests)
    with suppress(ValueError):
        packed = bytes.fromhex(joined)
        if packed.hex() == joined:  # fromhex also accepts spaces and capital letters
            return packed
    return None
