"""Resuming: load a version of the training's own run, or start from a version of another run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from limpet.errors import (
    Denied,
    FormatError,
    LimpetError,
    NoSnapshot,
    PlanError,
    RankFailed,
    SkippedVersion,
    StoreError,
    Unavailable,
)
from limpet.format.names import parse_version
from limpet.generators import open_block
from limpet.loading.binding import STRICT, Leniency
from limpet.ranks.collective import Collective
from limpet.ranks.group import Group
from limpet.run.lineage import find_newest, find_sessions, newest_version, start_branch
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader
from limpet.text import warn_user
from limpet.tiers.inventory import CurrentLine, TierSnapshot
from limpet.tiers.ladder import Ladder, LadderExhausted
from limpet.tiers.tiers import Tiers
from limpet.training.arguments import check_not_snapshot, suggest_new_run
from limpet.training.resume_from_tier import (
    continue_from_tier,
    find_leftovers,
    resume_from_tier,
)
from limpet.training.resume_point import (
    ResumeInstruction,
    ResumePoint,
    ResumeRequest,
    Skipped,
    StateLoader,
    count_skipped,
    describe_skipped,
    make_resume_point,
)


def resume_run(
    run: Run,
    state: dict[str, Any],
    group: Group,
    request: ResumeRequest,
    acquire_lock: Callable[[], object],
    tiers: Tiers,
    ladder: Ladder,
    leniency: Leniency = STRICT,
) -> ResumePoint | None:
    """Load the newest intact version of a run into ``state``, or return None if the run is empty.

    A newer state of a tier is loaded instead, if its files are on hosts that answer.

    ``request`` is as for ``Run.newest``. Unless the version is the newest one of the
    current lineage, a branch is durably started, and ``acquire_lock`` is called before that.
    Raises ``LimpetError`` if the request is invalid, and the errors of
    ``Run.newest`` and ``limpet.load``.

    Rank 0 chooses the version, and all ranks load it. If the version is damaged for one rank, all
    ranks fall back to an older one together. ``ladder`` leaves out states from which restarts made
    no progress. When it has nothing left, all ranks raise ``NoProgress``.
    """
    _refuse_in_block()
    tiers.open(run.store, state, is_resumed=True)
    collective = group.collective(f"the resume of {run.url}")
    loader = StateLoader(state, group, tiers, leniency)
    try:
        with collective:
            found = tiers.find(collective)
            if collective.rank == 0:
                rest = ladder, request, acquire_lock
                point = _choose(run, loader, collective, found, *rest)
            else:
                point = _follow_coordinator(run, loader, collective)
            if point is None and loader.error is not None:
                _require_valid_state(loader, collective, ladder)
            if tiers.local.is_open and not isinstance(point, str):
                own = loader.leftovers if collective.rank == 0 else None
                loader.leftovers = collective.broadcast(own, list[TierSnapshot])
        if isinstance(point, str):
            raise ladder.give_up(point)
        tier, kept = (None, None) if point is None else (point.tier, point.snapshot.version)
        tiers.resume_from(tier, kept, loader.leftovers)
        for message, kind in ladder.warnings:
            warn_user(message, kind)
        for message in describe_skipped(loader.problems if point is None else point.skipped):
            warn_user(message, SkippedVersion)
        return point
    except LimpetError as e:
        if loader.partially_loaded and not e.is_state_invalid:
            raise e.with_advice("The live state is not valid", live_state="not valid") from e
        raise
    finally:
        collective.close()


def _require_valid_state(loader: StateLoader, collective: Collective, ladder: Ladder) -> None:
    """Raise on all ranks if the run is empty, and a state of a tier that turned out to be damaged
    has overwritten a part of the live state of a rank. This counts as a restart from there that
    made no progress: the ladder then leaves it out, before anything is overwritten."""
    found = collective.gather(loader.partially_loaded, bool)
    is_invalid = collective.broadcast(any(found or ()) if collective.rank == 0 else None, bool)
    if is_invalid:
        if collective.rank == 0 and loader.first_from_tier is not None:
            ladder.record(*loader.first_from_tier)
        problems = " ".join(describe_skipped(loader.problems)) or "Rank 0 says which one."
        raise LimpetError(
            f"The only state to resume from is damaged. {problems}",
            expected="an intact state in a tier, or a version in the run",
            found="neither",
            todo="The training must begin again: delete the folders of the tiers of this run on all"
            " hosts, and start it again. Under `limpet run`, the fourth start leaves them out",
            live_state="not valid",
        )


def _refuse_in_block() -> None:
    if open_block() is not None:
        raise LimpetError(
            "resume() was called inside a block of isolated_rng()",
            expected="resume() outside, because the block would undo that it restores the random"
            " generators",
            todo="Train outside of the block; only an evaluation belongs into it",
        )


def _choose(
    run: Run,
    loader: StateLoader,
    collective: Collective,
    found: Sequence[TierSnapshot],
    ladder: Ladder,
    request: ResumeRequest,
    acquire_lock: Callable[[], object],
) -> ResumePoint | str | None:
    """Choose and load a state on rank 0. A string says why all ranks must leave instead."""
    point, problems, is_requested = None, list[Skipped](), request.is_specific
    try:
        line = CurrentLine(run) if found else None
        if line is not None:
            loader.leftovers = find_leftovers(line, loader, found)
            loader.goes_below = is_requested and any(line.is_newer(c.version) for c in found)
        found = ladder.choose(found, is_requested=is_requested)
        if line is not None and not is_requested:
            point, problems = resume_from_tier(
                run, line, loader, collective, found, acquire_lock, ladder
            )
            loader.problems = problems
        if point is None:
            rest = acquire_lock, problems, ladder
            point = _coordinate(run, loader, collective, request, *rest)
    except LadderExhausted as e:
        collective.broadcast(ResumeInstruction(True, given_up=str(e)), ResumeInstruction)
        collective.gather(True, bool)  # this rank may host the store through which they hear of it
        return str(e)
    return point


def _coordinate(
    run: Run,
    loader: StateLoader,
    collective: Collective,
    request: ResumeRequest,
    acquire_lock: Callable[[], object],
    problems: Sequence[Skipped],
    ladder: Ladder,
) -> ResumePoint | None:
    """``problems``: those of newer states of tiers. Training then continues on a new branch."""

    def load(snapshot: SnapshotReader) -> None:
        ladder.check(snapshot.version)
        collective.broadcast(
            ResumeInstruction(False, str(snapshot.version), snapshot.digest), ResumeInstruction
        )
        loader.load(snapshot)

    try:
        snapshot, skipped = find_newest(run.catalog, load, *request)
    except PlanError as e:
        if "missing" not in e.fields:
            raise  # from an object in the state, which gives more specific advice
        is_new = e.fields["missing"] and not (e.fields["unexpected"] or e.fields["misfits"])
        keep = ' Or keep the live values of these keys: resume(missing="keep").' if is_new else ""
        raise type(e)(
            e.what,
            expected=e.expected,
            found=e.found,
            todo=f"Restore the earlier structure of the state.{keep}"
            f" {suggest_new_run(run.url, loader.state, e)}",
            **e.fields,
        ) from e.__cause__  # the error itself says the same, with advice for a load
    except NoSnapshot:
        ladder.give_up_without_older()
        raise
    if snapshot is None:
        check_not_snapshot(run)
        ladder.record(None)
        collective.broadcast(ResumeInstruction(True), ResumeInstruction)
        return None
    version = snapshot.version
    newer = [*problems, *(Skipped(str(v), e) for v, e in skipped)]
    listing = run.listing()
    is_newest = version == newest_version(run.catalog, listing)
    if is_newest and not (problems or loader.goes_below or ladder.leaves_newer):
        ladder.record(snapshot)
        number = run.branch(listing)
    else:
        acquire_lock()  # only the writer of a run may change its current lineage
        ladder.record(snapshot)
        reason = ladder.branch_reason or count_skipped(newer) or "on request"
        number = start_branch(run.catalog, snapshot, version, reason)
    collective.broadcast(
        ResumeInstruction(True, str(version), snapshot.digest, number), ResumeInstruction
    )
    point = make_resume_point(snapshot, number, newer)
    return replace(point, sessions=find_sessions(run.catalog, listing, snapshot))


def _follow_coordinator(
    run: Run, loader: StateLoader, collective: Collective
) -> ResumePoint | str | None:
    snapshot = None
    while True:
        instruction = collective.broadcast(None, ResumeInstruction)
        if instruction.given_up:
            collective.gather(True, bool)
            return instruction.given_up
        version = None if instruction.version is None else parse_version(instruction.version)
        if version is None:
            return None
        if instruction.done and snapshot is not None:
            if loader.error is not None:
                raise loader.error
            if instruction.tier is not None:
                return continue_from_tier(run, snapshot, instruction, [])
            return make_resume_point(snapshot, instruction.branch, [])
        if instruction.tier is not None:
            with suppress(FormatError, StoreError, RankFailed):  # rank 0 gets the same error
                snapshot = loader.load_from_tier(instruction)
            continue
        snapshot = SnapshotReader(run.location(version), None, instruction.digest)
        try:
            # this also reads the manifest, so that nothing can fail after the last instruction
            loader.load(snapshot)
        except (Denied, Unavailable):
            raise
        except (FormatError, StoreError):
            continue  # rank 0 gets the same error, and falls back to an older version or raises
