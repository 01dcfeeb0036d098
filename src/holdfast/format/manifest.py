"""The manifest of a snapshot: its content and its complete validation.

Writing the manifest commits a snapshot. The manifest contains the tree of the state with every
plain value, and lists the shards and their indexes with lengths and digests. See
``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from holdfast.format import names
from holdfast.format.digest import is_digest
from holdfast.format.sealed import is_utc_time, make_require, seal, unseal

MAX_MANIFEST = 1 << 30
"""The maximum size of a manifest or index in bytes. A longer one is rejected before it is read."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that the manifest lists with its length in bytes and its digest."""

    name: str
    length: int
    digest: str


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name and length in bytes of a shard, and its index, whose digests cover the shard."""

    name: str
    length: int
    index: FileEntry

    @property
    def refers(self) -> Sequence[ShardReference]:
        """The files of earlier versions that hold a part of the shard; none in format 1."""
        return ()


class ShardReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shard of an earlier version that a shard refers to.

    ``path``: its path from this version's folder. ``length``: its length in bytes. ``bytes``: the
    number of its bytes that the shard uses.
    """

    path: str
    length: int
    bytes: int


class IncrementalShard(Shard, frozen=True, forbid_unknown_fields=True):
    """A shard of format 2: the data that it does not contain is in the files of ``refers``."""

    refers: Sequence[ShardReference]


class Parent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The previous snapshot: the one that training saved or resumed before this one."""

    version: str
    digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a snapshot. ``tree`` and ``metadata`` are nodes; see ``format/tree.py``."""

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
        """The number of versions since the last full version; 0 for a full version."""
        return 0


class IncrementalManifest(Manifest, frozen=True, forbid_unknown_fields=True):
    """A manifest of format 2: its snapshot refers to files of earlier versions."""

    shards: Sequence[IncrementalShard]
    chain: int


def encode_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """Return the bytes of the file and its digest."""
    return seal(manifest, 2 if isinstance(manifest, IncrementalManifest) else 1)


def decode_manifest(raw: bytes, file: str) -> tuple[Manifest, str]:
    """Return the manifest and its digest. Every field except the tree is checked.

    Raises ``ManifestInvalid``, ``DigestMismatch``, or ``FormatTooNew``, which name ``file``.
    """
    manifest, manifest_digest = unseal(raw, Manifest, file, {2: IncrementalManifest})
    _check(manifest, file)
    return manifest, manifest_digest


def _check(manifest: Manifest, file: str) -> None:
    require = make_require(file)
    require(names.is_attempt(manifest.attempt), "an attempt of 12 hex digits", manifest.attempt)
    require(is_utc_time(manifest.created), "a time in UTC", manifest.created)
    step, branch = manifest.step, manifest.branch
    require(step is None or 0 <= step < 10**18, "a step below 10**18", step)
    require(0 <= branch < 10**9, "a branch below 10**9", branch)
    if manifest.parent is not None:
        version = names.parse_version(manifest.parent.version)
        require(version is not None, "a version", manifest.parent.version)
        require(is_digest(manifest.parent.digest), "a digest", manifest.parent.digest)
    seen: set[str] = set()
    for shard in manifest.shards:
        index = shard.index
        require(names.is_shard_name(shard.name), "a shard name", shard.name)
        index_name = shard.name.removesuffix(".safetensors") + ".index.json"
        require(index.name == index_name, f"an index named {index_name}", index.name)
        require(is_digest(index.digest), "a digest of 32 hex digits", index.digest)
        require(0 <= shard.length < 1 << 62, "a length in bytes", shard.length)
        require(0 <= index.length <= MAX_MANIFEST, "a length in bytes", index.length)
        require(shard.name not in seen, "each shard only once", shard.name)
        seen.add(shard.name)
        for reference in shard.refers:
            _check_reference(reference, manifest, require)
        paths = [r.path for r in shard.refers]
        require(len(set(paths)) == len(paths), "each reference only once", paths)
    if isinstance(manifest, IncrementalManifest):
        require(0 < manifest.chain < 1 << 31, "a chain of 1 or more", manifest.chain)
        any_reference = any(shard.refers for shard in manifest.shards)
        require(any_reference, "a shard that refers to another version", "none")


def _check_reference(
    reference: ShardReference, manifest: Manifest, require: Callable[[bool, str, object], None]
) -> None:
    target = names.parse_reference(reference.path)
    other_version = target is not None and (target[0].step, target[0].branch) != (
        manifest.step,
        manifest.branch,
    )
    require(other_version, "a path to another version, like ../version_1/shard-...", reference.path)
    require(0 < reference.length < 1 << 62, "a length in bytes", reference.length)
    require(0 < reference.bytes <= reference.length, "1 byte to the file's length", reference.bytes)
