"""Fixtures: a run in memory that commands find by its URL."""

from __future__ import annotations

import itertools

import pytest

from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from tests.cli.invoke import make_run

_store_numbers = itertools.count()


@pytest.fixture
def store() -> MemoryStore:
    """Return a run with versions 20, 40, and 60 under a unique URL."""
    store = open_store(f"memory://cli-{next(_store_numbers)}")
    assert isinstance(store, MemoryStore)
    return make_run(store)


@pytest.fixture
def run(store: MemoryStore) -> str:
    return store.url


@pytest.fixture
def empty_url() -> str:
    """Return the URL of an empty store."""
    return f"memory://cli-{next(_store_numbers)}"
