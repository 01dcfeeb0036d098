"""Resuming: load a version of the training's own run, or start from a version of another run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.engine.distributed.collective import Collective
from holdfast.engine.distributed.group import Group, broadcast_from_first
from holdfast.engine.loading.binding import STRICT, Leniency
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.snapshot.location import Url, locate
from holdfast.engine.snapshot.snapshot import Snapshot, open_snapshot
from holdfast.errors import (
    Denied,
    FormatError,
    HoldfastError,
    PlanError,
    RankFailed,
    StoreError,
    Unavailable,
)
from holdfast.format.names import parse_version
from holdfast.format.tree import child_keys
from holdfast.generators import open_block
from holdfast.run.address import open_version
from holdfast.run.catalog import read_training_metadata
from holdfast.run.lineage import newest_version
from holdfast.run.run import Run
from holdfast.training.arguments import check_not_snapshot

_MAX_LISTED = 8


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


class ResumeInstruction(msgspec.Struct, frozen=True):
    """An instruction from rank 0 to the other ranks.

    If ``done`` is False, the ranks load the version ``version`` with the manifest ``digest``. If
    it is True, training continues from the version that was loaded last, on ``branch``, or from no
    version if ``version`` is None.
    """

    done: bool
    version: str | None = None
    digest: str = ""
    branch: int = 0


def resume_run(
    run: Run,
    state: dict[str, Any],
    group: Group,
    at: int | None,
    branch: int | None,
    acquire_lock: Callable[[], object],
) -> ResumePoint | None:
    """Load the newest intact version of a run into ``state``, or return None if the run is empty.

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
    collective = group.collective(f"the resume of {run.url}")
    loader = StateLoader(state, group)
    try:
        with collective:
            if collective.rank == 0:
                return _coordinate(run, loader, collective, at, branch, acquire_lock)
            return _follow_coordinator(run, loader, collective)
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


def _coordinate(
    run: Run,
    loader: StateLoader,
    collective: Collective,
    at: int | None,
    branch: int | None,
    acquire_lock: Callable[[], object],
) -> ResumePoint | None:
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
    if version == newest_version(run.catalog, listing):
        number = run.branch(listing)
    else:
        acquire_lock()  # only the writer of a run may change its current lineage
        number = run.leave_from(
            snapshot, version, f"{len(skipped)} newer damaged" if skipped else "on request"
        )
    collective.broadcast(
        ResumeInstruction(True, str(version), snapshot.digest, number), ResumeInstruction
    )
    # the messages of the errors, without their advice
    reasons = [(v, HoldfastError(e.what, expected=e.expected, found=e.found)) for v, e in skipped]
    return _make_resume_point(snapshot, number, [f"{v} is skipped. {e}" for v, e in reasons])


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
            return _make_resume_point(snapshot, instruction.branch, [])
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
    )


def check_start(
    start: object, keys: str | Sequence[str] | None, leniency: Leniency, goes_back: bool
) -> None:
    """Check the arguments of ``Checkpointer.resume`` that select a version of another run.

    ``goes_back`` is True if the caller also selects a version of the run itself. Raises
    ``HoldfastError`` for ``start`` together with such a version, for a partial selection without
    ``start``, and for a ``start`` that is not an address.
    """
    is_location = isinstance(start, str | os.PathLike) or hasattr(start, "put_if_absent")
    if start is not None and not is_location:
        raise HoldfastError(
            "Invalid value for start=",
            expected='an address ("RUN@120", "RUN@latest", or the URL of a snapshot), or a Store',
            found=f"{start=}",
            todo="resume(at=120) goes back to step 120 of this run itself",
        )
    if start is not None and goes_back:
        raise HoldfastError(
            "resume() cannot combine start= with at= or branch=",
            expected="start= for an empty run, or at= and branch= for a run with versions",
            found=f"{start=} and at= or branch=",
            todo='Write the step in the address: resume(start="RUN@120")',
        )
    if start is None and (keys is not None or leniency != STRICT):
        raise HoldfastError(
            "A run always resumes from its own versions completely",
            expected="keys=, missing=, unexpected=, or rename= only together with start=",
            found="no start=",
            todo="Pass start=, or load the snapshot with holdfast.load",
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
    loaded. Otherwise they begin at 0. Raises the errors of ``open_version`` and ``holdfast.load``.
    """
    snapshot = _open_on_all_ranks(start, group)
    load_snapshot(snapshot, state, keys, None, leniency, group)
    is_complete = keys is None and leniency == STRICT
    metadata = read_training_metadata(snapshot) if is_complete else {}
    return ResumePoint(
        snapshot,
        (snapshot.step or 0) if is_complete else 0,
        from_own_run=False,
        note={"started_from": {"url": snapshot.url, "digest": snapshot.digest}},
        # the state of early stopping belongs to the model, but goodput belongs to the run
        training_metadata={"stop": metadata["stop"]} if "stop" in metadata else {},
    )


def _open_on_all_ranks(start: Url, group: Group) -> Snapshot:
    """Open the snapshot at an address or in a store, the same one on all ranks."""
    is_address = isinstance(start, str | os.PathLike)
    where = os.fspath(start) if isinstance(start, str | os.PathLike) else start.url

    def choose() -> ResumeInstruction:
        snapshot = open_version(where) if is_address else open_snapshot(start)
        return ResumeInstruction(True, snapshot.url, snapshot.digest)

    instruction = broadcast_from_first(group, f"the start from {where}", choose, ResumeInstruction)
    # A URL does not contain the options of a store, so each rank uses the store that it was given.
    location = locate(instruction.version or "" if is_address else start)
    return Snapshot(location, None, instruction.digest)


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
