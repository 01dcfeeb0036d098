"""What a rank sends to the coordinator of a save: its boxes as columns of numbers.

A *weight* identifies a box and is additive: the product over its dimensions of R(d, b) - R(d, a),
with a fixed random number R(d, x) for each position x, times an odd number from the leaf's key,
modulo 2**64. The weights of boxes that tile a leaf add up to that of the leaf, and an overlap does
not make up for a gap. Boxes collide with a probability of 2**-64 per pair; then one is missing from
the sum, which is an error, never a loss of data.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from limpet.errors import PlanError
from limpet.layout.shard_layout import LeafBox, digest_leaf_boxes, itemsize
from limpet.ragged import Ints, flatten_rows, ranges, row_products

Hashes = NDArray[np.uint64]

_HEADER = struct.Struct("<16sQQQ")
_LEAF_TYPES = msgspec.msgpack.Decoder(list[tuple[str, str, tuple[int, ...]]])
_COLUMN_DTYPES = ("<u8", "<u8", "<u8", "<i8", "<u8", "<i8", "<u4", "<u1")


@dataclass(frozen=True, slots=True, eq=False)
class LocalPlan:
    """The boxes of one rank as it sends them to the coordinator, in columns, with one row per leaf
    (``leaf_*``) or per box (``box_*``)."""

    digest: bytes  # of all leaf boxes
    leaf_key: Hashes
    leaf_type: Hashes  # of dtype and shape
    leaf_weight: Hashes  # of the whole leaf, as ``leaf_bytes``
    leaf_bytes: Ints
    box_weight: Hashes
    box_bytes: Ints
    box_leaf: NDArray[np.uint32]  # the row of the box's leaf
    box_from_first: NDArray[np.uint8]  # 1: the first rank that has it must write it
    packed_leaf_types: bytes  # keys, dtypes, and shapes, unpacked only for an error

    def to_bytes(self) -> bytes:
        """Serialize the plan for a process of the same job, which has the same Limpet version."""
        head = _HEADER.pack(
            self.digest, len(self.leaf_key), len(self.box_weight), len(self.packed_leaf_types)
        )
        _, *columns, _ = (getattr(self, column.name) for column in fields(self))
        return b"".join([head, *(c.tobytes() for c in columns), self.packed_leaf_types])

    @classmethod
    def from_bytes(cls, data: bytes) -> LocalPlan:
        """Deserialize a plan, without a copy of the columns. Raises ``PlanError``."""
        has_header = len(data) >= _HEADER.size
        digest, leaves, boxes, packed_length = (
            _HEADER.unpack_from(data) if has_header else (b"", 0, 0, 0)
        )
        if not has_header or len(data) != _HEADER.size + 32 * leaves + 21 * boxes + packed_length:
            raise PlanError("The local plan of a rank was truncated or damaged in transit")
        columns: list[Any] = []
        offset = _HEADER.size
        for column_dtype, count in zip(_COLUMN_DTYPES, [leaves] * 4 + [boxes] * 4, strict=True):
            columns.append(np.frombuffer(data, column_dtype, count, offset))
            offset += columns[-1].nbytes
        columns.append(data[offset:])
        return cls(digest, *columns)

    def unpack_leaf_types(self) -> dict[int, tuple[str, str, tuple[int, ...]]]:
        """Return key, dtype, and shape of every leaf by the hash of its key."""
        rows = _LEAF_TYPES.decode(zlib.decompress(self.packed_leaf_types))
        return dict(zip(self.leaf_key.tolist(), rows, strict=True))


def make_local_plan(
    leaf_boxes: Sequence[LeafBox], from_first: NDArray[np.bool_] | None = None, digest: bytes = b""
) -> LocalPlan:
    """Make the plan that this rank sends to the coordinator. Raises ``PlanError`` for a box outside
    its tensor, or two types of one leaf, and ``Unsupported`` for an unknown dtype."""
    leaves, box_leaf = _distinct_leaves(leaf_boxes)
    leaf_types = {(leaf_box.dtype, leaf_box.shape) for leaf_box in leaves}
    itemsizes = {dtype: itemsize(dtype) for dtype, _ in leaf_types}
    type_hashes = {
        leaf_type: xxh3_64_intdigest(describe_type(*leaf_type).encode()) for leaf_type in leaf_types
    }
    width = np.array([itemsizes[leaf_box.dtype] for leaf_box in leaves], np.int64)
    key = np.array([xxh3_64_intdigest(leaf_box.key.encode()) for leaf_box in leaves], np.uint64)
    factor = key | np.uint64(1)
    leaf_dims = np.array([len(leaf_box.shape) for leaf_box in leaves], np.int64)
    dims = leaf_dims[box_leaf]
    shape = flatten_rows(leaf_box.shape for leaf_box in leaves)
    offsets = flatten_rows(leaf_box.box.offsets for leaf_box in leaf_boxes)
    sizes = flatten_rows(leaf_box.box.sizes for leaf_box in leaf_boxes)
    limits = flatten_rows(leaves[i].shape for i in box_leaf.tolist())
    out_of_bounds = (offsets < 0) | (sizes < 0) | (offsets + sizes > limits)
    if out_of_bounds.any():
        raise _out_of_bounds_error(
            leaf_boxes[int(np.repeat(np.arange(len(dims)), dims)[out_of_bounds.argmax()])]
        )
    return LocalPlan(
        digest=digest or digest_leaf_boxes(leaf_boxes),
        leaf_key=key,
        leaf_type=np.array(
            [type_hashes[leaf_box.dtype, leaf_box.shape] for leaf_box in leaves], np.uint64
        ),
        leaf_weight=_weights(np.zeros_like(shape), shape, leaf_dims) * factor,
        leaf_bytes=row_products(shape, leaf_dims) * width,
        box_weight=_weights(offsets, sizes, dims) * factor[box_leaf],
        box_bytes=row_products(sizes, dims) * width[box_leaf],
        box_leaf=box_leaf,
        box_from_first=np.zeros(len(box_leaf), np.uint8)
        if from_first is None
        else from_first.astype(np.uint8),
        packed_leaf_types=zlib.compress(
            msgspec.msgpack.encode(
                [(leaf_box.key, leaf_box.dtype, leaf_box.shape) for leaf_box in leaves]
            ),
            level=1,
        ),
    )


def _distinct_leaves(leaf_boxes: Sequence[LeafBox]) -> tuple[list[LeafBox], NDArray[np.uint32]]:
    """Return one leaf box of each leaf, and for each leaf box the index of its leaf."""
    index: dict[str, int] = {}
    leaves: list[LeafBox] = []
    box_leaf: list[int] = []
    for leaf_box in leaf_boxes:
        i = index.setdefault(leaf_box.key, len(leaves))
        if i == len(leaves):
            leaves.append(leaf_box)
        elif leaves[i].shape != leaf_box.shape or leaves[i].dtype != leaf_box.dtype:
            raise PlanError(
                f"A rank has two different tensors under the key {leaf_box.key}",
                expected=describe_type(leaves[i].dtype, leaves[i].shape),
                found=describe_type(leaf_box.dtype, leaf_box.shape),
                key=leaf_box.key,
            )
        if not len(leaf_box.box.offsets) == len(leaf_box.box.sizes) == len(leaf_box.shape):
            raise _out_of_bounds_error(leaf_box)
        box_leaf.append(i)
    return leaves, np.array(box_leaf, np.uint32)


def _out_of_bounds_error(leaf_box: LeafBox) -> PlanError:
    return PlanError(
        f"A rank has a box of {leaf_box.key} that is not within the tensor",
        expected=f"a box within {describe_type(leaf_box.dtype, leaf_box.shape)}",
        found=f"offsets {leaf_box.box.offsets}, sizes {leaf_box.box.sizes}",
        key=leaf_box.key,
    )


def describe_type(dtype: str, shape: tuple[int, ...]) -> str:
    """Return dtype and shape of a tensor as text, such as ``float32 [2, 3]``."""
    return f"{dtype} {list(shape)}"


def splitmix64(x: Hashes) -> Hashes:
    """Map each number to a fixed pseudorandom number (the finalizer of splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _weights(offsets: Ints, sizes: Ints, dims: Ints) -> Hashes:
    """Return the weights of boxes with ``dims`` numbers each in ``offsets`` and ``sizes``."""
    d = ranges(np.zeros_like(dims), dims)
    seed = splitmix64(d.astype(np.uint64))
    random = [splitmix64(seed ^ x.astype(np.uint64)) for x in (offsets, offsets + sizes)]
    return row_products(random[1] - random[0], dims)
