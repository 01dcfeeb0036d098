"""A run in memory that commands reach by its URL."""

from __future__ import annotations

import itertools

import pytest

from holdfast.storage.memory import MemoryStore
from holdfast.storage.open import open_store
from tests.cli.invoke import make_run

_numbers = itertools.count()


@pytest.fixture
def store() -> MemoryStore:
    """A run with versions 20, 40, 60 under a URL of its own."""
    made = open_store(f"memory://cli-{next(_numbers)}")
    assert isinstance(made, MemoryStore)
    return make_run(made)


@pytest.fixture
def run(store: MemoryStore) -> str:
    return store.url


@pytest.fixture
def elsewhere() -> str:
    """The URL of an empty place."""
    return f"memory://cli-{next(_numbers)}"
