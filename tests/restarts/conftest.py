"""Fixtures of the tests of the restore ladder."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator

import pytest

from tests.tiers.hosts import Host


@pytest.fixture
def host() -> Iterator[Host]:
    path = tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm")
    host = Host(path)
    yield host
    for ckpt in host.ckpts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ckpt._release()
    shutil.rmtree(path, ignore_errors=True)
