"""The manifest, the branch record and the pin: what they hold, and total validation.

A manifest is the commit of a snapshot. It holds the tree of the state with every plain value,
and names the shards and their indexes by length and digest. See ``docs/format.md``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec

from holdfast.errors import ManifestInvalid
from holdfast.format import names
from holdfast.format.digest import is_digest
from holdfast.format.sealed import seal, unseal

MAX_BYTES = 1 << 30
"""A longer manifest or index is refused before it is read."""

_PROCESS = re.compile(r"[0-9]{1,10}:([0-9]{1,20}|gone)")


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
    """From which version training went on, and why not from the newest (``reason``)."""

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
    """The record of a branch, every field checked. Raises as ``decode_manifest`` does."""
    branch = unseal(raw, Branch, file)[0]
    demand = _demands(file)
    demand(
        names.parse_branch(names.branch_name(branch.number)) is not None, "a branch", branch.number
    )
    demand(names.parse_version(branch.from_version) is not None, "a version", branch.from_version)
    demand(is_digest(branch.from_digest), "a digest of 32 hex digits", branch.from_digest)
    demand(_is_time(branch.created), "a time of day in UTC", branch.created)
    return branch


def encode_pin(pin: Pin) -> bytes:
    return seal(pin)[0]


def decode_pin(raw: bytes, file: str) -> Pin:
    """A pin, every field checked. Raises as ``decode_manifest`` does."""
    pin = unseal(raw, Pin, file)[0]
    demand = _demands(file)
    demand(names.is_attempt(pin.attempt), "an attempt of 12 hex digits", pin.attempt)
    version = pin.version is None or names.parse_version(pin.version) is not None
    demand(version, "a version or null", pin.version)
    demand(_is_time(pin.created), "a time of day in UTC", pin.created)
    demand(_PROCESS.fullmatch(pin.process) is not None, "a process as pid:start", pin.process)
    return pin


def _demands(file: str) -> Callable[[bool, str, object], None]:
    def demand(good: bool, expected: str, found: object) -> None:
        if not good:
            raise ManifestInvalid(
                f"{file} breaks the format", expected=expected, found=str(found)[:300], file=file
            )

    return demand


def _is_time(text: str) -> bool:
    try:
        return len(text) < 40 and datetime.fromisoformat(text).utcoffset() == timedelta(0)
    except ValueError:
        return False


def _check(manifest: Manifest, file: str) -> None:
    demand = _demands(file)
    demand(names.is_attempt(manifest.attempt), "an attempt of 12 hex digits", manifest.attempt)
    demand(_is_time(manifest.created), "a time of day in UTC", manifest.created)
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
