"""Test the promises of LocalStore, and the model of CrashFs, with a real power cut.

The "shutdown" of a file system drops everything that has not reached its journal or the disk.
"""

import fcntl
import os
import random
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from holdfast.errors import StoreError
from holdfast.storage.local.os_calls import Fs
from holdfast.storage.local.store import LocalStore
from holdfast.testing.contract import keys, put, random_bytes
from holdfast.testing.crashfs import CrashFs

pytestmark = [pytest.mark.slow, pytest.mark.root]

GOING_DOWN = 0x8004587D  # FS_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN
WITHOUT_FLUSHING_THE_LOG = struct.pack("I", 2)


class Disk:
    """A file system in its own image, on a loop device."""

    def __init__(self, kind, folder):
        self.image, self.mount_point = folder / "image", folder / "mounted"
        self.mount_point.mkdir()
        with self.image.open("wb") as image:
            image.truncate(400 << 20)
        force = "-F" if kind == "ext4" else "-f"
        run(f"mkfs.{kind}", "-q", force, str(self.image))
        self.mount()

    def mount(self):
        run("mount", "-o", "loop", str(self.image), str(self.mount_point))

    def cut_power(self):
        fd = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, GOING_DOWN, WITHOUT_FLUSHING_THE_LOG)
        finally:
            os.close(fd)

    def unmount(self):
        run("umount", str(self.mount_point))


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture(params=["ext4", "xfs"])
def disk(request):
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    if not shutil.which(f"mkfs.{request.param}"):
        if not shutil.which("apt-get"):
            pytest.skip(f"mkfs.{request.param} is not installed")
        package = {"ext4": "e2fsprogs", "xfs": "xfsprogs"}[request.param]
        install = ["apt-get", "install", "-y", "-q", package]
        if subprocess.run(install, capture_output=True, check=False).returncode:
            pytest.skip(f"{package} cannot be installed")
    folder = Path(tempfile.mkdtemp(prefix="holdfast-disk-", dir="/var/tmp"))
    try:
        try:
            disk = Disk(request.param, folder)
        except RuntimeError as error:
            pytest.skip(f"loop mounts are not permitted: {error}")
        yield disk
        disk.unmount()
    finally:
        shutil.rmtree(folder)


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
