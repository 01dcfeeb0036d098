"""Small immutable types that all layers share: sizes, dtypes, boxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

KIB = 1024
MIB = 1024 * KIB

BLOCK_SIZE = 4 * MIB
"""The number of bytes that one thread writes, reads, and digests at once. The buffers of eight
threads then fit into the last-level cache: with 8 MiB each, copying took twice the CPU time."""

ALIGNMENT = 4096
"""The alignment in bytes of addresses, offsets, and lengths for O_DIRECT on every known disk."""

Advance = Callable[[int], object]
"""Called with a number of bytes that were read or written, from any thread."""


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. ``stored_per_element`` elements of the safetensors type ``stored_dtype``
    make up one: a complex128 is two F64, in an extra trailing dimension."""

    name: str
    itemsize: int
    stored_dtype: str
    stored_per_element: int = 1


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("bool", 1, "BOOL"),
        DType("uint8", 1, "U8"),
        DType("int8", 1, "I8"),
        DType("uint16", 2, "U16"),
        DType("int16", 2, "I16"),
        DType("uint32", 4, "U32"),
        DType("int32", 4, "I32"),
        DType("uint64", 8, "U64"),
        DType("int64", 8, "I64"),
        DType("float16", 2, "F16"),
        DType("bfloat16", 2, "BF16"),
        DType("float32", 4, "F32"),
        DType("float64", 8, "F64"),
        DType("complex32", 4, "F16", 2),
        DType("complex64", 8, "F32", 2),
        DType("complex128", 16, "F64", 2),
        DType("float8_e4m3fn", 1, "F8_E4M3"),
        DType("float8_e5m2", 1, "F8_E5M2"),
        DType("float8_e4m3fnuz", 1, "U8"),
        DType("float8_e5m2fnuz", 1, "U8"),
        DType("float8_e8m0fnu", 1, "U8"),
        DType("float4_e2m1fn_x2", 1, "U8"),
    )
}


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a global tensor: its offset and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    @lru_cache(1024)
    def whole(shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor of this shape. (A state has many, but few shapes.)"""
        return Box((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def is_within(self, shape: tuple[int, ...]) -> bool:
        """Return True if the box lies within a tensor of this shape."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            min(o, s) >= 0 and o + s <= n
            for o, s, n in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """Return the box that both boxes share, or None if they do not overlap."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if stop <= start:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the box as an index into an array whose first element is at ``origin``."""
        return tuple(
            slice(o - z, o - z + s)
            for o, s, z in zip(self.offsets, self.sizes, origin, strict=True)
        )
