"""Resuming from a state in memory, or on the local disks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from msgspec import structs

from limpet import events
from limpet.errors import (
    FormatError,
    LimpetError,
    RankFailed,
    StoreError,
)
from limpet.format.manifest import Parent
from limpet.format.names import Version, parse_version
from limpet.ranks.collective import Collective
from limpet.run.lineage import start_branch
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader
from limpet.tiers.inventory import WHERE, Candidate, CurrentLine, Sources
from limpet.tiers.ladder import Ladder
from limpet.training.resume_point import (
    ResumeInstruction,
    ResumePoint,
    Skipped,
    StateLoader,
    count_skipped,
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
) -> tuple[ResumePoint | None, list[Skipped]]:
    """Load the newest state of a tier that continues the current lineage, and return it.

    Also return the newer ones that are skipped. None: the durable version is newer, or none is
    intact.
    """
    problems: list[Skipped] = []
    damaged: dict[Version, LimpetError] = {}
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
            problems.append(Skipped(f"{candidate.folder} {WHERE[candidate.tier]}", e))
            damaged[candidate.version] = e
            continue
        damaged.pop(candidate.version, None)  # another tier has had the state of this step
        durable = line.durable
        reference = None if durable is None else Parent(str(line.newest), durable.digest)
        number = line.branch
        if damaged:  # a newer state that was lost must not come back
            acquire_lock()
        ladder.record(snapshot, None if is_newest else candidate.tier)
        if damaged:
            reason = count_skipped(damaged)
            number = start_branch(run.catalog, snapshot, candidate.version, reason)
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
