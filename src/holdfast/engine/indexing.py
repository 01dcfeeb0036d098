"""What an index like ``[3, ..., :100]`` asks for of a leaf."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import numpy as np

from holdfast.words import Box

Index = int | slice | EllipsisType


def box_of(index: Any, shape: tuple[int, ...]) -> tuple[Box, set[int]]:
    """The box that an index asks for of a tensor, and the dimensions that an integer takes away.
    Raises ``IndexError``."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if sum(p is Ellipsis for p in parts) > 1 or len(parts) - (Ellipsis in parts) > len(shape):
        raise IndexError(f"{index!r} does not fit a tensor of shape {list(shape)}")
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    rest = parts[at + 1 :]
    parts = parts[:at] + [slice(None)] * (len(shape) - at - len(rest)) + rest
    offsets, sizes, drop = [], [], set()
    for d, (part, n) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            start, stop, step = part.indices(n)
            if step != 1:
                raise IndexError(f"slices of a leaf have step 1, not {step}")
            stop = max(start, stop)
        elif isinstance(part, int | np.integer) and not isinstance(part, bool):
            start = int(part) + n if part < 0 else int(part)
            stop = start + 1
            drop.add(d)
            if not 0 <= start < n:
                raise IndexError(f"index {part} is out of range for dimension {d} of size {n}")
        else:
            raise IndexError(f"a leaf takes integers, slices and ..., not {part!r}")
        offsets.append(start)
        sizes.append(stop - start)
    return Box(tuple(offsets), tuple(sizes)), drop
