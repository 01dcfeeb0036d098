"""The leaves of an index as columns: a million boxes take 40 MiB as columns, 600 MiB as objects.

The shards of a snapshot usually have the same leaves, each with a different box of them. Keys,
dtypes, and shapes are then stored only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from limpet.format.sealed import Int64
from limpet.ragged import Ints, exclusive_cumsum, flatten_rows, int_array, row_products
from limpet.types import DTYPES


class IndexBox(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A rectangle of a leaf, and the offset ``at`` in the shard at which its bytes begin."""

    offsets: tuple[Int64, ...]
    sizes: tuple[Int64, ...]
    at: Int64


class IndexLeaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A leaf: its dtype, its global shape, and its boxes in this shard."""

    key: str
    dtype: str
    shape: tuple[Int64, ...]
    boxes: list[IndexBox]


@dataclass(frozen=True, eq=False)
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

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each leaf by key."""
        return {key: number for number, key in enumerate(self.keys)}


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
        """Create and cache the schema of these leaves."""
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
        offsets, sizes = iter(self.offsets.tolist()), iter(self.sizes.tolist())
        file_offsets, counts = iter(self.file_offsets.tolist()), self.box_counts.tolist()
        schema = self.schema
        for key, dtype, shape, count in zip(
            schema.keys, schema.dtypes, schema.shapes, counts, strict=True
        ):
            ndim = len(shape)
            boxes = [
                IndexBox(tuple(islice(offsets, ndim)), tuple(islice(sizes, ndim)), at)
                for at in islice(file_offsets, count)
            ]
            yield IndexLeaf(key, dtype, shape, boxes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeafColumns) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def build_columns(leaves: Sequence[IndexLeaf], schema: LeafSchema) -> LeafColumns:
    """Convert leaves of this schema to columns."""
    boxes = [box for leaf in leaves for box in leaf.boxes]
    sizes = flatten_rows([box.sizes for box in boxes])
    return LeafColumns(
        schema,
        box_counts=int_array([len(leaf.boxes) for leaf in leaves]),
        file_offsets=int_array([box.at for box in boxes]),
        numels=row_products(sizes, int_array([len(box.sizes) for box in boxes])),
        offsets=flatten_rows([box.offsets for box in boxes]),
        sizes=sizes,
    )
