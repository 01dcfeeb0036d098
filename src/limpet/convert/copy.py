"""Copy a snapshot to another location, and check every digest on the way.

An incremental snapshot becomes a full one, whose attempt is derived from the manifest's digest, so
that all copies are identical. A copy writes files in the order of a save, and never removes one.
After a failure, its files are orphans for ``sweep``, or a repeated copy checks and uses them. It
begins only while no process deletes files of the version (see ``run/sweep.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from limpet import errors, events
from limpet.format import names
from limpet.format.digest import digest
from limpet.format.index import Index, IndexBox, IndexLeaf, ShardIndex, decode_index, encode_index
from limpet.format.manifest import (
    FEWER_LEAVES,
    MAX_MANIFEST,
    FileEntry,
    Manifest,
    Shard,
    decode_manifest,
)
from limpet.format.names import MANIFEST, parse_version
from limpet.format.safetensors import build_header
from limpet.format.sealed import FORMAT, check_length, seal
from limpet.layout.read_plan import ReadItem, chunk_read_items
from limpet.layout.shard_layout import full_shard_entries, leaf_boxes_from_index
from limpet.saving.commit import raise_if_exists
from limpet.snapshot import pins
from limpet.snapshot.chunks import merge_items, read_items
from limpet.snapshot.index_files import parse_index
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader, open_location
from limpet.storage.store import upload_memory
from limpet.threads import Workers, no_op
from limpet.types import MIB, Advance

MAX_UPLOAD_BYTES = 256 * MIB
"""How many bytes of parts the threads of a copy collect at most, unless one thread needs more. On
average, a part is half full, so this is twice of what they need."""


def copy_snapshot(
    snapshot: SnapshotReader, location: Location, advance: Advance = no_op
) -> SnapshotReader:
    """Copy ``snapshot``, in at most 256 MiB of memory; return the copy once it is committed.
    ``advance(nbytes)`` is called from several threads. If this raises, nothing was committed."""
    raise_if_exists(location)
    with snapshot.not_found_if_deleted():
        return _copy(snapshot, location, advance)


def _copy(snapshot: SnapshotReader, location: Location, advance: Advance) -> SnapshotReader:
    indexes, source = snapshot.indexes(), snapshot.location
    raw = source.store.get(source.key(MANIFEST), MAX_MANIFEST)
    manifest, manifest_digest = decode_manifest(raw, source.key(MANIFEST))
    if manifest_digest != snapshot.digest:
        raise errors.FormatError(
            f"{snapshot.url} was replaced after it was opened",
            expected=f"a manifest with digest {snapshot.digest}",
            found=manifest_digest,
            todo="Open the snapshot again",
        )
    if manifest.chain:
        copies = [_plan_full(snapshot, location, n, index) for n, index in enumerate(indexes)]
    else:
        copies = [
            _plan_same(source, location, shard, index)
            for shard, index in zip(manifest.shards, indexes, strict=True)
        ]
    shards = [shard_copy.shard for shard_copy in copies]
    if shards != manifest.shards:
        manifest = full_manifest(snapshot, attempt=attempt_of_copy(snapshot), shards=shards)
        raw, manifest_digest = seal(manifest)
    version = parse_version(location.folder.rpartition("/")[2])
    with snapshot.pin_while_reading(), pins.hold_pin(location, manifest.attempt, version):
        if version is not None:
            pins.require_no_deletion(location, version, of_files=True)
        for shard_copy in copies:
            _copy_shard(source, location, shard_copy, advance)
        for shard_copy in copies:
            _put_index(location, shard_copy)
            advance(len(shard_copy.index_bytes))
        copy = SnapshotReader(location, manifest, manifest_digest)
        _require_files(copy)
        location.store.put_if_absent(location.key(MANIFEST), raw)
    events.emit("copied", url=snapshot.url, to=location.url, bytes=copy.nbytes)
    return copy


def copy_shards(
    source: Location, location: Location, shards: Sequence[Shard], advance: Advance = no_op
) -> None:
    """Copy some shards of a full snapshot with their indexes, and commit nothing. Every byte is
    checked, and what the destination has already is not written again."""
    for shard in shards:
        raw = source.store.get(source.file_key(shard.index_path), MAX_MANIFEST)
        index = parse_index(source, shard, raw)
        shard_copy = _ShardCopy(index, shard, index, raw, None)
        _copy_shard(source, location, shard_copy, advance)
        _put_index(location, shard_copy)


def _put_index(location: Location, shard_copy: _ShardCopy) -> None:
    key = location.file_key(shard_copy.shard.index_path)
    try:
        location.store.put_if_absent(key, shard_copy.index_bytes)
    except errors.AlreadyExists as e:
        if location.store.get(key, MAX_MANIFEST) != shard_copy.index_bytes:
            raise _not_a_copy_error(location, key, "the index of this copy", "another file") from e


def _require_files(copy: SnapshotReader) -> None:
    """Read the indexes back, and check the lengths of the shards, before the commit. Raises
    ``CommitError``, not the ``FormatError`` of a damaged source."""
    try:
        copy.read_indexes()
    except errors.FormatError as e:
        raise errors.CommitError(
            f"The files of the copy {copy.url} are not what was written; nothing was committed",
            expected="the shards and indexes of the copy, which is pinned",
            found=e.what,
            todo="Find out what changes or deletes files at the destination, and copy again",
        ) from e


@dataclass(frozen=True, slots=True, eq=False)
class _ShardCopy:
    """The index of a shard, and the shard as the copy will have it: its entry in the manifest, its
    index, decoded and encoded, and its header, if that differs."""

    source_index: ShardIndex
    shard: Shard
    index: ShardIndex
    index_bytes: bytes
    new_header: bytes | None


def attempt_of_copy(snapshot: SnapshotReader) -> str:
    """Return the attempt id of a copy of the snapshot."""
    return snapshot.digest[:12] if snapshot.bases else snapshot.manifest.attempt


def find_copy(snapshot: SnapshotReader, location: Location) -> SnapshotReader | None:
    """Return the snapshot at ``location`` if it is a copy or the original of this one, or None if
    there is none. Raises ``AlreadyExists`` for any other one, and for a damaged one."""

    def is_copy(other: SnapshotReader) -> bool:
        return (
            other.digest == snapshot.digest
            or other.manifest.attempt == attempt_of_copy(snapshot)
            or snapshot.manifest.attempt == attempt_of_copy(other)
        )

    return find_same(location, is_copy, f"a copy of {snapshot.url}")


def find_same(
    location: Location, is_same: Callable[[SnapshotReader], bool], expected: str
) -> SnapshotReader | None:
    """Return the snapshot at ``location`` if it is what an earlier call has made there, or None if
    there is none. Raises ``AlreadyExists`` for any other one, and for a damaged one."""
    try:
        other = open_location(location)
        other.check_files()
    except errors.NotFound:
        return None
    except errors.FormatTooNew as e:
        raise errors.AlreadyExists(
            f"There is already a snapshot of a later format at {location.url}; nothing was changed",
            found=e.what,
            todo="Use a newer Limpet, or choose another location",
        ) from e
    except errors.FormatError as e:
        raise errors.AlreadyExists(
            f"There is already a damaged snapshot at {location.url}; nothing was changed",
            found=e.what,
            todo=f"Move its {MANIFEST} away, and nothing else (newer versions may refer to other"
            " files there), then try again; or choose another location",
        ) from e
    if not is_same(other):
        raise errors.AlreadyExists(
            f"There is already another snapshot at {location.url}; nothing was changed",
            expected=f"{expected}, or nothing",
            found=f"a snapshot that another save created at {other.manifest.created}",
            todo="Choose another location",
        )
    return other


def _plan_same(source: Location, location: Location, shard: Shard, index: ShardIndex) -> _ShardCopy:
    """Return the same shard, where the destination has its shards."""
    raw = source.store.get(source.file_key(shard.index_path), MAX_MANIFEST)
    path = location.shard_path(shard.name)
    shard = structs.replace(shard, path=path)
    return _ShardCopy(index, shard, replace(index, path=path), raw, None)


def _plan_full(
    snapshot: SnapshotReader, location: Location, number: int, index: ShardIndex
) -> _ShardCopy:
    """Return the full shard with the same image as an incremental one."""
    count, attempt = len(snapshot.manifest.shards), attempt_of_copy(snapshot)
    header = build_header(full_shard_entries(leaf_boxes_from_index(index)[0]))
    shift = len(header) - index.header
    leaves = [
        IndexLeaf(
            f.key, f.dtype, f.shape, [IndexBox(b.offsets, b.sizes, b.at + shift) for b in f.boxes]
        )
        for f in index.leaves
    ]
    cuts = (index.cuts + shift).tolist()
    full_index = Index(
        limpet=FORMAT,
        shard=names.shard_name(number, count, attempt),
        length=cuts[-1],
        header=len(header),
        leaves=leaves,
        cuts=cuts,
        digests=[digest(header), *map(index.chunk_digest, range(1, len(cuts)))],
        runs=[],
    )
    raw = encode_index(full_index)
    name = names.index_name(number, count, attempt)
    check_length(name, raw, MAX_MANIFEST, FEWER_LEAVES)
    path = location.shard_path(full_index.shard)
    shard = Shard(path, full_index.length, FileEntry(name, len(raw), digest(raw)), [])
    return _ShardCopy(index, shard, decode_index(raw, name, path=path), raw, header)


def full_manifest(snapshot: SnapshotReader, **changes: Any) -> Manifest:
    """Return the snapshot's manifest as that of a full snapshot, with changes of some fields."""
    fields = {f: getattr(snapshot.manifest, f) for f in Manifest.__struct_fields__}
    return Manifest(**{**fields, "chain": 0, **changes})


def _copy_shard(
    source: Location, location: Location, shard_copy: _ShardCopy, advance: Advance
) -> None:
    """Copy a shard, or check the file that the destination has."""
    if _is_copied(location, shard_copy.index, advance):
        return
    try:
        _write_shard(source, location, shard_copy, advance)
    except errors.AlreadyExists:  # a concurrent copy was faster
        if not _is_copied(location, shard_copy.index, no_op):
            raise


def _is_copied(location: Location, index: ShardIndex, advance: Advance) -> bool:
    """Return whether the destination has this shard, all checked; ``AlreadyExists``: another."""
    key = location.file_key(index.path)
    try:
        length = location.store.stat(key).length
    except errors.NotFound:
        return False
    if length != index.length:
        raise _not_a_copy_error(location, key, f"{index.length} bytes", f"{length} bytes")
    try:
        _read_shard(location, index, lambda item, data: advance(len(data)))
    except errors.DigestMismatch as e:
        raise _not_a_copy_error(location, key, e.expected, e.found) from e
    return True


def _write_shard(
    source: Location, location: Location, shard_copy: _ShardCopy, advance: Advance
) -> None:
    index, copy_index = shard_copy.source_index, shard_copy.index
    shift = copy_index.header - index.header
    traits = location.store.traits
    memory = 0 if traits.ordered else upload_memory(traits, copy_index.length)
    most_threads = max(1, MAX_UPLOAD_BYTES // memory) if memory else None
    with location.store.put(location.file_key(copy_index.path), copy_index.length) as upload:

        def write(item: ReadItem, data: memoryview) -> None:
            start, body = item.start, data
            if shard_copy.new_header is not None and not start:  # the header and what follows it
                upload.write_at(0, memoryview(shard_copy.new_header))
                start, body = index.header, data[index.header :]
            if body:
                upload.write_at(start + shift, body)
            advance(len(data))

        _read_shard(source, index, write, most_threads)
        upload.commit()


def _not_a_copy_error(
    location: Location, key: str, expected: object, found: object
) -> errors.AlreadyExists:
    return errors.AlreadyExists(
        f"{key} already exists in {location.store.url} and is not a copy of this snapshot's file",
        expected=expected,
        found=found,
        todo="Copy to another location, or delete that file first",
        key=key,
        store=location.store.url,
    )


def _read_shard(
    location: Location,
    index: ShardIndex,
    consume: Callable[[ReadItem, memoryview], object],
    most_threads: int | None = None,
) -> None:
    """Read a whole shard in several threads, check it, and pass its parts to ``consume``."""
    workers = Workers.create()
    if most_threads is not None:
        workers = replace(workers, threads=min(workers.threads, most_threads))

    def read(group: Sequence[ReadItem]) -> None:
        with read_items(location, index, group, workers) as verified:
            for item, buffer, start in verified:
                consume(item, buffer.view[item.start - start : item.stop - start])

    items = chunk_read_items(0, index.cuts, index.chunk_refs)
    workers.each(merge_items(location, [index], items, workers), read)
