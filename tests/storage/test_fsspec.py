"""Stores in the file systems of fsspec, which promise nothing, and which fail."""

import itertools
import threading
import uuid

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from holdfast.errors import Denied
from holdfast.storage.open import open_store
from holdfast.testing import StoreContract


def memory_url():
    return f"fsspec+memory://test-{uuid.uuid4().hex}"


class TestMemory(StoreContract):
    def make_store(self, folder):
        return open_store(f"{memory_url()}/a/b", allow_weak=True)


class TestFile(StoreContract):
    def make_store(self, folder):
        return open_store(f"fsspec+file://{folder}/not/yet", allow_weak=True)


class TestDirOfMemory(StoreContract):
    def make_store(self, folder):
        options = {"path": str(folder), "target_protocol": "memory"}
        return open_store("fsspec+dir://", **options, allow_weak=True)
