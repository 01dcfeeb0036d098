"""Starting an empty run from a version of another run, or from a part of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from holdfast.engine.distributed.group import Group, broadcast_from_first
from holdfast.engine.loading.binding import STRICT, Leniency
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.snapshot.location import Url, locate
from holdfast.engine.snapshot.snapshot import Snapshot, open_snapshot
from holdfast.errors import HoldfastError
from holdfast.run.address import open_version
from holdfast.run.catalog import read_training_metadata
from holdfast.training.resume_point import ResumeInstruction, ResumePoint


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
