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
from holdfast.engine.planning.read_plan import ReadItem, chunk_read_items
from holdfast.engine.planning.shard_layout import full_shard_entries, leaf_boxes_from_index
from holdfast.engine.saving.commit import raise_if_exists
from holdfast.engine.snapshot import pins
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.read import read_verified_chunks
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import AlreadyExists, DigestMismatch, FormatError, NotFound
from holdfast.format import names
from holdfast.format.digest import digest
from holdfast.format.index import Index, ShardIndex, decode_index, encode_index
from holdfast.format.index_columns import IndexBox, IndexLeaf
from holdfast.format.manifest import (
    MAX_MANIFEST,
    FileEntry,
    IncrementalManifest,
    Manifest,
    Shard,
    decode_manifest,
    encode_manifest,
)
from holdfast.format.names import MANIFEST
from holdfast.format.safetensors import build_header
from holdfast.settings import read_settings
from holdfast.threads import in_parallel

Advance = Callable[[int], None]


def copy_snapshot(
    snapshot: Snapshot, location: Location, advance: Advance | None = None
) -> Snapshot:
    """Copy ``snapshot`` to ``place`` and return the copy once it is committed there.

    Uses at most 256 MiB. ``progress(nbytes)`` is called as bytes are done, from several threads.
    Raises ``AlreadyExists`` if there is a snapshot, ``FormatError`` if this one is damaged, and
    ``StoreError``; whenever it raises, nothing was committed.
    """
    raise_if_exists(location)
    with snapshot.not_found_if_deleted():
        return _copy(snapshot, location, advance)


def _copy(snapshot: Snapshot, location: Location, advance: Advance | None) -> Snapshot:
    indexes = snapshot.indexes()
    raw = snapshot.location.store.get(snapshot.location.key(MANIFEST), MAX_MANIFEST)
    manifest, found = decode_manifest(raw, snapshot.location.key(MANIFEST))
    if found != snapshot.digest:
        raise FormatError(
            f"{snapshot.url} has been replaced since it was opened",
            expected=f"a manifest of digest {snapshot.digest}",
            found=found,
            todo="Open it anew",
        )
    if isinstance(manifest, IncrementalManifest):
        parts = [_plan_full(snapshot, n, index) for n, index in enumerate(indexes)]
        manifest = _build_manifest(snapshot, [part.shard for part in parts])
        raw, found = encode_manifest(manifest)
    else:
        parts = [
            _plan_unchanged(snapshot, *pair) for pair in zip(manifest.shards, indexes, strict=True)
        ]
    with snapshot.pin_while_reading(), pins.hold_pin(location, manifest.attempt):
        for index, part in zip(indexes, parts, strict=True):
            _copy_shard(snapshot.location, location, index, part, advance)
        for part in parts:
            key = location.key(part.shard.index.name)
            try:
                location.store.put_if_absent(key, part.index_bytes)
            except AlreadyExists as e:
                raise _not_a_copy_error(
                    location, key, "the index of this copy", "another file"
                ) from e
            _report_progress(advance, len(part.index_bytes))
        copy = Snapshot(location, manifest, found)
        copy.read_indexes()  # back through the store they went to; the shards by their length
        location.store.put_if_absent(location.key(MANIFEST), raw)
    events.emit("copied", url=snapshot.url, to=location.url, bytes=copy.nbytes)
    return copy


@dataclass(frozen=True, slots=True, eq=False)
class _ShardCopy:
    """A shard as it will be in the copy: its entry in the manifest, its index checked and as bytes;
    and its header where that is a new one."""

    shard: Shard
    index: ShardIndex
    index_bytes: bytes
    new_header: bytes | None


def _plan_unchanged(snapshot: Snapshot, shard: Shard, index: ShardIndex) -> _ShardCopy:
    raw = snapshot.location.store.get(snapshot.location.key(shard.index.name), MAX_MANIFEST)
    return _ShardCopy(shard, index, raw, None)


def attempt_of_copy(snapshot: Snapshot) -> str:
    """The attempt of a copy of the snapshot."""
    return snapshot.digest[:12] if snapshot.bases else snapshot.manifest.attempt


def _plan_full(snapshot: Snapshot, number: int, index: ShardIndex) -> _ShardCopy:
    """The full shard that an incremental one stands for."""
    shards, attempt = len(snapshot.manifest.shards), attempt_of_copy(snapshot)
    header = build_header(full_shard_entries(leaf_boxes_from_index(index)[0]))
    shift = len(header) - index.header
    moved = [
        IndexLeaf(
            f.key, f.dtype, f.shape, [IndexBox(b.offsets, b.sizes, b.at + shift) for b in f.boxes]
        )
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
        digests=[digest(header), *map(index.chunk_digest, range(1, len(cuts)))],
    )
    raw = encode_index(made)
    file = FileEntry(names.index_name(number, shards, attempt), len(raw), digest(raw))
    shard = Shard(made.shard, made.length, file)
    return _ShardCopy(shard, decode_index(raw, file.name), raw, header)


def _build_manifest(snapshot: Snapshot, shards: list[Shard]) -> Manifest:
    fields = {f: getattr(snapshot.manifest, f) for f in Manifest.__struct_fields__}
    return Manifest(**{**fields, "attempt": attempt_of_copy(snapshot), "shards": shards})


def _copy_shard(
    source: Location,
    location: Location,
    index: ShardIndex,
    shard_copy: _ShardCopy,
    advance: Advance | None,
) -> None:
    made = shard_copy.index
    key = location.key(made.shard)
    try:
        length = location.store.stat(key).length
    except NotFound:
        pass
    else:
        if length != made.length:
            raise _not_a_copy_error(location, key, f"{made.length} bytes", f"{length} bytes")
        items = chunk_read_items(0, made.cuts)
        try:
            _read_items(
                location, made, items, lambda item, data: _report_progress(advance, len(data))
            )
        except DigestMismatch as e:
            raise _not_a_copy_error(location, key, e.expected, e.found) from e
        return
    shift = made.header - index.header
    with location.store.put(key, made.length) as upload:

        def write(item: ReadItem, data: memoryview) -> None:
            if shard_copy.new_header is None:
                upload.write_at(item.start, data)
            elif item.first_chunk == 0:  # the header is an item of its own
                upload.write_at(0, memoryview(shard_copy.new_header))
            else:
                upload.write_at(item.start + shift, data)
            _report_progress(advance, len(data))

        _read_items(source, index, chunk_read_items(0, index.cuts, index.chunk_refs), write)
        upload.commit()


def _not_a_copy_error(
    location: Location, key: str, expected: object, found: object
) -> AlreadyExists:
    return AlreadyExists(
        f"{key} is in {location.store.url} already, and is no copy",
        expected=expected,
        found=found,
        todo="Copy to another place, or delete that file first",
        key=key,
        store=location.store.url,
    )


def _read_items(
    location: Location,
    index: ShardIndex,
    items: list[ReadItem],
    consume: Callable[[ReadItem, memoryview], None],
) -> None:
    """Read all items, check them, and hand their bytes on; by several threads."""
    pool = shared_pool()

    def work(item: ReadItem) -> None:
        with read_verified_chunks(location, index, item, pool) as (buffer, base):
            consume(item, buffer.view[item.start - base : item.stop - base])

    in_parallel(items, work, min(read_settings().threads, len(items)))


def _report_progress(advance: Advance | None, nbytes: int) -> None:
    if advance is not None:
        advance(nbytes)
