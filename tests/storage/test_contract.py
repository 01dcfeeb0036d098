"""Run the store contract with every store, on every available kind of file system."""

import shutil
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from limpet.storage.local.store import LocalStore
from limpet.storage.local.tmpfs import TmpfsStore
from limpet.storage.memory import MemoryStore
from limpet.testing.contract import StoreContract
from limpet.testing.crashfs import CrashFs
from tests.disks import KINDS, new_disk


class TestMemory(StoreContract):
    def make_store(self, folder):
        return MemoryStore()


class TestMemoryFolder(StoreContract):
    def make_store(self, folder):
        store = MemoryStore()
        store.put_if_absent("elsewhere", b"invisible in the folder")
        return store.at("a/b")


class _InParts(MemoryStore):
    @property
    def traits(self):
        return replace(super().traits, part_size=5 << 20)


class TestMemoryInParts(StoreContract):
    def make_store(self, folder):
        return _InParts()


class _InFolder(StoreContract):
    parent = "/var/tmp"
    direct = True

    def make_store(self, folder):
        return LocalStore(folder / "not" / "yet", direct=self.direct)

    @pytest.fixture
    def store(self):
        if not Path(self.parent).is_dir():
            pytest.skip(f"{self.parent} does not exist")
        folder = Path(tempfile.mkdtemp(prefix="limpet-", dir=self.parent))
        yield self.make_store(folder)
        shutil.rmtree(folder)


class TestLocal(_InFolder):
    pass


class TestLocalWithoutDirect(_InFolder):
    direct = False


class TestLocalOnTmpfs(_InFolder):
    parent = "/dev/shm"


class TestTmpfs(_InFolder):
    parent = "/dev/shm"

    def make_store(self, folder):
        return TmpfsStore(folder / "not" / "yet")


@pytest.fixture(scope="module", params=KINDS)
def mount_point(request):
    with new_disk(request.param) as disk:
        yield disk.mount_point


@pytest.mark.slow
@pytest.mark.root
class TestLocalOnDisk(_InFolder):
    """A new ext4 and a new xfs, whatever the file system of /var/tmp is."""

    @pytest.fixture
    def store(self, mount_point):
        folder = mount_point / uuid.uuid4().hex
        folder.mkdir()
        yield self.make_store(folder)
        shutil.rmtree(folder)


class TestLocalOverCrashFs(StoreContract):
    def make_store(self, folder):
        return LocalStore("/run", fs=CrashFs())
