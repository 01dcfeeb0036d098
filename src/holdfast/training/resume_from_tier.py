"""Resuming from a state in memory, or on the local disks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec import structs

from holdfast.engine.distributed.collective import Collective
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import FormatError, HoldfastError, NotFound, RankFailed, StoreError
from holdfast.format.manifest import Parent
from holdfast.format.names import parse_version
from holdfast.restarts.ladder import Ladder
from holdfast.run.lineage import newest_version
from holdfast.run.run import Run
from holdfast.tiers.inventory import WHERE, Candidate, continues
from holdfast.training.resume_point import (
    ResumeInstruction,
    ResumePoint,
    StateLoader,
    make_resume_point,
)


def resume_from_tier(
    run: Run,
    loader: StateLoader,
    collective: Collective,
    found: Sequence[Candidate],
    acquire_lock: Callable[[], object],
    ladder: Ladder,
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
            where = WHERE[candidate.tier]
            problems.append(f"{candidate.folder} {where} is skipped. {reason}")
            continue
        ladder.record(snapshot, candidate.tier)
        reference = None
        if durable is not None and newest is not None:
            reference = Parent(str(newest), durable.digest)
            if problems:  # a newer state that was lost must not come back
                acquire_lock()
                number = run.leave_from(durable, newest, f"{len(problems)} newer damaged")
        done = structs.replace(instruction, done=True, branch=number, sources={}, durable=reference)
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
