"""A save between its two halves, and its commit: pin what the save writes and refers to, later
check the receipts and the files, then write the manifest atomically, once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec

from limpet import errors, events, machine
from limpet.arguments import check_whole
from limpet.deadline import CLEANUP_SECONDS
from limpet.format import names, tree
from limpet.format.manifest import (
    FEWER_LEAVES,
    MAX_MANIFEST,
    Manifest,
    Parent,
    Shard,
    check_manifest,
)
from limpet.format.names import MANIFEST, escape_level, join_key
from limpet.format.sealed import check_length, seal
from limpet.format.tree import check_tree
from limpet.layout.devices import merge_device_maps
from limpet.layout.global_plan import GlobalPlan
from limpet.ranks.collective import Collective
from limpet.saving.image import Image, Piece, release_buffers
from limpet.saving.incremental import as_sibling
from limpet.saving.partition import Partition
from limpet.saving.staging import DeferredStaging
from limpet.snapshot import pins
from limpet.snapshot.location import Location, describe_run, versions_in
from limpet.snapshot.reader import SnapshotReader, open_location
from limpet.state.streamed import Members, end_members
from limpet.storage.store import MappedUpload
from limpet.threads import Workers, look_up_each, no_op
from limpet.version import __version__


@dataclass(frozen=True, slots=True)
class VersionMetadata:
    """The content of a manifest other than the state. ``training``: what the layers above need to
    resume; ``objectives``: the metrics whose best versions are wanted, each with its mode;
    ``config``: the node of the training's config, or None."""

    step: int | None = None
    branch: int = 0
    parent: Parent | None = None
    reason: str = "request"
    metrics: Mapping[str, Any] = field(default_factory=dict)
    note: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    objectives: Mapping[str, str] = field(default_factory=dict)
    config: Any = None

    def __post_init__(self) -> None:
        """Raise ``LimpetError`` unless ``step`` is one, before anything is written."""
        if self.step is not None:
            expected = "a whole number, 0 or more, with at most 18 digits"
            step = check_whole("step", self.step, expected, most=names.MAX_STEP)
            object.__setattr__(self, "step", step)

    def to_node(self) -> Any:
        """Return the manifest's ``metadata`` without the statistics. Raises ``Unsupported``."""
        content = {"reason": self.reason, "metrics": dict(self.metrics), "note": dict(self.note)}
        if self.training:
            content["training"] = dict(self.training)
        if self.objectives:
            content["objectives"] = dict(self.objectives)
        node = tree.encode_root(content, "metadata", tree.reject_value)
        return node if self.config is None else {"dict": {**node["dict"], "config": self.config}}


class Receipt(msgspec.Struct, frozen=True):
    """What a rank returns once its files are durable: its shard, if it had anything to write, the
    bytes of the boxes that it holds or refers to, and the map of the devices of its tensors."""

    rank: int
    shard: Shard | None
    data_bytes: int = 0
    devices: Any = None


class CommitResult(msgspec.Struct, frozen=True):
    """The result of a commit, broadcast by rank 0: the manifest's digest, the bytes written, and
    the bytes referred to in earlier versions; ``manifest``: its bytes, if each host needs them."""

    digest: str
    nbytes: int
    referred_bytes: int
    manifest: bytes = b""


NO_RESULT = CommitResult("", 0, 0)
"""The result of a save that has not committed."""


@dataclass(slots=True)
class SaveJob(AbstractContextManager["SaveJob"]):
    """A save between its halves: staged, or ready to be. A ``with`` block releases its memory, and
    ends the save of the streamed ``members`` of the state."""

    location: Location
    metadata: VersionMetadata
    base: SnapshotReader | None
    collective: Collective
    metadata_node: Any
    partition: Partition
    image: Image
    pieces: list[Piece]
    workers: Workers
    started_at: float
    staged_at: float = 0.0
    upload: MappedUpload | None = None  # this rank's shard, if it is staged into a store in memory
    deferred: DeferredStaging | None = None
    staging_error: Exception | None = None  # of this rank; others may have staged theirs
    devices: Mapping[str, Any] = field(default_factory=dict)
    copy_to_peers: Callable[[Any], object] = no_op  # gets the Receipt once the files are written
    result: CommitResult = NO_RESULT
    members: Members = field(default_factory=dict)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the buffers and the references to the live state, and leave the collective."""
        try:
            if self.deferred is not None:
                self.deferred.release()
            self.release_memory()
            self.collective.close()
        finally:
            end_members(self.members, self.result.digest or None, error)

    def release_memory(self) -> None:
        """Release the buffers, and abort the upload unless it was committed."""
        release_buffers(self.pieces, self.workers.pool)
        if self.upload is not None:
            self.upload.abort()

    def build_manifest(
        self, shards: Sequence[Shard], chain: int, receipts: Sequence[Receipt]
    ) -> Manifest:
        """Return the manifest that commits these shards; ``chain``: versions back to a full one;
        ``receipts``: of all ranks."""
        metadata = self.metadata
        version = names.parse_version(self.location.folder.rpartition("/")[2])
        step = version.step if metadata.step is None and version is not None else metadata.step
        statistics = {
            "bytes": sum(shard.length for shard in shards),
            "staged_seconds": round(self.staged_at - self.started_at, 6),
            "written_seconds": round(time.perf_counter() - self.staged_at, 6),
        }
        added: dict[str, Any] = {"statistics": {"dict": statistics}}
        devices = merge_device_maps(map(attrgetter("devices"), receipts))
        if devices is not None:
            added["devices"] = tree.encode(devices, "metadata/devices", tree.reject_value)
        members = ((key, name) for key, member in self.members.items() for name in member.tables)
        if tables := [join_key(key, escape_level(name)) for key, name in members]:
            added["tables"] = {"list": tables}
        return Manifest(
            attempt=self.partition.attempt,
            created=machine.utc_now(),
            writer=f"limpet {__version__}",
            step=step,
            branch=metadata.branch,
            parent=metadata.parent,
            chain=chain if any(shard.refers for shard in shards) else 0,
            shards=shards,
            metadata={"dict": {**self.metadata_node["dict"], **added}},
            tree=self.partition.tree,
        )


# -- the pins and the commit ---------------------------------------------------------------------


class BasePin(msgspec.Struct, frozen=True):
    """Rank 0's message before any rank writes: is the base intact, and the key of a pin."""

    usable: bool
    key: str


@contextmanager
def before_commit() -> Iterator[None]:
    """In an error of the ``with`` block, do not leave it open whether the version was committed: it
    may be unknown whether an object that the block wrote exists, but it is not the manifest."""
    try:
        yield
    except errors.StoreError as e:
        e.fields.pop("outcome", None)
        raise


@contextmanager
def pinned_attempt(
    location: Location, attempt: str, base: SnapshotReader | None, collective: Collective
) -> Iterator[SnapshotReader | None]:
    """Pin the attempt, ``base``, and what ``base`` refers to. Yield ``base`` as the store shows it
    now; None makes the save full: it is of another run, deleted, or visibly damaged.

    Rank 0 creates the pins before any rank writes. A rank that does not see one writes to a
    different location, and raises ``CommitError``. Nothing is pinned in stores of hosts: only the
    training deletes there.
    """
    if location.is_per_host:
        yield None
        return
    snapshot = None if base is None or collective.rank else as_sibling(location, base)
    base_pin = None
    with ExitStack() as pins_to_remove:
        if collective.rank == 0:
            # each pin also names the attempt
            versions = [None] if snapshot is None else sorted({snapshot.version, *snapshot.bases})
            keys: list[str] = []
            pins_to_remove.callback(pins.remove_pins, location, keys)
            for version in versions:
                with before_commit():
                    keys.append(pins.create_pin(location, attempt, version))
            if snapshot is not None:
                try:
                    pins.require_manifest(snapshot.location)
                    snapshot.check_files()
                except (errors.FormatError, errors.NotFound) as e:
                    events.emit("skipped", version=str(snapshot.version), error=e)
                    snapshot = None
            base_pin = BasePin(snapshot is not None, keys[0])
        base_pin = collective.broadcast(base_pin, BasePin)
        if collective.rank:
            try:
                location.store.stat(base_pin.key)
            except errors.NotFound as e:  # before this rank writes
                collective.raise_if_aborted()
                what = f"Nothing was committed to {location.url}"
                raise not_shared_error(what, collective.rank, base_pin.key) from e
            if base_pin.usable and base is not None:
                snapshot = as_sibling(location, base)  # only after rank 0 has found it there
        try:
            yield snapshot
        except BaseException as e:
            # Abort before the pins are removed, so that a rank that misses them learns why.
            if not collective.abort(e):
                # The version may still be committed, or no other rank could be notified. The pins
                # protect the base until this process ends.
                pins_to_remove.pop_all()
            raise


def not_shared_error(
    what: str, rank: int, key: str, found: str = "no such file", expected: str = ""
) -> errors.CommitError:
    """Return the error for a ``rank`` that has not ``found`` what rank 0 has."""
    return errors.CommitError(
        f"{what}: rank {rank} cannot see the files that rank 0 writes there",
        expected=expected or f"{key}, which rank 0 wrote",
        found=f"{found}; this is a different folder, possibly on another disk",
        todo="Use one location that all ranks can reach, such as a shared file system, under the"
        " same address on every rank",
        rank=rank,
        file=key,
    )


def check_receipts(
    location: Location,
    receipts: Sequence[Receipt],
    world_size: int,
    plan: GlobalPlan | None = None,
) -> list[Shard]:
    """Return the shards in rank order, once every rank has written what was planned. This process
    stats every file through its own store: that detects a folder that the hosts do not share."""
    ranks = [receipt.rank for receipt in receipts]
    if ranks != [*range(world_size)]:
        raise errors.CommitError(
            f"Nothing was committed to {location.url}: receipts are missing",
            expected=f"one receipt from each of {world_size} ranks",
            found=ranks,
        )
    shards: list[Shard] = []
    files: list[tuple[int, str, int]] = []  # rank, path, length
    referred: set[tuple[str, int]] = set()
    for rank, receipt in enumerate(receipts):
        planned = receipt.data_bytes if plan is None else int(plan.bytes_per_rank[rank])
        if receipt.data_bytes != planned:
            raise errors.CommitError(
                f"Nothing was committed to {location.url}: rank {rank} did not write what was"
                " planned",
                expected=f"{planned} bytes",
                found=f"{receipt.data_bytes} bytes",
                todo="Report this as a bug of Limpet, with the versions of Limpet on all ranks",
                rank=rank,
            )
        if (shard := receipt.shard) is not None:
            shards.append(shard)
            files.append((rank, shard.path, shard.length))
            files.append((rank, shard.index_path, shard.index.length))
            referred.update((file.path, file.length) for file in shard.refers)
    if location.is_per_host:  # each rank has checked its files before it sent its receipt
        return shards
    for path, length in sorted(referred):
        key, what = location.file_key(path), f"{path}, which this version refers to,"
        todo = "Save again, and find out what deletes versions that a running save has pinned"
        _require_length(location, key, length, what, {"todo": todo, "file": key})

    def require_file(file: tuple[int, str, int]) -> None:
        rank, path, length = file
        todo = "Check that all ranks write to the same folder"
        fields = {"todo": todo, "rank": rank, "file": path}
        _require_length(location, location.file_key(path), length, f"{path} of rank {rank}", fields)

    look_up_each(files, require_file)
    return shards


def _require_length(
    location: Location, key: str, length: int, what: str, fields: dict[str, Any]
) -> None:
    """Raise ``CommitError`` with these fields if a file is missing or does not have its length."""
    try:
        found = f"{location.store.stat(key).length} bytes"
    except errors.NotFound as e:
        found = str(e.found or "no such file")
    if found != f"{length} bytes":
        raise errors.CommitError(
            f"Nothing was committed to {location.url}: {what} is missing or has the wrong length",
            expected=f"{length} bytes",
            found=found,
            **fields,
        )


def put_manifest(
    location: Location, manifest: Manifest, plan: GlobalPlan | None = None
) -> SnapshotReader:
    """Write the manifest if none exists: the commit. Its tree must have exactly the leaves of
    ``plan``. ``CommitError``: another save was first; ``StoreError.outcome`` may be "unknown"."""
    # do not commit a manifest that a reader would reject
    check_manifest(manifest, MANIFEST)
    leaves = check_tree(manifest.tree, MANIFEST)
    raw, manifest_digest = seal(manifest)
    check_length(location.key(MANIFEST), raw, MAX_MANIFEST, FEWER_LEAVES)
    if plan is not None and (mismatched := plan.mismatched_leaves(leaves)):
        raise errors.CommitError(
            f"Nothing was committed to {location.url}: the tree and the boxes have different"
            " leaves",
            expected="every leaf of the tree in the boxes, and every leaf of the boxes in the tree",
            found=", ".join(mismatched[:5]),
            todo="Check that all ranks tie the same tensors; if they do, report this as a bug",
            leaves=tuple(mismatched),
        )
    try:
        location.store.put_if_absent(location.key(MANIFEST), raw)
    except errors.AlreadyExists as e:
        raise errors.CommitError(
            f"Nothing was committed to {location.url}: another save has committed this version",
            todo="Look for a second job that writes to the same run; each job needs its own run",
            file=MANIFEST,
        ) from e
    except errors.StoreError as e:
        # A store resolves lost replies itself. If one does not, the error must not claim that
        # nothing was committed.
        if not e.is_outcome_unknown and not isinstance(e, errors.Unavailable):
            raise
        raise e.with_advice(_OUTCOME_UNKNOWN, outcome="unknown") from e
    return SnapshotReader(location, manifest, manifest_digest, leaves)


_OUTCOME_UNKNOWN = (
    "It is unknown whether this version was committed; `limpet ls` lists it if it was"
)


def commit_collectively(
    location: Location,
    attempt: str,
    collective: Collective,
    receipt: Receipt,
    commit: Callable[[list[Receipt]], SnapshotReader],
) -> tuple[SnapshotReader, CommitResult]:
    """Gather all receipts, have rank 0 call ``commit``, and return the snapshot on all ranks.

    A rank that sees another one fail aborts the save. If the commit has begun by then, or the abort
    reaches no other rank, it looks for the manifest: rank 0 may have died right after the commit.
    """
    snapshot = result = None
    try:
        receipts = collective.gather(receipt, Receipt)
        if receipts is not None:
            snapshot = commit(receipts)
            raw = seal(snapshot.manifest)[0] if location.is_per_host else b""
            result = CommitResult(snapshot.digest, snapshot.nbytes, snapshot.referred_bytes, raw)
        result = collective.broadcast(result, CommitResult)
        if collective.rank and result.manifest:
            _put_same_manifest(location, result.manifest)
    except errors.RankFailed as e:
        if snapshot is not None and result is not None:
            return snapshot, result  # committed, whichever ranks received the result
        if collective.rank == 0 or collective.abort(e):
            raise
        with suppress(errors.FormatError, errors.StoreError):
            deadline = location.deadline
            seconds = CLEANUP_SECONDS if deadline is None else deadline.cleanup_seconds
            found = open_location(location.without_limit().limit("search", seconds))
            if found.manifest.attempt == attempt:
                return found, CommitResult(found.digest, found.nbytes, found.referred_bytes)
        raise e.with_advice(_OUTCOME_UNKNOWN, outcome="unknown") from e.__cause__
    return snapshot or SnapshotReader(location, None, result.digest), result


def _put_same_manifest(location: Location, raw: bytes) -> None:
    """Write rank 0's manifest into the store of this host, as other ranks here may. Raises
    ``CommitError`` if there is a different one."""
    key = location.key(MANIFEST)
    try:
        location.store.put_if_absent(key, raw)
    except errors.AlreadyExists as e:
        if location.store.get(key, MAX_MANIFEST) != raw:
            raise errors.CommitError(
                f"{location.url} is on this host already, with other contents",
                todo="Delete what an earlier training has left in this folder",
                file=key,
            ) from e


def raise_if_exists(location: Location) -> None:
    """Raise ``AlreadyExists``, before anything is written, where a snapshot or a run is."""
    try:
        location.store.stat(location.key(MANIFEST))
    except errors.NotFound:
        if versions := versions_in(location):
            raise errors.AlreadyExists(
                f"{location.url} is {describe_run(versions)}; nothing was changed",
                todo=f"Name a version in it, such as {location.url}/version_N, or another folder",
                key=location.folder,
                store=location.store.url,
            ) from None
        return
    raise errors.AlreadyExists(
        f"A snapshot already exists at {location.url}; nothing was changed",
        todo="Choose another name; a snapshot is never modified",
        key=location.key(MANIFEST),
        store=location.store.url,
    )
