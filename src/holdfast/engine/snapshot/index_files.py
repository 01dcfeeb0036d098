"""The files of a snapshot, held against what its manifest says of them."""

from __future__ import annotations

from holdfast.engine.snapshot.location import Location
from holdfast.errors import DigestMismatch, FormatError, ManifestInvalid, NotFound
from holdfast.format.digest import digest
from holdfast.format.index import ShardIndex, decode_index
from holdfast.format.index_columns import SchemaCache
from holdfast.format.manifest import MAX_MANIFEST, Shard


def read_index(
    location: Location, shard: Shard, schema_cache: SchemaCache | None = None
) -> ShardIndex:
    """The index of a shard, its bytes and its claims checked against the manifest. ``alike``: of
    the snapshot's other indexes."""
    file = location.key(shard.index.name)
    check_length(location, shard.index.name, shard.index.length)
    return parse_index(location, shard, location.store.get(file, MAX_MANIFEST), schema_cache)


def parse_index(
    location: Location, shard: Shard, raw: bytes, schema_cache: SchemaCache | None = None
) -> ShardIndex:
    """As ``read_index``, of bytes that are there."""
    file = location.key(shard.index.name)
    found = digest(raw)
    if found != shard.index.digest:
        raise DigestMismatch(
            f"{location.url}/{shard.index.name} is damaged",
            expected=f"digest {shard.index.digest}",
            found=found,
            todo="Take another version; `holdfast verify` shows which are intact",
            file=file,
            offset=0,
        )
    index = decode_index(raw, file, shard.refers, schema_cache)
    if (index.shard, index.length) != (shard.name, shard.length):
        raise ManifestInvalid(
            f"{file} is the index of another shard",
            expected=f"{shard.name} of {shard.length} bytes",
            found=f"{index.shard} of {index.length} bytes",
            file=file,
        )
    return index


def file_key(location: Location, path: str) -> str:
    """The key of a file by its path from the snapshot's folder."""
    return location.run_key(path[3:]) if path.startswith("../") else location.key(path)


def check_length(location: Location, name: str, length: int) -> None:
    """See that a file is there, with its length. Raises ``FormatError`` or ``StoreError``.

    ``name``: its path from the snapshot's folder.
    """
    file = file_key(location, name)
    if not location.folder and file != name:
        raise FormatError(
            f"{location.url} refers to {name}, which cannot be reached from here",
            expected="a snapshot opened within its run",
            found="a store that ends at the snapshot's own folder",
            todo="Open it as RUN/version_N; `holdfast copy` makes it self-contained",
            file=file,
            offset=0,
        )
    try:
        found = location.store.stat(file).length
    except NotFound as e:
        raise FormatError(
            f"{location.url} is damaged: {name} is missing",
            expected=f"{length} bytes",
            found="no such file",
            todo="Take another version; `holdfast verify` shows which are intact",
            file=file,
            offset=0,
        ) from e
    if found != length:
        raise FormatError(
            f"{location.url} is damaged: {name} has another length",
            expected=f"{length} bytes",
            found=f"{found} bytes",
            todo="Take another version; `holdfast verify` shows which are intact",
            file=file,
            offset=min(found, length),
        )
