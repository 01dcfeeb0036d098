"""The Store contract over every store, on every kind of file system that is at hand."""

import shutil
import tempfile
from pathlib import Path

import pytest

from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.testing.crashfs import CrashFs
from holdfast.testing.stores import StoreContract


class TestMemory(StoreContract):
    def make_store(self, folder):
        return MemoryStore()


class TestMemoryFolder(StoreContract):
    def make_store(self, folder):
        store = MemoryStore()
        store.put_if_absent("elsewhere", b"not seen from the folder")
        return store.at("a/b")


class _InFolder(StoreContract):
    parent = "/var/tmp"
    direct = True

    def make_store(self, folder):
        return LocalStore(folder / "not" / "yet", direct=self.direct)

    @pytest.fixture
    def store(self):
        if not Path(self.parent).is_dir():
            pytest.skip(f"no {self.parent} here")
        folder = Path(tempfile.mkdtemp(prefix="holdfast-", dir=self.parent))
        yield self.make_store(folder)
        shutil.rmtree(folder)


class TestLocal(_InFolder):
    pass


class TestLocalWithoutDirect(_InFolder):
    direct = False


class TestLocalOnTmpfs(_InFolder):
    parent = "/dev/shm"


class TestLocalOverCrashFs(StoreContract):
    def make_store(self, folder):
        return LocalStore("/run", fs=CrashFs())
