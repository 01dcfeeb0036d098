"""The index of a shard: which boxes of which leaves lie where, and the digest of every byte.

The file is tiled by chunks: ``cuts`` are their ends, the first chunk is exactly the safetensors
header, the last ends with the file, and none is longer than 16 MiB. A chunk never ends inside an
element. So every byte of a shard, header and padding included, has exactly one digest.

In number 2 the boxes and chunks are those of the shard as it would be if it held everything, and
``runs`` tell where its chunks lie: in the shard itself, or in files of earlier versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.errors import ManifestInvalid
from holdfast.format.digest import is_digest
from holdfast.format.manifest import Referred
from holdfast.format.places import Places, places_of
from holdfast.format.sealed import decode
from holdfast.format.tensorfile import MAX_HEADER
from holdfast.format.tree import MAX_DIMENSIONS
from holdfast.words import DTYPES, MIB

Ints = npt.NDArray[np.int64]
Broken = Callable[..., ManifestInvalid]

MAX_CHUNK = 16 * MIB


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


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands in an index file. ``header`` and ``length`` are bytes of the shard."""

    format: int
    shard: str
    length: int
    header: int
    leaves: list[Leaf]
    cuts: list[int]
    digests: list[str]


class IncrementalIndex(Index, frozen=True, forbid_unknown_fields=True):
    """An index of number 2. ``length`` is that of the file, the last cut that of the whole. A run:
    the number of its first chunk, the number of a file (0: this shard, from 1 on: what the
    manifest says that it refers to), and the offset there. Chunk 0, the header, is in none."""

    runs: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A checked index, ready to plan with. ``cuts`` as int64, ``digests`` one per cut; ``places``:
    where its chunks lie, if not all in the shard."""

    shard: str
    length: int
    header: int
    leaves: tuple[Leaf, ...]
    cuts: Ints
    digests: tuple[str, ...]
    places: Places | None = None
    refers: tuple[Referred, ...] = ()

    def where(self, chunk: int) -> tuple[str, int]:
        """The file in which a chunk lies, as a path from the snapshot's folder, and where in it."""
        if self.places is None:
            return self.shard, int(self.cuts[chunk - 1]) if chunk else 0
        file = int(self.places.file[chunk])
        return self.refers[file - 1].path if file else self.shard, int(self.places.at[chunk])


def encode_index(index: Index) -> bytes:
    return msgspec.json.encode(index)


def decode_index(raw: bytes, file: str, refers: Sequence[Referred] = ()) -> ShardIndex:
    """The index, totally checked: boxes within their leaves tile the data, chunks tile the file.

    ``refers``: what the manifest says that the shard refers to; with any, it is of number 2.
    Raises ``ManifestInvalid`` naming ``file`` and, where one is to blame, the leaf.
    """
    index = decode(raw, IncrementalIndex if refers else Index, file)
    number = 2 if refers else 1

    def broken(expected: str, found: object, leaf: str | None = None) -> ManifestInvalid:
        where = "" if leaf is None else f" at leaf {leaf[:200]!r}"
        return ManifestInvalid(
            f"{file} breaks the format{where}",
            expected=expected,
            found=str(found)[:300],
            file=file,
            leaf=leaf,
        )

    if index.format != number:
        raise broken(f"format {number}", index.format)
    if not (8 <= index.header <= min(index.length, 8 + MAX_HEADER) and index.length < 1 << 62):
        raise broken(
            f"a header of 8 to {8 + MAX_HEADER} bytes within the shard",
            (index.header, index.length),
        )
    whole = index.cuts[-1] if refers and index.cuts else index.length
    if not index.header <= whole < 1 << 62:
        raise broken("chunks of fewer than 2**62 bytes", whole)
    keys: set[str] = set()
    for leaf in index.leaves:
        if leaf.dtype not in DTYPES or leaf.key in keys or len(leaf.shape) > MAX_DIMENSIONS:
            found = f"{leaf.dtype}, {len(leaf.shape)} dimensions"
            raise broken(
                f"every leaf once, with a known dtype and at most {MAX_DIMENSIONS} dimensions",
                found if leaf.key not in keys else "it stands twice",
                leaf.key,
            )
        keys.add(leaf.key)
    try:
        cuts = np.array(index.cuts, dtype=np.int64)
        spans = _spans(index, whole, broken)
    except OverflowError as e:
        raise broken("numbers of 64 bits", str(e)) from e
    ends = np.concatenate([np.array([index.header]), spans.stops])
    begins = np.concatenate([spans.starts, np.array([whole])])
    wrong = ends != begins
    if wrong.any():
        i = int(wrong.argmax())
        raise broken(f"boxes packed without holes up to {whole}: one at {ends[i]}", begins[i])
    _check_chunks(index, whole, cuts, spans, broken)
    places = None
    if isinstance(index, IncrementalIndex):
        places = places_of(index.runs, cuts, index.length, refers, broken)
    return ShardIndex(
        index.shard,
        index.length,
        index.header,
        tuple(index.leaves),
        cuts,
        tuple(index.digests),
        places,
        tuple(refers),
    )


class _Spans(NamedTuple):
    """Where boxes begin and stop in the file, and the bytes of their elements, in file order."""

    starts: Ints
    stops: Ints
    widths: Ints


def _spans(index: Index, whole: int, broken: Broken) -> _Spans:
    """The spans of all boxes, each found to lie within its leaf. No loop goes over the boxes: of
    these there may be millions, and every rank checks them at every load."""
    leaves = index.leaves
    boxes = [box for leaf in leaves for box in leaf.boxes]
    of = np.repeat(np.arange(len(leaves)), np.array([len(leaf.boxes) for leaf in leaves], np.int64))
    dims = np.array([len(leaf.shape) for leaf in leaves], np.int64)[of]
    given = np.array([(len(b.offsets), len(b.sizes)) for b in boxes], np.int64).reshape(-1, 2)
    sizes = _flat(b.sizes for b in boxes)
    wrong = (given != dims[:, None]).any(axis=1)
    if not wrong.any():
        offsets = _flat(b.offsets for b in boxes)
        limits = _flat(leaf.shape for leaf in leaves for _ in leaf.boxes)
        outside = (offsets < 0) | (sizes < 0) | (sizes > limits) | (offsets > limits - sizes)
        wrong[np.repeat(np.arange(len(boxes)), dims)[outside]] = True
    if wrong.any():
        i = int(wrong.argmax())
        raise broken(f"a box within {leaves[of[i]].shape}", boxes[i], leaves[of[i]].key)
    widths = np.array([DTYPES[leaf.dtype].itemsize for leaf in leaves], np.int64)[of]
    # the product in floats tells whether that in integers is exact
    with np.errstate(over="ignore", invalid="ignore"):
        large = _products(sizes.astype(np.float64), dims) * widths > whole
    if large.any():
        i = int(large.argmax())
        raise broken(f"a box of at most {whole} bytes", boxes[i], leaves[of[i]].key)
    starts = np.array([b.at for b in boxes], np.int64)
    lengths = _products(sizes, dims) * widths
    order = np.lexsort((lengths, starts))
    return _Spans(starts[order], (starts + lengths)[order], widths[order])


def _flat(rows: Iterable[tuple[int, ...]]) -> Ints:
    return np.array(list(chain.from_iterable(rows)), np.int64)


def _products(sizes: npt.NDArray[Any], dims: Ints) -> npt.NDArray[Any]:
    """The product of each box's ``dims`` sizes, which lie one after the other; 1 for none."""
    made = np.ones(len(dims), sizes.dtype)
    some = dims > 0
    if some.any():
        made[some] = np.multiply.reduceat(sizes, (np.cumsum(dims) - dims)[some])
    return made


def _check_chunks(index: Index, whole: int, cuts: Ints, spans: _Spans, broken: Broken) -> None:
    """Raise unless the chunks tile the file and fall between elements."""
    lengths = np.diff(cuts, prepend=0)
    tiles = len(cuts) > 0 and cuts[0] == index.header and cuts[-1] == whole
    if not tiles or (np.diff(cuts) <= 0).any() or lengths[1:].max(initial=0) > MAX_CHUNK:
        raise broken(
            f"chunks of 1 to {MAX_CHUNK} bytes, the first the header, the last to the end",
            index.cuts[:20],
        )
    if len(index.digests) != len(cuts) or not all(map(is_digest, index.digests)):
        raise broken(f"{len(cuts)} digests of 32 hex digits", f"{len(index.digests)} digests")
    filled = spans.stops > spans.starts
    if filled.any():
        starts, widths = spans.starts[filled], spans.widths[filled]
        inner = cuts[:-1]
        inner = inner[inner >= starts[0]]
        box = np.searchsorted(starts, inner, side="right") - 1
        if ((inner - starts[box]) % widths[box]).any():
            raise broken("chunks that end between elements", index.cuts[:20])
