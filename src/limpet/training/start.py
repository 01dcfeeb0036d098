"""Starting an empty run from a version of another run, or from a part of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from limpet.errors import LimpetError, PlanError
from limpet.loading.binding import STRICT, Leniency
from limpet.loading.load import load_snapshot
from limpet.ranks.group import Group
from limpet.run.address import open_on_all_ranks
from limpet.run.catalog import read_training_metadata
from limpet.snapshot.location import Url
from limpet.training.resume_point import ResumePoint

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
