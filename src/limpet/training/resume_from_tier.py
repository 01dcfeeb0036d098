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
from limpet.tiers.inventory import WHERE, CurrentLine, Sources, TierSnapshot
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
