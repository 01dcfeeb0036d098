"""The commit: check the receipts and the shards, then write the manifest atomically, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from holdfast.engine.distributed.collective import Collective
from holdfast.engine.planning.global_plan import GlobalPlan
from holdfast.engine.snapshot.index_files import file_key
from holdfast.engine.snapshot.location import Location, describe_run, versions_in
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import (
    AlreadyExists,
    CommitError,
    FormatError,
    NotFound,
    RankFailed,
    StoreError,
    Unavailable,
)
from holdfast.format.manifest import (
    MAX_MANIFEST,
    IncrementalShard,
    Manifest,
    Shard,
    decode_manifest,
    encode_manifest,
)
from holdfast.format.names import MANIFEST
from holdfast.format.validate import check_tree
from holdfast.threads import in_parallel

_STAT_THREADS = 32
"""Largest number of threads that stat files before the commit. Each stat of an object store costs
a network round trip."""


class Receipt(msgspec.Struct, frozen=True):
    """What a rank returns once its files are durable.

    ``shard``: the rank's shard, or None if the rank had nothing to write; ``data_bytes``: the bytes
    of the boxes that the shard holds or refers to.
    """

    rank: int
    shard: IncrementalShard | None
    data_bytes: int = 0


def check_receipts(
    location: Location,
    receipts: Sequence[Receipt],
    world_size: int,
    plan: GlobalPlan | None = None,
) -> list[Shard]:
    """Check that every rank wrote what was planned and that this process sees the files.

    Return the shards in rank order. This process stats every file through its own store, which
    detects a folder that the hosts do not really share. Raises ``CommitError`` or ``StoreError``.
    """
    if [r.rank for r in receipts] != list(range(world_size)):
        raise CommitError(
            f"Nothing was committed to {location.url}: receipts are missing",
            expected=f"one receipt from each of {world_size} ranks",
            found=[r.rank for r in receipts],
        )
    for receipt in receipts:
        planned = receipt.data_bytes if plan is None else int(plan.bytes_per_rank[receipt.rank])
        if receipt.data_bytes != planned:
            raise CommitError(
                f"Nothing was committed to {location.url}: rank {receipt.rank} did not write what"
                " was planned",
                expected=f"{planned} bytes",
                found=f"{receipt.data_bytes} bytes",
                todo="Report this as a bug of Holdfast, with the versions of Holdfast on all ranks",
                rank=receipt.rank,
            )
    shards = [r.shard for r in receipts if r.shard is not None]
    _check_bases(location, shards)
    files = [
        (r, name, length)
        for r in receipts
        if r.shard is not None
        for name, length in (
            (r.shard.name, r.shard.length),
            (r.shard.index.name, r.shard.index.length),
        )
    ]

    def check_file(file: tuple[Receipt, str, int]) -> None:
        receipt, name, length = file
        found = _describe_length(location, location.key(name))
        if found != f"{length} bytes":
            raise CommitError(
                f"Nothing was committed to {location.url}: {name} of rank {receipt.rank} is missing"
                " or has the wrong length",
                expected=f"{length} bytes",
                found=found,
                todo="Check that all ranks write to the same folder",
                rank=receipt.rank,
                file=name,
            )

    in_parallel(files, check_file, min(_STAT_THREADS, len(files) // 8 + 1))
    return [s if s.refers else Shard(s.name, s.length, s.index) for s in shards]


def _check_bases(location: Location, shards: Sequence[Shard]) -> None:
    """Check every file of another version that a shard refers to. Raises ``CommitError``."""
    for path, length in sorted({(f.path, f.length) for s in shards for f in s.refers}):
        found = _describe_length(location, file_key(location, path))
        if found != f"{length} bytes":
            raise CommitError(
                f"Nothing was committed to {location.url}: {path}, which this version refers to,"
                " is missing or has the wrong length",
                expected=f"{length} bytes",
                found=found,
                todo="Save again, and find out what deletes versions that a running save has"
                " pinned",
                file=file_key(location, path),
            )


def _describe_length(location: Location, key: str) -> str:
    try:
        return f"{location.store.stat(key).length} bytes"
    except NotFound:
        return "no such file"


def put_manifest(
    location: Location, manifest: Manifest, plan: GlobalPlan | None = None
) -> Snapshot:
    """Write the manifest if none exists. This is the commit.

    ``plan``: the plan by which the shards were written; the tree must have exactly its leaves.

    Raises ``CommitError`` if another save committed this version first, and ``StoreError``. The
    error's field ``outcome`` is "unknown" if the store cannot say whether the manifest exists.
    """
    raw, manifest_digest = encode_manifest(manifest)
    # do not commit a manifest that a reader would reject
    leaves = check_tree(manifest.tree, MANIFEST)
    if plan is not None and (mismatched := plan.mismatched_leaves(leaves)):
        raise CommitError(
            f"Nothing was committed to {location.url}: the tree and the boxes have different"
            " leaves",
            expected="every leaf of the tree in the boxes, and every leaf of the boxes in the tree",
            found=", ".join(mismatched[:5]),
            todo="Check that all ranks tie the same tensors; if they do, report this as a bug",
            leaves=tuple(mismatched),
        )
    try:
        location.store.put_if_absent(location.key(MANIFEST), raw)
    except AlreadyExists as e:
        raise CommitError(
            f"Nothing was committed to {location.url}: another save has committed this version",
            todo="Look for a second job that writes to the same run; each job needs its own run",
            file=MANIFEST,
        ) from e
    except StoreError as e:
        # A store resolves lost replies itself. If one does not, the error must not claim that
        # nothing was committed.
        if not e.is_outcome_unknown and not isinstance(e, Unavailable):
            raise
        raise e.with_advice(_OUTCOME_UNKNOWN, outcome="unknown") from e
    return Snapshot(location, manifest, manifest_digest, leaves)


_OUTCOME_UNKNOWN = (
    "It is unknown whether this version was committed; `holdfast ls` lists it if it was"
)


class CommitResult(msgspec.Struct, frozen=True):
    """The result of a commit, broadcast by rank 0: the manifest's digest, the bytes written, and
    the bytes referred to in earlier versions."""

    digest: str
    nbytes: int
    referred_bytes: int


NO_RESULT = CommitResult("", 0, 0)
"""The result of a save that has not committed."""


def commit_collectively(
    location: Location,
    attempt: str,
    collective: Collective,
    receipt: Receipt,
    commit: Callable[[list[Receipt]], Snapshot],
) -> tuple[Snapshot, CommitResult]:
    """Gather the receipts of all ranks, have rank 0 call ``commit`` with them, and return the
    snapshot on all ranks.

    A rank that sees another rank fail meanwhile aborts the save. If the commit has begun by then,
    or the abort reaches no other rank, it looks for the manifest: rank 0 may have died right after
    the commit. Raises ``RankFailed``, or what ``commit`` raises.
    """
    snapshot = result = None
    try:
        receipts = collective.gather(receipt, Receipt)
        if receipts is not None:
            snapshot = commit(receipts)
            result = _commit_result(snapshot)
        result = collective.broadcast(result, CommitResult)
    except RankFailed as e:
        if snapshot is not None and result is not None:
            return snapshot, result  # committed, whichever ranks received the result
        if collective.rank == 0 or collective.abort(e):
            raise
        committed = _find_committed(location, attempt)
        if committed is not None:
            return committed, _commit_result(committed)
        raise e.with_advice(_OUTCOME_UNKNOWN, outcome="unknown") from e.__cause__
    return snapshot or Snapshot(location, None, result.digest), result


def _commit_result(snapshot: Snapshot) -> CommitResult:
    return CommitResult(snapshot.digest, snapshot.nbytes, snapshot.referred_bytes)


def _find_committed(location: Location, attempt: str) -> Snapshot | None:
    """Return the snapshot at ``location`` if this attempt committed it."""
    try:
        manifest, manifest_digest = decode_manifest(
            location.store.get(location.key(MANIFEST), MAX_MANIFEST), MANIFEST
        )
    except (FormatError, StoreError):
        return None
    return Snapshot(location, manifest, manifest_digest) if manifest.attempt == attempt else None


def raise_if_exists(location: Location) -> None:
    """Raise ``AlreadyExists`` if ``location`` holds a snapshot or a run. Called before the save
    writes anything."""
    try:
        location.store.stat(location.key(MANIFEST))
    except NotFound:
        if versions := versions_in(location):
            raise AlreadyExists(
                f"{location.url} is {describe_run(versions)}; nothing was changed",
                todo=f"Name a version in it, such as {location.url}/version_N, or another folder",
                key=location.folder,
                store=location.store.url,
            ) from None
        return
    raise AlreadyExists(
        f"A snapshot already exists at {location.url}; nothing was changed",
        todo="Choose another name; a snapshot is never modified",
        key=location.key(MANIFEST),
        store=location.store.url,
    )
