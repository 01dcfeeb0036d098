"""Fixtures: a run in memory that commands find by its URL."""

import itertools

import pytest

from limpet.storage.open import open_store
from tests.cli.invoke import make_run
from tests.storage.fake_s3 import s3  # noqa: F401  (a fixture)

_store_numbers = itertools.count()


@pytest.fixture(autouse=True)
def wide_output(monkeypatch):
    """Let no output be truncated, as in a pipe; pytest-xdist sets the variable."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def store():
    """Return a run with versions 20, 40, and 60 under a unique URL."""
    store = open_store(f"memory://cli-{next(_store_numbers)}")
    return make_run(store)


@pytest.fixture
def run(store):
    return store.url


@pytest.fixture
def empty_url():
    """Return the URL of an empty store."""
    return f"memory://cli-{next(_store_numbers)}"
