"""The manifest: what it holds, and total validation.

A manifest is the commit of a snapshot. It holds the tree of the state with every plain value,
and names the shards and their indexes by length and digest. See ``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from holdfast.format import names
from holdfast.format.digest import is_digest
from holdfast.format.sealed import is_utc_time, make_require, seal, unseal

MAX_MANIFEST = 1 << 30
"""A longer manifest or index is refused before it is read."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that the manifest vouches for."""

    name: str
    length: int
    digest: str


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shard by name and length in bytes, and its index, whose digests cover the shard."""

    name: str
    length: int
    index: FileEntry

    @property
    def refers(self) -> Sequence[ShardReference]:
        """The files of earlier versions that hold a part of it; none in number 1."""
        return ()


class ShardReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shard of an earlier version: its path from this version's folder, its length, and how many
    of its bytes are referred to."""

    path: str
    length: int
    bytes: int


class IncrementalShard(Shard, frozen=True, forbid_unknown_fields=True):
    """A shard of number 2: what is not in it lies in the files that it ``refers`` to."""

    refers: Sequence[ShardReference]


class Parent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The snapshot that training had been resumed from, or that was saved just before."""

    version: str
    digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a snapshot is. ``tree`` and ``metadata`` are nodes as ``format/tree.py`` has them."""

    attempt: str
    created: str
    writer: str
    step: int | None
    branch: int
    parent: Parent | None
    shards: Sequence[Shard]
    metadata: Any
    tree: Any

    @property
    def chain(self) -> int:
        """How many versions lie between it and a full one: 0 for a full one."""
        return 0


class IncrementalManifest(Manifest, frozen=True, forbid_unknown_fields=True):
    """A manifest of number 2: of a snapshot that refers to files of earlier versions."""

    shards: Sequence[IncrementalShard]
    chain: int


def encode_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """The file's bytes and its digest."""
    return seal(manifest, 2 if isinstance(manifest, IncrementalManifest) else 1)


def decode_manifest(raw: bytes, file: str) -> tuple[Manifest, str]:
    """The manifest and its digest, every field but the tree checked.

    Raises ``ManifestInvalid``, ``DigestMismatch`` or ``FormatTooNew``, naming ``file``.
    """
    manifest, made = unseal(raw, Manifest, file, {2: IncrementalManifest})
    _check(manifest, file)
    return manifest, made


def _check(manifest: Manifest, file: str) -> None:
    demand = make_require(file)
    demand(names.is_attempt(manifest.attempt), "an attempt of 12 hex digits", manifest.attempt)
    demand(is_utc_time(manifest.created), "a time of day in UTC", manifest.created)
    step, branch = manifest.step, manifest.branch
    demand(step is None or 0 <= step < 10**18, "a step below 10**18", step)
    demand(0 <= branch < 10**9, "a branch below 10**9", branch)
    if manifest.parent is not None:
        version = names.parse_version(manifest.parent.version)
        demand(version is not None, "a version", manifest.parent.version)
        demand(is_digest(manifest.parent.digest), "a digest", manifest.parent.digest)
    seen: set[str] = set()
    for shard in manifest.shards:
        index = shard.index
        demand(names.is_shard_name(shard.name), "the name of a shard", shard.name)
        beside = shard.name.removesuffix(".safetensors") + ".index.json"
        demand(index.name == beside, f"an index called {beside}", index.name)
        demand(is_digest(index.digest), "a digest of 32 hex digits", index.digest)
        demand(0 <= shard.length < 1 << 62, "a length in bytes", shard.length)
        demand(0 <= index.length <= MAX_MANIFEST, "a length in bytes", index.length)
        demand(shard.name not in seen, "every file once", shard.name)
        seen.add(shard.name)
        for referred in shard.refers:
            _check_reference(referred, manifest, demand)
        paths = [r.path for r in shard.refers]
        demand(len(set(paths)) == len(paths), "every file that is referred to once", paths)
    if isinstance(manifest, IncrementalManifest):
        demand(0 < manifest.chain < 1 << 31, "a chain of 1 or more", manifest.chain)
        refers = any(shard.refers for shard in manifest.shards)
        demand(refers, "a shard that refers to another version", "none")


def _check_reference(
    reference: ShardReference, manifest: Manifest, require: Callable[[bool, str, object], None]
) -> None:
    found = names.parse_reference(reference.path)
    other = found is not None and (found[0].step, found[0].branch) != (
        manifest.step,
        manifest.branch,
    )
    require(other, "a path to another version, like ../version_1/shard-...", reference.path)
    require(0 < reference.length < 1 << 62, "a length in bytes", reference.length)
    require(0 < reference.bytes <= reference.length, "1 byte to the file's length", reference.bytes)
