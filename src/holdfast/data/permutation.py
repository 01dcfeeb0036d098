"""The order of an epoch's samples: a permutation made from a seed, place by place."""

from __future__ import annotations

from hashlib import shake_256
from math import isqrt

import numpy as np
from numpy.typing import NDArray


def permute(positions: NDArray[np.int64], length: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """The samples at these places (each below ``length``) of the epoch's order.

    A permutation of ``range(length)`` that needs neither memory nor time for more than is asked
    for: a Feistel network over pairs of digits, the first below a, the second below b, with
    a * b just over ``length``; what falls out of the range is permuted again until it is inside
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Few places need more
    rounds to be shuffled evenly. It must never change: saved positions refer to it.
    """
    rounds = 24 if length < 1024 else 12
    key = shake_256(f"{seed} {epoch}".encode()).digest(8 * rounds)
    keys = np.frombuffer(key, "<u8").astype(np.uint64)
    rows = isqrt(length - 1) + 1
    columns = -(-length // rows)
    a, b = np.uint64(rows), np.uint64(columns)
    order = positions.astype(np.uint64)
    outside = np.arange(len(order))
    while len(outside):
        row, column = np.divmod(order[outside], b)
        for first, second in zip(keys[::2], keys[1::2]):
            row = (row + _splitmix64(column ^ first)) % a
            column = (column + _splitmix64(row ^ second)) % b
        again = row * b + column
        order[outside] = again
        outside = outside[again >= length]
    return order


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
