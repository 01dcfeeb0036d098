"""Ids: their hashes and buckets, the distinct ones of a batch, and the row of each.

``mix``, ``bucket_of``, and ``hash_ids`` are part of the format of a table: with any other number,
stored tables could not be read. The hash tables have vectorized rounds.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from limpet.arguments import require
from limpet.errors import LimpetError

Ids = NDArray[np.int64]

BUCKETS = 4096
ALL_BUCKETS = range(BUCKETS)
_EMPTY, _DELETED = -1, -2
_LEAST_BITS = 10
_BLOCK = 1 << 17  # ids that are processed at once, so that temporaries stay small

# With a multiplier that nobody knows, no set of ids can be made that shares its slots.
_SALTS = np.array([secrets.randbits(64) | 1 for _ in range(64)], dtype=np.uint64)


def hash_ids(texts: Iterable[str]) -> Ids:
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


def to_ids(ids: Any, name: str = "ids") -> Ids:
    """Return a NumPy array, or a torch tensor on any device, of integers of any shape as int64;
    uint64 ids by their bits. Raises ``LimpetError`` for floats and bools."""
    array = np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids)
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
    return (mix(ids) >> np.uint64(52)).astype(np.uint16)


def unique(ids: Ids) -> tuple[Ids, NDArray[np.int64]]:
    """Return the distinct ids of ``ids`` (1-d) in the order of their first occurrence, and for
    each of ``ids`` its position among them.

    In each round, the ids write their positions into the slots of a small table, the first one of
    a slot stays, and the ids that are not equal to it go on to the next round.
    """
    everything = rest = np.arange(len(ids), dtype=np.int32)
    first, keys, hashes = everything.copy(), ids, mix(ids)  # first: that of the same value
    for salt in itertools.cycle(_SALTS):
        shift = np.uint64(64 - max(_LEAST_BITS, len(rest).bit_length() + 1))
        slots = np.empty(1 << (64 - int(shift)), np.int32)
        at = ((hashes * salt) >> shift).view(np.int64)
        slots[at[::-1]] = rest[::-1]  # of several writes to a slot, the last one stays
        winner = slots[at]
        first[rest] = winner
        lost = np.flatnonzero(ids[winner] != keys)
        if not len(lost):
            break
        rest, keys, hashes = rest[lost], keys[lost], hashes[lost]
    is_first = first == everything
    number = np.cumsum(is_first) - 1
    return ids[is_first], number[first]


class IdIndex:
    """Open addressing with linear probing, from ids to rows.

    It stores row numbers only (int32), and compares ids in the column of ids, ``keys``, which each
    method gets: ``keys[row]`` is the id of the row. The caller has the lock.
    """

    def __init__(self) -> None:
        self._clear(_LEAST_BITS)

    def _clear(self, bits: int) -> None:
        self._shift = np.uint64(64 - bits)
        self._slots = np.full(1 << bits, _EMPTY, np.int32)
        self._live = self._used = 0  # slots with a row, and slots that are not empty

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def _home(self, ids: Ids) -> NDArray[np.int64]:
        return np.asarray(((mix(ids) * _SALTS[0]) >> self._shift).view(np.int64))

    def _next(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        return (at + 1) & (len(self._slots) - 1)

    def find(self, ids: Ids, keys: Ids) -> NDArray[np.int64]:
        """Return the row of each id, -1 if it has none."""
        if self._live == 0:
            return np.full(len(ids), -1, np.int64)
        at = self._home(ids)
        found, go_on = self._compare(ids, at, keys)
        rest = go_on
        while len(go_on):
            ids, at = ids[go_on], self._next(at[go_on])
            found[rest], go_on = self._compare(ids, at, keys)
            rest = rest[go_on]
        return found

    def _compare(self, ids: Ids, at: NDArray[np.int64], keys: Ids) -> tuple[Ids, NDArray[np.int64]]:
        """Return the rows in slots whose ids are ``ids``, else -1; and which must go on."""
        rows = self._slots.take(at)
        is_hit = (keys.take(rows, mode="clip") == ids) & (rows >= 0)
        return np.where(is_hit, rows, np.int64(-1)), np.flatnonzero(~is_hit & (rows != _EMPTY))

    def insert(self, ids: Ids, rows: NDArray[np.int64], keys: Ids) -> None:
        """Add ids that are distinct and not in the index; ``keys[rows]`` are the ids already.

        Raises ``LimpetError`` if an id occurs twice; the index must not be used then.
        """
        self._make_room(len(ids), keys)
        for start in range(0, len(ids), _BLOCK):
            part = slice(start, start + _BLOCK)
            self._put(ids[part], rows[part].astype(np.int32), keys)

    def _put(self, ids: Ids, rows: NDArray[np.int32], keys: Ids) -> None:
        self._live += len(ids)
        at = self._home(ids)
        while True:
            before = self._slots[at]
            is_free = before < 0
            self._slots[at[is_free]] = rows[is_free]
            after = self._slots[at]
            is_placed = after == rows
            self._used += int(np.count_nonzero(is_placed & (before == _EMPTY)))
            rest = np.flatnonzero(~is_placed)
            if not len(rest):
                return
            twice = ids[rest][keys[after[rest]] == ids[rest]]
            if len(twice):
                raise LimpetError(f"the id {twice[0]} occurs twice")
            ids, rows, at = ids[rest], rows[rest], self._next(at[rest])

    def remove(self, ids: Ids, rows: NDArray[np.int64]) -> None:
        """Remove distinct ids whose rows are ``rows``."""
        self._live -= len(ids)
        at = self._home(ids)
        while len(at):
            is_found = self._slots[at] == rows
            self._slots[at[is_found]] = _DELETED
            rest = np.flatnonzero(~is_found)
            rows, at = rows[rest], self._next(at[rest])

    def _make_room(self, count: int, keys: Ids) -> None:
        """Keep at most 70 % of the slots used. Clean if that makes much room, else double."""
        if (self._used + count) <= 0.7 * len(self._slots):
            return
        old, bits = self._slots, math.ceil(math.log2((self._live + count) / 0.6))
        self._clear(max(_LEAST_BITS, bits))
        for start in range(0, len(old), _BLOCK):
            # in the order of the old slots, which is about that of the new ones
            rows = old[start : start + _BLOCK]
            rows = rows[rows >= 0]
            self._put(keys[rows], rows, keys)
