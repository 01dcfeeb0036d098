"""Saving: the recipe. Read it from top to bottom; every step is called from here and returns here.

1. ``flatten`` the state, and deal out among the ranks who writes which boxes. 2. Stage: make the
shard's image, and for an asynchronous save fill it now, so that training may go on. 3. Write the
shard (only what its base lacks, if it has one), then its index. 4. Gather the receipts, check, and
commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast import events
from holdfast.buffers import BufferPool, shared_pool
from holdfast.engine.distributed.group import GroupSpec, current_group, saving_group, use_group
from holdfast.engine.saving.commit import (
    Receipt,
    check_receipts,
    commit_collectively,
    put_manifest,
    raise_if_exists,
)
from holdfast.engine.saving.image import make_image
from holdfast.engine.saving.incremental import pinned_base
from holdfast.engine.saving.job import SaveJob, VersionMetadata
from holdfast.engine.saving.overlap import DeferredStaging, split_pieces
from holdfast.engine.saving.partition import partition_state
from holdfast.engine.saving.pending import Pending
from holdfast.engine.saving.staging import release_buffers, stage_pieces, synchronize_streams
from holdfast.engine.saving.write import write_local_shard
from holdfast.engine.snapshot.location import Location, Url, locate
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.state.flatten import FlatState, flatten
from holdfast.engine.state.step_hooks import find_stable_leaves
from holdfast.errors import CommitError
from holdfast.settings import read_settings
from holdfast.threads import gc_paused


def save(
    url: Url,
    state: dict[str, Any],
    *,
    step: int | None = None,
    note: Mapping[str, Any] = {},
    group: GroupSpec = None,
) -> Snapshot:
    """Save ``state`` as the snapshot at ``url`` and return it once it is committed.

    ``state``: a dict of tensors, arrays, plain values, dicts and lists of those, modules,
    optimizers, and objects with ``state_dict()`` and ``load_state_dict()``. ``step`` is read from
    a name like ``version_120`` if it is not given; ``note`` holds plain values for ``metadata``.

    Under torch.distributed all ranks make this call, and the snapshot is one, of what all of them
    have: ``group="alone"`` saves what this process has, a ``ProcessGroup`` what its ranks have.

    Uses at most 256 MiB of memory beyond the state. Raises ``AlreadyExists`` if there is such a
    snapshot, ``Unsupported`` for what cannot be kept faithfully, ``StoreError`` or ``CommitError``;
    whenever it raises, nothing was committed, unless the error's ``outcome`` is "unknown".
    """
    label = VersionMetadata(step=step, note=note)
    with use_group(saving_group(group)):
        return finish_save(begin_save(locate(url), state, label, shared_pool(), stage_now=False))


def save_async(
    url: Url,
    state: dict[str, Any],
    *,
    step: int | None = None,
    note: Mapping[str, Any] = {},
    group: GroupSpec = None,
) -> Pending:
    """Copy ``state`` aside and return; what is left is done in the background.

    As ``save``, but the state may be changed as soon as this returns. Memory: one copy of the
    state and 256 MiB. ``wait()`` on the result returns the snapshot or raises what went wrong;
    a failure that nobody has waited for ends the process with code 1.
    """
    label = VersionMetadata(step=step, note=note)
    pool = BufferPool(1 << 50)
    try:
        with use_group(saving_group(group)):
            draft = begin_save(locate(url), state, label, pool, stage_now=True)
        return finish_in_background(draft, finish_save, after=pool.close)
    except BaseException:
        pool.close()
        raise


def finish_in_background(
    job: SaveJob, finish: Callable[[SaveJob], Snapshot], after: Callable[[], None] | None = None
) -> Pending:
    """The second half of a staged save, on a thread. Raises ``CommitError`` if there is none."""
    pending = None
    try:
        done = None if job.deferred is None else job.deferred.done
        pending = Pending(lambda: finish(job), job.location.url, after, done)
        pending.start()
    except BaseException:
        if pending is None or not pending.begun:
            try:
                with job.collective:  # it tells the other ranks
                    raise
            finally:
                release_job(job)  # no optimizer may wait for what never comes
        raise
    return pending


def begin_save(
    location: Location,
    state: Any,
    metadata: VersionMetadata,
    pool: BufferPool,
    *,
    stage_now: bool,
    base: Snapshot | None = None,
    overlap: bool = False,
) -> SaveJob:
    """The half that needs the live state to hold still: agree on who writes what, and stage if
    ``ahead``. ``base``: a version of the same run; what it has already is then referred to instead
    of written. ``beside``: what holds still until an optimizer steps is left to ``finish``, and no
    optimizer may step before ``rest.done``. ``state`` may be taken apart already."""
    began = time.perf_counter()
    group, threads = current_group(), read_settings().threads
    meeting = group.collective(f"the save of {location.url}")
    with meeting:
        if group.rank == 0:
            raise_if_exists(location)
        about = metadata.to_node()
        with gc_paused():
            flat = state if isinstance(state, FlatState) else flatten(state, group.rank)
            synchronize_streams([leaf.source for leaf in flat.leaves])
            dealt = partition_state(meeting, group, flat, pool, threads)
            image = make_image(dealt.leaves, dealt.leaf_boxes)
        pieces = image.pieces()
        draft = SaveJob(location, metadata, base, meeting, about, dealt, image, pieces, pool, began)
        try:
            if stage_now:
                now, later = split_pieces(
                    image, pieces, find_stable_leaves(state, flat) if overlap else ()
                )
                stage_pieces(image, now, pool, threads)
                draft.deferred = DeferredStaging(image, later)
            draft.staged_at = time.perf_counter()
            seconds = draft.staged_at - began
            events.emit("staged", url=location.url, bytes=image.length, seconds=seconds)
        except BaseException as e:
            release_buffers(pieces, pool)
            if meeting.size == 1 or not stage_now or not isinstance(e, Exception):
                raise
            draft.staging_error = (
                e  # the others have gone on to train: all raise at the end of the save
            )
    return draft


def finish_save(job: SaveJob, fence: Callable[[], object] = bool) -> Snapshot:
    """The half that runs beside the training: write, gather, commit. ``fence`` is called on rank 0
    right before the commit, and raises if there is to be none."""
    place, meeting = job.location, job.collective
    try:
        with meeting:
            if job.staging_error is not None:
                raise job.staging_error
            if job.deferred is not None:
                _stage_deferred(job, job.deferred)
            with pinned_base(place, job.attempt, job.base, meeting) as base:
                receipt = write_local_shard(job, base)

                def commit(receipts: list[Receipt]) -> Snapshot:
                    shards = check_receipts(place, receipts, meeting.size)
                    manifest = job.build_manifest(shards, 1 if base is None else base.chain + 1)
                    fence()
                    meeting.begin_commit()  # a rank that failed before this prevents it
                    return put_manifest(place, manifest, job.partition.plan)

                snapshot, job.result = commit_collectively(
                    place, job.attempt, meeting, receipt, commit
                )
    finally:
        release_job(job)
    seconds = time.perf_counter() - job.started_at
    events.emit("committed", url=snapshot.url, bytes=job.result.nbytes, seconds=seconds)
    return snapshot


def _stage_deferred(job: SaveJob, deferred: DeferredStaging) -> None:
    """Stage what was left to be staged beside the training. Raises ``CommitError`` if the training
    has changed it meanwhile."""
    changed = deferred.stage(job.pool, read_settings().threads)
    if changed:
        more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise CommitError(
            f"Nothing was committed to {job.location.url}: {', '.join(changed[:3])}{more} changed"
            " while being copied beside the training",
            todo="Change it in an optimizer's step only, or use overlap=False",
            leaves=changed,
        )


def release_job(job: SaveJob) -> None:
    """Give the buffers of a save back, and let go of the live state."""
    if job.deferred is not None:
        job.deferred.release()
    release_buffers(job.pieces, job.pool)
    job.collective.close()
