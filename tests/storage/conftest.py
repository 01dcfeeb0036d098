"""Small objects go past the page cache too, so that small tests show the direct path."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def direct_from_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.storage.local_files.DIRECT_MIN_BYTES", 1)
