"""Helpers that save the tiny training to a store, in one call or as begin and finish."""

from __future__ import annotations

from limpet.buffers import shared_pool
from limpet.saving.commit import SaveJob, VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import Store
from tests.trainings import state_after


def begin_version(store: Store, step: int, *, ahead: bool = False) -> SaveJob:
    label = VersionMetadata(step=step)
    return begin_save(
        Location(store, f"version_{step}"), state_after(step), label, shared_pool(), stage_now=ahead
    )


def save(store: Store, step: int) -> SnapshotReader:
    return finish_save(begin_version(store, step))


def keys(store: Store) -> list[str]:
    return [s.key for s in store.list("")]
