"""XXH3-128, the digest of every byte that Holdfast writes.

It runs at about 10 GiB/s per core, so disabling it is never worthwhile. It detects damage, not
tampering: anyone who can rewrite a snapshot can also rewrite its digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import xxhash

HEX_LENGTH = 32


def digest(data: Any) -> str:
    """Return the XXH3-128 of ``data`` (any buffer) as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_parts(parts: Iterable[Any]) -> str:
    """Return the digest of the concatenation of several buffers."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def is_digest(text: str) -> bool:
    """Return True if ``text`` has the form of a digest: 32 lowercase hexadecimal digits."""
    return len(text) == HEX_LENGTH and not text.strip("0123456789abcdef")


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
