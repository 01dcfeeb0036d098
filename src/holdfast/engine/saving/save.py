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
from holdfast.buffers import Pool, shared_pool
from holdfast.engine.distributed.group import Choice, acting_as, current_group, saving_group
from holdfast.engine.saving.commit import (
    Receipt,
    check_receipts,
    put_manifest,
    refuse_existing,
    settled,
)
from holdfast.engine.saving.image import make_image
from holdfast.engine.saving.incremental import held
from holdfast.engine.saving.job import Draft, Label
from holdfast.engine.saving.overlap import Rest, split
from holdfast.engine.saving.partition import deal
from holdfast.engine.saving.pending import Pending
from holdfast.engine.saving.staging import drop, stage_ahead, wait_queued
from holdfast.engine.saving.write import write_part
from holdfast.engine.snapshot.location import Location, Url, locate
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.state.flatten import Flat, flatten
from holdfast.engine.state.step_hooks import steady
from holdfast.errors import CommitError
from holdfast.settings import read_settings
from holdfast.threads import uncollected


def save(
    url: Url,
    state: dict[str, Any],
    *,
    step: int | None = None,
    note: Mapping[str, Any] = {},
    group: Choice = None,
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
    label = Label(step=step, note=note)
    with acting_as(saving_group(group)):
        return finish(begin(locate(url), state, label, shared_pool(), ahead=False))


def save_async(
    url: Url,
    state: dict[str, Any],
    *,
    step: int | None = None,
    note: Mapping[str, Any] = {},
    group: Choice = None,
) -> Pending:
    """Copy ``state`` aside and return; what is left is done in the background.

    As ``save``, but the state may be changed as soon as this returns. Memory: one copy of the
    state and 256 MiB. ``wait()`` on the result returns the snapshot or raises what went wrong;
    a failure that nobody has waited for ends the process with code 1.
    """
    label = Label(step=step, note=note)
    pool = Pool(1 << 50)
    try:
        with acting_as(saving_group(group)):
            draft = begin(locate(url), state, label, pool, ahead=True)
        return in_background(draft, finish, after=pool.close)
    except BaseException:
        pool.close()
        raise


def in_background(
    draft: Draft, finish: Callable[[Draft], Snapshot], after: Callable[[], None] | None = None
) -> Pending:
    """The second half of a staged save, on a thread. Raises ``CommitError`` if there is none."""
    pending = None
    try:
        done = None if draft.rest is None else draft.rest.done
        pending = Pending(lambda: finish(draft), draft.place.url, after, done)
        pending.start()
    except BaseException:
        if pending is None or not pending.begun:
            try:
                with draft.meeting:  # it tells the other ranks
                    raise
            finally:
                abandon(draft)  # no optimizer may wait for what never comes
        raise
    return pending


def begin(
    place: Location,
    state: Any,
    label: Label,
    pool: Pool,
    *,
    ahead: bool,
    base: Snapshot | None = None,
    beside: bool = False,
) -> Draft:
    """The half that needs the live state to hold still: agree on who writes what, and stage if
    ``ahead``. ``base``: a version of the same run; what it has already is then referred to instead
    of written. ``beside``: what holds still until an optimizer steps is left to ``finish``, and no
    optimizer may step before ``rest.done``. ``state`` may be taken apart already."""
    began = time.perf_counter()
    group, threads = current_group(), read_settings().threads
    meeting = group.meet(f"the save of {place.url}")
    with meeting:
        if group.rank == 0:
            refuse_existing(place)
        about = label.node()
        with uncollected():
            flat = state if isinstance(state, Flat) else flatten(state, group.rank)
            wait_queued([leaf.source for leaf in flat.leaves])
            dealt = deal(meeting, group, flat, pool, threads)
            image = make_image(dealt.leaves, dealt.holdings)
        pieces = image.pieces()
        draft = Draft(place, label, base, meeting, about, dealt, image, pieces, pool, began)
        try:
            if ahead:
                now, later = split(image, pieces, steady(state, flat) if beside else ())
                stage_ahead(image, now, pool, threads)
                draft.rest = Rest(image, later)
            draft.staged = time.perf_counter()
            seconds = draft.staged - began
            events.emit("staged", url=place.url, bytes=image.length, seconds=seconds)
        except BaseException as e:
            drop(pieces, pool)
            if meeting.size == 1 or not ahead or not isinstance(e, Exception):
                raise
            draft.failed = e  # the others have gone on to train: all raise at the end of the save
    return draft


def finish(draft: Draft, fence: Callable[[], object] = bool) -> Snapshot:
    """The half that runs beside the training: write, gather, commit. ``fence`` is called on rank 0
    right before the commit, and raises if there is to be none."""
    place, meeting = draft.place, draft.meeting
    try:
        with meeting:
            if draft.failed is not None:
                raise draft.failed
            if draft.rest is not None:
                _stage_rest(draft, draft.rest)
            with held(place, draft.attempt, draft.base, meeting) as base:
                receipt = write_part(draft, base)

                def commit(receipts: list[Receipt]) -> Snapshot:
                    shards = check_receipts(place, receipts, meeting.size)
                    manifest = draft.manifest(shards, 1 if base is None else base.chain + 1)
                    fence()
                    meeting.decide()  # a rank that fails before this one keeps it from being made
                    return put_manifest(place, manifest, draft.dealt.plan)

                snapshot, draft.outcome = settled(place, draft.attempt, meeting, receipt, commit)
    finally:
        abandon(draft)
    seconds = time.perf_counter() - draft.began
    events.emit("committed", url=snapshot.url, bytes=draft.outcome.nbytes, seconds=seconds)
    return snapshot


def _stage_rest(draft: Draft, rest: Rest) -> None:
    """Stage what was left to be staged beside the training. Raises ``CommitError`` if the training
    has changed it meanwhile."""
    changed = rest.stage(draft.pool, read_settings().threads)
    if changed:
        more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise CommitError(
            f"Nothing was committed to {draft.place.url}: {', '.join(changed[:3])}{more} changed"
            " while being copied beside the training",
            todo="Change it in an optimizer's step only, or use overlap=False",
            leaves=changed,
        )


def abandon(draft: Draft) -> None:
    """Give the buffers of a save back, and let go of the live state."""
    if draft.rest is not None:
        draft.rest.let_go()
    drop(draft.pieces, draft.pool)
    draft.meeting.close()
