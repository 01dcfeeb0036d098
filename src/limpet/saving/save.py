"""The save recipe. Read it from top to bottom; it calls every step, and each step returns to it.

1. Flatten the state, and agree with the other ranks on which rank writes which boxes. At the first
   save of a structure, check that a load could restore it.
2. Stage: make the shard's image. An asynchronous save copies it into buffers now, so that training
   can continue. For a store in memory, these are the memory of the shard's file.
3. Write the shard (with a base version, only the chunks that the base lacks), then its index.
4. Gather the receipts, check them, and commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from limpet import events
from limpet.buffers import BufferPool, enough_memory, shared_pool
from limpet.errors import CommitError
from limpet.loading.check import check_once
from limpet.loading.snapshot import Snapshot
from limpet.ranks.group import Group, GroupSpec, saving_group
from limpet.saving.commit import (
    Receipt,
    SaveJob,
    VersionMetadata,
    before_commit,
    check_receipts,
    commit_collectively,
    pinned_attempt,
    put_manifest,
    raise_if_exists,
)
from limpet.saving.image import make_image, split_into_pieces, synchronize
from limpet.saving.partition import local_tree, partition_state
from limpet.saving.pending import Pending
from limpet.saving.staging import DeferredStaging, split_pieces, stage_pieces
from limpet.saving.write import put_local_shard, write_local_shard
from limpet.snapshot.location import Location, Url, locate
from limpet.snapshot.reader import SnapshotReader
from limpet.state.flatten import FlatState, flatten
from limpet.state.streamed import begin_members, find_streamed
from limpet.state.walk import as_dict, find_stable_leaves
from limpet.text import format_list
from limpet.threads import Workers, gc_paused, no_op


def save(
    url: Url,
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    note: Mapping[str, Any] = {},
    group: GroupSpec = None,
    timeout: float | None = None,
) -> Snapshot:
    """Save ``state`` as the snapshot at ``url``, and return the snapshot once it is committed.

    ``state``: a mapping of tensors, arrays, plain values, dicts and lists of those, modules,
    optimizers, and objects with ``state_dict()`` and ``load_state_dict()``. ``step``: if it is not
    given, it is read from a folder name such as ``version_120``. ``note``: plain values for the
    snapshot's ``metadata``.

    Under torch.distributed, all ranks make this call, and one snapshot holds the state of all of
    them. ``group="alone"`` saves the state of this process only; a ``ProcessGroup`` or a
    ``limpet.Group`` saves the state of its ranks.

    ``timeout``: the seconds after which the save fails, on all ranks. Without it, every call of a
    store on a server ends in time (see ``docs/stores.md``), but the whole save may take long.

    The save uses at most 256 MiB of memory beyond the state. Raises ``AlreadyExists`` if the
    snapshot exists, ``Unsupported`` for a value that cannot be stored faithfully, ``StoreError``,
    or ``CommitError``. If it raises, nothing was committed, unless the error's ``outcome`` is
    "unknown".
    """
    metadata, ranks = VersionMetadata(step=step, note=note), saving_group(group)
    location = locate(url).limit("save", timeout)
    job = begin_save(location, state, metadata, shared_pool(), group=ranks, stage_now=False)
    return Snapshot(finish_save(job))


def save_async(
    url: Url,
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    note: Mapping[str, Any] = {},
    group: GroupSpec = None,
    timeout: float | None = None,
) -> Pending:
    """Copy ``state`` into host buffers and return; a background thread finishes the save.

    Like ``save``, but the state may change as soon as this returns. The save uses memory for one
    copy of the state plus 256 MiB. ``wait()`` on the result returns the snapshot or raises the
    error of the save. If a save fails and nothing waits for it, the process exits with code 1.
    ``timeout`` counts from this call.
    """
    metadata, location = VersionMetadata(step=step, note=note), locate(url).limit("save", timeout)
    pool = BufferPool(1 << 50)
    try:
        ranks = saving_group(group)
        job = begin_save(location, state, metadata, pool, group=ranks, stage_now=True)
        return finish_in_background(job, finish_save, after=pool.close)
    except BaseException:
        pool.close()
        raise


def finish_in_background(
    job: SaveJob,
    finish: Callable[[SaveJob], SnapshotReader],
    after: Callable[[], object] = no_op,
    register: Callable[[Pending | None], object] = no_op,
) -> Pending:
    """Run the second half on a thread; ``CommitError`` if none can be started. ``register`` gets
    the save before, because Ctrl-C may come while the thread runs, or None if it never begins."""
    pending = None
    try:
        staged = None if job.deferred is None else job.deferred.done
        pending = Pending(lambda: Snapshot(finish(job)), job.location.url, after, staged)
        register(pending)
        pending.start()
    except BaseException:
        if pending is None or pending.cancel():
            with job, job.collective:  # otherwise an optimizer or another rank would wait forever
                register(None)
                raise
        raise
    return pending


@gc_paused
def begin_save(
    location: Location,
    state: Any,
    metadata: VersionMetadata,
    pool: BufferPool,
    *,
    group: Group | None = None,
    stage_now: bool,
    base: SnapshotReader | None = None,
    overlap: bool = False,
) -> SaveJob:
    """Run the first half of a save, in which the live state must not change: agree on which rank
    writes what, and stage if ``stage_now``. Without a ``group``, this process saves alone.

    ``base``: a version of the run, to whose chunks the save refers. ``overlap``: ``finish_save``
    stages parameters and optimizer slots, so no optimizer may step before ``deferred.done``.
    """
    started_at = time.perf_counter()
    group, streamed = group or Group(), find_streamed(state)
    operation = ", with ".join([f"the save of {location.name}", *streamed])
    collective = group.collective(operation, deadline=location.deadline)
    workers = Workers.create(pool, collective.advance, location.check_time)
    begin = begin_members(streamed, base, group, collective)
    with collective, enough_memory(operation), begin as members:
        if group.rank == 0:
            raise_if_exists(location)
        metadata_node = metadata.to_node()
        if isinstance(state, FlatState):
            flat = state
        else:
            flat = flatten(state := as_dict(state), group.rank)
            check_once(state, flat, group.rank, partial(local_tree, flat, group.rank))
        synchronize([*map(attrgetter("source"), flat.leaves)])
        partition = partition_state(collective, group, flat, workers)
        cache = group.cache if stage_now else None  # a synchronous save is not one of many
        image = make_image(partition.sources, partition.leaf_boxes, cache=cache)
        job = SaveJob(
            location=location,
            metadata=metadata,
            base=base,
            collective=collective,
            metadata_node=metadata_node,
            partition=partition,
            image=image,
            pieces=split_into_pieces(len(image.header), image.length),
            workers=workers,
            started_at=started_at,
            devices=flat.devices(),
            members=members,
        )
        try:
            if stage_now:
                _stage_now(job, find_stable_leaves(state, flat.leaves) if overlap else ())
            job.staged_at = time.perf_counter()
            seconds = job.staged_at - started_at
            events.emit("staged", url=location.url, bytes=image.length, seconds=seconds)
        except BaseException as e:
            job.release_memory()
            if collective.size == 1 or not stage_now or not isinstance(e, Exception):
                raise
            # The other ranks already continue training, so all ranks raise at the end of the save.
            job.staging_error = e
    return job


def _stage_now(job: SaveJob, stable_keys: Collection[str]) -> None:
    """Copy what may change from now on, but for leaves that only an optimizer's step changes."""
    now, later = split_pieces(job.image, job.pieces, stable_keys)
    job.upload = put_local_shard(job)
    stage_pieces(job.image, now, job.workers, job.upload)
    job.deferred = DeferredStaging(job.image, later, job.upload)


def finish_save(
    job: SaveJob,
    fence: Callable[[], object] = no_op,
    is_sound: Callable[[SnapshotReader], bool] = bool,
) -> SnapshotReader:
    """Run the second half, maybe in the background: write, gather, commit. Rank 0 calls ``fence``
    right before the commit, to prevent it. The save refers to no base that is not ``is_sound``."""
    location, collective = job.location, job.collective
    with job, collective, enough_memory(f"the save of {location.name}"):
        if job.staging_error is not None:
            raise job.staging_error
        if job.deferred is not None and (changed := job.deferred.stage(job.workers)):
            raise CommitError(
                f"Nothing was committed to {location.url}: {format_list(changed, 3)} changed"
                " during the copy in the background",
                todo="Change these tensors only in an optimizer's step, or use overlap=False",
                leaves=changed,
            )
        if job.base is not None and not is_sound(job.base):
            job.base = None
        with pinned_attempt(location, job.partition.attempt, job.base, collective) as base:
            with before_commit():
                receipt = write_local_shard(job, base)
                job.copy_to_peers(receipt)

            def commit(receipts: list[Receipt]) -> SnapshotReader:
                with before_commit():
                    shards = check_receipts(location, receipts, collective.size, job.partition.plan)
                    chain = 1 if base is None else base.manifest.chain + 1
                    manifest = job.build_manifest(shards, chain, receipts)
                    fence()
                collective.advance()  # raises if the deadline has passed
                collective.begin_commit()  # raises if another rank failed before
                return put_manifest(location, manifest, job.partition.plan)

            snapshot, job.result = commit_collectively(
                location, job.partition.attempt, collective, receipt, commit
            )
    snapshot.location = location.without_limit()
    seconds = time.perf_counter() - job.started_at
    events.emit("committed", url=location.url, bytes=job.result.nbytes, seconds=seconds)
    return snapshot
