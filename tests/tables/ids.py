"""Ids that a test attacks with."""

import numpy as np

EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32)]


def unmix(hashes):
    """The ids whose hashes are ``hashes`` (uint64): the inverse of ``mix``."""
    x = hashes.copy()
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        step = x >> np.uint64(shift)
        while step.any():
            x ^= step
            step >>= np.uint64(shift)
        x *= np.uint64(pow(factor, -1, 2**64))
    return x.view(np.int64)


def zipf(count, size, seed=0):
    """``size`` ids of ``count``, of which few are frequent."""
    weights = np.cumsum(1 / np.arange(1, count + 1) ** 1.05)
    ranks = np.searchsorted(weights / weights[-1], np.random.default_rng(seed).random(size))
    return (ranks * 0x9E3779B97F4A7C1).astype(np.int64)
