"""Objectives: by which metrics the versions of a run are compared, as its evaluations record it.

A training records the metrics of its own policies in the metadata of each version. An evaluation
comes later, when the version cannot change any more, so it has files of its own in the run.
"""

from __future__ import annotations

from contextlib import suppress

from limpet import events
from limpet.errors import AlreadyExists, FormatError, LimpetError, NotFound
from limpet.format.digest import digest
from limpet.format.names import is_objective_name, objective_name
from limpet.format.records import MAX_RECORD, Objective, decode_objective, encode_objective
from limpet.snapshot.location import get_bounded
from limpet.storage.store import Store, list_level
from limpet.text import to_repr


def make_objective(objective: object) -> Objective:
    """Return the objective of a metric and a mode. Raises ``LimpetError`` if it is not valid."""
    match objective:
        case (str(metric), "min" | "max" as mode) if metric:
            return Objective(metric, mode)
    raise LimpetError(
        "Invalid value for objective= of Evaluation",
        expected='a metric and "min" or "max", such as ("val/loss", "min")',
        found=to_repr(objective)[:200],
    )


def record_objective(store: Store, objective: Objective) -> None:
    """Record an objective in a run, unless it is recorded. Raises ``StoreError``."""
    name = digest(f"{objective.mode} {objective.metric}".encode())
    with suppress(AlreadyExists):
        store.put_if_absent(objective_name(name), encode_objective(objective))


def read_recorded_objectives(store: Store) -> list[Objective]:
    """Return the objectives that evaluations have recorded in a run.

    A damaged record is left out, and the event ``skipped`` reports it. Raises ``StoreError``.
    """
    found = []
    for entry in list_level(store, "", "objective-"):
        if entry.kind != "folder" and is_objective_name(entry.name):
            try:
                raw = get_bounded(store, entry.name, MAX_RECORD)
                found.append(decode_objective(raw, entry.name))
            except NotFound:
                continue
            except FormatError as e:
                events.emit("skipped", version=entry.name, error=e)
    return found
