"""RUN@120 and the like."""

from __future__ import annotations

import os

from holdfast.engine.snapshot.location import suggest_similar_path
from holdfast.engine.snapshot.snapshot import Snapshot, open_snapshot
from holdfast.errors import NotFound
from holdfast.format.names import Version, split_address
from holdfast.run.run import Run

ADDRESS_FORMS = "A version is RUN/version_120, RUN@120 (of branch 1: RUN@120.1) or RUN@latest"


def open_version(address: str | os.PathLike[str]) -> Snapshot:
    """The snapshot at an address: ``RUN@120`` (step 120 on the line that training is on),
    ``RUN@120.1`` (step 120 of branch 1), ``RUN@latest`` (the newest intact), or a snapshot's own.

    A snapshot whose own address it is goes first. Raises ``NotFound``, ``NoSnapshot``,
    ``FormatError``.
    """
    place, version = split_address(os.fspath(address))
    try:
        return open_snapshot(address)
    except NotFound as e:
        if version is None:
            raise e.with_advice(ADDRESS_FORMS) from e
    run = Run(place)
    snapshot = run.latest() if version == "latest" else None
    if snapshot is not None:
        return snapshot
    if version == "latest" or not run.listing().versions:
        close = suggest_similar_path(place)
        raise NotFound(
            f"{run.url} is no run with versions",
            todo="Check the path" if close is None else f"Perhaps {close} is meant",
            key=os.fspath(address),
            store=run.url,
        )
    step, _, branch = version.partition(".")
    return run.open(Version(int(step), int(branch)) if branch else run.find(int(step)))
