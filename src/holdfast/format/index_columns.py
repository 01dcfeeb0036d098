"""The leaves of an index as columns: a million boxes take 40 MiB as columns, 600 MiB as objects.

The shards of a snapshot usually have the same leaves, each with a different box of them. Keys,
dtypes, and shapes are then stored only once.
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
    """A rectangle of a leaf, and the offset ``at`` in the shard at which its bytes begin."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int


class IndexLeaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A leaf: its dtype, its global shape, and its boxes in this shard."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    boxes: list[IndexBox]


@dataclass(frozen=True, slots=True, eq=False)
class LeafSchema:
    """The keys, dtypes, and global shapes of leaves.

    ``ndims``: the number of dimensions of each leaf. ``flat_shapes``: all shapes, concatenated.
    ``itemsizes``: the element size of each leaf in bytes.
    """

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    ndims: Ints
    flat_shapes: Ints
    itemsizes: Ints


@dataclass(slots=True)
class SchemaCache:
    """The schemas and strings that several indexes share, each stored once."""

    schemas: dict[tuple[tuple[object, ...], ...], LeafSchema] = field(default_factory=dict)
    interned: dict[Any, Any] = field(default_factory=dict)

    def add(
        self,
        keys: tuple[str, ...],
        dtypes: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
    ) -> LeafSchema:
        """Create and cache the schema of these leaves.

        Raises ``OverflowError`` if a size has more than 64 bits.
        """
        intern = self.interned.setdefault
        keys, dtypes, shapes = (tuple(map(intern, c, c)) for c in (keys, dtypes, shapes))
        schema = self.schemas[keys, dtypes, shapes] = LeafSchema(
            keys,
            dtypes,
            shapes,
            int_array([len(shape) for shape in shapes]),
            flatten_rows(shapes),
            int_array([DTYPES[dtype].itemsize for dtype in dtypes]),
        )
        return schema


@dataclass(frozen=True, slots=True, eq=False)
class LeafColumns:
    """The leaves of an index. Iteration creates each ``IndexLeaf`` when it is needed.

    ``box_counts``: the number of boxes of each leaf. ``file_offsets``: the offset of each box in
    the shard. ``numels``: the number of elements of each box. ``offsets`` and ``sizes``: those of
    all boxes, concatenated.
    """

    schema: LeafSchema
    box_counts: Ints
    file_offsets: Ints
    numels: Ints
    offsets: Ints
    sizes: Ints

    @property
    def leaf_numbers(self) -> Ints:
        """The number of the leaf of each box."""
        return np.repeat(np.arange(len(self.box_counts)), self.box_counts)

    @property
    def dim_starts(self) -> Ints:
        """The position at which each box's row begins in ``offsets`` and ``sizes``."""
        return exclusive_cumsum(self.schema.ndims[self.leaf_numbers])

    def stored_numels(self) -> Ints:
        """Return the total number of elements in the boxes of each leaf."""
        sums = np.zeros(len(self.file_offsets) + 1, np.int64)
        np.cumsum(self.numels, out=sums[1:])  # below 2**62: boxes do not overlap
        first = exclusive_cumsum(self.box_counts)
        numels: Ints = sums[first + self.box_counts] - sums[first]
        return numels

    def __len__(self) -> int:
        return len(self.box_counts)

    def __iter__(self) -> Iterator[IndexLeaf]:
        offsets, sizes = self.offsets.tolist(), self.sizes.tolist()
        file_offsets, counts = self.file_offsets.tolist(), self.box_counts.tolist()
        first = begin = 0
        schema = self.schema
        for key, dtype, shape, count in zip(
            schema.keys, schema.dtypes, schema.shapes, counts, strict=True
        ):
            boxes = []
            for box in range(first, first + count):
                stop = begin + len(shape)
                index_box = IndexBox(
                    tuple(offsets[begin:stop]), tuple(sizes[begin:stop]), file_offsets[box]
                )
                boxes.append(index_box)
                begin = stop
            first += count
            yield IndexLeaf(key, dtype, shape, boxes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeafColumns) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def build_columns(leaves: Sequence[IndexLeaf], schema: LeafSchema) -> LeafColumns:
    """Convert leaves of this schema to columns.

    Raises ``OverflowError`` for a number of more than 64 bits.
    """
    boxes = [box for leaf in leaves for box in leaf.boxes]
    counts = int_array([len(leaf.boxes) for leaf in leaves])
    size_rows = [box.sizes for box in boxes]
    sizes = flatten_rows(size_rows)
    numels = row_products(sizes, int_array([*map(len, size_rows)]))
    file_offsets = int_array([box.at for box in boxes])
    offsets = flatten_rows([box.offsets for box in boxes])
    return LeafColumns(schema, counts, file_offsets, numels, offsets, sizes)
