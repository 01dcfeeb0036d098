"""Test the promises of LocalStore, and the model of CrashFs, with a real power cut.

The "shutdown" of a file system drops everything that has not reached its journal or the disk.
"""

import os
import random
import threading
import time

import pytest

from limpet.errors import StoreError
from limpet.storage.local.os_calls import Fs
from limpet.storage.local.store import LocalStore
from limpet.testing.contract import keys, put, random_bytes
from limpet.testing.crashfs import CrashFs

pytestmark = [pytest.mark.slow, pytest.mark.root]


def data_of(key):
    return random_bytes(random.Random(key).choice([10, 5000, 4096 * 20, 700_001]), hash(key) % 1000)


def write(store, key, turn):
    if turn % 2:
        store.put_if_absent(key, data_of(key))
    else:
        put(store, key, data_of(key))


def test_finished_writes_survive_and_others_are_complete_or_absent(disk):
    for trial in range(6):
        root = disk.mount_point / f"trial{trial}" / "deep" / "run"
        returned, deleted = [], []

        def work(number, root=root, returned=returned, deleted=deleted):
            store = LocalStore(root)
            for turn in range(10_000):
                key = f"v{turn // 3}/{number}-{turn}"
                try:
                    write(store, key, turn)
                    returned.append(key)
                    if turn % 5 == 4:
                        deleted.append(f"v{turn // 3}/{number}-{turn}")
                        store.delete(key)
                except StoreError:
                    return  # the power is cut

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        while len(returned) < 5 + 7 * trial:
            time.sleep(0.001)
        disk.cut_power()
        for thread in threads:
            thread.join()
        disk.unmount()
        disk.mount()
        store = LocalStore(root)
        found = keys(store)
        assert len(returned) >= 5
        assert set(returned) - set(deleted) <= set(found)
        # The last deletion of each thread may not have returned.
        assert len(set(deleted) & set(found)) <= 3
        for key in found:
            assert store.get(key, 1 << 20) == data_of(key)


def make_file(fs, root, name, *, sync, folder=None):
    """Write a file, sync it if asked, and link it to its name, as LocalStore does."""
    temp = f"{root}/{folder}/t" if folder else f"{root}/.{name}"
    fd = fs.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    fs.pwrite(fd, memoryview(b"x" * 5000), 0)
    if sync:
        fs.fsync(fd)
    fs.close(fd)
    fs.link(temp, f"{root}/{folder or '.'}/{name}".replace("/./", "/"))


def make_history(fs, root):
    """Make files whose durability decreases from one to the next."""
    make_file(fs, root, "kept", sync=True)
    fs.mkdir(f"{root}/made")
    fd = fs.open(root, os.O_RDONLY | os.O_DIRECTORY)
    fs.fsync(fd)
    fs.close(fd)
    fs.unlink(f"{root}/.kept")
    make_file(fs, root, "synced", sync=True, folder="made")
    make_file(fs, root, "unsynced", sync=False)
    fs.mkdir(f"{root}/new")
    make_file(fs, root, "inside", sync=False, folder="new")


def read_files(fs, root):
    """Return the content of each file that exists."""
    found = {}
    for name in ("kept", ".kept", "made/synced", "unsynced", "new/inside"):
        try:
            fd = fs.open(f"{root}/{name}", os.O_RDONLY)
        except FileNotFoundError:
            continue
        into = bytearray(fs.fstat(fd).size)
        if into:
            fs.preadv(fd, memoryview(into), 0)
        fs.close(fd)
        found[name] = bytes(into)
    return found


def test_the_model_includes_the_result_of_a_real_power_cut(disk):
    root = str(disk.mount_point)
    make_history(Fs(), root)
    disk.cut_power()
    disk.unmount()
    disk.mount()
    real = read_files(Fs(), root)
    assert real["kept"] == b"x" * 5000
    assert real.get("unsynced") != b"x" * 5000, (
        "the power cut dropped nothing, so it proves nothing"
    )
    model = CrashFs()
    make_history(model, "")
    possible = [read_files(left, "") for left in model.crashes(limit=1 << 17)]
    assert real in possible


def test_a_store_without_syncs_loses_data(disk):
    class WithoutSync(Fs):
        def fsync(self, fd):
            pass

    store = LocalStore(disk.mount_point / "run", fs=WithoutSync(), direct=False)
    put(store, "v/a", data_of("v/a"))
    disk.cut_power()
    disk.unmount()
    disk.mount()
    left = LocalStore(disk.mount_point / "run")
    assert keys(left) == [] or left.get("v/a", 1 << 20) != data_of("v/a")
