"""The record of an evaluation that failed."""

from __future__ import annotations

from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import NotFound
from holdfast.format.records import MAX_TEXT, FailedEvaluation
from holdfast.run.evaluations.metrics import put_about_version
from holdfast.run.run import Run


def record_failure(run: Run, snapshot: Snapshot, name: str, cause: str) -> None:
    """Record that the evaluation ``name`` of a snapshot failed.

    Raises ``NotFound`` if the snapshot was deleted or replaced, ``FormatError`` if its manifest is
    damaged, and ``StoreError``.
    """
    version = snapshot.version
    if run.open(version).digest != snapshot.digest:
        raise NotFound(f"{snapshot.url} was replaced by another snapshot", store=run.url)
    earlier = run.catalog.evaluations.read(version, snapshot.digest).records
    about = version, snapshot.digest
    put_about_version(FailedEvaluation, name, about, run.store, earlier, cause=cause[:MAX_TEXT])
