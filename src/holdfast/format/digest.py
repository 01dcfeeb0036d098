"""XXH3-128, the digest of every byte that Holdfast writes.

It runs at about 10 GiB/s per core, so disabling it is never worthwhile. It detects damage, not
tampering: anyone who can rewrite a snapshot can also rewrite its digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    """Concatenate digests, 16 bytes each. Return None if one does not have the form of a digest."""
    joined = "".join(hex_digests)
    if any(len(text) != HEX_LENGTH for text in hex_digests):
        return None
    try:
        packed = bytes.fromhex(joined)
    except ValueError:
        return None
    # fromhex also accepts spaces and capital letters
    return packed if packed.hex() == joined else None
