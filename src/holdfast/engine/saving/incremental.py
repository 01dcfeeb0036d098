"""What of an image stands in an earlier version already: the base of an incremental save.

A chunk is referred to if the base has the same bytes (by digest) at the same offset of the same
box of the same leaf, of the same dtype; everything else is written. References lead to the file
that holds the bytes, never to another reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast import events
from holdfast.engine.distributed.collective import Collective
from holdfast.engine.planning import shard_layout
from holdfast.engine.planning.shard_layout import partial_shard_entries
from holdfast.engine.saving.image import Image, Piece
from holdfast.engine.snapshot import pins as pin
from holdfast.engine.snapshot.index_files import read_index
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import CommitError, FormatError, ManifestInvalid, NotFound
from holdfast.format import names
from holdfast.format.chunk_refs import ChunkRefs, expand_runs
from holdfast.format.index import ShardIndex
from holdfast.format.manifest import Shard, ShardReference
from holdfast.format.safetensors import build_header
from holdfast.ragged import Ints, exclusive_cumsum, ranges
from holdfast.threads import gc_paused
from holdfast.types import ALIGNMENT, DTYPES

MIN_BASE_FRACTION = 0.1
"""The part of a shard that the base must have. Below it, a full shard costs hardly more bytes and
depends on nothing."""

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class BaseVersion:
    """What one rank may refer to in an earlier version: ``shards`` of it with their ``indexes``.
    ``folder``: its name; ``chain``: how many versions lie between it and a full one."""

    folder: str
    chain: int
    shards: Sequence[Shard]
    indexes: Sequence[ShardIndex]

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, collective: Collective) -> BaseVersion:
        """Of the shards that this rank has written itself, or of all if it is the only one: with
        the same layout there is nothing else to be found, and with another it is written in full
        once."""
        manifest = snapshot.manifest
        mine = names.shard_name(collective.rank, collective.size, "")[: -len(".safetensors")]
        shards = [s for s in manifest.shards if collective.size == 1 or s.name.startswith(mine)]
        indexes: Sequence[ShardIndex] = []
        try:
            if collective.size == 1:
                indexes = snapshot.indexes()
            else:
                indexes = [read_index(snapshot.location, s) for s in shards]
        except (FormatError, NotFound) as e:
            events.emit("skipped", version=str(snapshot.version), error=e)
            shards = []
        return cls(snapshot.location.folder.rpartition("/")[2], manifest.chain, shards, indexes)


class BasePin(msgspec.Struct, frozen=True):
    """What rank 0 tells before any rank writes: whether the base is good, and a pin's key."""

    usable: bool
    key: str


@contextmanager
def pinned_base(
    location: Location, attempt: str, base: Snapshot | None, collective: Collective
) -> Iterator[BaseVersion | None]:
    """Pins the attempt, and ``base`` with all that it refers to; gives ``base`` as the store of
    ``place`` shows it now. Rank 0 pins, before any rank writes; the others look whether they see
    that. Raises ``CommitError`` if not: they write to another place.

    None, and the save is a full one, if it is not a version of the same run, was deleted, or
    is damaged as far as its manifest, its indexes and the lengths of its files tell.
    """
    found, told = None if base is None or collective.rank else _as_sibling(location, base), None
    with ExitStack() as pins:
        if collective.rank == 0:
            # each pin names the attempt too
            versions = [None] if found is None else sorted({found.version, *found.bases})
            keys = []
            for version in versions:
                keys.append(pin.create_pin(location, attempt, version))
                pins.callback(pin.remove_pin, location, keys[-1])
            if found is not None:
                try:
                    pin.require_manifest(found.location)
                    found.check_files()
                except (FormatError, NotFound) as e:
                    events.emit("skipped", version=str(found.version), error=e)
                    found = None
            told = BasePin(found is not None, keys[0])
        told = collective.broadcast(told, BasePin)
        if collective.rank:
            _check_visible(location, told.key, collective)
            if told.usable and base is not None:
                found = _as_sibling(location, base)  # not before rank 0 has found it there
        try:
            yield (
                BaseVersion.from_snapshot(found, collective)
                if told.usable and found is not None
                else None
            )
        except BaseException as e:
            # before the pins go: who does not see them then hears why
            if not collective.abort(e):
                pins.pop_all()  # nobody could be told: they stay, until this process ends
            raise


def _check_visible(location: Location, key: str, collective: Collective) -> None:
    """See that this rank sees what rank 0 has written, before it writes something itself."""
    rank = collective.rank
    try:
        location.store.stat(key)
    except NotFound as e:
        collective.raise_if_aborted()
        raise CommitError(
            f"Nothing was committed to {location.url}: rank {rank} does not see there what rank 0"
            " writes",
            expected=f"{key}, which rank 0 has just written",
            found="no such file: it is another folder, of another disk maybe",
            todo="Give all ranks one place that all of them reach: a shared file system, by one"
            " address",
            rank=rank,
            file=key,
        ) from e


def _as_sibling(location: Location, base: Snapshot) -> Snapshot | None:
    """The base as a neighbour of ``place``, or None if it is none."""
    run, _, folder = base.location.folder.rpartition("/")
    own, _, mine = location.folder.rpartition("/")
    try:
        _ = base.version
    except ManifestInvalid:
        return None
    if not mine or run != own or folder == mine or base.location.store.url != location.store.url:
        return None
    if base.location.store is location.store:
        return base
    return Snapshot(Location(location.store, base.location.folder), base.manifest, base.digest)


@dataclass(frozen=True, slots=True, eq=False)
class IncrementalLayout:
    """What an incremental shard holds of its image, and where the rest lies.

    ``image``: with the cuts that the digests are for; ``digests``, ``own``: of each of its chunks,
    and whether the shard holds it; ``starts``, ``stops`` (in the image) and ``at`` (in the shard)
    of the spans that it holds, in the shard's order; ``length``: of the shard; ``runs`` and
    ``refers`` as index and manifest have them.
    """

    image: Image
    header: bytes
    digests: list[str]
    written: NDArray[np.bool_]
    starts: list[int]
    stops: list[int]
    shard_offsets: list[int]
    length: int
    runs: list[tuple[int, int, int]]
    refers: list[ShardReference]

    def unneeded_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces of the image of which the shard holds nothing: those of its header too."""
        written = np.cumsum(self.written)
        first = np.searchsorted(self.image.cuts, [p.start for p in pieces], "right")
        last = np.searchsorted(self.image.cuts, [p.stop for p in pieces], "left")
        idle = written[last] == written[np.maximum(first, 1) - 1]
        return [p for p, none in zip(pieces, idle.tolist(), strict=True) if none]


@gc_paused()
def align_chunks(image: Image, base: BaseVersion) -> Image:
    """The image with the chunks of each large box cut as the base has cut that box.

    Otherwise a leaf that has grown, come or gone would shift all that lies behind it against the
    multiples of ``UNIT`` at which an image is cut, and nothing there would be found again.
    """
    own = image.cuts - len(image.header)
    indexes = base.indexes
    if any(np.array_equal(index.cuts - index.header, own) for index in indexes):
        return image
    lengths = np.array(image.box_ends) - np.array(image.box_starts)
    large = np.flatnonzero(lengths >= shard_layout.SMALL_BOX_BYTES).tolist()
    keys = {image.leaf_boxes[i].key for i in large}
    known = {
        (leaf.key, leaf.dtype, box.offsets): (
            index.cuts,
            box.at,
            DTYPES[leaf.dtype].itemsize * prod(box.sizes),
        )
        for index in indexes
        for leaf in index.leaves
        if leaf.key in keys
        for box in leaf.boxes
    }
    keep = np.ones(len(image.cuts), bool)
    parts = []
    for i in large:
        h, begin, end = image.leaf_boxes[i], image.box_starts[i], image.box_ends[i]
        found = known.get((h.key, h.dtype, h.box.offsets))
        if found is not None:
            cuts, at, nbytes = found
            parts.append(_cuts_between(cuts, at, at + min(nbytes, end - begin)) - at + begin)
            inside = slice(*np.searchsorted(image.cuts, [begin + 1, end]).tolist())
            keep[inside] = False
    cuts = np.unique(np.concatenate([image.cuts[keep], *parts]))
    # a leaf may have grown, or another writer's chunks may be longer than ours
    return replace(image, cuts=shard_layout.split_long_chunks(cuts))


def _cuts_between(cuts: Ints, low: int, high: int) -> Ints:
    return cuts[np.searchsorted(cuts, low, "right") : np.searchsorted(cuts, high)]


@gc_paused()
def make_incremental_layout(
    base: BaseVersion, image: Image, digests: list[str]
) -> IncrementalLayout | None:
    """What to write and what to refer to, or None if the base has too little of it."""
    cuts = image.cuts
    lengths = np.diff(cuts, prepend=0)
    found = _find_in_base(base, image, digests)
    own = np.array([f is None for f in found])
    data = int(cuts[-1] - cuts[0])
    if int(lengths[~own].sum()) < max(1, MIN_BASE_FRACTION * data):
        return None
    files: dict[tuple[str, int], int] = {}
    file = np.zeros(len(cuts), np.int64)
    at = np.zeros(len(cuts), np.int64)
    used: dict[int, int] = {}
    for c, place in enumerate(found):
        if place is not None:
            number = files.setdefault(place[:2], len(files) + 1)
            file[c], at[c] = number, place[2]
            used[number] = used.get(number, 0) + int(lengths[c])
    starts, stops, offsets = _written_spans(own, cuts)
    spans = zip(starts.tolist(), stops.tolist(), offsets.tolist(), strict=True)
    header = build_header(partial_shard_entries(image.leaf_boxes, image.box_starts, spans))
    for start, stop, offset in zip(starts.tolist(), stops.tolist(), offsets.tolist(), strict=True):
        first, last = np.searchsorted(cuts, [start, stop])
        at[first + 1 : last + 1] = cuts[first:last] - start + offset + len(header)
    apart = np.flatnonzero(~ChunkRefs(file, at).is_contiguous_with_next(cuts)[1:]) + 2
    firsts = [1, *apart.tolist()]
    packing = IncrementalLayout(
        image,
        header,
        digests,
        own,
        starts.tolist(),
        stops.tolist(),
        (offsets + len(header)).tolist(),
        len(header) + int((stops - starts).sum()),
        list(zip(firsts, file[firsts].tolist(), at[firsts].tolist(), strict=True)),
        [ShardReference(path, length, used[number]) for (path, length), number in files.items()],
    )
    # nothing is committed that would be refused when read
    shifted = cuts + (len(header) - len(image.header))
    expand_runs(packing.runs, shifted, packing.length, packing.refers, _invalid_index_error)
    return packing


def _invalid_index_error(expected: str, found: object) -> ManifestInvalid:
    return ManifestInvalid("An incremental index went wrong", expected=expected, found=str(found))


def _written_spans(written: NDArray[np.bool_], cuts: Ints) -> tuple[Ints, Ints, Ints]:
    """Spans of neighbouring chunks that are written, and where in the shard's data they go. Those
    of whole pages come first, so that as much as can be is read and written past the page cache."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], written[1:], [False]]).astype(np.int8)))
    starts, stops = cuts[edges[::2]], cuts[edges[1::2]]
    order = np.argsort((stops - starts) % ALIGNMENT != 0, kind="stable")
    starts, stops = starts[order], stops[order]
    return starts, stops, exclusive_cumsum(stops - starts)


def _find_in_base(
    base: BaseVersion, image: Image, digests: list[str]
) -> list[tuple[str, int, int] | None]:
    """For each chunk of the image path and length of the file that holds it, and where in it."""
    known: dict[tuple[int, str], tuple[str, int, int]] = {}
    for index, shard in zip(base.indexes, base.shards, strict=True):
        rows = [
            (hash((f.key, f.dtype, b.offsets)), b.at, DTYPES[f.dtype].itemsize * prod(b.sizes))
            for f in index.leaves
            for b in f.boxes
        ]
        lengths = {r.path: r.length for r in shard.refers}
        for c, mark in enumerate(_chunk_layout_hashes(rows, index.cuts), 1):
            path, at = index.locate_chunk(c)
            if path == shard.name:
                place = names.reference_path(base.folder, path), shard.length, at
            else:
                place = path, lengths[path], at
            known[mark, index.chunk_digest(c)] = place
    rows = [
        (hash((h.key, h.dtype, h.box.offsets)), begin, end - begin)
        for h, begin, end in zip(image.leaf_boxes, image.box_starts, image.box_ends, strict=True)
    ]
    marks = enumerate(_chunk_layout_hashes(rows, image.cuts), 1)
    return [None, *(known.get((mark, digests[c])) for c, mark in marks)]


def _chunk_layout_hashes(rows: list[tuple[int, int, int]], cuts: Ints) -> list[int]:
    """For each chunk but the header a number for what it holds: its length, and which boxes from
    which of their bytes on. ``rows``: hash of the box, where it begins, its bytes."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    table = table[table[:, 2] > 0]
    table = table[np.argsort(table[:, 1])]
    box, begins, stops = table[:, 0], table[:, 1], table[:, 1] + table[:, 2]
    starts, ends = cuts[:-1], cuts[1:]
    first = np.searchsorted(stops, starts, "right")
    counts = np.searchsorted(begins, ends, "left") - first
    chunk = np.repeat(np.arange(len(starts)), counts)
    row = ranges(first, counts)
    made = (ends - starts).astype(np.uint64)
    np.add.at(made, chunk, _mix_hash(box[row], begins[row] - starts[chunk]))
    marks: list[int] = made.tolist()
    return marks


def _mix_hash(box: Ints, offset: Ints) -> Hashes:
    """One number for a box at an offset, so that sums of them tell who is in a chunk and where."""
    mixed = box.astype(np.uint64) + offset.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    return mixed
