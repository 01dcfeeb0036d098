"""Copying a snapshot to another place: every digest checked on the way.

A full snapshot is copied byte for byte. An incremental one becomes a full one; its attempt is made
from the digest of its manifest, so that every copy of it is the same, byte for byte.

In the order of a save: shards, then their indexes, then the manifest. Nothing is ever removed: what
a copy that failed left behind is checked and used when it is tried again, and is an orphan for
``sweep`` until then. So two copies to one place cannot harm each other either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast import events
from holdfast.buffers import shared_pool
from holdfast.engine.planning.read_plan import ReadItem, whole_file
from holdfast.engine.planning.shard_layout import holdings_of, whole_entries
from holdfast.engine.saving.commit import refuse_existing
from holdfast.engine.snapshot import pins
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.read import checked
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import AlreadyExists, DigestMismatch, FormatError, NotFound
from holdfast.format import names
from holdfast.format.digest import digest
from holdfast.format.index import Index, ShardIndex, decode_index, encode_index
from holdfast.format.index_columns import BoxAt, Leaf
from holdfast.format.manifest import (
    MAX_BYTES,
    File,
    Incremental,
    Manifest,
    Shard,
    decode_manifest,
    encode_manifest,
)
from holdfast.format.names import MANIFEST
from holdfast.format.safetensors import build_header
from holdfast.settings import read_settings
from holdfast.threads import in_parallel

Progress = Callable[[int], None]


def copy_snapshot(
    snapshot: Snapshot, place: Location, progress: Progress | None = None
) -> Snapshot:
    """Copy ``snapshot`` to ``place`` and return the copy once it is committed there.

    Uses at most 256 MiB. ``progress(nbytes)`` is called as bytes are done, from several threads.
    Raises ``AlreadyExists`` if there is a snapshot, ``FormatError`` if this one is damaged, and
    ``StoreError``; whenever it raises, nothing was committed.
    """
    refuse_existing(place)
    with snapshot.told_if_deleted():
        return _copy(snapshot, place, progress)


def _copy(snapshot: Snapshot, place: Location, progress: Progress | None) -> Snapshot:
    indexes = snapshot.indexes()
    raw = snapshot.place.store.get(snapshot.place.key(MANIFEST), MAX_BYTES)
    manifest, found = decode_manifest(raw, snapshot.place.key(MANIFEST))
    if found != snapshot.digest:
        raise FormatError(
            f"{snapshot.url} has been replaced since it was opened",
            expected=f"a manifest of digest {snapshot.digest}",
            found=found,
            todo="Open it anew",
        )
    if isinstance(manifest, Incremental):
        parts = [_whole(snapshot, n, index) for n, index in enumerate(indexes)]
        manifest = _manifest(snapshot, [part.shard for part in parts])
        raw, found = encode_manifest(manifest)
    else:
        parts = [_as_it_is(snapshot, *pair) for pair in zip(manifest.shards, indexes, strict=True)]
    with snapshot.pinned(), pins.held(place, manifest.attempt):
        for index, part in zip(indexes, parts, strict=True):
            _copy_shard(snapshot.place, place, index, part, progress)
        for part in parts:
            key = place.key(part.shard.index.name)
            try:
                place.store.put_if_absent(key, part.raw)
            except AlreadyExists as e:
                raise _no_copy(place, key, "the index of this copy", "another file") from e
            _tell(progress, len(part.raw))
        copy = Snapshot(place, manifest, found)
        copy.read_indexes()  # back through the store they went to; the shards by their length
        place.store.put_if_absent(place.key(MANIFEST), raw)
    events.emit("copied", url=snapshot.url, to=place.url, bytes=copy.nbytes)
    return copy


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A shard as it will be in the copy: its entry in the manifest, its index checked and as bytes;
    and its header where that is a new one."""

    shard: Shard
    index: ShardIndex
    raw: bytes
    header: bytes | None


def _as_it_is(snapshot: Snapshot, shard: Shard, index: ShardIndex) -> _Part:
    raw = snapshot.place.store.get(snapshot.place.key(shard.index.name), MAX_BYTES)
    return _Part(shard, index, raw, None)


def copied_attempt(snapshot: Snapshot) -> str:
    """The attempt of a copy of the snapshot."""
    return snapshot.digest[:12] if snapshot.bases else snapshot.manifest.attempt


def _whole(snapshot: Snapshot, number: int, index: ShardIndex) -> _Part:
    """The full shard that an incremental one stands for."""
    shards, attempt = len(snapshot.manifest.shards), copied_attempt(snapshot)
    header = build_header(whole_entries(holdings_of(index)[0]))
    shift = len(header) - index.header
    moved = [
        Leaf(f.key, f.dtype, f.shape, [BoxAt(b.offsets, b.sizes, b.at + shift) for b in f.boxes])
        for f in index.leaves
    ]
    cuts = (index.cuts + shift).tolist()
    made = Index(
        format=1,
        shard=names.shard_name(number, shards, attempt),
        length=cuts[-1],
        header=len(header),
        leaves=moved,
        cuts=cuts,
        digests=[digest(header), *map(index.digest, range(1, len(cuts)))],
    )
    raw = encode_index(made)
    file = File(names.index_name(number, shards, attempt), len(raw), digest(raw))
    shard = Shard(made.shard, made.length, file)
    return _Part(shard, decode_index(raw, file.name), raw, header)


def _manifest(snapshot: Snapshot, shards: list[Shard]) -> Manifest:
    fields = {f: getattr(snapshot.manifest, f) for f in Manifest.__struct_fields__}
    return Manifest(**{**fields, "attempt": copied_attempt(snapshot), "shards": shards})


def _copy_shard(
    source: Location,
    place: Location,
    index: ShardIndex,
    part: _Part,
    progress: Progress | None,
) -> None:
    made = part.index
    key = place.key(made.shard)
    try:
        length = place.store.stat(key).length
    except NotFound:
        pass
    else:
        if length != made.length:
            raise _no_copy(place, key, f"{made.length} bytes", f"{length} bytes")
        items = whole_file(0, made.cuts)
        try:
            _each(place, made, items, lambda item, data: _tell(progress, len(data)))
        except DigestMismatch as e:
            raise _no_copy(place, key, e.expected, e.found) from e
        return
    shift = made.header - index.header
    with place.store.put(key, made.length) as upload:

        def write(item: ReadItem, data: memoryview) -> None:
            if part.header is None:
                upload.write_at(item.start, data)
            elif item.first == 0:  # the header is an item of its own
                upload.write_at(0, memoryview(part.header))
            else:
                upload.write_at(item.start + shift, data)
            _tell(progress, len(data))

        _each(source, index, whole_file(0, index.cuts, index.places), write)
        upload.commit()


def _no_copy(place: Location, key: str, expected: object, found: object) -> AlreadyExists:
    return AlreadyExists(
        f"{key} is in {place.store.url} already, and is no copy",
        expected=expected,
        found=found,
        todo="Copy to another place, or delete that file first",
        key=key,
        store=place.store.url,
    )


def _each(
    place: Location,
    index: ShardIndex,
    items: list[ReadItem],
    use: Callable[[ReadItem, memoryview], None],
) -> None:
    """Read all items, check them, and hand their bytes on; by several threads."""
    pool = shared_pool()

    def work(item: ReadItem) -> None:
        with checked(place, index, item, pool) as (buffer, base):
            use(item, buffer.view[item.start - base : item.stop - base])

    in_parallel(items, work, min(read_settings().threads, len(items)))


def _tell(progress: Progress | None, nbytes: int) -> None:
    if progress is not None:
        progress(nbytes)
