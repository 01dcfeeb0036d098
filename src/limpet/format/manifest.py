"""The manifest of a snapshot: its content and its complete validation.

Writing it commits a snapshot. It contains the tree of the state with every plain value, and lists
the shards and their indexes with lengths and digests. See ``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from limpet.format.digest import Digest
from limpet.format.names import MAX_STEP, Attempt, ShardPath, VersionName, parse_reference
from limpet.format.sealed import is_utc_time, require, unseal
from limpet.format.strict_json import StrictDecoder

MAX_MANIFEST = 1 << 30
"""The maximum size of a manifest or index in bytes. A longer one is rejected before it is read."""

FEWER_LEAVES = "Store small values in fewer, larger tensors, or save with more ranks"
"""The advice for a state whose manifest or index would be too long."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that the manifest lists with its length in bytes and its digest."""

    name: str
    length: Annotated[int, Meta(ge=0, le=MAX_MANIFEST)]
    digest: Digest


class ShardReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shard of an earlier version: its path from this version's folder, its length, and how many
    ``bytes`` of it are used."""

    path: str
    length: Annotated[int, Meta(gt=0, lt=1 << 62)]
    bytes: Annotated[int, Meta(gt=0)]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shard, and its index, in the same folder, whose digests cover it. ``path``: from the
    version's folder. ``refers``: files of earlier versions with the data that the shard lacks."""

    path: ShardPath
    length: Annotated[int, Meta(ge=0, lt=1 << 62)]
    index: FileEntry
    refers: Sequence[ShardReference]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def index_path(self) -> str:
        """The path of the index from the version's folder."""
        return self.path.removesuffix(self.name) + self.index.name


class Parent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The previous snapshot: the one that training saved or resumed before this one."""

    version: VersionName
    digest: Digest


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a snapshot. ``tree`` and ``metadata`` are nodes (``format/tree.py``).
    ``chain``: the number of versions since the last full one."""

    attempt: Attempt
    created: str
    writer: str
    step: Annotated[int, Meta(ge=0, lt=MAX_STEP + 1)] | None
    branch: Annotated[int, Meta(ge=0, lt=10**9)]
    parent: Parent | None
    chain: Annotated[int, Meta(ge=0, lt=1 << 31)]
    shards: Sequence[Shard]
    metadata: Any
    tree: Any


_MANIFEST = StrictDecoder(msgspec.json.Decoder(Manifest))


def decode_manifest(raw: bytes, file: str) -> tuple[Manifest, str]:
    """Return the manifest and its digest; ``tree`` and ``metadata`` are not checked. Raises
    ``ManifestInvalid``, ``DigestMismatch``, or ``FormatTooNew``, which name ``file``."""
    manifest, manifest_digest = unseal(raw, _MANIFEST, file)
    check_manifest(manifest, file)
    return manifest, manifest_digest


def check_manifest(manifest: Manifest, file: str) -> None:
    """Check what the types of the fields do not. Raises ``ManifestInvalid``."""
    require(file, is_utc_time(manifest.created), "a time in UTC in `created`", manifest.created)
    own = manifest.step, manifest.branch
    names: set[str] = set()
    any_reference = False
    for shard in manifest.shards:
        name, paths = shard.name, set[str]()
        require(file, name not in names, "each shard only once", name)
        names.add(name)
        index_name = name.removesuffix(".safetensors") + ".index.json"
        require(
            file, shard.index.name == index_name, f"an index named {index_name}", shard.index.name
        )
        target = parse_reference(shard.path)  # None if it is in the version's folder
        is_own = target is None or (target[0].step, target[0].branch) == own
        require(file, is_own, "a path of a shard of this version", shard.path)
        for r in shard.refers:
            target = parse_reference(r.path)
            valid = target is not None and (target[0].step, target[0].branch) != own
            require(file, valid, "a path to another version, like ../version_1/shard-...", r.path)
            require(file, r.bytes <= r.length, "at most the file's length in bytes", r.bytes)
            require(file, r.path not in paths, "each reference only once", r.path)
            paths.add(r.path)
            any_reference = True
    expected = "a shard that refers to another version exactly if chain is not 0"
    require(file, any_reference == (manifest.chain > 0), expected, f"chain {manifest.chain}")
