"""The leaves of an index as columns: a million boxes take 40 MiB so, as objects 600.

The shards of a snapshot mostly have the same leaves, each another box of them; keys, dtypes and
shapes are then kept once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from holdfast.ragged import Ints, before, flat, numbers, products
from holdfast.types import DTYPES


class BoxAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A rectangle of a leaf and the offset in the shard at which its bytes begin."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A leaf: dtype and global shape, and those of its boxes that lie in this shard."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    boxes: list[BoxAt]


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """Key, dtype and global shape of leaves. ``limits``: the shapes one after the other, each of
    ``dims`` numbers; ``widths``: bytes of an element."""

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dims: Ints
    limits: Ints
    widths: Ints


@dataclass(slots=True)
class Alike:
    """What several indexes have in common, each thing of it once."""

    kinds: dict[tuple[tuple[object, ...], ...], Kinds] = field(default_factory=dict)
    words: dict[Any, Any] = field(default_factory=dict)

    def add(
        self,
        keys: tuple[str, ...],
        dtypes: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
    ) -> Kinds:
        """The kinds of leaves that no index before had together. Raises ``OverflowError``."""
        one = self.words.setdefault
        keys, dtypes, shapes = (tuple(map(one, c, c)) for c in (keys, dtypes, shapes))
        made = self.kinds[keys, dtypes, shapes] = Kinds(
            keys,
            dtypes,
            shapes,
            numbers([len(shape) for shape in shapes]),
            flat(shapes),
            numbers([DTYPES[dtype].itemsize for dtype in dtypes]),
        )
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The leaves, each made when it is asked for.

    ``counts``: for each leaf how many boxes it has; ``at``: where the boxes begin in the shard;
    ``elements``: theirs; ``offsets`` and ``sizes``: of all boxes, one after the other.
    """

    kinds: Kinds
    counts: Ints
    at: Ints
    elements: Ints
    offsets: Ints
    sizes: Ints

    @property
    def leaf(self) -> Ints:
        """For each box the number of its leaf."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def begins(self) -> Ints:
        """For each box where its own ``offsets`` and ``sizes`` begin."""
        return before(self.kinds.dims[self.leaf])

    def stored(self) -> Ints:
        """For each leaf the elements of all its boxes."""
        sums = np.zeros(len(self.at) + 1, np.int64)
        np.cumsum(self.elements, out=sums[1:])  # boxes of a shard do not overlap: less than 2**62
        first = before(self.counts)
        made: Ints = sums[first + self.counts] - sums[first]
        return made

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[Leaf]:
        offsets, sizes = self.offsets.tolist(), self.sizes.tolist()
        at, counts = self.at.tolist(), self.counts.tolist()
        first = begin = 0
        kinds = self.kinds
        for key, dtype, shape, count in zip(
            kinds.keys, kinds.dtypes, kinds.shapes, counts, strict=True
        ):
            boxes = []
            for box in range(first, first + count):
                stop = begin + len(shape)
                row = BoxAt(tuple(offsets[begin:stop]), tuple(sizes[begin:stop]), at[box])
                boxes.append(row)
                begin = stop
            first += count
            yield Leaf(key, dtype, shape, boxes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def columns_of(leaves: Sequence[Leaf], kinds: Kinds) -> Columns:
    """Leaves of these kinds as columns. Raises ``OverflowError`` for a number beyond 64 bits."""
    boxes = [box for leaf in leaves for box in leaf.boxes]
    counts = numbers([len(leaf.boxes) for leaf in leaves])
    given = [box.sizes for box in boxes]
    sizes = flat(given)
    elements = products(sizes, numbers([*map(len, given)]))
    at, offsets = numbers([box.at for box in boxes]), flat([box.offsets for box in boxes])
    return Columns(kinds, counts, at, elements, offsets, sizes)
