"""Reshard: write a snapshot again with other shards.

1. Lay out: put all leaves into one order, and assign the parts of each leaf to new shards.
2. Write the new shards, as many at a time as the memory for their uploads suffices for
   (see ``windows.py``).
3. Write the new indexes, then the manifest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from limpet import events
from limpet.convert import windows
from limpet.convert.copy import find_same, full_manifest
from limpet.format import names
from limpet.layout.shard_layout import LeafBox
from limpet.saving.commit import Receipt, check_receipts, put_manifest, raise_if_exists
from limpet.saving.image import Image, make_image
from limpet.saving.write import shard_key, write_index
from limpet.snapshot import pins
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import Traits, upload_memory
from limpet.threads import no_op
from limpet.types import DTYPES, MIB, Advance, Box
from limpet.version import __version__

MAX_UPLOAD_BYTES = 128 * MIB
"""Largest number of bytes that all unfinished uploads keep in memory, unless one needs more."""

MAX_OPEN_SHARDS = 256
"""Largest number of shards that are written concurrently; each has two open files. With more
shards, or if each upload keeps bytes in memory, the leaves are read several times."""


def order_leaves(
    snapshot: SnapshotReader, locations: windows.LeafLocations
) -> list[windows.OrderedLeaf]:
    """Return all leaves in the order of all new shards: larger elements first, so that boxes are
    aligned, then by the first level of their keys, then as in the old shards."""
    leaves = [
        windows.OrderedLeaf(key, dtype, shape, prod(shape) * DTYPES[dtype].itemsize)
        for key, (dtype, shape) in snapshot.leaves.items()
    ]
    leaves.sort(
        key=lambda leaf: (
            -DTYPES[leaf.dtype].itemsize,
            leaf.key.partition("/")[0],
            locations.first_box(leaf.key),
            leaf,
        )
    )
    return windows.group_leaves(snapshot, leaves, locations)


def assign_leaves(
    leaves: Sequence[windows.OrderedLeaf], shards: int, split: str
) -> list[int | None]:
    """Return, for each leaf, the new shard that gets the whole leaf, or None if the leaf's rows are
    split over all shards. A whole leaf goes to the shard with the fewest bytes."""
    assignment: list[int | None] = [None] * len(leaves)
    shard_bytes, whole = [0] * shards, []
    for number, leaf in enumerate(leaves):
        if split == "even" and leaf.nbytes and leaf.shape and leaf.shape[0] >= shards > 1:
            for shard in range(shards):
                first, end = _row_range(leaf, shard, shards)
                shard_bytes[shard] += (end - first) * leaf.row_bytes
        else:
            whole.append((-leaf.nbytes, number))
    heap = [(nbytes, shard) for shard, nbytes in enumerate(shard_bytes)]
    heapq.heapify(heap)
    for negative_nbytes, number in sorted(whole):  # largest first
        nbytes, shard = heap[0]
        heapq.heapreplace(heap, (nbytes - negative_nbytes, shard))
        assignment[number] = shard
    return assignment


def _row_range(leaf: windows.OrderedLeaf, shard: int, shards: int) -> tuple[int, int]:
    """Return the first and the end row of a new shard's part of a split leaf."""
    rows = leaf.shape[0]
    step = -(-rows // shards)
    return min(shard * step, rows), min((shard + 1) * step, rows)


def group_by_shard(assignment: Sequence[int | None], shards: int) -> list[list[int]]:
    """Return, for each new shard, the numbers of the leaves of which it gets a part, in order."""
    numbers: list[list[int]] = [[] for _ in range(shards)]
    for number, assigned in enumerate(assignment):
        for of_shard in numbers if assigned is None else (numbers[assigned],):
            of_shard.append(number)
    return numbers


def make_shard_image(
    leaves: Sequence[windows.OrderedLeaf],
    assignment: Sequence[int | None],
    numbers: Sequence[int],
    shard: int,
    shards: int,
) -> Image:
    """Return the image of a new shard, which gets parts of the leaves ``numbers``. Its ``sources``
    are, for each box, the number of the leaf and the first byte of the box in the leaf."""
    leaf_boxes, sources = [], []
    for number in numbers:
        leaf = leaves[number]
        box, first = Box.whole(leaf.shape), 0
        if assignment[number] is None:
            first, end = _row_range(leaf, shard, shards)
            if first == end:
                continue
            other_sizes = leaf.shape[1:]
            box = Box((first, *(0 for _ in other_sizes)), (end - first, *other_sizes))
        leaf_boxes.append(LeafBox(leaf.key, leaf.dtype, leaf.shape, box))
        sources.append((number, first * leaf.row_bytes))
    image = make_image(sources, leaf_boxes, range(len(leaf_boxes)))
    return windows.add_cuts(image, leaves, min(shards, MAX_OPEN_SHARDS))


def batch_shards(images: Iterable[Image], traits: Traits) -> Iterator[list[Image]]:
    """Group images of new shards into batches that are written concurrently: their uploads together
    keep at most ``MAX_UPLOAD_BYTES`` in memory."""
    batch: list[Image] = []
    used = 0
    for image in images:
        memory = upload_memory(traits, image.length)
        if batch and (len(batch) == MAX_OPEN_SHARDS or used + memory > MAX_UPLOAD_BYTES):
            yield batch
            batch, used = [], 0
        batch.append(image)
        used += memory
    if batch:
        yield batch


# -- the recipe -----------------------------------------------------------------------------------

SPLITS = ("even", "none")


def reshard(
    snapshot: SnapshotReader,
    location: Location,
    shards: int,
    split: str = "even",
    advance: Advance = no_op,
) -> SnapshotReader:
    """Write ``snapshot`` again at ``location`` as ``shards`` shards; return the new, self-contained
    snapshot once it is committed. It has the old state, step, branch, parent, and metadata.

    ``split="even"`` cuts leaves with enough rows along dimension 0, as FSDP2 does
    (``torch.chunk``), so that rank r of as many ranks restores from shard r; ``"none"`` cuts no
    leaf. An uncut leaf goes to the shard with the fewest bytes. The memory is at most 256 MiB plus
    the indexes and 40 bytes per leaf of each. ``advance(nbytes)`` is called from several threads.
    If an earlier call has made the same snapshot there, it is returned. If this raises, nothing was
    committed, unless the error's ``outcome`` is "unknown".
    """
    origin = {"from": snapshot.digest, "shards": len(snapshot.manifest.shards)}
    node: dict[str, Any] = {"dict": origin | ({} if split == SPLITS[0] else {"split": split})}
    if (earlier := _find_earlier(snapshot, location, shards, node)) is not None:
        return earlier
    raise_if_exists(location)  # a run
    with snapshot.not_found_if_deleted():
        locations = windows.locate_leaves(snapshot)
        leaves = order_leaves(snapshot, locations)
        read = windows.make_reader(snapshot, leaves, locations)
        assignment = assign_leaves(leaves, shards, split)
        numbers = group_by_shard(assignment, shards)
        attempt, receipts = names.random_id(), list[Receipt]()
        with snapshot.pin_while_reading(), pins.hold_pin(location, attempt):
            all_images = (
                make_shard_image(leaves, assignment, numbers[shard], shard, shards)
                for shard in range(shards)
            )
            for images in batch_shards(all_images, location.store.traits):
                batch = range(len(receipts), len(receipts) + len(images))
                shard_names = [names.shard_name(shard, shards, attempt) for shard in batch]
                keys = [shard_key(location, name) for name in shard_names]
                digests = windows.write_images(location.store, keys, images, leaves, read, advance)
                for shard, name, image, chunk_digests in zip(
                    batch, shard_names, images, digests, strict=True
                ):
                    index_name = names.index_name(shard, shards, attempt)
                    entry = write_index(location, index_name, name, image, chunk_digests)
                    receipts.append(Receipt(shard, entry))
            metadata = {**snapshot.manifest.metadata["dict"], "resharded": node}
            manifest = full_manifest(
                snapshot,
                attempt=attempt,
                writer=f"limpet {__version__}",
                shards=check_receipts(location, receipts, shards),
                metadata={"dict": metadata},
            )
            # read the indexes back from the destination, as a load does
            SnapshotReader(location, manifest, "").read_indexes()
            resharded = put_manifest(location, manifest)
    events.emit(
        "resharded",
        url=snapshot.url,
        to=location.url,
        shards=shards,
        bytes=resharded.nbytes,
    )
    return resharded


def _find_earlier(
    snapshot: SnapshotReader, location: Location, shards: int, origin: dict[str, Any]
) -> SnapshotReader | None:
    """Return the snapshot that the same call has made at ``location`` before, or None."""

    def is_same(other: SnapshotReader) -> bool:
        made_from = other.manifest.metadata["dict"].get("resharded")
        return made_from == origin and len(other.manifest.shards) == shards

    return find_same(location, is_same, f"{snapshot.url} in {shards} shards")
