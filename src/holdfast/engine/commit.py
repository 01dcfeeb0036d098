"""The commit: receipts checked, shards seen, then the manifest, whole and once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.files import key_of
from holdfast.engine.location import Location, run_of, versions_in
from holdfast.errors import AlreadyExists, CommitError, NotFound, StoreError, Unavailable
from holdfast.format.grammar import Leaves, check_tree
from holdfast.format.manifest import Manifest, Shard, encode_manifest
from holdfast.format.names import MANIFEST


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a rank returns when its part is durable: the shard, and the bytes planned for it."""

    rank: int
    shard: Shard
    planned: int


def check_receipts(place: Location, receipts: Sequence[Receipt], ranks: int) -> None:
    """Check that every rank has written what was planned, and that this process sees it.

    A folder that hosts do not really share shows here: every file is looked at through this
    process's own store. Raises ``CommitError`` or ``StoreError``.
    """
    if [r.rank for r in receipts] != list(range(ranks)):
        raise CommitError(
            f"Nothing was committed to {place.url}: receipts are missing",
            expected=f"one of each of {ranks} ranks",
            found=[r.rank for r in receipts],
        )
    _check_bases(place, receipts)
    for receipt in receipts:
        shard, index = receipt.shard, receipt.shard.index
        lengths = {shard.name: receipt.planned, index.name: index.length}
        for name, length in lengths.items():
            found = place.store.stat(place.key(name)).length
            if found != length or shard.length != receipt.planned:
                raise CommitError(
                    f"Nothing was committed to {place.url}: {name} of rank {receipt.rank} differs",
                    expected=f"{length} bytes",
                    found=f"{found} bytes",
                    todo="See whether all ranks really write to the same folder",
                    rank=receipt.rank,
                    file=name,
                )


def _check_bases(place: Location, receipts: Sequence[Receipt]) -> None:
    """Look at every file of another version that a shard refers to. Raises ``CommitError``."""
    for path, length in sorted({(f.path, f.length) for r in receipts for f in r.shard.refers}):
        try:
            found = f"{place.store.stat(key_of(place, path)).length} bytes"
        except NotFound:
            found = "no such file"
        if found != f"{length} bytes":
            raise CommitError(
                f"Nothing was committed to {place.url}: {path}, to which it refers, is not there",
                expected=f"{length} bytes",
                found=found,
                todo="Save again; see what deletes versions that a running save has pinned",
                file=key_of(place, path),
            )


def put_manifest(place: Location, manifest: Manifest) -> tuple[str, Leaves]:
    """Write the manifest if there is none; its digest, and the leaves of its tree. This is the
    commit.

    Raises ``CommitError`` if another save has committed this version first, and ``StoreError``;
    its field ``outcome`` is "unknown" where the store cannot tell whether the manifest is there.
    """
    raw, made = encode_manifest(manifest)
    leaves = check_tree(
        manifest.tree, MANIFEST
    )  # nothing is committed that would be refused when read
    try:
        place.store.put_if_absent(place.key(MANIFEST), raw)
    except AlreadyExists as e:
        raise CommitError(
            f"Nothing was committed to {place.url}: another save has committed this version",
            todo="Look for a second job that writes to the same run; each needs a run of its own",
            file=MANIFEST,
        ) from e
    except StoreError as e:
        # A store settles lost answers itself; one that does not must not make us say "nothing".
        if e.fields.get("outcome") != "unknown" and not isinstance(e, Unavailable):
            raise
        more = "Whether this version was committed is not known: `holdfast ls` shows it if it was"
        raise e.told(more, outcome="unknown") from e
    return made, leaves


def refuse_existing(place: Location) -> None:
    """Raise ``AlreadyExists`` if there is a snapshot, or a run, before anything is written."""
    try:
        place.store.stat(place.key(MANIFEST))
    except NotFound:
        if versions := versions_in(place):
            raise AlreadyExists(
                f"{place.url} is {run_of(versions)}; nothing was changed",
                todo=f"Name a version in it, such as {place.url}/version_N, or another folder",
                key=place.folder,
                store=place.store.url,
            ) from None
        return
    raise AlreadyExists(
        f"There is a snapshot at {place.url} already; nothing was changed",
        todo="Take another name: a snapshot is never modified",
        key=place.key(MANIFEST),
        store=place.store.url,
    )
