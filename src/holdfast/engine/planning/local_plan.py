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

from holdfast.engine.planning.shard_layout import Holding, itemsize
from holdfast.errors import PlanError
from holdfast.ragged import Ints, flat, products, within

Hashes = NDArray[np.uint64]

_HEAD = struct.Struct("<16sQQQ")
_KINDS = ("<u8", "<u8", "<u8", "<i8", "<u8", "<i8", "<u4", "<u1")


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What one rank has, as it tells the coordinator. Columns over its leaves and its boxes.

    ``structure``: digest of all holdings; ``leaf_key``, ``leaf_type``: hashes of the key, and of
    dtype and shape; ``leaf_weight``, ``leaf_bytes``: of the whole leaf; ``box_leaf``: which leaf;
    ``box_first``: 1 for a box that the first rank which has it is to write;
    ``names``: keys, dtypes and shapes, compressed, opened only to explain an error.
    """

    structure: bytes
    leaf_key: Hashes
    leaf_type: Hashes
    leaf_weight: Hashes
    leaf_bytes: Ints
    box_weight: Hashes
    box_bytes: Ints
    box_leaf: NDArray[np.uint32]
    box_first: NDArray[np.uint8]
    names: bytes

    def to_bytes(self) -> bytes:
        """The offer for the wire, between processes of one job (the same version of us)."""
        head = _HEAD.pack(self.structure, len(self.leaf_key), len(self.box_weight), len(self.names))
        return b"".join([head, *(c.tobytes() for c in self._columns()), self.names])

    @classmethod
    def from_bytes(cls, data: bytes) -> Offer:
        """The offer that ``to_bytes`` packed, without copying. Raises ``PlanError``."""
        whole = len(data) >= _HEAD.size
        structure, leaves, boxes, names = _HEAD.unpack_from(data) if whole else (b"", 0, 0, 0)
        if not whole or len(data) != _HEAD.size + 32 * leaves + 21 * boxes + names:
            raise PlanError("An offer of a rank was cut off or damaged on its way")
        columns: list[Any] = []
        at = _HEAD.size
        for kind, count in zip(_KINDS, [leaves] * 4 + [boxes] * 4, strict=True):
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
            self.box_first,
        )

    def describe(self) -> dict[int, tuple[str, str, tuple[int, ...]]]:
        """Key, dtype and shape of every leaf, by the hash of its key."""
        rows = msgspec.msgpack.decode(
            zlib.decompress(self.names), type=list[tuple[str, str, tuple[int, ...]]]
        )
        return dict(zip(self.leaf_key.tolist(), rows, strict=True))


def structure(holdings: Sequence[Holding]) -> bytes:
    """Digest (16 bytes) of all that an offer says; as long as it stays, so does the plan."""
    return xxh3_128_digest(msgspec.msgpack.encode(holdings))


def make_offer(
    holdings: Sequence[Holding], first: NDArray[np.bool_] | None = None, made: bytes = b""
) -> Offer:
    """What this rank tells the coordinator. ``first``: for each holding whether it is to be written
    by the first rank that has it; ``made``: the digest of all that, if there is one already.

    Raises ``PlanError`` if a box leaves its tensor or two boxes of a leaf name different tensors,
    ``Unsupported`` for an unknown dtype.
    """
    leaves, of = _leaves(holdings)
    types = {(h.dtype, h.shape) for h in leaves}
    widths = {dtype: itemsize(dtype) for dtype, _ in types}
    hashed = {t: xxh3_64_intdigest(describe_type(*t).encode()) for t in types}
    width = np.array([widths[h.dtype] for h in leaves], np.int64)
    key = np.array([xxh3_64_intdigest(h.key.encode()) for h in leaves], np.uint64)
    factor = key | np.uint64(1)
    leaf_dims = np.array([len(h.shape) for h in leaves], np.int64)
    dims = leaf_dims[of]
    shape = flat(h.shape for h in leaves)
    offsets = flat(h.box.offsets for h in holdings)
    sizes = flat(h.box.sizes for h in holdings)
    limits = flat(leaves[i].shape for i in of.tolist())
    wrong = (offsets < 0) | (sizes < 0) | (offsets + sizes > limits)
    if wrong.any():
        raise _outside(holdings[int(np.repeat(np.arange(len(dims)), dims)[wrong.argmax()])])
    return Offer(
        structure=made or structure(holdings),
        leaf_key=key,
        leaf_type=np.array([hashed[h.dtype, h.shape] for h in leaves], np.uint64),
        leaf_weight=_weights(np.zeros_like(shape), shape, leaf_dims) * factor,
        leaf_bytes=products(shape, leaf_dims) * width,
        box_weight=_weights(offsets, sizes, dims) * factor[of],
        box_bytes=products(sizes, dims) * width[of],
        box_leaf=of,
        box_first=np.zeros(len(of), np.uint8) if first is None else first.astype(np.uint8),
        names=zlib.compress(
            msgspec.msgpack.encode([(h.key, h.dtype, h.shape) for h in leaves]), level=1
        ),
    )


def _leaves(holdings: Sequence[Holding]) -> tuple[list[Holding], NDArray[np.uint32]]:
    """One holding of each leaf, and for each box the index of its leaf."""
    index: dict[str, int] = {}
    leaves: list[Holding] = []
    of: list[int] = []
    for h in holdings:
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
            raise _outside(h)
        of.append(i)
    return leaves, np.array(of, np.uint32)


def _outside(h: Holding) -> PlanError:
    return PlanError(
        f"A rank offers a part of {h.key} that is not within the tensor",
        expected=f"a part of {describe_type(h.dtype, h.shape)}",
        found=f"offsets {h.box.offsets}, sizes {h.box.sizes}",
        key=h.key,
    )


def describe_type(dtype: str, shape: tuple[int, ...]) -> str:
    """A tensor's type in words, as ``float32 [2, 3]``."""
    return f"{dtype} {list(shape)}"


def mix(x: Hashes) -> Hashes:
    """A random-looking number for each, always the same one (the finalizer of splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _weights(offsets: Ints, sizes: Ints, dims: Ints) -> Hashes:
    """Weights of boxes (see the module's text), given flat over boxes and their dimensions."""
    d = within(np.zeros_like(dims), dims)
    seed = mix(d.astype(np.uint64))
    random = [mix(seed ^ x.astype(np.uint64)) for x in (offsets, offsets + sizes)]
    weights: Hashes = products(random[1] - random[0], dims)
    return weights
