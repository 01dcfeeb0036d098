"""The index of a shard: which boxes of which leaves lie where, and the digest of every byte.

The file is tiled by chunks: ``cuts`` are their ends, the first chunk is exactly the safetensors
header, the last ends with the file, and none is longer than 16 MiB. A chunk never ends inside an
element. So every byte of a shard, header and padding included, has exactly one digest.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.errors import ManifestInvalid
from holdfast.format.digest import is_digest
from holdfast.format.sealed import decode
from holdfast.words import DTYPES, MIB, Box

MAX_CHUNK = 16 * MIB


class BoxAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rectangle of a leaf and the offset in the shard at which its bytes begin."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A leaf: dtype and global shape, and those of its boxes that lie in this shard."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    boxes: list[BoxAt]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands in an index file. ``header`` and ``length`` are bytes of the shard."""

    format: int
    shard: str
    length: int
    header: int
    leaves: list[Leaf]
    cuts: list[int]
    digests: list[str]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A checked index, ready to plan with. ``cuts`` as int64, ``digests`` one per cut."""

    shard: str
    length: int
    header: int
    leaves: tuple[Leaf, ...]
    cuts: npt.NDArray[np.int64]
    digests: tuple[str, ...]


def encode_index(index: Index) -> bytes:
    return msgspec.json.encode(index)


def decode_index(raw: bytes, file: str) -> ShardIndex:
    """The index, totally checked: boxes within their leaves tile the data, chunks tile the file.

    Raises ``ManifestInvalid`` naming ``file`` and, where one is to blame, the leaf.
    """
    index = decode(raw, Index, file)

    def broken(expected: str, found: object, leaf: str | None = None) -> ManifestInvalid:
        where = "" if leaf is None else f" at leaf {leaf[:200]!r}"
        return ManifestInvalid(
            f"{file} breaks the format{where}",
            expected=expected,
            found=str(found)[:300],
            file=file,
            leaf=leaf,
        )

    if index.format != 1:
        raise broken("format 1", index.format)
    if not (0 <= index.header <= index.length < 1 << 62):
        raise broken("header <= length", (index.header, index.length))
    spans: list[tuple[int, int, int]] = []
    keys: set[str] = set()
    for leaf in index.leaves:
        dtype = DTYPES.get(leaf.dtype)
        if dtype is None or leaf.key in keys:
            raise broken("a known dtype, and every leaf once", leaf.dtype, leaf.key)
        keys.add(leaf.key)
        for box in leaf.boxes:
            if not Box(box.offsets, box.sizes).inside(leaf.shape):
                raise broken(f"a box within {leaf.shape}", box, leaf.key)
            size = dtype.itemsize * Box(box.offsets, box.sizes).elements
            spans.append((box.at, box.at + size, dtype.itemsize))
    spans.sort()
    at = index.header
    for start, stop, _ in spans:
        if start != at:
            raise broken(f"boxes packed without holes: one at {at}", f"one at {start}")
        at = stop
    if at != index.length:
        raise broken(f"boxes up to {index.length}", f"boxes up to {at}")
    cuts = _check_chunks(index, spans, broken)
    return ShardIndex(
        index.shard, index.length, index.header, tuple(index.leaves), cuts, tuple(index.digests)
    )


def _check_chunks(index: Index, spans: list[tuple[int, int, int]], broken):  # type: ignore[no-untyped-def]
    """The cuts as an array, if they tile the file and fall between elements."""
    try:
        cuts = np.array(index.cuts, dtype=np.int64)
    except OverflowError as e:
        raise broken("cuts of 64 bits", str(e)) from e
    lengths = np.diff(cuts, prepend=0)
    tiles = len(cuts) > 0 and cuts[0] == index.header and cuts[-1] == index.length
    if not tiles or lengths.min() <= 0 or lengths[1:].max(initial=0) > MAX_CHUNK:
        raise broken(
            f"chunks of 1 to {MAX_CHUNK} bytes, the first the header, the last to the end",
            index.cuts[:20],
        )
    if len(index.digests) != len(cuts) or not all(map(is_digest, index.digests)):
        raise broken(f"{len(cuts)} digests of 32 hex digits", f"{len(index.digests)} digests")
    filled = [s for s in spans if s[1] > s[0]]
    if filled:
        starts = np.array([s[0] for s in filled], dtype=np.int64)
        sizes = np.array([s[2] for s in filled], dtype=np.int64)
        inner = cuts[:-1]
        inner = inner[inner >= starts[0]]
        box = np.searchsorted(starts, inner, side="right") - 1
        if ((inner - starts[box]) % sizes[box]).any():
            raise broken("chunks that end between elements", index.cuts[:20])
    return cuts
