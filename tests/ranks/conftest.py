"""Small saves that take the way of large ones, as for the crash tests, by ranks that have stores of
their own."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from holdfast import buffers
from holdfast.storage.open import open_store
from tests.crash.conftest import PAGE, PoolTracker, pools  # noqa: F401  (a fixture)
from tests.ranks import faults as perils


@pytest.fixture
def trial_stores(pools: PoolTracker, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolTracker]:  # noqa: F811
    """What ``perils.Trial`` needs: URLs that lead to the store of one rank, small buffers, and no
    pin that is taken for one of this process."""
    monkeypatch.setattr(
        "holdfast.engine.snapshot.location.open_store",
        lambda url: perils.STORES_BY_URL.get(url) or open_store(url),
    )
    monkeypatch.setattr(buffers, "_pool", pools.make_pool(4096 * PAGE))
    monkeypatch.setenv("HOLDFAST_THREADS", "2")
    with mock.patch("holdfast.engine.snapshot.pins.is_holder_alive", return_value=False):
        yield pools
    for crew in perils.OPEN_JOBS:
        crew.group.close()
    perils.OPEN_JOBS.clear()
    perils.STORES_BY_URL.clear()
