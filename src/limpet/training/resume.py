"""Resuming: load a version of the training's own run, or start from a version of another run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from limpet import events
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
from limpet.format.manifest import Parent
from limpet.format.names import Version, parse_version
from limpet.generators import open_block
from limpet.loading.binding import STRICT, Leniency
from limpet.loading.differences import LoadReport
from limpet.loading.load import load_snapshot
from limpet.ranks.collective import Collective
from limpet.ranks.group import Group
from limpet.run.address import open_on_all_ranks
from limpet.run.catalog import read_sessions, read_training_metadata
from limpet.run.lineage import find_newest, find_sessions, newest_version, start_branch
from limpet.run.run import Run
from limpet.snapshot.location import Url
from limpet.snapshot.reader import SnapshotReader
from limpet.text import format_list, to_repr, warn_user
from limpet.tiers.inventory import WHERE, CurrentLine, Sources, TierName, TierSnapshot
from limpet.tiers.ladder import Ladder, LadderExhausted
from limpet.tiers.tiers import Tiers
from limpet.training.arguments import check_not_snapshot


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


def refuse_in_block() -> None:
    """Raise ``LimpetError`` inside a block of ``isolated_rng``."""
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
        options = (e.todo or "").partition("options as needed: ")[2].replace("cast=True", CAST)
        raise type(e)(
            e.what,
            expected=e.expected,
            found=e.found,
            todo=f"Restore the earlier structure of the state.{keep} Or continue with the changed"
            f' state in a new run: use another folder and resume(start="{run.url}@latest"), with'
            f" options as needed: {options or 'rename={OLD: NEW}'}",
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


# -- starting from another run -------------------------------------------------------------------


KEEP_MISSING = Leniency(missing="keep")
"""What may be tolerated in versions of the run itself."""


CAST = 'mismatched="cast"'
"""How ``resume`` requests what ``limpet.load`` does with ``cast=True``."""


def check_start(
    start: object, keys: str | Sequence[str] | None, leniency: Leniency, goes_back: bool
) -> None:
    """Check the arguments of ``Checkpointer.resume`` that select a version of another run.

    ``goes_back`` is True if the caller also selects a version of the run itself. Raises
    ``LimpetError`` for ``start`` together with such a version, for a partial selection without
    ``start`` other than ``missing="keep"``, and for a ``start`` that is not an address.
    """
    is_location = isinstance(start, str | os.PathLike) or hasattr(start, "put_if_absent")
    if start is not None and not is_location:
        raise LimpetError(
            "Invalid value for start=",
            expected='an address ("RUN@120", "RUN@best", or the URL of a snapshot), or a Store',
            found=f"{start=}",
            todo="resume(at=120) goes back to step 120 of this run itself",
        )
    if start is not None and goes_back:
        raise LimpetError(
            "resume() cannot combine start= with at=",
            expected="start= for an empty run, or at= for a run with versions",
            found=f"{start=} and at=",
            todo='Write the step in the address: resume(start="RUN@120")',
        )
    if start is None and (keys is not None or leniency not in (STRICT, KEEP_MISSING)):
        raise LimpetError(
            "A run always resumes all of its own versions",
            expected="keys=, unexpected=, rename=, or mismatched= only together with start=."
            ' missing="keep" keeps new members of the state',
            found="no start=",
            todo="Pass start=, or load the snapshot with limpet.load",
        )


def start_from(
    start: Url,
    state: dict[str, Any],
    group: Group,
    keys: str | Sequence[str] | None,
    leniency: Leniency,
) -> ResumePoint:
    """Load a version of another run, or a part of it, into ``state``.

    If the state has no ``Progress``, steps continue from those of the version only if all of it is
    loaded. Otherwise they begin at 0. Raises the errors of ``open_version`` and ``limpet.load``.
    """
    snapshot = open_on_all_ranks(start, group)
    try:
        report = load_snapshot(snapshot, state, keys, None, leniency, group)
    except PlanError as e:
        if "match" not in e.fields:
            raise
        # the error of a load, whose into= is the state of a Checkpointer
        todo = (e.todo or "").replace("into={", "the state {").replace("cast=True", CAST)
        raise type(e)(e.what, todo=todo, **e.fields) from e.__cause__
    # a conversion of dtypes leaves nothing out
    is_complete = keys is None and replace(leniency, cast=False) == STRICT
    metadata = read_training_metadata(snapshot) if is_complete else {}
    return ResumePoint(
        snapshot,
        (snapshot.step or 0) if is_complete else 0,
        from_own_run=False,
        note={"started_from": {"url": snapshot.url, "digest": snapshot.digest}},
        # the position and the state of early stopping belong to the model, but goodput to the run
        training_metadata={n: metadata[n] for n in ("stop", "progress") if n in metadata},
        start_report=report,
        is_exact=keys is None and report.is_exact,
    )


# -- resuming from a tier ------------------------------------------------------------------------


def find_leftovers(
    line: CurrentLine, loader: StateLoader, found: Sequence[TierSnapshot]
) -> list[TierSnapshot]:
    """Return the versions on local disks that the run lacks, oldest first: an earlier training
    ended before they were promoted."""
    leftovers = []
    for in_tier in reversed(found):
        is_whole = in_tier.tier == "local" and in_tier.is_whole
        if is_whole and line.is_newer(in_tier.version):
            with suppress(FormatError, StoreError):  # it is skipped below, with a warning
                if line.is_continued_by(in_tier, loader.open_in_tier(_instruct(in_tier, 0))):
                    leftovers.append(in_tier)
    return leftovers


def _instruct(in_tier: TierSnapshot, branch: int) -> ResumeInstruction:
    return ResumeInstruction(
        False, in_tier.folder, in_tier.digest, branch, in_tier.tier, in_tier.sources
    )


def resume_from_tier(
    run: Run,
    line: CurrentLine,
    loader: StateLoader,
    collective: Collective,
    found: Sequence[TierSnapshot],
    acquire_lock: Callable[[], object],
    ladder: Ladder,
) -> tuple[ResumePoint | None, list[Skipped]]:
    """Load the newest state of a tier that continues the current lineage, and return it.

    Also return the newer ones that are skipped. None: the durable version is newer, or none is
    intact.
    """
    problems: list[Skipped] = []
    damaged: dict[Version, LimpetError] = {}
    for in_tier in found:
        is_newest = in_tier.version == line.newest
        if not (is_newest or line.is_newer(in_tier.version)):
            continue
        instruction = _instruct(in_tier, line.branch)
        try:
            reader = loader.open_in_tier(instruction)
            # a state of another history is no problem, damaged or not
            belongs = line.is_same if is_newest else line.is_continued_by
            if in_tier.digest and not belongs(in_tier, reader):
                continue
            in_tier.check_whole(reader)
            collective.broadcast(instruction, ResumeInstruction)
            snapshot = loader.load_from_tier(instruction)
        except (FormatError, StoreError, RankFailed) as e:
            if is_newest:  # the run has it, too
                events.emit("skipped", version=in_tier.folder, error=e)
                continue
            problems.append(Skipped(f"{in_tier.folder} {WHERE[in_tier.tier]}", e))
            damaged[in_tier.version] = e
            continue
        damaged.pop(in_tier.version, None)  # another tier has had the state of this step
        durable = line.durable
        reference = None if durable is None else Parent(str(line.newest), durable.digest)
        number = line.branch
        if damaged:  # a newer state that was lost must not come back
            acquire_lock()
        ladder.record(snapshot, None if is_newest else in_tier.tier)
        if damaged:
            reason = count_skipped(damaged)
            number = start_branch(run.catalog, snapshot, in_tier.version, reason)
        done = structs.replace(
            instruction, done=True, branch=number, sources=Sources(), durable=reference
        )
        collective.broadcast(done, ResumeInstruction)
        return continue_from_tier(run, snapshot, done, problems), problems
    return None, problems


def continue_from_tier(
    run: Run, snapshot: SnapshotReader, done: ResumeInstruction, skipped: Sequence[Skipped]
) -> ResumePoint:
    """Return how training continues from a state of a tier, which later versions name."""
    point = make_resume_point(snapshot, done.branch, skipped)
    version = None if done.durable is None else parse_version(done.durable.version)
    durable = None
    if done.durable is not None and version is not None:
        durable = SnapshotReader(run.location(version), None, done.durable.digest)
    origin = {"tier": done.tier, "version": done.version, "digest": done.digest}
    note = {**point.note, "resumed_from_tier": origin}
    return replace(point, note=note, durable=durable, tier=done.tier)


# -- where a training continues ------------------------------------------------------------------


_MAX_NAMES = 9

_NAME = re.compile(r"(?:version_)?([0-9]{1,18})(?:\.([0-9]{1,9}))?")
"""The name of a version, as people write it: ``91``, ``91.1``, or ``version_91.1``."""


class ResumeRequest(NamedTuple):
    """What the caller of ``resume`` asks for: see ``Run.newest``."""

    at: int | None
    branch: int | None

    @classmethod
    def parse(cls, at: int | str | None) -> ResumeRequest:
        """Return the request for a step, or for a version by its name. Raises ``LimpetError``."""
        if at is None:
            return cls(None, None)
        if not isinstance(at, str | bool) and hasattr(at, "__index__"):
            return cls(at, None)
        match = _NAME.fullmatch(at) if isinstance(at, str) else None
        if match is None:
            raise LimpetError(
                'at= must be a step, or the name of a version such as "91.1",'
                f" not {to_repr(at)[:100]}"
            )
        return cls(int(match[1]), int(match[2] or 0))

    @property
    def is_specific(self) -> bool:
        """True if a person has named the version or the branch."""
        return (self.at, self.branch) != (None, None)


class Skipped(NamedTuple):
    """A newer state that is not loaded, and why. ``name``: ``version_70 in memory``."""

    name: str
    error: LimpetError


def describe_skipped(skipped: Sequence[Skipped]) -> list[str]:
    """Return a message for each reason, without its advice."""
    by_reason: dict[str, list[str]] = {}
    for name, e in skipped:
        by_reason.setdefault(e.brief, []).append(name)
    return [
        f"{format_list(found, _MAX_NAMES)} {'is' if len(found) == 1 else 'are'} skipped. {reason}"
        for reason, found in by_reason.items()
    ]


def count_skipped(skipped: Sized) -> str:
    """Return the reason for a branch that begins before these states; empty if there are none."""
    return f"{len(skipped)} newer damaged" if skipped else ""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The version that was loaded, and how training continues from it.

    ``from_own_run`` is True if the version belongs to the run itself. ``note`` is metadata about
    the origin of the run, which later versions store. ``training_metadata`` is the state of early
    stopping and goodput that the version stores. ``skipped`` holds the newer states that were not
    loaded. ``durable`` is the newest version of the run. ``tier`` is the name of the tier from
    which the version was loaded, or None if it is a version of the run. ``start_report``: what was
    loaded from a version of another run. ``sessions``: those whose work continues, also in versions
    that are left behind. ``is_exact``: the whole version was loaded as it is.
    """

    snapshot: SnapshotReader
    step: int
    from_own_run: bool = True
    branch: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)
    training_metadata: Mapping[str, Any] = field(default_factory=dict)
    skipped: Sequence[Skipped] = ()
    durable: SnapshotReader | None = None
    tier: TierName | None = None
    start_report: LoadReport | None = None
    sessions: Sequence[str] = ()
    is_exact: bool = True


class ResumeInstruction(msgspec.Struct, frozen=True):
    """An instruction from rank 0 to the other ranks.

    If ``done`` is False, the ranks load the version ``version`` with the manifest ``digest``. If
    it is True, training continues from the version that was loaded last, on ``branch``, or from no
    version if ``version`` is None. ``tier``: the name of the tier that has the version, or None
    for a version of the run; ``sources``: where its files are there; ``durable``: the newest
    version of the run, if a state of a tier was loaded. ``given_up``: why all ranks leave instead,
    for people.
    """

    done: bool
    version: str | None = None
    digest: str = ""
    branch: int = 0
    tier: TierName | None = None
    sources: Sources = Sources()
    durable: Parent | None = None
    given_up: str = ""


@dataclass(slots=True)
class StateLoader:
    """Loads versions into a state until one is intact for all ranks.

    ``error`` is the error of the last load, or None if it succeeded. ``partially_loaded`` is True
    if a failed load has overwritten a part of the state and no load has succeeded since.
    ``first_from_tier``: the first state that was loaded from a tier, which is the newest one, and
    the name of the tier. ``leftovers`` are the versions on local disks that are still to be
    promoted, and ``problems`` the newer states of tiers that are skipped. ``goes_below``: a
    newer state is in a tier, but a person has named another version.
    """

    state: dict[str, Any]
    group: Group
    tiers: Tiers
    leniency: Leniency = STRICT
    error: LimpetError | None = None
    partially_loaded: bool = False
    first_from_tier: tuple[SnapshotReader, TierName | None] | None = None
    leftovers: list[TierSnapshot] = field(default_factory=list)
    problems: Sequence[Skipped] = ()
    goes_below: bool = False

    def load(self, snapshot: SnapshotReader) -> None:
        """Load a version. If it is damaged for one rank, all ranks raise that error.

        Raises ``RankFailed`` if the store of another rank denies access or does not answer,
        because the version may then be intact.
        """
        try:
            load_snapshot(snapshot, self.state, leniency=self.leniency, group=self.group)
        except LimpetError as e:
            self.error, self.partially_loaded = e, self.partially_loaded or left_state_invalid(e)
            cause = e.__cause__ if isinstance(e, RankFailed) else None
            if isinstance(cause, StoreError) and not isinstance(cause, Denied | Unavailable):
                raise cause from e
            raise
        self.error, self.partially_loaded = None, False

    def load_from_tier(self, instruction: ResumeInstruction) -> SnapshotReader:
        """Load a state of a tier, and return it. Raises the same errors."""
        snapshot = self.open_in_tier(instruction)
        self.first_from_tier = self.first_from_tier or (snapshot, instruction.tier)
        self.load(snapshot)
        return snapshot

    def open_in_tier(self, instruction: ResumeInstruction) -> SnapshotReader:
        """Return a state of a tier, of which nothing is read yet."""
        tier, folder = instruction.tier or "memory", instruction.version or ""
        return SnapshotReader(
            self.tiers.locate(tier, folder, instruction.sources), None, instruction.digest
        )


def make_resume_point(
    snapshot: SnapshotReader,
    branch: int,
    skipped: Sequence[Skipped],
) -> ResumePoint:
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
        sessions=read_sessions(snapshot),
    )


def left_state_invalid(error: BaseException | None) -> bool:
    """Return True if an error of a resume, or one of its causes, may have left the state invalid.

    Errors other than ``LimpetError`` count as such, because they may occur at any point.
    """
    depth = 0
    while error is not None and depth < 20:
        if not isinstance(error, LimpetError) or error.is_state_invalid:
            return True
        error, depth = error.__cause__, depth + 1
    return False
