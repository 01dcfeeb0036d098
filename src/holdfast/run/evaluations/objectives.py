"""Objectives: by which metrics the versions of a run are compared, as its evaluations record it.

A training records the metrics of its own policies in the metadata of each version. An evaluation
comes later, when the version cannot change any more, so it has files of its own in the run.
"""

from __future__ import annotations

from contextlib import suppress

from holdfast import events
from holdfast.engine.snapshot.location import get_bounded
from holdfast.errors import AlreadyExists, FormatError, HoldfastError, NotFound
from holdfast.format.digest import digest
from holdfast.format.names import is_objective_name, objective_name
from holdfast.format.records import MAX_RECORD, Objective, decode_objective, encode_objective
from holdfast.storage.store import Store, list_level
from holdfast.text import to_repr


def make_objective(pair: object) -> Objective:
    """Return the objective of a metric and a mode. Raises ``HoldfastError`` if it is not valid."""
    metric, mode = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
    if not isinstance(metric, str) or not metric or mode not in ("min", "max"):
        raise HoldfastError(
            "Invalid value for objective= of Evaluation",
            expected='a metric and "min" or "max", such as ("val/loss", "min")',
            found=to_repr(pair)[:200],
        )
    return Objective(metric, mode)


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
