"""Resuming: load a version of the training's own run, or start from a version of another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import structs

from holdfast.engine.distributed.collective import Collective
from holdfast.engine.distributed.group import Group
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import (
    Denied,
    FormatError,
    HoldfastError,
    NotFound,
    PlanError,
    RankFailed,
    SkippedVersion,
    StoreError,
    Unavailable,
)
from holdfast.format.manifest import Parent
from holdfast.format.names import parse_version
from holdfast.format.tree import child_keys
from holdfast.generators import open_block
from holdfast.run.catalog import read_training_metadata
from holdfast.run.lineage import newest_version
from holdfast.run.run import Run
from holdfast.text import warn_user
from holdfast.tiers.inventory import Candidate, continues
from holdfast.tiers.tiers import Tiers
from holdfast.training.arguments import check_not_snapshot

_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The version that was loaded, and how training continues from it.

    ``from_own_run`` is True if the version belongs to the run itself. ``note`` is metadata about
    the origin of the run, which later versions store. ``training_metadata`` is the state of early
    stopping and goodput that the version stores. ``skipped`` holds a message for each newer
    version that is damaged. ``durable`` is the newest version of the run. ``tier`` is the name of
    the tier from which the version was loaded, or None if it is a version of the run.
    """

    snapshot: Snapshot
    step: int
    from_own_run: bool = True
    branch: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)
    training_metadata: Mapping[str, Any] = field(default_factory=dict)
    skipped: Sequence[str] = ()
    durable: Snapshot | None = None
    tier: str | None = None


class ResumeInstruction(msgspec.Struct, frozen=True):
    """An instruction from rank 0 to the other ranks.

    If ``done`` is False, the ranks load the version ``version`` with the manifest ``digest``. If
    it is True, training continues from the version that was loaded last, on ``branch``, or from no
    version if ``version`` is None. ``tier``: the name of the tier that has the version, or None
    for a version of the run; ``sources``: for each of its files there, the ranks that serve it;
    ``durable``: the newest version of the run, if a state of a tier was loaded.
    """

    done: bool
    version: str | None = None
    digest: str = ""
    branch: int = 0
    tier: str | None = None
    sources: dict[str, list[int]] = {}
    durable: Parent | None = None


def resume_run(
    run: Run,
    state: dict[str, Any],
    group: Group,
    at: int | None,
    branch: int | None,
    acquire_lock: Callable[[], object],
    tiers: Tiers,
) -> ResumePoint | None:
    """Load the newest intact version of a run into ``state``, or return None if the run is empty.

    A newer state of a tier is loaded instead, if its files are on hosts that answer.

    ``at`` and ``branch`` are as for ``Run.newest``. Unless the version is the newest one of the
    current lineage, a branch is durably started, and ``acquire_lock`` is called before that.
    Raises ``HoldfastError`` if ``at`` or ``branch`` is not a whole number, and the errors of
    ``Run.newest`` and ``holdfast.load``.

    Rank 0 chooses the version, and all ranks load it. If the version is damaged for one rank, all
    ranks fall back to an older one together.
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
    tiers.open(run.store, state, is_resumed=True)
    collective = group.collective(f"the resume of {run.url}")
    loader = StateLoader(state, group, tiers)
    try:
        with collective:
            found = tiers.find(collective)
            if collective.rank == 0:
                point = None
                problems: list[str] = []
                if at is None and branch is None:
                    point, problems = _resume_from_tier(
                        run, loader, collective, found, acquire_lock
                    )
                if point is None:
                    point = _coordinate(run, loader, collective, at, branch, acquire_lock, problems)
            else:
                point = _follow_coordinator(run, loader, collective)
        kept = None if point is None else point.snapshot.version
        tiers.keep_only(None if point is None else point.tier, kept)
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
    tiers: Tiers
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

    def load_from_tier(self, instruction: ResumeInstruction) -> Snapshot:
        """Load a state of a tier, and return it. Raises the same errors."""
        snapshot = self.open_in_tier(instruction)
        self.load(snapshot)
        return snapshot

    def open_in_tier(self, instruction: ResumeInstruction) -> Snapshot:
        """Return a state of a tier, of which nothing is read yet."""
        tier, folder = instruction.tier or "", instruction.version or ""
        return Snapshot(
            self.tiers.locate(tier, folder, instruction.sources), None, instruction.digest
        )


def _resume_from_tier(
    run: Run,
    loader: StateLoader,
    collective: Collective,
    found: Sequence[Candidate],
    acquire_lock: Callable[[], object],
) -> tuple[ResumePoint | None, list[str]]:
    """Load the newest state of a tier that continues the current lineage, and return it.

    Also return the problems of newer ones. None: the durable version is newer, or none is intact.
    """
    listing = run.listing()
    newest, number = newest_version(run.catalog, listing), run.branch(listing)
    problems: list[str] = []
    for candidate in found:
        is_older = newest is not None and candidate.version.step < newest.step
        if candidate.branch != number or is_older:
            continue
        instruction = ResumeInstruction(
            False, candidate.folder, candidate.digest, number, candidate.tier, candidate.sources
        )
        try:
            if candidate.problem:
                raise NotFound(candidate.problem)
            durable = None if newest is None else run.open(newest)
            if not continues(candidate, loader.open_in_tier(instruction), durable):
                continue
            collective.broadcast(instruction, ResumeInstruction)
            snapshot = loader.load_from_tier(instruction)
        except (FormatError, StoreError, RankFailed) as e:
            reason = HoldfastError(e.what, expected=e.expected, found=e.found)
            where = _WHERE[candidate.tier]
            problems.append(f"{candidate.folder} {where} is skipped. {reason}")
            continue
        reference = None
        if durable is not None and newest is not None:
            reference = Parent(str(newest), durable.digest)
            if problems:  # a newer state that was lost must not come back
                acquire_lock()
                number = run.leave_from(durable, newest, f"{len(problems)} newer damaged")
        done = structs.replace(instruction, done=True, branch=number, sources={}, durable=reference)
        collective.broadcast(done, ResumeInstruction)
        return _from_tier(run, snapshot, done, problems), problems
    return None, problems


_WHERE = {"memory": "in memory", "local": "on the local disk"}


def _from_tier(
    run: Run, snapshot: Snapshot, done: ResumeInstruction, skipped: Sequence[str]
) -> ResumePoint:
    """Return how training continues from a state of a tier, which later versions name."""
    point = _make_resume_point(snapshot, done.branch, skipped)
    version = None if done.durable is None else parse_version(done.durable.version)
    durable = None
    if done.durable is not None and version is not None:
        durable = Snapshot(run.location(version), None, done.durable.digest)
    origin = {"tier": done.tier, "version": done.version, "digest": done.digest}
    note = {**point.note, "resumed_from_tier": origin}
    return replace(point, note=note, durable=durable, tier=done.tier)


def _coordinate(
    run: Run,
    loader: StateLoader,
    collective: Collective,
    at: int | None,
    branch: int | None,
    acquire_lock: Callable[[], object],
    problems: Sequence[str],
) -> ResumePoint | None:
    """``problems``: those of newer states of tiers. Training then continues on a new branch."""

    def load(snapshot: Snapshot) -> None:
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
            f" a new run: use another folder and {_suggest_call(run.url, loader.state, e)}",
            **e.fields,
        ) from e
    if snapshot is None:
        check_not_snapshot(run)
        collective.broadcast(ResumeInstruction(True), ResumeInstruction)
        return None
    version = snapshot.version
    listing = run.listing()
    if version == newest_version(run.catalog, listing) and not problems:
        number = run.branch(listing)
    else:
        acquire_lock()  # only the writer of a run may change its current lineage
        damaged = len(skipped) + len(problems)
        number = run.leave_from(
            snapshot, version, f"{damaged} newer damaged" if damaged else "on request"
        )
    collective.broadcast(
        ResumeInstruction(True, str(version), snapshot.digest, number), ResumeInstruction
    )
    # the messages of the errors, without their advice
    reasons = [(v, HoldfastError(e.what, expected=e.expected, found=e.found)) for v, e in skipped]
    messages = [*problems, *(f"{v} is skipped. {e}" for v, e in reasons)]
    return _make_resume_point(snapshot, number, messages)


def _follow_coordinator(
    run: Run, loader: StateLoader, collective: Collective
) -> ResumePoint | None:
    snapshot = None
    while True:
        instruction = collective.broadcast(None, ResumeInstruction)
        version = None if instruction.version is None else parse_version(instruction.version)
        if version is None:
            return None
        if instruction.done and snapshot is not None:
            if loader.error is not None:
                raise loader.error
            if instruction.tier is not None:
                return _from_tier(run, snapshot, instruction, [])
            return _make_resume_point(snapshot, instruction.branch, [])
        if instruction.tier is not None:
            with suppress(FormatError, StoreError, RankFailed):  # rank 0 gets the same error
                snapshot = loader.load_from_tier(instruction)
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


def _suggest_call(url: str, state: dict[str, Any], error: PlanError) -> str:
    """Return the ``resume`` call that loads the matching part of a version into a changed state."""
    members = dict(zip(child_keys(list(state), ""), state.values(), strict=True))
    misfits = {key.partition("/")[0] for key in error.fields["misfits"]}
    excluded = set(misfits)
    if any(
        _has_attribute(members.get(m), "parameters", "param_groups", "requires_grad")
        for m in misfits
    ):
        # an optimizer's slots belong to the old parameters, and so do a scheduler's learning rates
        excluded |= {
            m for m, value in members.items() if _has_attribute(value, "param_groups", "optimizer")
        }
    chosen = [m for m in members if m not in excluded]
    arguments, hint = [f'start="{url}@latest"'], ""
    if misfits:
        listed = ", ".join(f'"{m}"' for m in chosen) if len(chosen) <= _MAX_LISTED else ""
        arguments.append(f"keys=[{listed or '...'}]")
        partial = sorted(m for m in misfits if not _has_attribute(members.get(m), "param_groups"))
        if partial:
            hint = f". Add the matching keys of {', '.join(partial[:_MAX_LISTED])} to keys="
    arguments += [
        f'{name}="{choice}"'
        for name, choice in (("missing", "keep"), ("unexpected", "ignore"))
        if any(not misfits or key.partition("/")[0] in chosen for key in error.fields[name])
    ]
    return f"resume({', '.join(arguments)}){hint}"


def _has_attribute(value: Any, *attributes: str) -> bool:
    """Return True if a value, or a value in its dicts, lists, and tuples, has an attribute."""
    if isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        return any(_has_attribute(v, *attributes) for v in items)
    return any(hasattr(value, a) for a in attributes)


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
