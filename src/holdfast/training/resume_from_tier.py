"""Resuming from a state in memory, or on the local disks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from msgspec import structs

from holdfast import events
from holdfast.engine.distributed.collective import Collective
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import FormatError, HoldfastError, RankFailed, StoreError
from holdfast.format.manifest import Parent
from holdfast.format.names import Version, parse_version
from holdfast.restarts.ladder import Ladder
from holdfast.run.run import Run
from holdfast.tiers.inventory import WHERE, Candidate, CurrentLine, Sources
from holdfast.training.resume_point import (
    ResumeInstruction,
    ResumePoint,
    StateLoader,
    make_resume_point,
)


def find_leftovers(
    line: CurrentLine, loader: StateLoader, found: Sequence[Candidate]
) -> list[Candidate]:
    """Return the versions on local disks that the run lacks, oldest first: an earlier training
    ended before they were promoted."""
    leftovers = []
    for candidate in reversed(found):
        is_whole = candidate.tier == "local" and candidate.is_whole
        if is_whole and line.is_newer(candidate.version):
            with suppress(FormatError, StoreError):  # it is skipped below, with a warning
                if line.is_continued_by(candidate, loader.open_in_tier(_instruct(candidate, 0))):
                    leftovers.append(candidate)
    return leftovers


def _instruct(candidate: Candidate, branch: int) -> ResumeInstruction:
    return ResumeInstruction(
        False, candidate.folder, candidate.digest, branch, candidate.tier, candidate.sources
    )


def resume_from_tier(
    run: Run,
    line: CurrentLine,
    loader: StateLoader,
    collective: Collective,
    found: Sequence[Candidate],
    acquire_lock: Callable[[], object],
    ladder: Ladder,
) -> tuple[ResumePoint | None, list[str]]:
    """Load the newest state of a tier that continues the current lineage, and return it.

    Also return the problems of newer ones. None: the durable version is newer, or none is intact.
    """
    problems: list[str] = []
    damaged: set[Version] = set()
    for candidate in found:
        is_newest = candidate.version == line.newest
        if not (is_newest or line.is_newer(candidate.version)):
            continue
        instruction = _instruct(candidate, line.branch)
        try:
            captured = loader.open_in_tier(instruction)
            # a state of another history is no problem, damaged or not
            belongs = line.is_same if is_newest else line.is_continued_by
            if candidate.digest and not belongs(candidate, captured):
                continue
            candidate.check_whole(captured)
            collective.broadcast(instruction, ResumeInstruction)
            snapshot = loader.load_from_tier(instruction)
        except (FormatError, StoreError, RankFailed) as e:
            if is_newest:  # the run has it, too
                events.emit("skipped", version=candidate.folder, error=e)
                continue
            reason = HoldfastError(e.what, expected=e.expected, found=e.found)
            where = WHERE[candidate.tier]
            problems.append(f"{candidate.folder} {where} is skipped. {reason}")
            damaged.add(candidate.version)
            continue
        damaged.discard(candidate.version)  # another tier has had the state of this step
        durable = line.durable
        reference = None if durable is None else Parent(str(line.newest), durable.digest)
        number = line.branch
        if damaged:  # a newer state that was lost must not come back
            acquire_lock()
        ladder.record(snapshot, None if is_newest else candidate.tier)
        if damaged:
            reason_of_branch = f"{len(damaged)} newer damaged"
            number = run.leave_from(snapshot, candidate.version, reason_of_branch)
        done = structs.replace(
            instruction, done=True, branch=number, sources=Sources(), durable=reference
        )
        collective.broadcast(done, ResumeInstruction)
        return continue_from_tier(run, snapshot, done, problems), problems
    return None, problems


def continue_from_tier(
    run: Run, snapshot: Snapshot, done: ResumeInstruction, skipped: Sequence[str]
) -> ResumePoint:
    """Return how training continues from a state of a tier, which later versions name."""
    point = make_resume_point(snapshot, done.branch, skipped)
    version = None if done.durable is None else parse_version(done.durable.version)
    durable = None
    if done.durable is not None and version is not None:
        durable = Snapshot(run.location(version), None, done.durable.digest)
    origin = {"tier": done.tier, "version": done.version, "digest": done.digest}
    note = {**point.note, "resumed_from_tier": origin}
    return replace(point, note=note, durable=durable, tier=done.tier)
