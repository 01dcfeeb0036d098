"""What follows the last save of a training that ends normally."""

from __future__ import annotations

from contextlib import suppress

from limpet.errors import LimpetError, NotFound
from limpet.format.records import Ended
from limpet.ranks.group import broadcast_from_first
from limpet.run.records import put_about_version
from limpet.run.retention import undeleted_error
from limpet.snapshot import pins
from limpet.training.saves.save_spec import version_of
from limpet.training.saves.saver import Saver

_AUTHOR = "training"
"""The name under which a training records its end."""


def record_end(saver: Saver, epochs: int) -> None:
    """Record about the newest version that the training has ended, so that nobody waits for more.
    ``epochs``: the number of complete epochs.

    Raises ``StoreError``.
    """
    newest, run, reason = saver.newest, saver.run, saver.checks.early_stop.end_reason
    if newest is None or saver.group.rank:
        return
    version = version_of(newest)
    try:
        records = run.catalog.evaluations.read(version, newest.digest)
        if [(end.reason, end.epochs) for end in records.of(Ended)[-1:]] == [(reason, epochs)]:
            return
        with suppress(NotFound):  # somebody has deleted the version
            pins.require_manifest(run.location(version))
            about = version, newest.digest
            content = {"reason": reason, "epochs": epochs}
            put_about_version(Ended, _AUTHOR, about, run.store, records.records, **content)
    except LimpetError as e:
        advice = f"{version} was saved, but the end of the training could not be recorded"
        raise e.with_advice(advice, committed=str(version)) from e


def ended_epochs(saver: Saver) -> int:
    """Return how many epochs were complete when a training ended at the newest version, or 0.

    All ranks call this. Raises ``StoreError``, on all ranks.
    """

    def read() -> int:
        newest = saver.newest
        if newest is None:
            return 0
        records = saver.run.catalog.evaluations.read(version_of(newest), newest.digest)
        return next((end.epochs for end in reversed(records.of(Ended))), 0)

    return broadcast_from_first(saver.group, f"the end of {saver.url}", read, int)


def finish_retention(saver: Saver) -> None:
    """Apply retention after the last save, if it is due. Raises ``LimpetError``."""
    try:
        saver.retention.finish()
    except LimpetError as e:
        raise undeleted_error(e, saver.newest and saver.newest.location.folder) from e
