"""The commit: receipts checked, shards seen, then the manifest, whole and once."""

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
"""Threads that look for files before the commit: an object store takes its time for each."""


class Receipt(msgspec.Struct, frozen=True):
    """What a rank returns when its part is durable: its shard (None if it had nothing to write),
    and the bytes planned for it."""

    rank: int
    shard: IncrementalShard | None
    planned_bytes: int = 0


def check_receipts(location: Location, receipts: Sequence[Receipt], world_size: int) -> list[Shard]:
    """Check that every rank has written what was planned, and that this process sees it: the
    shards, in order of ranks.

    A folder that hosts do not really share shows here: every file is looked at through this
    process's own store. Raises ``CommitError`` or ``StoreError``.
    """
    if [r.rank for r in receipts] != list(range(world_size)):
        raise CommitError(
            f"Nothing was committed to {location.url}: receipts are missing",
            expected=f"one of each of {world_size} ranks",
            found=[r.rank for r in receipts],
        )
    shards = [r.shard for r in receipts if r.shard is not None]
    _check_bases(location, shards)
    files = [
        (r, name, length)
        for r in receipts
        if r.shard is not None
        for name, length in (
            (r.shard.name, r.planned_bytes),
            (r.shard.index.name, r.shard.index.length),
        )
    ]

    def look(file: tuple[Receipt, str, int]) -> None:
        receipt, name, length = file
        try:
            found = f"{location.store.stat(location.key(name)).length} bytes"
        except NotFound:
            found = "no such file"
        shard = receipt.shard
        if found != f"{length} bytes" or (shard and shard.length != receipt.planned_bytes):
            raise CommitError(
                f"Nothing was committed to {location.url}: {name} of rank {receipt.rank} differs",
                expected=f"{length} bytes",
                found=found,
                todo="See whether all ranks really write to the same folder",
                rank=receipt.rank,
                file=name,
            )

    in_parallel(files, look, min(_STAT_THREADS, len(files) // 8 + 1))
    return [s if s.refers else Shard(s.name, s.length, s.index) for s in shards]


def _check_bases(location: Location, shards: Sequence[Shard]) -> None:
    """Look at every file of another version that a shard refers to. Raises ``CommitError``."""
    for path, length in sorted({(f.path, f.length) for s in shards for f in s.refers}):
        try:
            found = f"{location.store.stat(file_key(location, path)).length} bytes"
        except NotFound:
            found = "no such file"
        if found != f"{length} bytes":
            raise CommitError(
                f"Nothing was committed to {location.url}: {path}, to which it refers,"
                " is not there",
                expected=f"{length} bytes",
                found=found,
                todo="Save again; see what deletes versions that a running save has pinned",
                file=file_key(location, path),
            )


def put_manifest(
    location: Location, manifest: Manifest, plan: GlobalPlan | None = None
) -> Snapshot:
    """Write the manifest if there is none. This is the commit. ``plan``: what was written by; the
    tree must have just its leaves.

    Raises ``CommitError`` if another save has committed this version first, and ``StoreError``;
    its field ``outcome`` is "unknown" where the store cannot tell whether the manifest is there.
    """
    raw, made = encode_manifest(manifest)
    # nothing is committed that would be refused when read
    leaves = check_tree(manifest.tree, MANIFEST)
    if plan is not None and (lacking := plan.mismatched_leaves(leaves)):
        raise CommitError(
            f"Nothing was committed to {location.url}: tree and boxes have different leaves",
            expected="each leaf of the tree in the boxes, and each of these in the tree",
            found=", ".join(lacking[:5]),
            todo="Two ranks may tie tensors in different ways; report it if not",
            leaves=tuple(lacking),
        )
    try:
        location.store.put_if_absent(location.key(MANIFEST), raw)
    except AlreadyExists as e:
        raise CommitError(
            f"Nothing was committed to {location.url}: another save has committed this version",
            todo="Look for a second job that writes to the same run; each needs a run of its own",
            file=MANIFEST,
        ) from e
    except StoreError as e:
        # A store settles lost answers itself; one that does not must not make us say "nothing".
        if e.fields.get("outcome") != "unknown" and not isinstance(e, Unavailable):
            raise
        raise e.with_advice(_OUTCOME_UNKNOWN, outcome="unknown") from e
    return Snapshot(location, manifest, made, leaves)


_OUTCOME_UNKNOWN = (
    "Whether this version was committed is not known: `holdfast ls` shows it if it was"
)


class CommitResult(msgspec.Struct, frozen=True):
    """What rank 0 tells of a commit: the manifest's digest, and bytes written and referred to."""

    digest: str
    nbytes: int
    referred_bytes: int


NO_RESULT = CommitResult("", 0, 0)
"""Before there is one."""


def commit_collectively(
    location: Location,
    attempt: str,
    collective: Collective,
    receipt: Receipt,
    commit: Callable[[list[Receipt]], Snapshot],
) -> tuple[Snapshot, CommitResult]:
    """Hand in the receipt of this rank; the snapshot, on all ranks, once rank 0 has made it by
    ``commit``, given those of all.

    A rank that fails meanwhile calls it off. If that is too late, or it reaches nobody, it looks
    whether the manifest is there: it may be that rank 0 has died right after the commit. Raises
    ``RankFailed``, or what ``commit`` raises.
    """
    made = outcome = None
    try:
        receipts = collective.gather(receipt, Receipt)
        if receipts is not None:
            made = commit(receipts)
            outcome = CommitResult(made.digest, made.nbytes, made.referred_bytes)
        outcome = collective.broadcast(outcome, CommitResult)
    except RankFailed as e:
        if made is not None and outcome is not None:
            return made, outcome  # it is committed, whoever has heard of it
        if collective.rank == 0 or collective.abort(e):
            raise
        found = _find_committed(location, attempt)
        if found is not None:
            return found, CommitResult(found.digest, found.nbytes, found.referred_bytes)
        raise e.with_advice(_OUTCOME_UNKNOWN, outcome="unknown") from e.__cause__
    return made or Snapshot(location, None, outcome.digest), outcome


def _find_committed(location: Location, attempt: str) -> Snapshot | None:
    """The snapshot if this attempt has committed it."""
    try:
        manifest, made = decode_manifest(
            location.store.get(location.key(MANIFEST), MAX_MANIFEST), MANIFEST
        )
    except (FormatError, StoreError):
        return None
    return Snapshot(location, manifest, made) if manifest.attempt == attempt else None


def raise_if_exists(location: Location) -> None:
    """Raise ``AlreadyExists`` if there is a snapshot, or a run, before anything is written."""
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
        f"There is a snapshot at {location.url} already; nothing was changed",
        todo="Take another name: a snapshot is never modified",
        key=location.key(MANIFEST),
        store=location.store.url,
    )
