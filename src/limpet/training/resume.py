"""Resuming: load a version of the training's own run, or start from a version of another run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from limpet import errors, events
from limpet.format.manifest import Parent
from limpet.format.names import MANIFEST, Version, parse_version
from limpet.loading.differences import STRICT, Leniency, LoadReport
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import Snapshot
from limpet.ranks.collective import Collective
from limpet.ranks.group import Group
from limpet.run import lineage
from limpet.run.address import open_on_all_ranks
from limpet.run.catalog import read_sessions, read_training_metadata
from limpet.run.run import Run
from limpet.saving.commit import not_shared_error
from limpet.snapshot import pins
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.local.store import LocalStore
from limpet.text import format_list, to_repr, warn_user
from limpet.threads import no_op
from limpet.tiers.inventory import WHERE, CurrentLine, TierName, TierSnapshot
from limpet.tiers.ladder import Ladder, LadderExhausted
from limpet.tiers.tiers import Tiers
from limpet.training.options import check_not_snapshot


class ResumeOptions(msgspec.Struct, frozen=True):
    """How an empty run begins, and how much of ``start`` is loaded: see ``Checkpointer.resume``.
    The run's own versions are loaded strictly if there is a ``start``."""

    start: Any = None  # a Url | Snapshot
    keys: str | Sequence[str] | None = None
    leniency: Leniency = STRICT
    check: bool = False

    def require_valid(self, *, goes_back: bool) -> None:
        """Check the arguments that select a version of another run: a valid address, without one
        of the run itself (``goes_back``). Without ``start``, the only choice is ``missing``."""
        start, is_store = self.start, hasattr(self.start, "put_if_absent")
        if not (is_store or isinstance(start, str | os.PathLike | Snapshot | None)):
            raise errors.LimpetError(
                'start= must be an address ("RUN@120", "RUN@best", or the URL of a snapshot), a'
                f" Store, or a Snapshot, not {to_repr(start)[:200]}; resume(at=120) goes back to"
                " step 120 of this run"
            )
        if start is not None and goes_back:
            raise errors.LimpetError(
                "resume() cannot combine start= for an empty run with at= for one with versions;"
                ' write the step in the address: resume(start="RUN@120")'
            )
        is_strict = replace(self.leniency, missing="error") == STRICT
        if start is None and not (self.keys is None and is_strict):
            raise errors.LimpetError(
                "A run resumes all of its own versions: keys=, unexpected=, rename=, and"
                " mismatched= are valid only together with start="
            )


@dataclass(kw_only=True)
class Resume:
    """A resume by all ranks from versions and tiers. Rank 0 chooses; if one is damaged for a rank,
    all fall back together. ``ladder`` leaves out states from which restarts made no progress."""

    run: Run
    state: dict[str, Any]
    group: Group
    tiers: Tiers
    ladder: Ladder
    at: int | None = None
    branch: int | None = None
    acquire_lock: Callable[[], object] = no_op
    options: ResumeOptions
    _collective: Collective = field(init=False)
    _error: errors.LimpetError | None = None  # of the last load; None: it has succeeded
    _is_partially_loaded: bool = False
    """True if a failed load has overwritten a part of the state, and none has succeeded since."""

    _first_from_tier: tuple[SnapshotReader, TierName | None] | None = None
    _leftovers: list[TierSnapshot] = field(default_factory=list)
    """The versions on local disks that are still to be promoted."""

    _problems: list[tuple[str, errors.LimpetError]] = field(default_factory=list)
    """The newer states that are skipped, on rank 0, such as ``version_70 in memory``, and why."""

    def load(self) -> ResumePoint | None:
        """Load the newest state, as ``load_newest``, or, in an empty run, ``start``, if any, or a
        part of it. Without a ``Progress``, steps continue from its steps only if all of it is
        loaded, else from 0."""
        point, options = self.load_newest(), self.options
        if point is not None or options.start is None:
            return point
        keys, leniency = options.keys, options.leniency
        snapshot = open_on_all_ranks(options.start, self.group)
        report = load_snapshot(snapshot, self.state, keys, None, leniency, self.group)
        # a conversion of dtypes leaves nothing out
        is_complete = keys is None and replace(leniency, cast=False) == STRICT
        metadata = read_training_metadata(snapshot) if is_complete else {}
        return ResumePoint(
            snapshot,
            (snapshot.step or 0) if is_complete else 0,
            from_own_run=False,
            note={"started_from": {"url": snapshot.url, "digest": snapshot.digest}},
            # the position and early stopping belong to the model, but goodput to the run
            training_metadata={n: metadata[n] for n in ("stop", "progress") if n in metadata},
            start_report=report,
            is_exact=keys is None and report.is_exact,
        )

    def load_newest(self) -> ResumePoint | None:
        """Load the newest intact version, or a newer state of a tier; None: the run is empty. A
        branch is durably started unless it is its lineage's newest. May raise ``NoProgress``."""
        tiers, ladder = self.tiers, self.ladder
        tiers.open(self.run.store, self.state, is_resumed=True)
        self._collective = collective = self.group.collective(f"the resume of {self.run.url}")
        try:
            with collective:
                found = tiers.find(collective) if tiers.can_flush else []
                point = self._choose(found) if collective.rank == 0 else self._follow()
                if point is None and self._error is not None:
                    self._require_valid_state()
                if point is None and collective.size > 1 and not self.group.members:
                    self._require_one_folder()  # members do not take part if there is no version
                if tiers.local is not None and not isinstance(point, str):
                    own = self._leftovers if collective.rank == 0 else None
                    self._leftovers = collective.broadcast(own, list[TierSnapshot])
            if isinstance(point, str):
                raise ladder.give_up(point)
            tier, kept = (None, None) if point is None else (point.tier, point.snapshot.version)
            tiers.resume_from(tier, kept, self._leftovers)
            if ladder.left_out is not None:
                warn_user(ladder.left_out, errors.SkippedVersion)
            for message in describe_skipped(self._problems):
                warn_user(message, errors.SkippedVersion)
            return point
        except errors.LimpetError as e:
            if self._is_partially_loaded and not e.is_state_invalid:
                raise e.with_advice("The live state is not valid", live_state="not valid") from e
            raise
        finally:
            collective.close()

    def _require_valid_state(self) -> None:
        """Raise on all ranks if the run is empty and a damaged state of a tier has overwritten live
        state. It counts as a restart without progress, so the ladder leaves it out."""
        found = self._collective.gather(self._is_partially_loaded, bool)
        is_invalid = self._collective.broadcast(None if found is None else any(found), bool)
        if is_invalid:
            if self._collective.rank == 0 and self._first_from_tier is not None:
                self.ladder.record(*self._first_from_tier)
            problems = " ".join(describe_skipped(self._problems)) or "Rank 0 says which one."
            raise errors.LimpetError(
                f"The only state to resume from is damaged. {problems}",
                expected="an intact state in a tier, or a version in the run",
                found="neither",
                todo="The training must begin again: delete the folders of the tiers of this run on"
                " all hosts, and start it again. Under `limpet run`, the fourth start leaves them"
                " out",
                live_state="not valid",
            )

    def _require_one_folder(self) -> None:
        """Raise on all ranks if rank 0 finds no version on its disk, and another rank does."""
        is_local = isinstance(self.run.store, LocalStore)  # a server is the same for all ranks
        has_version = is_local and self.run.listing().has_version()
        found = self._collective.gather(has_version, bool)
        if found is not None and any(found) and not found[0]:
            raise not_shared_error(
                f"Nothing was loaded from {self.run.url}",
                found.index(True),
                self.run.url,
                found="a run with versions",
                expected="no version, as rank 0 finds it",
            )
        self._collective.broadcast(None if found is None else True, bool)

    # -- rank 0 --------------------------------------------------------------------------------

    def _choose(self, found: Sequence[TierSnapshot]) -> ResumePoint | str | None:
        """Choose and load a state. A string says why all ranks must leave instead."""
        is_requested, goes_below, point = self.at is not None, False, None
        try:
            line = CurrentLine(self.run) if found else None
            if line is not None:
                self._find_leftovers(line, found)
                goes_below = is_requested and any(line.is_newer(c.version) for c in found)
            found = self.ladder.choose(found, is_requested=is_requested)
            if line is not None and not is_requested:
                point = self._choose_from_tiers(line, found)
            if point is None:
                point = self._choose_from_run(goes_below)
        except LadderExhausted as e:
            self._tell(ResumeInstruction(True, given_up=str(e)))
            # this rank may host the store through which they hear of it
            self._collective.gather(True, bool)
            return str(e)
        return point

    def _tell(self, instruction: ResumeInstruction) -> None:
        self._collective.broadcast(instruction, ResumeInstruction)

    def _choose_from_run(self, goes_below: bool) -> ResumePoint | None:
        """``goes_below``: a newer state is in a tier, but a person has named another version."""
        run, ladder = self.run, self.ladder
        try:
            snapshot, skipped = lineage.find_newest(
                run.catalog, self._load_with_others, at=self.at, branch=self.branch
            )
        except errors.NoSnapshot:
            ladder.give_up_without_older()
            raise
        if snapshot is None:
            check_not_snapshot(run)
            ladder.record(None)
            self._tell(ResumeInstruction(True))
            return None
        version, goes_below = snapshot.version, goes_below or bool(self._problems)
        self._problems += [(str(damaged), error) for damaged, error in skipped]
        listing = run.catalog.listing()
        is_newest = version == lineage.newest_version(run.catalog, listing)
        if is_newest and not (goes_below or ladder.leaves_newer):
            ladder.record(snapshot)
            number = lineage.newest_branch(run.catalog, listing)
        else:
            self.acquire_lock()  # only the writer of a run may change its current lineage
            ladder.record(snapshot)
            reason = ladder.branch_reason or lineage.skipped_reason(self._problems) or "on request"
            number = lineage.start_branch(run.catalog, snapshot, version, reason)
        self._tell(ResumeInstruction(True, str(version), snapshot.digest, number))
        sessions = lineage.find_sessions(run.catalog, listing, snapshot)
        return make_resume_point(snapshot, number, sessions)

    def _load_with_others(self, snapshot: SnapshotReader) -> None:
        self.ladder.check(snapshot.version)
        self._tell(ResumeInstruction(False, str(snapshot.version), snapshot.digest))
        try:
            self._load(snapshot)
        except errors.PlanError as e:
            raise self._unfit_error(e, snapshot) from e.__cause__
        except (errors.NotFound, errors.DigestMismatch) as e:
            rank, key = e.fields.get("rank"), snapshot.location.key(MANIFEST)
            if rank and key in (e.fields.get("key"), e.fields.get("file")):
                pins.require_manifest(snapshot.location, "while the ranks read it")
                found = "another file" if isinstance(e, errors.DigestMismatch) else "no such file"
                what = f"Nothing was loaded from {self.run.url}"
                raise not_shared_error(what, rank, key, found=found) from e
            raise

    def _unfit_error(self, error: errors.PlanError, snapshot: SnapshotReader) -> errors.PlanError:
        """Return the error for a version that does not fit the state, with advice for a resume. An
        error without ``missing`` is of an object in the state, which gives more specific advice."""
        fields, saved = error.fields, snapshot.manifest.created[:16].replace("T", " at ")
        if "missing" not in fields:
            return error
        is_new = fields["missing"] and not (fields["unexpected"] or fields["misfits"])
        keep = ' Or keep the live values of these keys: resume(missing="keep").' if is_new else ""
        return type(error)(
            f"{self.run.url} holds a training with another state, of which step {snapshot.step} was"
            f" saved on {saved} UTC. {error.what}",
            todo="For another training, use another folder. To continue this one, restore the state"
            f" of then.{keep} To go on with the changed state, begin a new run: use another"
            f' folder and resume(start="{self.run.url}@latest"), with options as needed:'
            f" {fields['options']}",
            **fields,
        )

    def _find_leftovers(self, line: CurrentLine, found: Sequence[TierSnapshot]) -> None:
        """Find the versions on local disks that the run lacks, oldest first: an earlier training
        ended before they were promoted."""
        for in_tier in reversed(found):
            is_whole = in_tier.tier == "local" and in_tier.is_whole
            if is_whole and line.is_newer(in_tier.version):
                # else it is skipped below, with a warning
                with suppress(errors.FormatError, errors.StoreError):
                    reader = self._open_in_tier(in_tier)
                    if line.is_continued_by(in_tier, reader):
                        self._leftovers.append(in_tier)

    def _choose_from_tiers(
        self, line: CurrentLine, found: Sequence[TierSnapshot]
    ) -> ResumePoint | None:
        """Load the newest state of a tier that continues the current lineage, and return it. None:
        the durable version is newer, or none is intact. ``_problems``: the newer ones."""
        damaged: dict[Version, errors.LimpetError] = {}
        for in_tier in found:
            is_newest = in_tier.version == line.newest
            if not (is_newest or line.is_newer(in_tier.version)):
                continue
            try:
                reader = self._open_in_tier(in_tier)
                # a state of another history is no problem, damaged or not
                belongs = line.is_same if is_newest else line.is_continued_by
                if in_tier.digest and not belongs(in_tier, reader):
                    continue
                in_tier.check_whole(reader)
                self._tell(ResumeInstruction(False, in_tier=in_tier))
                snapshot = self._load_from_tier(in_tier)
            except (errors.FormatError, errors.StoreError, errors.RankFailed) as e:
                if is_newest:  # the run has it, too
                    events.emit("skipped", version=in_tier.folder, error=e)
                    continue
                self._problems.append((f"{in_tier.folder} {WHERE[in_tier.tier]}", e))
                damaged[in_tier.version] = e
                continue
            damaged.pop(in_tier.version, None)  # another tier has had the state of this step
            durable, number = line.durable, line.branch
            if damaged:  # a newer state that was lost must not come back
                self.acquire_lock()
            self.ladder.record(snapshot, None if is_newest else in_tier.tier)
            if damaged:
                reason = lineage.skipped_reason(damaged)
                number = lineage.start_branch(self.run.catalog, snapshot, in_tier.version, reason)
            before = None if durable is None else Parent(str(line.newest), durable.digest)
            done = ResumeInstruction(True, in_tier.folder, in_tier.digest, number, durable=before)
            self._tell(done)
            return continue_from_tier(self.run, snapshot, in_tier, done)
        return None

    # -- the other ranks -----------------------------------------------------------------------

    def _follow(self) -> ResumePoint | str | None:
        snapshot, in_tier = None, None
        while True:
            instruction = self._collective.broadcast(None, ResumeInstruction)
            if instruction.given_up:
                self._collective.gather(True, bool)
                return instruction.given_up
            if instruction.in_tier is not None:
                in_tier = instruction.in_tier
                # rank 0 gets the same error
                with suppress(errors.FormatError, errors.StoreError, errors.RankFailed):
                    snapshot = self._load_from_tier(in_tier)
                continue
            version = parse_version(instruction.version)
            if version is None:
                return None
            if instruction.done and snapshot is not None:
                if self._error is not None:
                    raise self._error
                if in_tier is not None:
                    return continue_from_tier(self.run, snapshot, in_tier, instruction)
                return make_resume_point(snapshot, instruction.branch)
            in_tier = None
            snapshot = SnapshotReader(self.run.location(version), None, instruction.digest)
            try:
                # this also reads the manifest: nothing can fail after the last instruction
                self._load(snapshot)
            except (errors.Denied, errors.Unavailable):
                raise
            except (errors.FormatError, errors.StoreError):
                continue  # rank 0 gets the same error, and falls back to an older version or raises

    # -- all ranks -----------------------------------------------------------------------------

    def _load(self, snapshot: SnapshotReader) -> None:
        """Load a version. All ranks raise if it is damaged for one. ``RankFailed``: another rank's
        store denies access or does not answer, so it may be intact."""
        try:
            leniency = self.options.leniency if self.options.start is None else STRICT
            load_snapshot(snapshot, self.state, leniency=leniency, group=self.group)
        except errors.LimpetError as e:
            self._error = e
            self._is_partially_loaded |= left_state_invalid(e)
            cause = e.__cause__ if isinstance(e, errors.RankFailed) else None
            if isinstance(cause, errors.StoreError) and not isinstance(
                cause, errors.Denied | errors.Unavailable
            ):
                raise cause from e
            raise
        self._error, self._is_partially_loaded = None, False

    def _load_from_tier(self, in_tier: TierSnapshot) -> SnapshotReader:
        """Load a state of a tier, and return it. Raises the same errors."""
        snapshot = self._open_in_tier(in_tier)
        self._first_from_tier = self._first_from_tier or (snapshot, in_tier.tier)
        self._load(snapshot)
        return snapshot

    def _open_in_tier(self, in_tier: TierSnapshot) -> SnapshotReader:
        """Return a state of a tier, of which nothing is read yet."""
        location = self.tiers.locate(in_tier.tier, in_tier.folder, in_tier.sources)
        return SnapshotReader(location, None, in_tier.digest)


# -- where a training continues ------------------------------------------------------------------


_MAX_NAMES = 9

_NAME = re.compile(r"(?:version_)?([0-9]{1,18})(?:\.([0-9]{1,9}))?")
"""The name of a version, as people write it: ``91``, ``91.1``, or ``version_91.1``."""


def parse_at(at: int | str | None) -> tuple[int | None, int | None]:
    """Return the step and the branch of a step or a version's name: see ``Run.newest``."""
    if at is None:
        return None, None
    if not isinstance(at, str | bool) and hasattr(at, "__index__"):
        return at, None
    match = _NAME.fullmatch(at) if isinstance(at, str) else None
    if match is None:
        raise errors.LimpetError(
            f'at= must be a step, or the name of a version such as "91.1", not {to_repr(at)[:100]}'
        )
    return int(match[1]), int(match[2] or 0)


def describe_skipped(skipped: Sequence[tuple[str, errors.LimpetError]]) -> list[str]:
    """Return a message for each reason, without its advice."""
    by_reason: dict[str, list[str]] = {}
    for name, e in skipped:
        by_reason.setdefault(e.brief, []).append(name)
    return [
        f"{format_list(found, _MAX_NAMES)} {'is' if len(found) == 1 else 'are'} skipped. {reason}"
        for reason, found in by_reason.items()
    ]


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The version that was loaded, and how training continues. ``note``: the run's origin;
    ``durable``: its newest version; ``sessions``: those that continue, also if left behind."""

    snapshot: SnapshotReader
    step: int
    from_own_run: bool = True
    branch: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)
    training_metadata: Mapping[str, Any] = field(default_factory=dict)
    durable: SnapshotReader | None = None
    tier: TierName | None = None
    start_report: LoadReport | None = None
    sessions: Sequence[str] = ()
    is_exact: bool = True


class ResumeInstruction(msgspec.Struct, frozen=True):
    """Rank 0's instruction: load ``in_tier``, or ``version`` with the manifest ``digest``; or if
    ``done``, go on from the last one, on ``branch`` (without a ``version``: from none).
    ``durable``: the run's newest version; ``given_up``: why all leave, for people."""

    done: bool
    version: str = ""
    digest: str = ""
    branch: int = 0
    in_tier: TierSnapshot | None = None
    durable: Parent | None = None
    given_up: str = ""


def continue_from_tier(
    run: Run, snapshot: SnapshotReader, in_tier: TierSnapshot, done: ResumeInstruction
) -> ResumePoint:
    """Return how training continues from a state of a tier, which later versions name."""
    point, durable = make_resume_point(snapshot, done.branch), None
    if done.durable is not None:
        location = Location(run.store, done.durable.version)
        durable = SnapshotReader(location, None, done.durable.digest)
    origin = {"tier": in_tier.tier, "version": done.version, "digest": done.digest}
    note = {**point.note, "resumed_from_tier": origin}
    return replace(point, note=note, durable=durable, tier=in_tier.tier)


def make_resume_point(
    snapshot: SnapshotReader, branch: int, sessions: Sequence[str] | None = None
) -> ResumePoint:
    note = snapshot.metadata.get("note")
    origin = note.get("started_from") if isinstance(note, dict) else None
    return ResumePoint(
        snapshot,
        snapshot.version.step,
        branch=branch,
        note={} if origin is None else {"started_from": origin},
        training_metadata=read_training_metadata(snapshot),
        durable=snapshot,
        sessions=read_sessions(snapshot) if sessions is None else sessions,
    )


def left_state_invalid(error: BaseException | None) -> bool:
    """Return True if an error of a resume, or a cause of it, may have left the state invalid, as
    any other than a ``LimpetError`` may."""
    depth = 0
    while error is not None and depth < 20:
        if not isinstance(error, errors.LimpetError) or error.is_state_invalid:
            return True
        error, depth = error.__cause__, depth + 1
    return False
