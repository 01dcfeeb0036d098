"""What a rank tells the coordinator of a save: its holdings as columns of numbers.

**Weights.** A box is known by one number that both names it and adds up. Give every position x
of dimension d a fixed random number R(d, x); an interval [a, b) weighs R(d, b) - R(d, a), a box the
product over its dimensions, times an odd number made of the leaf's key; all modulo 2**64. Like an
area, weights of boxes that tile a leaf add up to the weight of the leaf; unlike an area, an
overlap does not make up for a gap, because each part of the tensor weighs something of its own.
Different boxes have different weights, except by chance (2**-64 for a pair); and where chance
strikes, the box that is taken for another is missing in the sum: an error, never a loss.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from holdfast.engine.planning.shard_layout import LeafBox, itemsize
from holdfast.errors import PlanError
from holdfast.ragged import Ints, flatten_rows, ranges, row_products

Hashes = NDArray[np.uint64]

_HEADER = struct.Struct("<16sQQQ")
_COLUMN_DTYPES = ("<u8", "<u8", "<u8", "<i8", "<u8", "<i8", "<u4", "<u1")


@dataclass(frozen=True, slots=True, eq=False)
class LocalPlan:
    """What one rank has, as it tells the coordinator. Columns over its leaves and its boxes.

    ``structure``: digest of all holdings; ``leaf_key``, ``leaf_type``: hashes of the key, and of
    dtype and shape; ``leaf_weight``, ``leaf_bytes``: of the whole leaf; ``box_leaf``: which leaf;
    ``box_first``: 1 for a box that the first rank which has it is to write;
    ``names``: keys, dtypes and shapes, compressed, opened only to explain an error.
    """

    digest: bytes
    leaf_key: Hashes
    leaf_type: Hashes
    leaf_weight: Hashes
    leaf_bytes: Ints
    box_weight: Hashes
    box_bytes: Ints
    box_leaf: NDArray[np.uint32]
    box_from_first: NDArray[np.uint8]
    packed_leaf_types: bytes

    def to_bytes(self) -> bytes:
        """The offer for the wire, between processes of one job (the same version of us)."""
        head = _HEADER.pack(
            self.digest, len(self.leaf_key), len(self.box_weight), len(self.packed_leaf_types)
        )
        return b"".join([head, *(c.tobytes() for c in self._columns()), self.packed_leaf_types])

    @classmethod
    def from_bytes(cls, data: bytes) -> LocalPlan:
        """The offer that ``to_bytes`` packed, without copying. Raises ``PlanError``."""
        whole = len(data) >= _HEADER.size
        structure, leaves, boxes, names = _HEADER.unpack_from(data) if whole else (b"", 0, 0, 0)
        if not whole or len(data) != _HEADER.size + 32 * leaves + 21 * boxes + names:
            raise PlanError("An offer of a rank was cut off or damaged on its way")
        columns: list[Any] = []
        at = _HEADER.size
        for kind, count in zip(_COLUMN_DTYPES, [leaves] * 4 + [boxes] * 4, strict=True):
            columns.append(np.frombuffer(data, kind, count, at))
            at += columns[-1].nbytes
        columns.append(data[at:])
        return cls(structure, *columns)

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return (
            self.leaf_key,
            self.leaf_type,
            self.leaf_weight,
            self.leaf_bytes,
            self.box_weight,
            self.box_bytes,
            self.box_leaf,
            self.box_from_first,
        )

    def unpack_leaf_types(self) -> dict[int, tuple[str, str, tuple[int, ...]]]:
        """Key, dtype and shape of every leaf, by the hash of its key."""
        rows = msgspec.msgpack.decode(
            zlib.decompress(self.packed_leaf_types), type=list[tuple[str, str, tuple[int, ...]]]
        )
        return dict(zip(self.leaf_key.tolist(), rows, strict=True))


def digest_leaf_boxes(leaf_boxes: Sequence[LeafBox]) -> bytes:
    """Digest (16 bytes) of all that an offer says; as long as it stays, so does the plan."""
    return xxh3_128_digest(msgspec.msgpack.encode(leaf_boxes))


def make_local_plan(
    leaf_boxes: Sequence[LeafBox], from_first: NDArray[np.bool_] | None = None, digest: bytes = b""
) -> LocalPlan:
    """What this rank tells the coordinator. ``first``: for each holding whether it is to be written
    by the first rank that has it; ``made``: the digest of all that, if there is one already.

    Raises ``PlanError`` if a box leaves its tensor or two boxes of a leaf name different tensors,
    ``Unsupported`` for an unknown dtype.
    """
    leaves, of = _distinct_leaves(leaf_boxes)
    types = {(h.dtype, h.shape) for h in leaves}
    widths = {dtype: itemsize(dtype) for dtype, _ in types}
    hashed = {t: xxh3_64_intdigest(describe_type(*t).encode()) for t in types}
    width = np.array([widths[h.dtype] for h in leaves], np.int64)
    key = np.array([xxh3_64_intdigest(h.key.encode()) for h in leaves], np.uint64)
    factor = key | np.uint64(1)
    leaf_dims = np.array([len(h.shape) for h in leaves], np.int64)
    dims = leaf_dims[of]
    shape = flatten_rows(h.shape for h in leaves)
    offsets = flatten_rows(h.box.offsets for h in leaf_boxes)
    sizes = flatten_rows(h.box.sizes for h in leaf_boxes)
    limits = flatten_rows(leaves[i].shape for i in of.tolist())
    wrong = (offsets < 0) | (sizes < 0) | (offsets + sizes > limits)
    if wrong.any():
        raise _out_of_bounds_error(
            leaf_boxes[int(np.repeat(np.arange(len(dims)), dims)[wrong.argmax()])]
        )
    return LocalPlan(
        digest=digest or digest_leaf_boxes(leaf_boxes),
        leaf_key=key,
        leaf_type=np.array([hashed[h.dtype, h.shape] for h in leaves], np.uint64),
        leaf_weight=_weights(np.zeros_like(shape), shape, leaf_dims) * factor,
        leaf_bytes=row_products(shape, leaf_dims) * width,
        box_weight=_weights(offsets, sizes, dims) * factor[of],
        box_bytes=row_products(sizes, dims) * width[of],
        box_leaf=of,
        box_from_first=np.zeros(len(of), np.uint8)
        if from_first is None
        else from_first.astype(np.uint8),
        packed_leaf_types=zlib.compress(
            msgspec.msgpack.encode([(h.key, h.dtype, h.shape) for h in leaves]), level=1
        ),
    )


def _distinct_leaves(leaf_boxes: Sequence[LeafBox]) -> tuple[list[LeafBox], NDArray[np.uint32]]:
    """One holding of each leaf, and for each box the index of its leaf."""
    index: dict[str, int] = {}
    leaves: list[LeafBox] = []
    of: list[int] = []
    for h in leaf_boxes:
        i = index.setdefault(h.key, len(leaves))
        if i == len(leaves):
            leaves.append(h)
        elif leaves[i].shape != h.shape or leaves[i].dtype != h.dtype:
            raise PlanError(
                f"A rank offers two different tensors as {h.key}",
                expected=describe_type(leaves[i].dtype, leaves[i].shape),
                found=describe_type(h.dtype, h.shape),
                key=h.key,
            )
        if not len(h.box.offsets) == len(h.box.sizes) == len(h.shape):
            raise _out_of_bounds_error(h)
        of.append(i)
    return leaves, np.array(of, np.uint32)


def _out_of_bounds_error(leaf_box: LeafBox) -> PlanError:
    return PlanError(
        f"A rank offers a part of {leaf_box.key} that is not within the tensor",
        expected=f"a part of {describe_type(leaf_box.dtype, leaf_box.shape)}",
        found=f"offsets {leaf_box.box.offsets}, sizes {leaf_box.box.sizes}",
        key=leaf_box.key,
    )


def describe_type(dtype: str, shape: tuple[int, ...]) -> str:
    """A tensor's type in words, as ``float32 [2, 3]``."""
    return f"{dtype} {list(shape)}"


def splitmix64(x: Hashes) -> Hashes:
    """A random-looking number for each, always the same one (the finalizer of splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _weights(offsets: Ints, sizes: Ints, dims: Ints) -> Hashes:
    """Weights of boxes (see the module's text), given flat over boxes and their dimensions."""
    d = ranges(np.zeros_like(dims), dims)
    seed = splitmix64(d.astype(np.uint64))
    random = [splitmix64(seed ^ x.astype(np.uint64)) for x in (offsets, offsets + sizes)]
    weights: Hashes = row_products(random[1] - random[0], dims)
    return weights
