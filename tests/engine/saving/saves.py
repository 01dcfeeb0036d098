"""Saves of the tiny training into a store, in one piece or in two halves."""

from __future__ import annotations

from holdfast.buffers import shared_pool
from holdfast.engine.saving.job import Draft, Label
from holdfast.engine.saving.save import begin, finish
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.storage.store import Store
from tests.trainings import after


def draft(store: Store, step: int, *, ahead: bool = False) -> Draft:
    label = Label(step=step)
    return begin(Location(store, f"version_{step}"), after(step), label, shared_pool(), ahead=ahead)


def save(store: Store, step: int) -> Snapshot:
    return finish(draft(store, step))


def keys(store: Store) -> list[str]:
    return [s.key for s in store.list("")]
