"""The index of a shard: which boxes of which leaves lie where, and the digest of every byte.

The file is tiled by chunks: ``cuts`` are their ends, the first chunk is exactly the safetensors
header, the last ends with the file, and none is longer than 16 MiB. A chunk never ends inside an
element. So every byte of a shard, header and padding included, has exactly one digest.

In number 2 the boxes and chunks are those of the shard as it would be if it held everything, and
``runs`` tell where its chunks lie: in the shard itself, or in files of earlier versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.errors import ManifestInvalid
from holdfast.format.chunk_refs import ChunkRefs, expand_runs
from holdfast.format.digest import pack_digests
from holdfast.format.index_columns import (
    IndexLeaf,
    LeafColumns,
    LeafSchema,
    SchemaCache,
    build_columns,
)
from holdfast.format.manifest import ShardReference
from holdfast.format.safetensors import MAX_HEADER
from holdfast.format.sealed import decode_struct
from holdfast.format.tree import MAX_DIMENSIONS
from holdfast.ragged import Ints, exclusive_cumsum, int_array, ranges, row_products
from holdfast.types import DTYPES, MIB

ErrorFactory = Callable[..., ManifestInvalid]

MAX_CHUNK = 16 * MIB


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands in an index file. ``header`` and ``length`` are bytes of the shard."""

    format: int
    shard: str
    length: int
    header: int
    leaves: list[IndexLeaf]
    cuts: list[int]
    digests: list[str]


class IncrementalIndex(Index, frozen=True, forbid_unknown_fields=True):
    """An index of number 2. ``length`` is that of the file, the last cut that of the whole. A run:
    the number of its first chunk, the number of a file (0: this shard, from 1 on: what the
    manifest says that it refers to), and the offset there. Chunk 0, the header, is in none."""

    runs: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A checked index, ready to plan with. ``cuts`` as int64, ``digests`` one per cut, of 16 bytes
    each; ``places``: where its chunks lie, if not all in the shard."""

    shard: str
    length: int
    header: int
    leaves: LeafColumns
    cuts: Ints
    digests: bytes
    chunk_refs: ChunkRefs | None = None
    refers: tuple[ShardReference, ...] = ()

    def chunk_digest(self, chunk: int) -> str:
        return self.digests[16 * chunk : 16 * chunk + 16].hex()

    def locate_chunk(self, chunk: int) -> tuple[str, int]:
        """The file in which a chunk lies, as a path from the snapshot's folder, and where in it."""
        if self.chunk_refs is None:
            return self.shard, int(self.cuts[chunk - 1]) if chunk else 0
        file = int(self.chunk_refs.files[chunk])
        return self.refers[file - 1].path if file else self.shard, int(
            self.chunk_refs.offsets[chunk]
        )


def encode_index(index: Index) -> bytes:
    return msgspec.json.encode(index)


def decode_index(
    raw: bytes,
    file: str,
    refers: Sequence[ShardReference] = (),
    schema_cache: SchemaCache | None = None,
) -> ShardIndex:
    """The index, totally checked: boxes within their leaves tile the data, chunks tile the file.

    ``refers``: what the manifest says that the shard refers to; with any, it is of number 2.
    ``alike``: of the other indexes of the snapshot.
    Raises ``ManifestInvalid`` naming ``file`` and, where one is to blame, the leaf.
    """
    index = decode_struct(raw, IncrementalIndex if refers else Index, file)
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
    kinds = _check_schema(
        index.leaves, SchemaCache() if schema_cache is None else schema_cache, broken
    )
    try:
        cuts = int_array(index.cuts)
        columns, spans = _check_boxes(index.leaves, kinds, whole, broken)
    except OverflowError as e:
        raise broken("numbers of 64 bits", str(e)) from e
    ends = np.concatenate([np.array([index.header]), spans.stops])
    begins = np.concatenate([spans.starts, np.array([whole])])
    wrong = ends != begins
    if wrong.any():
        i = int(wrong.argmax())
        raise broken(f"boxes packed without holes up to {whole}: one at {ends[i]}", begins[i])
    digests = _check_chunks(index, whole, cuts, spans, broken)
    places = None
    if isinstance(index, IncrementalIndex):
        places = expand_runs(index.runs, cuts, index.length, refers, broken)
    return ShardIndex(
        index.shard,
        index.length,
        index.header,
        columns,
        cuts,
        digests,
        places,
        tuple(refers),
    )


class _Spans(NamedTuple):
    """Where boxes begin and stop in the file, and the bytes of their elements, in file order."""

    starts: Ints
    stops: Ints
    itemsizes: Ints


def _check_schema(
    leaves: Sequence[IndexLeaf], schema_cache: SchemaCache, make_error: ErrorFactory
) -> LeafSchema:
    """Keys, dtypes and shapes: checked, unless another index had just these."""
    keys = tuple([leaf.key for leaf in leaves])
    dtypes = tuple([leaf.dtype for leaf in leaves])
    shapes = tuple([leaf.shape for leaf in leaves])
    known = schema_cache.schemas.get((keys, dtypes, shapes))
    if known is not None:
        return known
    seen: set[str] = set()
    for leaf in leaves:
        if leaf.dtype not in DTYPES or leaf.key in seen or len(leaf.shape) > MAX_DIMENSIONS:
            found = f"{leaf.dtype}, {len(leaf.shape)} dimensions"
            raise make_error(
                f"every leaf once, with a known dtype and at most {MAX_DIMENSIONS} dimensions",
                found if leaf.key not in seen else "it stands twice",
                leaf.key,
            )
        seen.add(leaf.key)
    try:
        return schema_cache.add(keys, dtypes, shapes)
    except OverflowError as e:
        raise make_error("numbers of 64 bits", str(e)) from e


def _check_boxes(
    leaves: Sequence[IndexLeaf], schema: LeafSchema, full_length: int, make_error: ErrorFactory
) -> tuple[LeafColumns, _Spans]:
    """The columns, and the spans of all boxes, each found to lie within its leaf. Few loops go over
    the boxes: of these there may be millions, and every rank checks them at every load."""
    boxes = [box for leaf in leaves for box in leaf.boxes]
    columns = build_columns(leaves, schema)
    of, sizes = columns.leaf_numbers, columns.sizes
    dims = schema.ndims[of]
    wrong = int_array([len(b.offsets) for b in boxes]) != dims
    wrong |= int_array([len(b.sizes) for b in boxes]) != dims
    if not wrong.any():
        limits = schema.flat_shapes[ranges(exclusive_cumsum(schema.ndims)[of], dims)]
        offsets = columns.offsets
        outside = (offsets < 0) | (sizes < 0) | (sizes > limits) | (offsets > limits - sizes)
        if outside.any():
            wrong[np.repeat(np.arange(len(boxes)), dims)[outside]] = True
    if wrong.any():
        i = int(wrong.argmax())
        raise make_error(f"a box within {leaves[of[i]].shape}", boxes[i], leaves[of[i]].key)
    widths = schema.itemsizes[of]
    # the product in floats tells whether that in integers is exact
    with np.errstate(over="ignore", invalid="ignore"):
        large = row_products(sizes.astype(np.float64), dims) * widths > full_length
    if large.any():
        i = int(large.argmax())
        raise make_error(f"a box of at most {full_length} bytes", boxes[i], leaves[of[i]].key)
    lengths = columns.numels * widths
    order = np.lexsort((lengths, columns.file_offsets))
    begins = columns.file_offsets[order]
    return columns, _Spans(begins, begins + lengths[order], widths[order])


def _check_chunks(
    index: Index, full_length: int, cuts: Ints, spans: _Spans, make_error: ErrorFactory
) -> bytes:
    """The digests; raises unless the chunks tile the file and fall between elements."""
    lengths = np.diff(cuts, prepend=0)
    tiles = len(cuts) > 0 and cuts[0] == index.header and cuts[-1] == full_length
    if not tiles or (np.diff(cuts) <= 0).any() or lengths[1:].max(initial=0) > MAX_CHUNK:
        raise make_error(
            f"chunks of 1 to {MAX_CHUNK} bytes, the first the header, the last to the end",
            index.cuts[:20],
        )
    digests = pack_digests(index.digests)
    if digests is None or len(digests) != 16 * len(cuts):
        raise make_error(f"{len(cuts)} digests of 32 hex digits", f"{len(index.digests)} digests")
    filled = spans.stops > spans.starts
    if filled.any():
        starts, widths = spans.starts[filled], spans.itemsizes[filled]
        inner = cuts[:-1]
        inner = inner[inner >= starts[0]]
        box = np.searchsorted(starts, inner, side="right") - 1
        if ((inner - starts[box]) % widths[box]).any():
            raise make_error("chunks that end between elements", index.cuts[:20])
    return digests
