"""What an evaluation inside the training records, and what a resumed training reads of it."""

from __future__ import annotations

from collections.abc import Mapping

from limpet.errors import LimpetError
from limpet.format.records import Evaluation, InexactEvaluation
from limpet.ranks.group import all_reduce, broadcast_from_first
from limpet.run.catalog import read_training_metadata
from limpet.snapshot.snapshot import Snapshot, reader_of
from limpet.training.checkpointer import Checkpointer
from limpet.training.saves.save_spec import version_of

_FIELD = "evaluated"
"""The field of the training metadata of a version: by name, the numbers of steps and of epochs at
which the last completed evaluation began."""

Steps = tuple[int, int]


def read_last(ckpt: Checkpointer, name: str, arguments: str) -> Steps:
    """Return the numbers of steps and of epochs at which the last completed evaluation began.

    All ranks call this. Raises ``LimpetError`` if their ``arguments`` differ.
    """

    def combine(found: list[str]) -> list[int]:
        if len({*found}) > 1:
            raise LimpetError(
                f"The ranks have different arguments for the evaluation {name}",
                expected=found[0],
                found=next(f for f in found if f != found[0]),
                todo="Give all ranks the same data, batch_size, every, and on",
            )
        return list(_read_last(ckpt, name))

    operation = f"the begin of the evaluation {name}"
    steps, epochs = all_reduce(ckpt._group, operation, lambda: arguments, str, combine, list)
    _complete(ckpt, name, (steps, epochs))
    return steps, epochs


def _read_last(ckpt: Checkpointer, name: str) -> Steps:
    newest = ckpt._saver.newest
    if newest is None:
        return 0, 0
    version, stored = version_of(newest), read_training_metadata(newest).get(_FIELD)
    last = stored.get(name) if isinstance(stored, dict) else None
    if not isinstance(last, list) or len(last) != 2 or not all(type(n) is int for n in last):
        last = [0, 0]
    # records about this version may be newer than it: the training ended before the next one
    evaluations = ckpt.run.catalog.evaluations.read(version, newest.digest)
    recorded = [version.step for r in evaluations.of(Evaluation) if r.name == name]
    recorded += [r.first_step for r in evaluations.of(InexactEvaluation) if r.name == name]
    begun = max((step for step in recorded if step <= version.step), default=0)
    return (begun, ckpt._step_counter.epoch) if begun > last[0] else (last[0], last[1])


def record_exact(ckpt: Checkpointer, name: str, metrics: Mapping[str, float], began: Steps) -> str:
    """Record the metrics of the current step with its version, and save that first if there is
    none. Early stopping sees them at once. Return the version. All ranks call this."""
    snapshot = reader_of(ckpt.save())
    ckpt._saver.add_metrics(snapshot, metrics, name)
    ckpt._early_stop.observe(metrics, ckpt._step_counter.step, ckpt._agreement, False)
    _complete(ckpt, name, began)
    return str(version_of(snapshot))


def record_inexact(
    ckpt: Checkpointer,
    name: str,
    metrics: Mapping[str, float],
    steps: Steps,
    began: Steps,
    keep: bool,
) -> str:
    """Record the metrics about the newest version, and return it. The current step is saved first
    with ``keep``, and if there is no version. All ranks call this."""
    group, operation = ckpt._group, f"the record of the evaluation {name}"
    before = ckpt._saver.evaluated
    _complete(ckpt, name, began)  # the version that is saved now says so, too

    def has_version() -> bool:
        return ckpt.run.latest() is not None

    def record() -> str:
        about = snapshot or ckpt.run.latest()
        if about is None:
            raise LimpetError(f"The versions of {ckpt.run.url} were deleted meanwhile")
        content = {"metrics": dict(metrics), "first_step": steps[0], "last_step": steps[1]}
        ckpt.run.put_record(InexactEvaluation, name, about, **content)
        return str(version_of(reader_of(about)))

    try:
        snapshot: Snapshot | None = None
        if keep or not broadcast_from_first(group, f"{operation}: its version", has_version, bool):
            snapshot = ckpt.save()
        return broadcast_from_first(group, operation, record, str)
    except BaseException:
        ckpt._saver.evaluated = before
        raise


def _complete(ckpt: Checkpointer, name: str, began: Steps) -> None:
    """Let the versions that are saved from now on say that this evaluation is complete."""
    earlier = ckpt._saver.evaluated.get(_FIELD, {})
    ckpt._saver.evaluated = {_FIELD: {**earlier, name: [*began]}}
