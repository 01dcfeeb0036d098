"""Helpers that write a snapshot again with other shards, in layouts that no save produces."""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
from msgspec.structs import replace

from limpet.format.digest import digest
from limpet.format.index import Index, IndexBox, IndexLeaf, LeafColumns, SchemaCache, encode_index
from limpet.format.manifest import FileEntry, Shard
from limpet.format.names import MANIFEST, index_name, random_id, shard_name
from limpet.format.safetensors import build_header
from limpet.format.sealed import seal
from limpet.layout.read_plan import ReadRequest
from limpet.layout.shard_layout import LeafBox, chunk_cuts, full_shard_entries
from limpet.ragged import flatten_rows
from limpet.snapshot.chunks import Target
from limpet.snapshot.reader import open_location
from limpet.types import DTYPES, Box

Layout = Callable[[str, tuple[int, ...]], Sequence[tuple[int, Box]]]
"""Maps the key and the shape of a leaf to its boxes, each with the number of its shard."""


def split_rows(shards):
    """Return a layout that splits dimension 0 evenly, like FSDP2. A leaf without dimensions or
    elements goes to the first shard."""
    return _split_dim(0, shards)


def split_columns(shards):
    """Return a layout that splits the last dimension, like tensor-parallel layers."""
    return _split_dim(-1, shards)


def _split_dim(dim, shards):
    def split(key, shape):
        if not shape or 0 in shape:
            return [(0, Box.whole(shape))]
        d, boxes = dim % len(shape), []
        step = -(-shape[d] // shards)
        for n in range(shards):
            a, b = min(n * step, shape[d]), min((n + 1) * step, shape[d])
            if b > a:
                offsets, sizes = [0] * len(shape), list(shape)
                offsets[d], sizes[d] = a, b - a
                boxes.append((n, Box(tuple(offsets), tuple(sizes))))
        return boxes

    return split


def index_columns(leaves):
    """Return the leaves in the form that an index uses."""
    schema = [tuple(getattr(leaf, name) for leaf in leaves) for name in ("key", "dtype", "shape")]
    boxes = [box for leaf in leaves for box in leaf.boxes]
    return LeafColumns(
        SchemaCache().add(*schema),
        box_counts=np.array([len(leaf.boxes) for leaf in leaves], np.int64),
        file_offsets=np.array([box.at for box in boxes], np.int64),
        numels=np.array([prod(box.sizes) for box in boxes], np.int64),
        offsets=flatten_rows([box.offsets for box in boxes]),
        sizes=flatten_rows([box.sizes for box in boxes]),
    )


def read_elements(snapshot, key):
    """Read a leaf as an array of opaque elements."""
    dtype, shape = snapshot.leaves[key]
    opaque = f"V{DTYPES[dtype].itemsize}"
    into = np.zeros(shape, opaque)
    if into.size:
        address = into.__array_interface__["data"][0]
        snapshot.read([ReadRequest(key, Box.whole(shape))], [Target(opaque, shape, into, address)])
    return into


def write_resharded(snapshot, location, layout, shards):
    """Write the snapshot again at ``location``, with its leaves split by ``layout``."""
    attempt = random_id()
    boxes_by_shard: list[list[LeafBox]] = [[] for _ in range(shards)]
    for key, (dtype, shape) in snapshot.leaves.items():
        for n, box in layout(key, shape):
            boxes_by_shard[n].append(LeafBox(key, dtype, shape, box))
    values = {key: read_elements(snapshot, key) for key in snapshot.leaves}
    shard_entries = [
        _write_shard(values, location, n, attempt, boxes_by_shard) for n in range(shards)
    ]
    manifest = replace(snapshot.manifest, attempt=attempt, shards=shard_entries)
    location.store.put_if_absent(location.key(MANIFEST), seal(manifest)[0])
    return open_location(location)


def _write_shard(values, location, number, attempt, boxes_by_shard):
    leaf_boxes = boxes_by_shard[number]
    header = build_header(full_shard_entries(leaf_boxes))
    cuts = chunk_cuts(len(header), np.array([h.nbytes for h in leaf_boxes], np.int64))
    raw, leaves = bytearray(header), {}
    for h in leaf_boxes:
        leaf = leaves.setdefault(h.key, IndexLeaf(h.key, h.dtype, h.shape, []))
        leaf.boxes.append(IndexBox(h.box.offsets, h.box.sizes, len(raw)))
        raw += values[h.key][h.box.slices((0,) * len(h.shape))].tobytes()
    ends = cuts.tolist()
    digests = [digest(bytes(raw[a:b])) for a, b in zip([0, *ends], ends, strict=False)]
    name = shard_name(number, len(boxes_by_shard), attempt)
    index = Index(1, name, len(raw), len(header), list(leaves.values()), ends, digests, [])
    encoded = encode_index(index)
    file = FileEntry(
        index_name(number, len(boxes_by_shard), attempt), len(encoded), digest(encoded)
    )
    location.store.put_if_absent(location.key(name), bytes(raw))
    location.store.put_if_absent(location.key(file.name), encoded)
    return Shard(name, len(raw), file, [])
