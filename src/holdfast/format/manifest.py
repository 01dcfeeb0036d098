"""The manifest, the branch record and the pin: what they hold, and total validation.

A manifest is the commit of a snapshot. It holds the tree of the state with every plain value,
and names the shards and their indexes by length and digest. See ``docs/format.md``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.errors import ManifestInvalid
from holdfast.format import names
from holdfast.format.digest import is_digest
from holdfast.format.sealed import seal, unseal

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


class Branch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From which version training went on, and why not from the newest (``reason``).

    ``from_version`` is None where training began afresh on purpose.
    """

    number: int
    from_version: str
    from_digest: str
    created: str
    reason: str


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keeps ``sweep`` and retention off: the files of an attempt under way, or a version.

    ``host``, ``boot`` and ``process`` (pid and start time) tell on the same machine whether the
    one who holds it still lives, whatever the clock says.
    """

    attempt: str
    version: str | None
    created: str
    host: str
    boot: str
    process: str


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


def encode_branch(branch: Branch) -> bytes:
    return seal(branch)[0]


def decode_branch(raw: bytes, file: str) -> Branch:
    return unseal(raw, Branch, file)[0]


def encode_pin(pin: Pin) -> bytes:
    return seal(pin)[0]


def decode_pin(raw: bytes, file: str) -> Pin:
    return unseal(raw, Pin, file)[0]


def _check(manifest: Manifest, file: str) -> None:
    def demand(good: bool, expected: str, found: object) -> None:
        if not good:
            raise ManifestInvalid(
                f"{file} breaks the format", expected=expected, found=repr(found)[:300], file=file
            )

    demand(names.is_attempt(manifest.attempt), "an attempt of 12 hex digits", manifest.attempt)
    demand(manifest.step is None or manifest.step >= 0, "a step of 0 or more", manifest.step)
    demand(manifest.branch >= 0, "a branch of 0 or more", manifest.branch)
    if manifest.parent is not None:
        demand(is_digest(manifest.parent.digest), "a digest", manifest.parent.digest)
    seen: set[str] = set()
    for shard in manifest.shards:
        index = shard.index
        demand(names.is_shard(shard.name), "the name of a shard", shard.name)
        demand(names.is_index(index.name), "the name of an index", index.name)
        demand(is_digest(index.digest), "a digest of 32 hex digits", index.digest)
        demand(0 <= shard.length < 1 << 62, "a length in bytes", shard.length)
        demand(0 <= index.length <= MAX_BYTES, "a length in bytes", index.length)
        demand(not seen & {shard.name, index.name}, "every file once", shard.name)
        seen |= {shard.name, index.name}
