"""The hash of an id, its bucket, and the random bits of a row: part of the format of a table.

A change of any number here makes stored tables unreadable, and initial vectors different.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from limpet.arguments import require
from limpet.errors import LimpetError

BUCKETS = 4096
_BUCKET_SHIFT = np.uint64(64 - 12)
_WORDS = 1 << 16  # random words of one block: with its temporaries, it fits in the L2 cache


def hash_ids(texts: Iterable[str]) -> NDArray[np.int64]:
    """Return the ids of ``texts``: the XXH3-64 hash of the UTF-8 bytes of each, int64 ``[n]``.

    Two of a hundred million texts have the same id with a probability of about 0.03 %.
    Raises ``LimpetError`` if ``texts`` is one text, or has something that is no text.
    """
    require("texts", not isinstance(texts, str | bytes), "several texts, such as a list", texts)
    try:
        hashes = [xxh3_64_intdigest(text.encode()) for text in texts]
    except AttributeError:
        raise LimpetError("hash_ids takes texts only") from None
    return np.array(hashes, dtype=np.uint64).view(np.int64)


def to_ids(ids: Any, name: str = "ids") -> NDArray[np.int64]:
    """Return a NumPy array or a torch tensor of integers of any shape as int64; uint64 ids by
    their bits. Raises ``LimpetError`` for floats and bools."""
    array = np.asarray(ids)
    is_valid = array.dtype.kind in "iu" or (array.size == 0 and not hasattr(ids, "dtype"))
    require(name, is_valid, "an array of integers", f"an array of {array.dtype}")
    if array.dtype == np.uint64:
        return array.view(np.int64)
    return np.ascontiguousarray(array, dtype=np.int64).reshape(array.shape)


def mix(x: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a permutation of the 64-bit integers, as uint64 (the finalizer of splitmix64)."""
    x = x.view(np.uint64)
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def bucket_of(ids: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Return the bucket of each id, 0 to 4095: the top 12 bits of ``mix``."""
    return (mix(ids) >> _BUCKET_SHIFT).astype(np.uint16)


def random_words(
    ids: NDArray[np.int64], key: int, dim: int
) -> Iterator[tuple[slice, NDArray[np.uint32]]]:
    """Yield slices of the ids, with random words ``[rows, dim]`` that the caller may overwrite.

    A word is a function of (key, id, column). Both halves of an id's hash enter, on two sides of a
    multiplication, so that two ids do not share several columns.
    """
    columns = np.arange(dim, dtype=np.uint32) * np.uint32(0x9E3779B9)
    hashes = mix(mix(ids) ^ np.uint64(key))[:, None]
    low, high = hashes.astype(np.uint32), (hashes >> np.uint64(32)).astype(np.uint32)
    rows = max(1, _WORDS // dim)
    for start in range(0, len(ids), rows):
        part = slice(start, start + rows)
        x = low[part] + columns
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x7FEB352D)
        x ^= high[part]
        x ^= x >> np.uint32(15)
        x *= np.uint32(0x846CA68B)
        x ^= x >> np.uint32(16)
        yield part, x
