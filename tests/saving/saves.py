"""Helpers that save the tiny training to a store, in one call or as begin and finish."""

from limpet.buffers import shared_pool
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot.location import Location
from tests.trainings import state_after


def begin_version(store, step, *, ahead=False):
    label = VersionMetadata(step=step)
    return begin_save(
        Location(store, f"version_{step}"), state_after(step), label, shared_pool(), stage_now=ahead
    )


def save(store, step):
    return finish_save(begin_version(store, step))


def keys(store):
    return [s.key for s in store.list("")]
