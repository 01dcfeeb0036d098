"""Copies of thousands of short ranges of host memory at once, which a loop in Python cannot."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache

import numpy as np
from numpy.typing import NDArray

RangesOfSize = tuple[int, NDArray[np.int64]]
"""A number of bytes, and the addresses of the ranges of host memory that have this size."""

_FIRST_ADDRESS = 1 << 12
"""No object is at a lower address."""


def find_read_only(ranges: Iterable[tuple[int, int]]) -> list[bool]:
    """Return for each range of host memory, given by its first address and the one after it, True
    if this process may not write to it, as to a file mapped for reading. Only Linux says so."""
    starts, stops = [0], [0]
    with suppress(OSError), open("/proc/self/maps", "rb") as maps:
        for line in maps:
            addresses, rights, _ = line.split(None, 2)
            if rights[1:2] != b"w":
                start, _, stop = addresses.partition(b"-")
                starts.append(int(start, 16))
                stops.append(int(stop, 16))

    def is_read_only(address: int) -> bool:
        return address < stops[bisect_right(starts, address) - 1]

    return [is_read_only(first) or is_read_only(end - 1) for first, end in ranges]


def group_ranges(ranges: Iterable[tuple[int, int]]) -> list[RangesOfSize]:
    """Return ranges of host memory, each given by its address and size in bytes, by their size."""
    by_size = defaultdict(list)
    for address, size in ranges:
        by_size[size].append(address)
    return [(size, np.array(addresses, np.int64)) for size, addresses in by_size.items()]


def read_ranges(groups: Sequence[RangesOfSize]) -> list[NDArray[np.void]]:
    """Return a copy of ranges of readable memory of this process, one array of ranges per size."""
    return [_host_memory(size)[addresses - _FIRST_ADDRESS] for size, addresses in groups]


def write_ranges(memory: memoryview, offsets: NDArray[np.int64], ranges: NDArray[np.void]) -> None:
    """Write ``ranges``, which have the same size, at these offsets in bytes of ``memory``."""
    size = ranges.itemsize
    windows = np.ndarray((len(memory) - size + 1,), ranges.dtype, memory, strides=(1,))
    windows[offsets] = ranges


@cache
def _host_memory(size: int) -> NDArray[np.void]:
    """Return an array whose element ``i`` is the ``size`` bytes at address ``_FIRST_ADDRESS + i``,
    over the whole address space. NumPy reads only the elements that are used."""

    class AddressSpace:
        __array_interface__ = {  # noqa: RUF012  (NumPy reads it once)
            "data": (_FIRST_ADDRESS, True),
            "shape": (1 << 48,),
            "strides": (1,),
            "typestr": f"|V{size}",
            "version": 3,
        }

    return np.asarray(AddressSpace())
