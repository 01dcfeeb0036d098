"""Fixtures of the tests of tiers."""

import warnings
from pathlib import Path

import pytest

from tests.tiers.hosts import Host


@pytest.fixture
def folder(memory):
    return Path(memory)


@pytest.fixture
def host(memory):
    host = Host(memory)
    yield host
    for ckpt in host.ckpts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ckpt._release()
