"""Reads the indexes of a snapshot, and checks its files against its manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import numpy as np

from limpet.errors import DigestMismatch, FormatError, ManifestInvalid, NotFound
from limpet.format.digest import digest
from limpet.format.index import LeafSchema, SchemaCache, ShardIndex, decode_index
from limpet.format.manifest import MAX_MANIFEST, Shard
from limpet.format.tree import LeafSpecs
from limpet.ragged import Ints
from limpet.snapshot.location import Location
from limpet.text import VERIFY_ADVICE
from limpet.threads import look_up_each
from limpet.types import MIB

_BYTES_AT_ONCE = 16 * MIB
"""The size of the indexes that are read before they are parsed."""

_OPEN_IN_RUN = (
    "Open the snapshot as RUN/version_N, or make a self-contained copy with `limpet copy`"
)


def read_index(location: Location, shard: Shard) -> ShardIndex:
    """Read the index of a shard, and check its length, digest, and content against the manifest.
    Raises ``FormatError`` or ``StoreError``."""
    check_length(location, shard.index_path, shard.index.length)
    raw = location.store.get(location.file_key(shard.index_path), MAX_MANIFEST)
    return parse_index(location, shard, raw)


def read_indexes(location: Location, shards: Sequence[Shard]) -> list[ShardIndex]:
    """Read the indexes of all shards of a snapshot, whose lengths were checked before."""
    schema_cache = SchemaCache()
    indexes, raw = list[ShardIndex](), dict[str, bytes]()

    def read(shard: Shard) -> None:
        raw[shard.name] = location.store.get(location.file_key(shard.index_path), MAX_MANIFEST)

    group, nbytes = list[Shard](), 0
    for number, shard in enumerate(shards, 1):
        group.append(shard)
        nbytes += shard.index.length
        if nbytes >= _BYTES_AT_ONCE or number == len(shards):
            look_up_each(group, read)
            for each in group:
                indexes.append(parse_index(location, each, raw.pop(each.name), schema_cache))
            group, nbytes = [], 0
    return indexes


def parse_index(
    location: Location, shard: Shard, raw: bytes, schema_cache: SchemaCache | None = None
) -> ShardIndex:
    """Do the same as ``read_index`` for bytes. ``schema_cache``: one for a snapshot."""
    file = location.file_key(shard.index_path)
    actual = digest(raw)
    if actual != shard.index.digest:
        raise DigestMismatch(
            f"{location.url}/{shard.index_path} is damaged",
            expected=f"digest {shard.index.digest}",
            found=actual,
            todo=VERIFY_ADVICE,
            file=file,
            offset=0,
        )
    index = decode_index(raw, file, shard.refers, schema_cache, shard.path)
    if (index.shard, index.length) != (shard.name, shard.length):
        raise ManifestInvalid(
            f"{file} is the index of another shard",
            expected=f"{shard.name} of {shard.length} bytes",
            found=f"{index.shard} of {index.length} bytes",
            file=file,
        )
    return index


def check_length(location: Location, path: str, length: int) -> None:
    """Raise ``FormatError`` if the file at a path from the snapshot's folder is missing, has
    another length, or is outside of the store. Raises ``StoreError``."""
    file = location.file_key(path)
    if not location.folder and file != path:
        raise FormatError(
            f"{location.url} refers to {path}, which is outside of the store",
            expected="a snapshot that is opened as part of its run",
            found="a store whose root is the snapshot's folder",
            todo=_OPEN_IN_RUN,
            file=file,
            offset=0,
        )
    try:
        actual = location.store.stat(file).length
    except NotFound as e:
        raise FormatError(
            f"{location.url} is damaged: {path} is missing",
            expected=f"{length} bytes",
            found=e.found or "no such file",
            todo=VERIFY_ADVICE if location.folder else _OPEN_IN_RUN,
            file=file,
            offset=0,
        ) from e
    if actual != length:
        raise FormatError(
            f"{location.url} is damaged: {path} has the wrong length",
            expected=f"{length} bytes",
            found=f"{actual} bytes",
            todo=VERIFY_ADVICE,
            file=file,
            offset=min(actual, length),
        )


def check_indexes(url: str, file: str, leaves: LeafSpecs, indexes: Sequence[ShardIndex]) -> None:
    """Raise ``ManifestInvalid`` unless the indexes of a snapshot hold all elements of its
    ``leaves``. ``file``: the key of its manifest."""

    def contradiction_error(expected: str, found: str, leaf: str) -> ManifestInvalid:
        return ManifestInvalid(
            f"The manifest and the indexes of {url} contradict each other",
            expected=expected,
            found=found,
            todo="Load another version; this one was not written by a correct Limpet",
            file=file,
            leaf=leaf,
        )

    numels_by_schema = dict[LeafSchema, Ints]()
    for index in indexes:
        schema, numels = index.leaves.schema, index.leaves.stored_numels()
        if schema in numels_by_schema:
            # clipped, so that the next sum does not overflow 64 bits
            numels = np.minimum(numels + numels_by_schema[schema], 1 << 62)
        else:  # shards that share a schema need only one check of its leaves
            for key, *spec in zip(schema.keys, schema.dtypes, schema.shapes, strict=True):
                if leaves.get(key) != tuple(spec):
                    raise contradiction_error(
                        f"leaf {key} as {leaves.get(key)}",
                        f"{tuple(spec)} in the index of {index.shard}",
                        key,
                    )
        numels_by_schema[schema] = numels
    stored: Counter[str] = Counter()
    for schema, numels in numels_by_schema.items():
        for key, numel in zip(schema.keys, numels.tolist(), strict=True):
            stored[key] += numel
    for key, (_, shape) in leaves.items():
        # every element of a shape has stored bytes, so a shape cannot demand too much memory
        if key not in stored or stored[key] < prod(shape):
            raise contradiction_error(
                f"{prod(shape)} elements of leaf {key[:200]!r}",
                f"{stored[key]} in the indexes",
                key,
            )
