"""Properties of local folders beyond the store contract: links, names, races, real limits."""

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from limpet.errors import Denied, NoSpace, NotFound, StoreError
from limpet.storage.local.os_calls import Fs
from limpet.storage.local.store import LocalStore
from limpet.testing.contract import keys, partial_keys, put


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "run")


def test_reads_of_a_missing_root_find_nothing_and_do_not_create_it(store, tmp_path):
    assert keys(store) == partial_keys(store) == []
    for read in (store.stat, lambda key: store.get(key, 1)):
        with pytest.raises(NotFound):
            read("a")
    store.delete("a")
    assert not (tmp_path / "run").exists()


def test_an_unfinished_upload_is_in_the_folder_of_its_object(store, tmp_path):
    upload = store.put("v/a", 3)
    (name,) = os.listdir(tmp_path / "run" / "v")
    assert name.startswith(".a.")
    assert partial_keys(store) == [f"v/{name}"]
    assert list(store.partials("w")) == []
    upload.abort()


def test_the_partial_file_of_a_killed_process_is_listed_and_deleted(store):
    program = f"""
import os
from limpet.storage.local.store import LocalStore
upload = LocalStore({store.url!r}).put("v/a", 5)
upload.write_at(0, memoryview(b"123"))
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    assert keys(store) == []
    (partial,) = store.partials("v")
    assert partial.modified > 0
    store.delete(partial.key)
    assert partial_keys(store) == []


def test_a_key_with_the_name_of_a_partial_file_is_an_error(store):
    for write in (lambda: store.put("v/.a.partial", 1), lambda: put(store, ".partial", b"")):
        with pytest.raises(StoreError, match="unfinished"):
            write()


@pytest.mark.parametrize("name", ["n" * 255, "日" * 85, "." + "x" * 254])
def test_the_longest_valid_names(store, name):
    store.put_if_absent(f"v/{name}", b"1")
    assert keys(store) == [f"v/{name}"]


@pytest.mark.parametrize("name", ["n" * 256, "\ud800"])
def test_names_that_the_file_system_rejects(store, name):
    for call in (lambda: store.put_if_absent(name, b"1"), lambda: store.stat(name)):
        with pytest.raises(StoreError) as caught:
            call()
        assert not isinstance(caught.value, NotFound)


def test_a_name_that_is_not_valid_unicode_can_be_listed_and_deleted(store, tmp_path):
    (tmp_path / "run").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/run/\xff")).write_bytes(b"1")
    (key,) = keys(store)
    store.delete(key)
    assert keys(store) == []


def test_delete_removes_empty_folders_below_the_root(store, tmp_path):
    put(store, "v/w/x/a", b"1")
    put(store, "v/b", b"1")
    store.delete("v/w/x/a")
    assert not (tmp_path / "run" / "v" / "w").exists()
    store.delete("v/b")
    assert (tmp_path / "run").is_dir()
    assert os.listdir(tmp_path / "run") == []


def test_a_folder_that_is_deleted_when_an_upload_begins_is_created_again(tmp_path):
    class RacingFs(Fs):
        remaining_races = 3

        def open(self, path, flags):
            if flags & os.O_CREAT and self.remaining_races:
                self.remaining_races -= 1
                os.rmdir(os.path.dirname(path))
            return super().open(path, flags)

    store = LocalStore(tmp_path / "run", fs=RacingFs())
    put(store, "v/a", b"1")
    assert keys(store) == ["v/a"]


def test_list_omits_objects_that_are_deleted_meanwhile(tmp_path):
    class RacingFs(Fs):
        def scandir(self, path):
            found = super().scandir(path)
            return [*found, ("gone", "file"), ("gone too", "folder")]

    store = LocalStore(tmp_path, fs=RacingFs())
    put(store, "a", b"1")
    assert keys(store) == ["a"]


def test_abort_closes_the_file_after_the_active_writes(tmp_path):
    inside, go = threading.Barrier(3), [threading.Event(), threading.Event()]

    class SlowFs(Fs):
        def pwrite(self, fd, data, offset):
            if len(data) == 2:
                inside.wait(10)
                go[offset // 2].wait(10)
            return super().pwrite(fd, data[:1], offset)

    upload = LocalStore(tmp_path, fs=SlowFs()).put("a", 4)
    threads = [
        threading.Thread(target=upload.write_at, args=(at, memoryview(b"ab"))) for at in (0, 2)
    ]
    for thread in threads:
        thread.start()
    inside.wait(10)
    upload.abort()
    for thread, gate in zip(threads, go, strict=True):
        # If the descriptor were closed too early, a file like this one would get its number.
        with (tmp_path / f"other-{thread.name}").open("wb"):
            gate.set()
            thread.join(10)
    assert len(os.listdir(tmp_path)) == 2
    assert all((tmp_path / name).read_bytes() == b"" for name in os.listdir(tmp_path))


def test_commit_during_a_write_is_an_error(tmp_path):
    inside, go = threading.Event(), threading.Event()

    class SlowFs(Fs):
        def pwrite(self, fd, data, offset):
            inside.set()
            go.wait(10)
            return super().pwrite(fd, data, offset)

    with LocalStore(tmp_path, fs=SlowFs()).put("a", 2) as upload:
        thread = threading.Thread(target=upload.write_at, args=(0, memoryview(b"ab")))
        thread.start()
        inside.wait(10)
        with pytest.raises(StoreError, match="active writes: 1"):
            upload.commit()
        go.set()
        thread.join(10)
        upload.commit()


def test_the_limit_on_file_size_raises_no_space(store):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(NoSpace):
            store.put("v/a", 200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert partial_keys(store) == []


def test_an_upload_that_exceeds_the_disk_fails_before_the_first_byte(tmp_path):
    with pytest.raises(NoSpace) as caught:
        LocalStore(tmp_path).put("v/a", 1 << 62)
    assert "Free space" in str(caught.value) or "file size" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_key_below_an_object_is_an_error(store):
    put(store, "v", b"1")
    with pytest.raises(StoreError) as caught:
        store.put("v/a", 1)
    assert not isinstance(caught.value, NotFound)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write to every folder")
def test_a_folder_without_write_permission_raises_denied(tmp_path):
    (tmp_path / "run").mkdir(mode=0o500)
    with pytest.raises(Denied):
        LocalStore(tmp_path / "run").put("v/a", 1)
