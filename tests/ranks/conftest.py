"""Fixtures for small saves that use the code paths of large saves, by ranks with their own stores.

The pieces and pools are as small as in the crash tests.
"""

from unittest import mock

import pytest

from limpet import buffers
from limpet.storage.open import open_store
from tests.crash.conftest import PAGE, PoolTracker, pools  # noqa: F401  (a fixture)
from tests.ranks import faults


@pytest.fixture
def trial_stores(pools, monkeypatch):  # noqa: F811
    """Set up what ``faults.Trial`` needs.

    A URL leads to the store of one rank, the buffers are small, and every process that holds a pin
    counts as dead, because the pins of a killed thread would otherwise count as held.
    """
    monkeypatch.setattr(
        "limpet.snapshot.location.open_store",
        lambda url: faults.STORES_BY_URL.get(url) or open_store(url),
    )
    monkeypatch.setattr(buffers, "_pool", pools.make_pool(4096 * PAGE))
    monkeypatch.setenv("LIMPET_THREADS", "2")
    monkeypatch.setattr("limpet.threads.BYTES_PER_THREAD", 1)
    with mock.patch("limpet.snapshot.pins.is_holder_alive", return_value=False):
        yield pools
    for job in faults.OPEN_JOBS:
        job.group.close()
    faults.OPEN_JOBS.clear()
    faults.STORES_BY_URL.clear()
