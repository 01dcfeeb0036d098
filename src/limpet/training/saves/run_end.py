"""What follows the last save of a training that ends normally."""

from __future__ import annotations

from contextlib import suppress

from limpet.errors import LimpetError, NotFound
from limpet.format.records import Ended
from limpet.run.evaluations.metrics import put_about_version
from limpet.run.retention import undeleted_error
from limpet.snapshot import pins
from limpet.training.saves.save_spec import version_of
from limpet.training.saves.saver import Saver

_AUTHOR = "training"
"""The name under which a training records its end."""


def record_end(saver: Saver) -> None:
    """Record about the newest version that the training has ended, so that nobody waits for more.

    Raises ``StoreError``.
    """
    newest, run, reason = saver.newest, saver.run, saver.checks.early_stop.end_reason
    if newest is None or saver.group.rank:
        return
    version = version_of(newest)
    try:
        records = run.catalog.evaluations.read(version, newest.digest)
        if [end.reason for end in records.of(Ended)[-1:]] == [reason]:
            return
        with suppress(NotFound):  # somebody has deleted the version
            pins.require_manifest(run.location(version))
            about = version, newest.digest
            put_about_version(Ended, _AUTHOR, about, run.store, records.records, reason=reason)
    except LimpetError as e:
        advice = f"{version} was saved, but the end of the training could not be recorded"
        raise e.with_advice(advice, committed=str(version)) from e


def finish_retention(saver: Saver) -> None:
    """Apply retention after the last save, if it is due. Raises ``LimpetError``."""
    try:
        saver.retention.finish()
    except LimpetError as e:
        raise undeleted_error(e, saver.newest and saver.newest.location.folder) from e
