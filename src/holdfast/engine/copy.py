"""Copying a snapshot to another place, as its bytes are: every digest checked on the way.

In the order of a save: shards, then their indexes, then the manifest. Nothing is ever removed: what
a copy that failed left behind is checked and used when it is tried again, and is an orphan for
``sweep`` until then. So two copies to one place cannot harm each other either.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast import events
from holdfast.engine import pin
from holdfast.engine.buffers import shared_pool
from holdfast.engine.commit import refuse_existing
from holdfast.engine.cover import ReadItem, whole_file
from holdfast.engine.location import Location
from holdfast.engine.parallel import in_parallel
from holdfast.engine.read import read_chunks
from holdfast.engine.snapshot import Snapshot
from holdfast.errors import AlreadyExists, FormatError, NotFound
from holdfast.format.index import ShardIndex
from holdfast.format.manifest import MAX_BYTES, decode_manifest
from holdfast.format.names import MANIFEST
from holdfast.settings import read_settings
from holdfast.storage.direct import Buffer

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
    with pin.held(place, manifest.attempt):
        for index in indexes:
            _copy_shard(snapshot.place, place, index, progress)
        for shard in manifest.shards:
            data = snapshot.place.store.get(snapshot.place.key(shard.index.name), MAX_BYTES)
            place.store.put_if_absent(place.key(shard.index.name), data)
            if progress is not None:
                progress(shard.index.length)
        copy = Snapshot(place, manifest, found)
        copy.indexes()  # read back through the store they went to; the shards by their length
        place.store.put_if_absent(place.key(MANIFEST), raw)
    events.emit("copied", url=snapshot.url, to=place.url, bytes=copy.nbytes)
    return copy


def _copy_shard(
    source: Location, place: Location, index: ShardIndex, progress: Progress | None
) -> None:
    items = whole_file(0, index.cuts)
    key = place.key(index.shard)
    try:
        length = place.store.stat(key).length
    except NotFound:
        pass
    else:
        if length != index.length:
            raise AlreadyExists(
                f"{key} is in {place.store.url} already, and is no copy",
                expected=f"{index.length} bytes",
                found=f"{length} bytes",
                todo="Copy to another place, or delete that file first",
                key=key,
                store=place.store.url,
            )
        _each(place, index, items, lambda item, data: _tell(progress, len(data)))
        return
    with place.store.put(key, index.length) as upload:

        def write(item: ReadItem, data: memoryview) -> None:
            upload.write_at(item.start, data)
            _tell(progress, len(data))

        _each(source, index, items, write)
        upload.commit()


def _each(
    place: Location,
    index: ShardIndex,
    items: list[ReadItem],
    use: Callable[[ReadItem, memoryview], None],
) -> None:
    """Read all items, check them, and hand their bytes on; by several threads."""
    pool = shared_pool()
    align = place.store.traits.alignment

    def work(item: ReadItem) -> None:
        base = item.start // align * align
        pooled = item.stop - base <= pool.unit
        buffer = pool.acquire() if pooled else Buffer(item.stop - base)
        try:
            read_chunks(place, index, item, base, buffer.view)
            use(item, buffer.view[item.start - base : item.stop - base])
        finally:
            if pooled:
                pool.release(buffer)

    in_parallel(items, work, min(read_settings().threads, len(items)))


def _tell(progress: Progress | None, nbytes: int) -> None:
    if progress is not None:
        progress(nbytes)
