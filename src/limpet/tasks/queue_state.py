"""The state of a queue in snapshots, and how it is matched with the jobs that a queue has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from limpet.errors import PlanError
from limpet.tasks.spec import parse_spec
from limpet.tasks.table import TaskTable, check_progress


class LoadedState(NamedTuple):
    """A state that was checked: new tables with its jobs, and the dicts of their progress."""

    next_id: int
    tables: list[TaskTable]
    progress: list[dict[str, Any]]


def to_state(next_id: int, tables: Mapping[str, TaskTable]) -> dict[str, Any]:
    """Return the state of a queue. Its jobs are a list, in the order of their ids."""
    return {"next_id": next_id, "jobs": [table.to_state() for table in tables.values()]}


def check_state(state: object) -> LoadedState:
    """Return a state after complete checks. Raises ``PlanError`` if it is not that of a queue."""
    if (
        not isinstance(state, dict)
        or set(state) != {"next_id", "jobs"}
        or type(state["next_id"]) is not int
        or type(state["jobs"]) is not list
        or not all(isinstance(job, dict) and "spec" in job for job in state["jobs"])
    ):
        raise _invalid("next_id and jobs", repr(state)[:200])
    tables, next_id = [], 1
    for job in state["jobs"]:
        spec = parse_spec(job["spec"])
        check_progress(spec, job)
        table = TaskTable(spec, job["first_id"])
        if table.first_id < next_id:
            raise _invalid("jobs in the order of their ids", f"{spec.name!r} at {table.first_id}")
        next_id = table.last_id + 1
        tables.append(table)
    names = {table.spec.name for table in tables}
    if len(names) < len(tables) or state["next_id"] < next_id:
        raise _invalid("different names, and a next_id after all jobs", state["next_id"])
    return LoadedState(state["next_id"], tables, state["jobs"])


def match_tables(
    loaded: LoadedState, live: Mapping[str, TaskTable]
) -> tuple[list[TaskTable], list[TaskTable]]:
    """Return the tables that receive the progress of a state, and the live ones that a load drops.

    A job that the queue has keeps its table, so that who waits for it need not know of the load.
    Raises ``PlanError`` if a job has another specification, and if a training job would be dropped
    that has not begun: it is one that the script adds for the first time.
    """
    receiving = []
    for table in loaded.tables:
        own = live.get(table.spec.name)
        if own is not None and own.spec != table.spec:
            raise PlanError(
                f"Job {table.spec.name!r} of the task queue differs from the saved one",
                expected=table.spec.text[:300],
                found=own.spec.text[:300],
                todo="Add it with the saved arguments, or give the new job another name",
            )
        receiving.append(table if own is None else own)
    names = {table.spec.name for table in loaded.tables}
    dropped = [table for name, table in live.items() if name not in names]
    new = [t.spec.name for t in dropped if t.spec.kind == "training" and not t.is_touched]
    if new:
        raise PlanError(
            f"The saved task queue does not have job {new[0]!r}, which would be lost",
            expected="the jobs that the queue had when the version was saved",
            found=f"{len(new)} more that have not begun",
            todo="Add jobs that are new after resume()",
        )
    return receiving, dropped


def _invalid(expected: str, found: object) -> PlanError:
    what = "The loaded value is not the state of a task queue"
    return PlanError(what, expected=expected, found=found)
