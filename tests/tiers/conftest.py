"""Fixtures of the tests of tiers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from tests.tiers.hosts import Host


@pytest.fixture
def host(memory: str) -> Iterator[Host]:
    host = Host(memory)
    yield host
    for ckpt in host.ckpts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ckpt._release()
