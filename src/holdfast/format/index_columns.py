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

from holdfast.ragged import Ints, exclusive_cumsum, flatten_rows, int_array, row_products
from holdfast.types import DTYPES


class IndexBox(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A rectangle of a leaf and the offset in the shard at which its bytes begin."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int


class IndexLeaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A leaf: dtype and global shape, and those of its boxes that lie in this shard."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    boxes: list[IndexBox]


@dataclass(frozen=True, slots=True, eq=False)
class LeafSchema:
    """Key, dtype and global shape of leaves. ``limits``: the shapes one after the other, each of
    ``dims`` numbers; ``widths``: bytes of an element."""

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    ndims: Ints
    flat_shapes: Ints
    itemsizes: Ints


@dataclass(slots=True)
class SchemaCache:
    """What several indexes have in common, each thing of it once."""

    schemas: dict[tuple[tuple[object, ...], ...], LeafSchema] = field(default_factory=dict)
    interned: dict[Any, Any] = field(default_factory=dict)

    def add(
        self,
        keys: tuple[str, ...],
        dtypes: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
    ) -> LeafSchema:
        """The kinds of leaves that no index before had together. Raises ``OverflowError``."""
        one = self.interned.setdefault
        keys, dtypes, shapes = (tuple(map(one, c, c)) for c in (keys, dtypes, shapes))
        made = self.schemas[keys, dtypes, shapes] = LeafSchema(
            keys,
            dtypes,
            shapes,
            int_array([len(shape) for shape in shapes]),
            flatten_rows(shapes),
            int_array([DTYPES[dtype].itemsize for dtype in dtypes]),
        )
        return made


@dataclass(frozen=True, slots=True, eq=False)
class LeafColumns:
    """The leaves, each made when it is asked for.

    ``counts``: for each leaf how many boxes it has; ``at``: where the boxes begin in the shard;
    ``elements``: theirs; ``offsets`` and ``sizes``: of all boxes, one after the other.
    """

    schema: LeafSchema
    box_counts: Ints
    file_offsets: Ints
    numels: Ints
    offsets: Ints
    sizes: Ints

    @property
    def leaf_numbers(self) -> Ints:
        """For each box the number of its leaf."""
        return np.repeat(np.arange(len(self.box_counts)), self.box_counts)

    @property
    def dim_starts(self) -> Ints:
        """For each box where its own ``offsets`` and ``sizes`` begin."""
        return exclusive_cumsum(self.schema.ndims[self.leaf_numbers])

    def stored_numels(self) -> Ints:
        """For each leaf the elements of all its boxes."""
        sums = np.zeros(len(self.file_offsets) + 1, np.int64)
        np.cumsum(self.numels, out=sums[1:])  # boxes of a shard do not overlap: less than 2**62
        first = exclusive_cumsum(self.box_counts)
        made: Ints = sums[first + self.box_counts] - sums[first]
        return made

    def __len__(self) -> int:
        return len(self.box_counts)

    def __iter__(self) -> Iterator[IndexLeaf]:
        offsets, sizes = self.offsets.tolist(), self.sizes.tolist()
        at, counts = self.file_offsets.tolist(), self.box_counts.tolist()
        first = begin = 0
        kinds = self.schema
        for key, dtype, shape, count in zip(
            kinds.keys, kinds.dtypes, kinds.shapes, counts, strict=True
        ):
            boxes = []
            for box in range(first, first + count):
                stop = begin + len(shape)
                row = IndexBox(tuple(offsets[begin:stop]), tuple(sizes[begin:stop]), at[box])
                boxes.append(row)
                begin = stop
            first += count
            yield IndexLeaf(key, dtype, shape, boxes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeafColumns) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def build_columns(leaves: Sequence[IndexLeaf], schema: LeafSchema) -> LeafColumns:
    """Leaves of these kinds as columns. Raises ``OverflowError`` for a number beyond 64 bits."""
    boxes = [box for leaf in leaves for box in leaf.boxes]
    counts = int_array([len(leaf.boxes) for leaf in leaves])
    given = [box.sizes for box in boxes]
    sizes = flatten_rows(given)
    elements = row_products(sizes, int_array([*map(len, given)]))
    at, offsets = int_array([box.at for box in boxes]), flatten_rows([box.offsets for box in boxes])
    return LeafColumns(schema, counts, at, elements, offsets, sizes)
