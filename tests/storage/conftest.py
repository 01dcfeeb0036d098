"""Use direct I/O for small objects too, so that small tests cover it."""

import pytest

from tests.disks import disk  # noqa: F401  (a fixture)
from tests.storage.fake_s3 import s3  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def use_direct_io_for_all_sizes(monkeypatch):
    monkeypatch.setattr("limpet.storage.local.store.DIRECT_MIN_BYTES", 1)
