"""How many threads load from a store."""

import os
from contextlib import nullcontext

import pytest

from limpet.snapshot.location import Location
from limpet.snapshot.read import read_workers
from limpet.storage.local.store import LocalStore
from limpet.storage.local.tmpfs import TmpfsStore
from limpet.storage.memory import MemoryStore
from limpet.tiers.inventory import Sources
from limpet.tiers.recovery_store import Peers, RecoveryStore


@pytest.mark.parametrize(
    ("processors", "processes", "threads"),
    [(1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 8, 1), (96, 8, 8), (32, 8, 4)],
)
def test_a_load_from_memory_has_no_more_threads_than_processors(
    tmp_path, monkeypatch, processors, processes, threads
):
    monkeypatch.delenv("LIMPET_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(processors)})
    tmpfs = TmpfsStore(tmp_path)
    peers = Peers(0, lambda rank: [rank], lambda *_: nullcontext())
    for store in (MemoryStore(), tmpfs, RecoveryStore(tmpfs, "v", Sources(), peers)):
        assert read_workers(Location(store, "v"), processes=processes).threads == threads
    assert read_workers(Location(LocalStore(tmp_path), "v"), processes=processes).threads == 8


def test_the_number_of_threads_that_the_user_has_set_is_an_upper_limit(monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(64)})
    assert read_workers(Location(MemoryStore(), "v")).threads == 2
