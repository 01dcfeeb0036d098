"""The commit: receipts checked, shards seen, then the manifest, whole and once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from holdfast.engine.distributed.collective import Meeting
from holdfast.engine.planning.global_plan import WritePlan
from holdfast.engine.snapshot.index_files import key_of
from holdfast.engine.snapshot.location import Location, run_of, versions_in
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
    MAX_BYTES,
    Increment,
    Manifest,
    Shard,
    decode_manifest,
    encode_manifest,
)
from holdfast.format.names import MANIFEST
from holdfast.format.validate import check_tree
from holdfast.threads import in_parallel

_LOOKING = 32
"""Threads that look for files before the commit: an object store takes its time for each."""


class Receipt(msgspec.Struct, frozen=True):
    """What a rank returns when its part is durable: its shard (None if it had nothing to write),
    and the bytes planned for it."""

    rank: int
    shard: Increment | None
    planned: int = 0


def check_receipts(place: Location, receipts: Sequence[Receipt], ranks: int) -> list[Shard]:
    """Check that every rank has written what was planned, and that this process sees it: the
    shards, in order of ranks.

    A folder that hosts do not really share shows here: every file is looked at through this
    process's own store. Raises ``CommitError`` or ``StoreError``.
    """
    if [r.rank for r in receipts] != list(range(ranks)):
        raise CommitError(
            f"Nothing was committed to {place.url}: receipts are missing",
            expected=f"one of each of {ranks} ranks",
            found=[r.rank for r in receipts],
        )
    shards = [r.shard for r in receipts if r.shard is not None]
    _check_bases(place, shards)
    files = [
        (r, name, length)
        for r in receipts
        if r.shard is not None
        for name, length in (
            (r.shard.name, r.planned),
            (r.shard.index.name, r.shard.index.length),
        )
    ]

    def look(file: tuple[Receipt, str, int]) -> None:
        receipt, name, length = file
        try:
            found = f"{place.store.stat(place.key(name)).length} bytes"
        except NotFound:
            found = "no such file"
        shard = receipt.shard
        if found != f"{length} bytes" or (shard and shard.length != receipt.planned):
            raise CommitError(
                f"Nothing was committed to {place.url}: {name} of rank {receipt.rank} differs",
                expected=f"{length} bytes",
                found=found,
                todo="See whether all ranks really write to the same folder",
                rank=receipt.rank,
                file=name,
            )

    in_parallel(files, look, min(_LOOKING, len(files) // 8 + 1))
    return [s if s.refers else Shard(s.name, s.length, s.index) for s in shards]


def _check_bases(place: Location, shards: Sequence[Shard]) -> None:
    """Look at every file of another version that a shard refers to. Raises ``CommitError``."""
    for path, length in sorted({(f.path, f.length) for s in shards for f in s.refers}):
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


def put_manifest(place: Location, manifest: Manifest, plan: WritePlan | None = None) -> Snapshot:
    """Write the manifest if there is none. This is the commit. ``plan``: what was written by; the
    tree must have just its leaves.

    Raises ``CommitError`` if another save has committed this version first, and ``StoreError``;
    its field ``outcome`` is "unknown" where the store cannot tell whether the manifest is there.
    """
    raw, made = encode_manifest(manifest)
    # nothing is committed that would be refused when read
    leaves = check_tree(manifest.tree, MANIFEST)
    if plan is not None and (lacking := plan.unlike(leaves)):
        raise CommitError(
            f"Nothing was committed to {place.url}: tree and boxes have different leaves",
            expected="each leaf of the tree in the boxes, and each of these in the tree",
            found=", ".join(lacking[:5]),
            todo="Two ranks may tie tensors in different ways; report it if not",
            leaves=tuple(lacking),
        )
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
        raise e.told(_UNKNOWN, outcome="unknown") from e
    return Snapshot(place, manifest, made, leaves)


_UNKNOWN = "Whether this version was committed is not known: `holdfast ls` shows it if it was"


class Outcome(msgspec.Struct, frozen=True):
    """What rank 0 tells of a commit: the manifest's digest, and bytes written and referred to."""

    digest: str
    nbytes: int
    referred: int


UNKNOWN = Outcome("", 0, 0)
"""Before there is one."""


def settled(
    place: Location,
    attempt: str,
    meeting: Meeting,
    receipt: Receipt,
    commit: Callable[[list[Receipt]], Snapshot],
) -> tuple[Snapshot, Outcome]:
    """Hand in the receipt of this rank; the snapshot, on all ranks, once rank 0 has made it by
    ``commit``, given those of all.

    A rank that fails meanwhile calls it off. If that is too late, or it reaches nobody, it looks
    whether the manifest is there: it may be that rank 0 has died right after the commit. Raises
    ``RankFailed``, or what ``commit`` raises.
    """
    made = outcome = None
    try:
        receipts = meeting.gather(receipt, Receipt)
        if receipts is not None:
            made = commit(receipts)
            outcome = Outcome(made.digest, made.nbytes, made.referred_bytes)
        outcome = meeting.share(outcome, Outcome)
    except RankFailed as e:
        if made is not None and outcome is not None:
            return made, outcome  # it is committed, whoever has heard of it
        if meeting.rank == 0 or meeting.call_off(e):
            raise
        found = _own(place, attempt)
        if found is not None:
            return found, Outcome(found.digest, found.nbytes, found.referred_bytes)
        raise e.told(_UNKNOWN, outcome="unknown") from e.__cause__
    return made or Snapshot(place, None, outcome.digest), outcome


def _own(place: Location, attempt: str) -> Snapshot | None:
    """The snapshot if this attempt has committed it."""
    try:
        manifest, made = decode_manifest(place.store.get(place.key(MANIFEST), MAX_BYTES), MANIFEST)
    except (FormatError, StoreError):
        return None
    return Snapshot(place, manifest, made) if manifest.attempt == attempt else None


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
