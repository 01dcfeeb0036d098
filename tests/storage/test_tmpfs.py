"""A store in memory: mapped uploads, the reuse of their files, full file systems, forks, kills."""

import errno
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from limpet.errors import AlreadyExists, NoSpace, NotFound, StoreError
from limpet.storage.local.store import LocalStore
from limpet.storage.local.tmpfs import MappedFile, TmpfsStore
from limpet.testing.contract import partial_keys, put, random_bytes
from limpet.testing.faults import Fault, FaultFs

SIZE = 2 << 20


@pytest.fixture
def folder(memory):
    return Path(memory)


def stage(store, key, data):
    """Write an object by its memory only."""
    with store.put_mapped(key, len(data)) as upload:
        view = upload.view(0, len(data))
        view[:] = data
        upload.write_at(0, view)
        return upload.commit()


def inode(folder, key):
    return (folder / key).stat().st_ino


def blocks(folder):
    """The bytes that the files of a folder and deleted files that are mapped from it take."""
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())


def test_an_object_is_written_by_its_memory(folder):
    store, data = TmpfsStore(folder), random_bytes(SIZE + 5)
    assert stage(store, "v/a", data).length == len(data)
    for reader in (store, LocalStore(folder)):
        assert reader.get("v/a", len(data)) == data
    assert partial_keys(store) == []


def test_views_and_copies_may_be_mixed(folder):
    store, data = TmpfsStore(folder), random_bytes(SIZE)
    with store.put_mapped("a", SIZE) as upload:
        view = upload.view(1000, 5000)
        view[:] = data[1000:6000]
        upload.write_at(1000, view)
        upload.write_at(6000, memoryview(data)[6000:])
        with pytest.raises(StoreError, match="byte 0 written never"):
            upload.commit()
    with store.put_mapped("a", SIZE) as upload:
        view = upload.view(1000, 5000)
        view[:] = data[1000:6000]
        upload.write_at(6000, memoryview(data)[6000:])
        upload.write_at(0, memoryview(data)[:1000])
        upload.write_at(1000, view)
        upload.commit()
    assert store.get("a", SIZE) == data


# reuse


@pytest.mark.parametrize("change", [-4097, -1, 0, 1, 70_000])
def test_the_next_upload_takes_the_pages_of_a_deleted_object(folder, change):
    store = TmpfsStore(folder)
    stage(store, "v1/a", random_bytes(SIZE, 1))
    first = inode(folder, "v1/a")
    store.delete("v1/a")
    with pytest.raises(NotFound):
        store.stat("v1/a")
    assert not (folder / "v1").exists()
    assert store.spare_bytes == SIZE
    data = random_bytes(SIZE + change, 2)
    assert stage(store, "v2/a", data).length == len(data)
    assert inode(folder, "v2/a") == first
    assert store.get("v2/a", 2 * SIZE) == data
    assert store.spare_bytes == 0
    assert partial_keys(store) == []
    assert blocks(folder) <= len(data) + mmap.PAGESIZE


@pytest.mark.parametrize("use", ["open", "mapped", "linked"])
def test_a_file_that_someone_else_uses_is_never_written_again(folder, use):
    """A reader that has opened an object reads its bytes, also after it was deleted."""
    store, data = TmpfsStore(folder), random_bytes(SIZE, 1)
    stage(store, "v1/a", data)
    file = (folder / "v1/a").open("rb")
    mapping = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)
    if use != "open":
        file.close()
    if use == "linked":
        mapping.close()
        os.link(folder / "v1/a", folder / "other")
    store.delete("v1/a")
    stage(store, "v2/a", random_bytes(SIZE, 2))
    found = {
        "open": file.read,
        "mapped": lambda: mapping[:],
        "linked": (folder / "other").read_bytes,
    }[use]()
    file.close()
    assert found == data
    assert store.get("v2/a", SIZE) == random_bytes(SIZE, 2)
    assert partial_keys(store) == []


def test_a_spare_file_that_another_process_deleted_is_not_used(folder):
    store = TmpfsStore(folder)
    stage(store, "v1/a", random_bytes(SIZE, 1))
    store.delete("v1/a")
    (spare,) = partial_keys(store)
    LocalStore(folder).delete(spare)
    stage(store, "v2/a", random_bytes(SIZE, 2))
    assert store.get("v2/a", SIZE) == random_bytes(SIZE, 2)


def test_an_object_that_another_process_replaced_is_deleted_and_not_reused(folder):
    store = TmpfsStore(folder)
    stage(store, "a", random_bytes(SIZE, 1))
    LocalStore(folder).delete("a")
    put(LocalStore(folder), "a", b"other")
    store.delete("a")
    assert store.spare_bytes == 0
    assert list(store.list("")) == []


def test_the_number_of_spare_files_is_bounded(folder):
    store = TmpfsStore(folder, spare_files=2)
    for number in range(4):
        stage(store, f"v/{number}", random_bytes(SIZE, number))
    for number in range(4):
        store.delete(f"v/{number}")
    assert store.spare_bytes == 2 * SIZE
    store.release_memory()
    assert store.spare_bytes == 0
    assert blocks(folder) == 0


def test_an_aborted_upload_leaves_nothing_but_views(folder):
    """A thread may still copy into a view; that must not reach the next upload."""
    store = TmpfsStore(folder)
    upload = store.put_mapped("a", SIZE)
    late = upload.view(0, SIZE)
    upload.abort()
    stage(store, "b", random_bytes(SIZE))
    late[:] = bytes(SIZE)
    assert store.get("b", SIZE) == random_bytes(SIZE)


def test_a_refused_commit_leaves_the_object(folder):
    store = TmpfsStore(folder)
    stage(store, "a", random_bytes(SIZE, 1))
    with pytest.raises(AlreadyExists):
        stage(store, "a", random_bytes(SIZE, 2))
    assert store.get("a", SIZE) == random_bytes(SIZE, 1)
    store.delete("a")
    assert store.spare_bytes == SIZE


def test_memory_is_allocated_ahead(folder):
    store = TmpfsStore(folder)
    store.preallocate(SIZE)
    store.preallocate(SIZE)
    assert store.spare_bytes == SIZE == blocks(folder)
    (spare,) = folder.iterdir()
    first = spare.stat().st_ino
    stage(store, "v/a", random_bytes(SIZE))
    assert inode(folder, "v/a") == first


# errors


def test_a_full_file_system_is_an_error_and_not_a_signal(folder):
    store = TmpfsStore(folder, fs=FaultFs(None, Fault("fallocate", 1, errno.ENOSPC)))
    with pytest.raises(NoSpace, match=r"v/a.*df -h"):
        store.put_mapped("v/a", SIZE)
    assert blocks(folder) == 0
    assert [*folder.iterdir()] == []
    with pytest.raises(NoSpace):
        fault = Fault("fallocate", 1, errno.ENOSPC)
        TmpfsStore(folder, fs=FaultFs(None, fault)).preallocate(SIZE)
    assert [*folder.iterdir()] == []


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_a_small_tmpfs(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path], check=True)
    try:
        store = TmpfsStore(tmp_path / "run")
        stage(store, "v1/a", random_bytes(6 << 20))
        with pytest.raises(NoSpace):
            store.put_mapped("v2/a", 6 << 20)
        store.delete("v1/a")
        with pytest.raises(NoSpace) as caught:  # a spare file cannot grow either
            store.put_mapped("v2/a", 9 << 20)
        assert caught.value.key == "v2/a"  # the error keeps no memory
        stage(store, "v2/a", random_bytes(6 << 20, 2))
        assert store.get("v2/a", 6 << 20) == random_bytes(6 << 20, 2)
        assert partial_keys(store) == []
    finally:
        del store
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.parametrize("call", ["rename_noreplace", "stat", "fstat"])
def test_a_file_that_cannot_be_kept_is_deleted(folder, call):
    store = TmpfsStore(folder)
    stage(store, "v/a", random_bytes(SIZE))
    number = 2 if call == "stat" else 1  # the first one is for the folder
    store.fs = FaultFs(None, Fault(call, number, errno.EIO))
    store.delete("v/a")
    assert blocks(folder) == 0


# other processes


def test_a_forked_process_has_neither_the_memory_nor_the_files(folder):
    store = TmpfsStore(folder)
    stage(store, "v1/a", random_bytes(SIZE, 1))
    store.delete("v1/a")
    upload = store.put_mapped("v2/a", SIZE)
    view = upload.view(0, SIZE)
    view[:] = random_bytes(SIZE, 2)
    held = [f for f in os.listdir("/proc/self/fd") if "mapped.partial" in _target(f)]
    assert held
    child = os.fork()
    if not child:
        code = 1
        try:
            maps = Path("/proc/self/maps").read_text()
            descriptors = [_target(f) for f in os.listdir("/proc/self/fd")]
            is_free = str(folder) not in maps
            # one descriptor remains: that of the unfinished upload, which the child cannot use
            is_free &= sum(str(folder) in target for target in descriptors) <= 1
            stage(store, "child/a", random_bytes(SIZE, 3))
            store.delete("child/a")
            store.release_memory()
            code = 0 if is_free else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    upload.write_at(0, view)
    upload.commit()
    assert store.get("v2/a", SIZE) == random_bytes(SIZE, 2)
    assert partial_keys(store) == []


def _target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


WRITER = """
import sys, signal, os
from limpet.storage.local.tmpfs import TmpfsStore
store = TmpfsStore(sys.argv[1])
with store.put_mapped("v1/a", 1 << 21) as upload:
    upload.write_at(0, memoryview(bytes(1 << 21)))
    upload.commit()
with store.put_mapped("v0/a", 1 << 21) as upload:
    upload.write_at(0, memoryview(bytes(1 << 21)))
    upload.commit()
store.delete("v0/a")
store._max_spares = 2
store.preallocate(1 << 21)
upload = store.put_mapped("v2/a", 1 << 21)
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_and_its_objects_stay(folder):
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdin=-1, stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"ready\n"
    store = TmpfsStore(folder)
    assert len(partial_keys(store)) == 2
    assert store.remove_leftovers() == 0  # the process runs
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert store.remove_leftovers() == 2 * SIZE
    assert partial_keys(store) == []
    assert [stat.key for stat in store.list("")] == ["v1/a"]
    assert store.get("v1/a", SIZE) == bytes(SIZE)
    assert blocks(folder) == SIZE


def test_a_spare_file_that_cannot_be_moved_is_released(folder):
    store = TmpfsStore(folder)
    stage(store, "v1/a", random_bytes(SIZE))
    store.delete("v1/a")
    store.fs = FaultFs(None, Fault("rename_noreplace", 1, errno.EIO))
    with pytest.raises(StoreError, match="v2/a"):
        store.put_mapped("v2/a", SIZE)
    assert blocks(folder) == 0
    assert store.spare_bytes == 0


READER = """
import sys, hashlib
from limpet.errors import StoreError
from limpet.storage.local.store import LocalStore
store, found = LocalStore(sys.argv[1], direct=False), 0
print("ready", flush=True)
while True:
    for stat in list(store.list("")):
        try:
            data = store.get(stat.key, 1 << 21)
        except StoreError:
            continue
        if data != stat.key.rpartition("/")[2].encode() * (len(data) // 4):
            sys.exit(f"{stat.key} has other bytes")
        found += 1
        if found == 300:
            sys.exit(0)
"""


@pytest.mark.slow
def test_a_reader_never_sees_bytes_of_another_object(folder):
    """Another process reads every object that it sees, while their files are used in turn."""
    store, inodes = TmpfsStore(folder, spare_files=2), set()
    reader = subprocess.Popen([sys.executable, "-c", READER, str(folder)], stdout=subprocess.PIPE)
    assert reader.stdout.readline() == b"ready\n"
    number = 1000
    while reader.poll() is None:
        number = number + 1 if number < 9999 else 1000
        stage(store, f"v{number}/{number}", str(number).encode() * (SIZE // 4))
        inodes.add(inode(folder, f"v{number}/{number}"))
        store.delete(f"v{number - 2}/{number - 2}")
    assert reader.returncode == 0
    reader.stdout.close()
    assert len(inodes) < number - 1000  # files were used again


def test_memory_is_allocated_while_the_store_is_closed(folder, monkeypatch):
    """The thread that allocates ends after the training has released the memory."""
    store = TmpfsStore(folder)
    monkeypatch.setattr(MappedFile, "populate", lambda file: store.release_memory())
    store.preallocate(SIZE)
    assert store.spare_bytes == blocks(folder) == 0
