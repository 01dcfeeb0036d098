"""The index of a shard: the location of each box of each leaf, and the digest of every byte.

Chunks cover the file without gaps; ``cuts`` are their ends. The first is the safetensors header, no
other is longer than 16 MiB, and none ends inside an element. Boxes and chunks describe the shard as
if it contained all of its data; ``runs`` list where the chunks are, here or in earlier versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from limpet.errors import ManifestInvalid
from limpet.format.digest import HEX_LENGTH, pack_digests
from limpet.format.manifest import ShardReference
from limpet.format.safetensors import MAX_HEADER
from limpet.format.sealed import FORMAT, Int64, decode_struct
from limpet.format.strict_json import StrictDecoder
from limpet.format.tree import MAX_DIMENSIONS
from limpet.ragged import Ints, exclusive_cumsum, flatten_rows, int_array, ranges, row_products
from limpet.types import DTYPES, MIB

# -- the leaves as columns: a million boxes take 40 MiB as columns, 600 MiB as objects -------------
#
# The shards of a snapshot usually have the same leaves, each with a different box of them. Keys,
# dtypes, and shapes are then stored only once.


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
    """The keys, dtypes, global shapes (also concatenated), and element sizes in bytes of leaves."""

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    ndims: Ints
    flat_shapes: Ints
    itemsizes: Ints

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each leaf by key."""
        return dict(zip(self.keys, range(len(self.keys)), strict=True))


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
        keys, dtypes = tuple(map(intern, keys, keys)), tuple(map(intern, dtypes, dtypes))
        shapes = tuple(map(intern, shapes, shapes))
        schema = self.schemas[keys, dtypes, shapes] = LeafSchema(
            keys,
            dtypes,
            shapes,
            int_array([*map(len, shapes)]),
            flatten_rows(shapes),
            int_array([DTYPES[dtype].itemsize for dtype in dtypes]),
        )
        return schema


@dataclass(frozen=True, slots=True, eq=False)
class LeafColumns:
    """The leaves of an index; iteration creates each ``IndexLeaf`` when it is needed. ``offsets``
    and ``sizes`` of all boxes are concatenated."""

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


# -- where the chunks of an incremental shard are: in it or in earlier versions -------------------


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRefs:
    """The file number of each chunk (0: the shard; others: ``refers``), and the offset there."""

    files: Ints
    offsets: Ints

    def is_contiguous_with_next(self, cuts: Ints) -> npt.NDArray[np.bool_]:
        """Return, for each chunk but the last, whether the next chunk follows it in its file."""
        lengths = np.diff(cuts, prepend=0)
        contiguous: npt.NDArray[np.bool_] = (self.files[1:] == self.files[:-1]) & (
            self.offsets[1:] == (self.offsets + lengths)[:-1]
        )
        return contiguous


def expand_runs(
    runs: Sequence[tuple[int, int, int]],
    cuts: Ints,
    length: int,
    refers: Sequence[ShardReference],
    make_error: Callable[[str, object], ManifestInvalid],
) -> ChunkRefs:
    """Return the locations of all chunks. The runs have each chunk but the header once, fill
    ``length`` bytes of the shard, and use of other files what the manifest lists."""
    header_run = (0, 0, 0)
    first, files, offsets = np.array([header_run, *runs], np.int64).T
    valid = (
        len(first) > 1
        and first[1] == 1
        and first[-1] < len(cuts)
        and bool((np.diff(first) > 0).all())
        and files.min() >= 0
        and files.max() <= len(refers)
        and offsets.min() >= 0
        and offsets.max() < 1 << 62
    )
    if not valid:
        raise make_error(
            f"runs with chunks 1 to {len(cuts) - 1}, in order, in files 0 to {len(refers)}",
            runs[:20],
        )
    chunk_starts = np.append(0, cuts[:-1])
    starts = chunk_starts[first]
    lengths = np.diff(starts, append=cuts[-1])
    file_lengths = [length, *(r.length for r in refers)]
    _check_run_overlap(files, offsets, offsets + lengths, file_lengths, make_error)
    used = np.zeros(len(file_lengths), np.int64)
    np.add.at(used, files, lengths)
    listed = [r.bytes for r in refers]
    if used[1:].tolist() != listed:
        raise make_error(f"{listed} bytes of the files that the manifest lists", used[1:].tolist())
    counts = np.diff(first, append=len(cuts))
    return ChunkRefs(np.repeat(files, counts), chunk_starts + np.repeat(offsets - starts, counts))


def _check_run_overlap(
    files: Ints,
    offsets: Ints,
    stops: Ints,
    file_lengths: Sequence[int],
    make_error: Callable[[str, object], ManifestInvalid],
) -> None:
    """Raise unless the runs do not overlap and those in file 0 cover it without gaps."""
    order = np.lexsort((offsets, files))
    files, offsets, stops = files[order], offsets[order], stops[order]
    same_file = files[1:] == files[:-1]
    gaps = offsets[1:] - stops[:-1]
    wrong = same_file & ((gaps < 0) | ((files[1:] == 0) & (gaps != 0)))
    if wrong.any():
        i = int(wrong.argmax())
        raise make_error(
            f"runs without overlap: the next run at {stops[i]} of file {files[i]}", offsets[i + 1]
        )
    last = np.append(~same_file, True)
    ends = stops[last].tolist()
    for number, end in zip(files[last].tolist(), ends, strict=True):
        if end > file_lengths[number] or (number == 0 and end < file_lengths[0]):
            raise make_error(
                f"runs up to byte {file_lengths[number]} of file {number}",
                f"a run that ends at {end}",
            )


# -- the index ------------------------------------------------------------------------------------

ErrorFactory = Callable[..., ManifestInvalid]

MAX_CHUNK = 16 * MIB


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of an index file. A run: its first chunk, a file number (0: this shard, others:
    the manifest's ``refers``), an offset. There are none if the shard refers to no other file."""

    limpet: int
    shard: str
    length: int
    header: int
    leaves: list[IndexLeaf]
    cuts: list[Int64]
    digests: list[Annotated[str, msgspec.Meta(min_length=HEX_LENGTH, max_length=HEX_LENGTH)]]
    runs: list[tuple[Int64, Int64, Int64]]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A checked index, ready for planning. ``digests``: 16 bytes per chunk; ``chunk_refs``: None if
    all chunks are in the shard; ``path``: from the snapshot's folder."""

    shard: str
    length: int
    header: int
    leaves: LeafColumns
    cuts: Ints
    digests: bytes
    chunk_refs: ChunkRefs | None = None
    refers: tuple[ShardReference, ...] = ()
    path: str = ""

    def chunk_digest(self, chunk: int) -> str:
        return self.digests[16 * chunk : 16 * chunk + 16].hex()

    def locate_chunk(self, chunk: int) -> tuple[str, int]:
        """Return the file of a chunk, as a path from the snapshot's folder, and its offset."""
        if self.chunk_refs is None:
            return self.path, int(self.cuts[chunk - 1]) if chunk else 0
        file = int(self.chunk_refs.files[chunk])
        path = self.refers[file - 1].path if file else self.path
        return path, int(self.chunk_refs.offsets[chunk])


_INDEX: StrictDecoder[Index] = StrictDecoder(msgspec.json.Decoder(Index))
encode_index: Callable[[Index], bytes] = msgspec.json.encode


def decode_index(
    raw: bytes,
    file: str,
    refers: Sequence[ShardReference] = (),
    schema_cache: SchemaCache | None = None,
    path: str = "",
) -> ShardIndex:
    """Decode and fully check an index. ``schema_cache``: shared by the indexes of one snapshot. The
    ``ManifestInvalid`` names ``file`` and, if one leaf is at fault, the leaf."""
    index = decode_struct(raw, _INDEX, file)
    make_error = partial(_index_error, file)
    if index.limpet != FORMAT:
        raise make_error(f"format {FORMAT}", index.limpet)
    if not (8 <= index.header <= min(index.length, 8 + MAX_HEADER) and index.length < 1 << 62):
        raise make_error(
            f"a header of 8 to {8 + MAX_HEADER} bytes within the shard",
            (index.header, index.length),
        )
    full_length = index.cuts[-1] if refers and index.cuts else index.length
    if not index.header <= full_length < 1 << 62:
        raise make_error("chunks with fewer than 2**62 bytes in total", full_length)
    schema = _check_schema(index.leaves, schema_cache or SchemaCache(), make_error)
    columns, starts, itemsizes = _check_boxes(index, schema, full_length, make_error)
    cuts = int_array(index.cuts)
    digests = _check_chunks(index, full_length, cuts, starts, itemsizes, make_error)
    chunk_refs = None
    if index.runs or refers:
        chunk_refs = expand_runs(index.runs, cuts, index.length, refers, make_error)
    return ShardIndex(
        shard=index.shard,
        length=index.length,
        header=index.header,
        leaves=columns,
        cuts=cuts,
        digests=digests,
        chunk_refs=chunk_refs,
        refers=tuple(refers),
        path=path or index.shard,
    )


def _index_error(
    file: str, expected: str, found: object, leaf: str | None = None
) -> ManifestInvalid:
    position = "" if leaf is None else f" at leaf {leaf[:200]!r}"
    return ManifestInvalid(
        f"{file} violates the format{position}",
        expected=expected,
        found=str(found)[:300],
        file=file,
        leaf=leaf,
    )


def _check_schema(
    leaves: Sequence[IndexLeaf], schema_cache: SchemaCache, make_error: ErrorFactory
) -> LeafSchema:
    """Check keys, dtypes, and shapes, unless another index with the same ones was checked."""
    schema = (
        tuple(map(attrgetter("key"), leaves)),
        tuple(map(attrgetter("dtype"), leaves)),
        tuple(map(attrgetter("shape"), leaves)),
    )
    cached = schema_cache.schemas.get(schema)
    if cached is not None:
        return cached
    seen: set[str] = set()
    for leaf in leaves:
        if leaf.dtype not in DTYPES or leaf.key in seen or len(leaf.shape) > MAX_DIMENSIONS:
            raise make_error(
                f"every leaf once, with a known dtype and at most {MAX_DIMENSIONS} dimensions",
                "it occurs twice"
                if leaf.key in seen
                else f"{leaf.dtype}, {len(leaf.shape)} dimensions",
                leaf.key,
            )
        seen.add(leaf.key)
    return schema_cache.add(*schema)


def _check_boxes(
    index: Index, schema: LeafSchema, full_length: int, make_error: ErrorFactory
) -> tuple[LeafColumns, Ints, Ints]:
    """Check the boxes; return the columns, and the starts and element sizes of all boxes in file
    order. Vectorized: there may be millions of boxes, and every rank checks them at every load."""
    leaves = index.leaves
    boxes_by_leaf = [*map(attrgetter("boxes"), leaves)]
    boxes = [*chain.from_iterable(boxes_by_leaf)]
    offset_rows = [*map(attrgetter("offsets"), boxes)]
    size_rows = [*map(attrgetter("sizes"), boxes)]
    sizes, size_counts = flatten_rows(size_rows), int_array([*map(len, size_rows)])
    columns = LeafColumns(
        schema,
        box_counts=int_array([*map(len, boxes_by_leaf)]),
        file_offsets=int_array([*map(attrgetter("at"), boxes)]),
        numels=row_products(sizes, size_counts),
        offsets=flatten_rows(offset_rows),
        sizes=sizes,
    )
    leaf_numbers = columns.leaf_numbers
    ndims = schema.ndims[leaf_numbers]
    invalid = (int_array([*map(len, offset_rows)]) != ndims) | (size_counts != ndims)
    if not invalid.any():
        limits = schema.flat_shapes[ranges(exclusive_cumsum(schema.ndims)[leaf_numbers], ndims)]
        offsets = columns.offsets
        outside = (offsets < 0) | (sizes < 0) | (sizes > limits) | (offsets > limits - sizes)
        if outside.any():
            invalid[np.repeat(np.arange(len(boxes)), ndims)[outside]] = True
    if invalid.any():
        i = int(invalid.argmax())
        raise make_error(
            f"a box within {leaves[leaf_numbers[i]].shape}", boxes[i], leaves[leaf_numbers[i]].key
        )
    itemsizes = schema.itemsizes[leaf_numbers]
    # the float product shows whether the integer product overflows
    with np.errstate(over="ignore", invalid="ignore"):
        too_large = row_products(sizes.astype(np.float64), ndims) * itemsizes > full_length
    if too_large.any():
        i = int(too_large.argmax())
        raise make_error(
            f"a box of at most {full_length} bytes", boxes[i], leaves[leaf_numbers[i]].key
        )
    lengths = columns.numels * itemsizes
    order = np.lexsort((lengths, columns.file_offsets))
    starts = columns.file_offsets[order]
    ends = np.append(index.header, starts + lengths[order])
    next_starts = np.append(starts, full_length)
    wrong = ends != next_starts
    if wrong.any():
        i = int(wrong.argmax())
        raise make_error(
            f"boxes without gaps or overlap up to {full_length}: the next box at {ends[i]}",
            next_starts[i],
        )
    return columns, starts, itemsizes[order]


def _check_chunks(
    index: Index,
    full_length: int,
    cuts: Ints,
    starts: Ints,
    itemsizes: Ints,
    make_error: ErrorFactory,
) -> bytes:
    """Check that the chunks cover the file and end between elements; return their digests.
    ``starts`` and ``itemsizes``: as ``_check_boxes`` returns them."""
    lengths = np.diff(cuts, prepend=0)
    covers_file = len(cuts) > 0 and cuts[0] == index.header and cuts[-1] == full_length
    if not covers_file or (np.diff(cuts) <= 0).any() or lengths[1:].max(initial=0) > MAX_CHUNK:
        raise make_error(
            f"chunks of 1 to {MAX_CHUNK} bytes, from the header to the end of the shard",
            index.cuts[:20],
        )
    digests = pack_digests(index.digests)
    if digests is None or len(digests) != 16 * len(cuts):
        raise make_error(f"{len(cuts)} digests of 32 hex digits", f"{len(index.digests)} digests")
    # of the boxes that begin at the same byte, the last one has elements
    box = np.searchsorted(starts, cuts[:-1], side="right") - 1
    if ((cuts[:-1] - starts[box]) % itemsizes[box]).any():
        raise make_error("chunks that end between elements", index.cuts[:20])
    return digests
