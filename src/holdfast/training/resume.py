"""Resuming: load a version of the training's own run, or start from a version of another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from holdfast.engine.distributed.collective import Collective
from holdfast.engine.distributed.group import Group
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import (
    Denied,
    FormatError,
    HoldfastError,
    NoSnapshot,
    NotFound,
    PlanError,
    RankFailed,
    SkippedVersion,
    StoreError,
    Unavailable,
)
from holdfast.format.manifest import Parent
from holdfast.format.names import parse_version
from holdfast.generators import open_block
from holdfast.restarts.ladder import Ladder, LadderExhausted
from holdfast.run.catalog import read_training_metadata
from holdfast.run.lineage import newest_version
from holdfast.run.run import Run
from holdfast.text import warn_user
from holdfast.tiers.captures import Captures
from holdfast.tiers.inventory import Candidate, continues
from holdfast.training.arguments import check_not_snapshot, suggest_start


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The version that was loaded, and how training continues from it.

    ``from_own_run`` is True if the version belongs to the run itself. ``note`` is metadata about
    the origin of the run, which later versions store. ``training_metadata`` is the state of early
    stopping and goodput that the version stores. ``skipped`` holds a message for each newer
    version that is damaged.
    """

    snapshot: Snapshot
    step: int
    from_own_run: bool = True
    branch: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)
    training_metadata: Mapping[str, Any] = field(default_factory=dict)
    skipped: Sequence[str] = ()
    durable: Snapshot | None = None
    memory_folder: str | None = None


class ResumeInstruction(msgspec.Struct, frozen=True):
    """An instruction from rank 0 to the other ranks.

    If ``done`` is False, the ranks load the version ``version`` with the manifest ``digest``. If
    it is True, training continues from the version that was loaded last, on ``branch``, or from no
    version if ``version`` is None. ``sources``: for each file of a state in memory, the ranks that
    serve it, or None for a version of the run; ``durable``: the newest version of the run, if a
    state in memory was loaded. ``given_up``: why all ranks leave instead, for people.
    """

    done: bool
    version: str | None = None
    digest: str = ""
    branch: int = 0
    sources: dict[str, list[int]] | None = None
    durable: Parent | None = None
    given_up: str = ""


def resume_run(
    run: Run,
    state: dict[str, Any],
    group: Group,
    at: int | None,
    branch: int | None,
    acquire_lock: Callable[[], object],
    captures: Captures,
    ladder: Ladder,
) -> ResumePoint | None:
    """Load the newest intact version of a run into ``state``, or return None if the run is empty.

    A newer state in memory is loaded instead, if its files are in the memory of hosts that answer.

    ``at`` and ``branch`` are as for ``Run.newest``. Unless the version is the newest one of the
    current lineage, a branch is durably started, and ``acquire_lock`` is called before that.
    Raises ``HoldfastError`` if ``at`` or ``branch`` is not a whole number, and the errors of
    ``Run.newest`` and ``holdfast.load``.

    Rank 0 chooses the version, and all ranks load it. If the version is damaged for one rank, all
    ranks fall back to an older one together. ``ladder`` leaves out states from which restarts made
    no progress. When it has nothing left, all ranks raise ``NoProgress``.
    """
    if not all(
        n is None or (hasattr(n, "__index__") and type(n) is not bool) for n in (at, branch)
    ):
        raise HoldfastError(
            "Invalid value for at= or branch= of resume()",
            expected="whole numbers",
            found=f"{at=}, {branch=}",
            todo="resume() continues from the newest version, and resume(at=120) from the version"
            ' of step 120. resume(start="RUN@120") starts from a version of another run',
        )
    if open_block() is not None:
        raise HoldfastError(
            "resume() was called inside a block of isolated_rng()",
            expected="resume() outside, because the block would undo that it restores the random"
            " generators",
            todo="Train outside of the block; only an evaluation belongs into it",
        )
    captures.open(run.store, state)
    collective = group.collective(f"the resume of {run.url}")
    loader = StateLoader(state, group, captures)
    try:
        with collective:
            found = captures.find(collective)
            if collective.rank == 0:
                goal = at, branch, acquire_lock
                point = _choose(run, loader, collective, found, ladder, *goal)
            else:
                point = _follow_coordinator(run, loader, collective)
        if isinstance(point, str):
            raise ladder.give_up(point)
        captures.keep_only(None if point is None else point.memory_folder)
        for message, kind in ladder.warnings:
            warn_user(message, kind)
        for message in () if point is None else point.skipped:
            warn_user(message, SkippedVersion)
        return point
    except HoldfastError as e:
        if loader.partially_loaded and not e.is_state_invalid:
            raise e.with_advice("The live state is not valid", live_state="not valid") from e
        raise
    finally:
        collective.close()


@dataclass(slots=True)
class StateLoader:
    """Loads versions into a state until one is intact for all ranks.

    ``error`` is the error of the last load, or None if it succeeded. ``partially_loaded`` is True
    if a failed load has overwritten a part of the state and no load has succeeded since.
    """

    state: dict[str, Any]
    group: Group
    captures: Captures
    error: HoldfastError | None = None
    partially_loaded: bool = False

    def load(self, snapshot: Snapshot) -> None:
        """Load a version. If it is damaged for one rank, all ranks raise that error.

        Raises ``RankFailed`` if the store of another rank denies access or does not answer,
        because the version may then be intact.
        """
        try:
            load_snapshot(snapshot, self.state, group=self.group)
        except HoldfastError as e:
            self.error, self.partially_loaded = e, self.partially_loaded or left_state_invalid(e)
            cause = e.__cause__ if isinstance(e, RankFailed) else None
            if isinstance(cause, StoreError) and not isinstance(cause, Denied | Unavailable):
                raise cause from e
            raise
        self.error, self.partially_loaded = None, False

    def load_from_memory(self, instruction: ResumeInstruction) -> Snapshot:
        """Load a state in memory, and return it. Raises the same errors."""
        folder, sources = instruction.version or "", instruction.sources or {}
        snapshot = self.open_in_memory(folder, instruction.digest, sources)
        self.load(snapshot)
        return snapshot

    def open_in_memory(self, folder: str, digest: str, sources: dict[str, list[int]]) -> Snapshot:
        """Return a state in memory, of which nothing is read yet."""
        return Snapshot(self.captures.locate(folder, sources), None, digest)


def _choose(
    run: Run,
    loader: StateLoader,
    collective: Collective,
    found: Sequence[Candidate],
    ladder: Ladder,
    at: int | None,
    branch: int | None,
    acquire_lock: Callable[[], object],
) -> ResumePoint | str | None:
    """Choose and load a state on rank 0. A string says why all ranks must leave instead."""
    point, problems, is_requested = None, list[str](), (at, branch) != (None, None)
    try:
        found = ladder.choose(found, is_requested=is_requested)
        if not is_requested:
            point, problems = _resume_from_memory(run, loader, collective, found, ladder)
        if point is None:
            rest = acquire_lock, problems, ladder
            point = _coordinate(run, loader, collective, at, branch, *rest)
    except LadderExhausted as e:
        collective.broadcast(ResumeInstruction(True, given_up=str(e)), ResumeInstruction)
        collective.gather(True, bool)  # this rank may host the store through which they hear of it
        return str(e)
    return point


def _resume_from_memory(
    run: Run,
    loader: StateLoader,
    collective: Collective,
    found: Sequence[Candidate],
    ladder: Ladder,
) -> tuple[ResumePoint | None, list[str]]:
    """Load the newest state in memory that continues the current lineage, and return it.

    Also return the problems of newer ones. None: the durable version is newer, or none is intact.
    """
    listing = run.listing()
    newest, number = newest_version(run.catalog, listing), run.branch(listing)
    problems: list[str] = []
    for candidate in found:
        is_older = newest is not None and candidate.version.step < newest.step
        if candidate.branch != number or is_older:
            continue
        try:
            if candidate.problem:
                raise NotFound(candidate.problem)
            durable = None if newest is None else run.open(newest)
            captured = loader.open_in_memory(candidate.folder, candidate.digest, candidate.sources)
            if not continues(candidate, captured, durable):
                continue
            instruction = ResumeInstruction(
                False, candidate.folder, candidate.digest, sources=candidate.sources
            )
            collective.broadcast(instruction, ResumeInstruction)
            snapshot = loader.load_from_memory(instruction)
        except (FormatError, StoreError, RankFailed) as e:
            reason = HoldfastError(e.what, expected=e.expected, found=e.found)
            problems.append(f"{candidate.folder} in memory is skipped. {reason}")
            continue
        reference = None if durable is None else Parent(str(newest), durable.digest)
        ladder.record(snapshot, from_memory=True)
        done = ResumeInstruction(
            True, candidate.folder, candidate.digest, number, {}, durable=reference
        )
        collective.broadcast(done, ResumeInstruction)
        return _from_memory(run, snapshot, done, problems), problems
    return None, problems


def _from_memory(
    run: Run, snapshot: Snapshot, done: ResumeInstruction, skipped: Sequence[str]
) -> ResumePoint:
    """Return how training continues from a state in memory, which later versions name."""
    point = _make_resume_point(snapshot, done.branch, skipped)
    version = None if done.durable is None else parse_version(done.durable.version)
    durable = None
    if done.durable is not None and version is not None:
        durable = Snapshot(run.location(version), None, done.durable.digest)
    origin = {"version": done.version, "digest": done.digest}
    note = {**point.note, "resumed_from_memory": origin}
    return replace(point, note=note, durable=durable, memory_folder=done.version)


def _coordinate(
    run: Run,
    loader: StateLoader,
    collective: Collective,
    at: int | None,
    branch: int | None,
    acquire_lock: Callable[[], object],
    problems: Sequence[str],
    ladder: Ladder,
) -> ResumePoint | None:
    """``problems``: those of newer states in memory. Training then continues on a new branch."""

    def load(snapshot: Snapshot) -> None:
        ladder.check(snapshot.version)
        collective.broadcast(
            ResumeInstruction(False, str(snapshot.version), snapshot.digest), ResumeInstruction
        )
        loader.load(snapshot)

    try:
        snapshot, skipped = run.newest(load, at, branch)
    except PlanError as e:
        if "missing" not in e.fields:
            raise  # from an object in the state, which gives more specific advice
        raise type(e)(
            e.what,
            expected=e.expected,
            found=e.found,
            todo="Restore the earlier structure of the state. Or continue with the changed state in"
            f" a new run: use another folder and {suggest_start(run.url, loader.state, e)}",
            **e.fields,
        ) from e
    except NoSnapshot:
        ladder.give_up_without_older()
        raise
    if snapshot is None:
        check_not_snapshot(run)
        ladder.record(None)
        collective.broadcast(ResumeInstruction(True), ResumeInstruction)
        return None
    version = snapshot.version
    listing = run.listing()
    is_newest = version == newest_version(run.catalog, listing)
    if is_newest and not problems and not ladder.leaves_newer:
        ladder.record(snapshot)
        number = run.branch(listing)
    else:
        acquire_lock()  # only the writer of a run may change its current lineage
        ladder.record(snapshot)
        damaged = len(skipped) + len(problems)
        reason = f"{damaged} newer damaged" if damaged else "on request"
        number = run.leave_from(snapshot, version, ladder.branch_reason or reason)
    collective.broadcast(
        ResumeInstruction(True, str(version), snapshot.digest, number), ResumeInstruction
    )
    # the messages of the errors, without their advice
    reasons = [(v, HoldfastError(e.what, expected=e.expected, found=e.found)) for v, e in skipped]
    messages = [*problems, *(f"{v} is skipped. {e}" for v, e in reasons)]
    return _make_resume_point(snapshot, number, messages)


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
            if instruction.sources is not None:
                return _from_memory(run, snapshot, instruction, [])
            return _make_resume_point(snapshot, instruction.branch, [])
        if instruction.sources is not None:
            with suppress(FormatError, StoreError, RankFailed):  # rank 0 gets the same error
                snapshot = loader.load_from_memory(instruction)
            continue
        snapshot = Snapshot(run.location(version), None, instruction.digest)
        try:
            # this also reads the manifest, so that nothing can fail after the last instruction
            loader.load(snapshot)
        except (Denied, Unavailable):
            raise
        except (FormatError, StoreError):
            continue  # rank 0 gets the same error, and falls back to an older version or raises


def _make_resume_point(snapshot: Snapshot, branch: int, skipped: Sequence[str]) -> ResumePoint:
    note = snapshot.metadata.get("note")
    origin = note.get("started_from") if isinstance(note, dict) else None
    return ResumePoint(
        snapshot,
        snapshot.version.step,
        branch=branch,
        note={} if origin is None else {"started_from": origin},
        training_metadata=read_training_metadata(snapshot),
        skipped=skipped,
        durable=snapshot,
    )


def left_state_invalid(error: BaseException | None) -> bool:
    """Return True if an error of a resume, or one of its causes, may have left the state invalid.

    Errors other than ``HoldfastError`` count as such, because they may occur at any point.
    """
    depth = 0
    while error is not None and depth < 20:
        if not isinstance(error, HoldfastError) or error.is_state_invalid:
            return True
        error, depth = error.__cause__, depth + 1
    return False
