"""The manifest: what it holds, and total validation.

A manifest is the commit of a snapshot. It holds the tree of the state with every plain value,
and names the shards and their indexes by length and digest. See ``docs/format.md``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.format import names
from holdfast.format.digest import is_digest
from holdfast.format.sealed import demands, is_time, seal, unseal

MAX_BYTES = 1 << 30
"""A longer manifest or index is refused before it is read."""


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that the manifest vouches for."""

    name: str
    length: int
    digest: str


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shard by name and length in bytes, and its index, whose digests cover the shard."""

    name: str
    length: int
    index: File


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
    shards: list[Shard]
    metadata: Any
    tree: Any


def encode_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """The file's bytes and its digest."""
    return seal(manifest)


def decode_manifest(raw: bytes, file: str) -> tuple[Manifest, str]:
    """The manifest and its digest, every field but the tree checked.

    Raises ``ManifestInvalid``, ``DigestMismatch`` or ``FormatTooNew``, naming ``file``.
    """
    manifest, made = unseal(raw, Manifest, file)
    _check(manifest, file)
    return manifest, made


def _check(manifest: Manifest, file: str) -> None:
    demand = demands(file)
    demand(names.is_attempt(manifest.attempt), "an attempt of 12 hex digits", manifest.attempt)
    demand(is_time(manifest.created), "a time of day in UTC", manifest.created)
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
        demand(names.is_shard(shard.name), "the name of a shard", shard.name)
        beside = shard.name.removesuffix(".safetensors") + ".index.json"
        demand(index.name == beside, f"an index called {beside}", index.name)
        demand(is_digest(index.digest), "a digest of 32 hex digits", index.digest)
        demand(0 <= shard.length < 1 << 62, "a length in bytes", shard.length)
        demand(0 <= index.length <= MAX_BYTES, "a length in bytes", index.length)
        demand(shard.name not in seen, "every file once", shard.name)
        seen.add(shard.name)
