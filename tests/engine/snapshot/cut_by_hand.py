"""Snapshots of several shards, cut by hand as no saver needs to: from one that was saved whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from holdfast.engine.planning.read_plan import Want
from holdfast.engine.planning.shard_layout import Holding, chunk_cuts, whole_entries
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.read import Target
from holdfast.engine.snapshot.snapshot import Snapshot, open_at
from holdfast.format.digest import digest
from holdfast.format.index import Index, encode_index
from holdfast.format.index_columns import Alike, BoxAt, Columns, Leaf, columns_of
from holdfast.format.manifest import File, Shard, encode_manifest
from holdfast.format.names import MANIFEST, index_name, new_attempt, shard_name
from holdfast.format.safetensors import build_header
from holdfast.types import DTYPES, Box

Layout = Callable[[str, tuple[int, ...]], Sequence[tuple[int, Box]]]
"""For a leaf, by key and shape: its boxes, each with the number of the shard that holds it."""


def rows(shards: int) -> Layout:
    """As FSDP2 cuts: dimension 0 into even parts; what has none lies in the first shard."""
    return _along(0, shards)


def columns(shards: int) -> Layout:
    """As tensor parallel layers are cut: the last dimension."""
    return _along(-1, shards)


def _along(dim: int, shards: int) -> Layout:
    def cut(key: str, shape: tuple[int, ...]) -> list[tuple[int, Box]]:
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

    return cut


def columns_from(leaves: Sequence[Leaf]) -> Columns:
    """Leaves as an index has them."""
    kinds = [tuple(getattr(leaf, name) for leaf in leaves) for name in ("key", "dtype", "shape")]
    return columns_of(leaves, Alike().add(*kinds))


def elements(snapshot: Snapshot, key: str) -> np.ndarray:
    """A leaf as an array of opaque elements."""
    dtype, shape = snapshot.leaves[key]
    opaque = f"V{DTYPES[dtype].itemsize}"
    into = np.zeros(shape, opaque)
    if into.size:
        address = into.__array_interface__["data"][0]
        snapshot.read([Want(key, Box.whole(shape))], [Target(opaque, shape, into, address)])
    return into


def recut(snapshot: Snapshot, place: Location, layout: Layout, shards: int) -> Snapshot:
    """Write the snapshot anew at ``place``, its leaves cut as ``layout`` says."""
    attempt = new_attempt()
    held: list[list[Holding]] = [[] for _ in range(shards)]
    for key, (dtype, shape) in snapshot.leaves.items():
        for n, box in layout(key, shape):
            held[n].append(Holding(key, dtype, shape, box))
    values = {key: elements(snapshot, key) for key in snapshot.leaves}
    made = [_write(values, place, n, attempt, held) for n in range(shards)]
    manifest = replace(snapshot.manifest, attempt=attempt, shards=made)
    place.store.put_if_absent(place.key(MANIFEST), encode_manifest(manifest)[0])
    return open_at(place)


def _write(
    values: dict[str, np.ndarray],
    place: Location,
    n: int,
    attempt: str,
    held: list[list[Holding]],
) -> Shard:
    holdings = held[n]
    header = build_header(whole_entries(holdings))
    cuts = chunk_cuts(len(header), np.array([h.nbytes for h in holdings], np.int64))
    raw, leaves = bytearray(header), {}
    for h in holdings:
        leaf = leaves.setdefault(h.key, Leaf(h.key, h.dtype, h.shape, []))
        leaf.boxes.append(BoxAt(h.box.offsets, h.box.sizes, len(raw)))
        raw += values[h.key][h.box.slices((0,) * len(h.shape))].tobytes()
    ends = cuts.tolist()
    digests = [digest(bytes(raw[a:b])) for a, b in zip([0, *ends], ends, strict=False)]
    name = shard_name(n, len(held), attempt)
    index = Index(1, name, len(raw), len(header), list(leaves.values()), ends, digests)
    encoded = encode_index(index)
    file = File(index_name(n, len(held), attempt), len(encoded), digest(encoded))
    place.store.put_if_absent(place.key(name), bytes(raw))
    place.store.put_if_absent(place.key(file.name), encoded)
    return Shard(name, len(raw), file)
