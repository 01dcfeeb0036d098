"""Test ``CrashFs``, the model of a power cut."""

import errno
import os
from contextlib import suppress

import pytest

from limpet.testing.crashfs import CrashFs, PowerCut


def write(fs, path, data, *, sync=False):
    fd = fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    fs.pwrite(fd, memoryview(data), 0)
    if sync:
        fs.fsync(fd)
    fs.close(fd)


def sync_folder(fs, path="/"):
    fd = fs.open(path, os.O_RDONLY | os.O_DIRECTORY)
    fs.fsync(fd)
    fs.close(fd)


def content(fs, path):
    try:
        fd = fs.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    into = bytearray(fs.fstat(fd).size)
    fs.preadv(fd, memoryview(into), 0)
    return bytes(into)


def outcomes(fs, path="/a"):
    return {content(crashed, path) for crashed in fs.crashes(limit=64)}


def test_any_part_of_unsynced_data_can_be_lost():
    fs = CrashFs()
    data = b"1" * 4096 + b"2" * 4096
    write(fs, "/a", data)
    assert outcomes(fs) == {
        None,
        b"",
        bytes(8192),
        bytes(4096) + b"2" * 4096,
        b"1" * 4096 + bytes(4096),
        data,
    }


def test_only_the_calls_that_change_something_count_as_changes():
    fs = CrashFs()

    def changed(call):
        before = fs.changes
        with suppress(OSError):
            call()
        return fs.changes > before

    assert changed(lambda: fs.mkdir("/f"))
    assert not changed(lambda: fs.mkdir("/f"))  # it exists
    fd = fs.open("/a", os.O_CREAT | os.O_RDWR)
    assert fs.changes == 2
    assert changed(lambda: fs.pwrite(fd, memoryview(b"1"), 0))
    assert changed(lambda: fs.fsync(fd))
    assert changed(lambda: fs.fallocate(fd, 9))
    assert changed(lambda: fs.link("/a", "/b"))
    assert changed(lambda: fs.rename_noreplace("/a", "/c"))
    assert changed(lambda: fs.unlink("/b"))
    assert changed(lambda: fs.rmdir("/f"))
    into = memoryview(bytearray(1))
    for read in (
        lambda: fs.open("/c", os.O_CREAT | os.O_RDONLY),
        lambda: fs.preadv(fd, into, 0),
        lambda: fs.fstat(fd),
        lambda: fs.stat("/c"),
        lambda: fs.scandir("/"),
        lambda: fs.close(fd),
    ):
        assert not changed(read)


def test_syncing_a_file_does_not_sync_its_name_and_the_reverse():
    fs = CrashFs()
    write(fs, "/a", b"1", sync=True)
    assert outcomes(fs) == {None, b"1"}
    sync_folder(fs)
    assert outcomes(fs) == {b"1"}
    fs = CrashFs()
    write(fs, "/a", b"1")
    sync_folder(fs)
    assert outcomes(fs) == {b"", b"\0", b"1"}


def test_links_renames_and_removals_can_be_lost_until_the_folder_is_synced():
    fs = CrashFs()
    write(fs, "/t", b"1", sync=True)
    sync_folder(fs)
    fs.link("/t", "/a")
    fs.unlink("/t")
    assert {(content(x, "/t"), content(x, "/a")) for x in fs.crashes()} == {
        (b"1", None),
        (b"1", b"1"),
        (None, None),
        (None, b"1"),
    }
    sync_folder(fs)
    assert {(content(x, "/t"), content(x, "/a")) for x in fs.crashes()} == {(None, b"1")}
    fs.rename_noreplace("/a", "/b")
    assert {(content(x, "/a"), content(x, "/b")) for x in fs.crashes()} == {
        (b"1", None),
        (None, b"1"),
    }


def test_losing_an_unsynced_folder_loses_its_files():
    fs = CrashFs()
    fs.mkdir("/d")
    write(fs, "/d/a", b"1", sync=True)
    sync_folder(fs, "/d")
    assert outcomes(fs, "/d/a") == {None, b"1"}
    sync_folder(fs)
    assert outcomes(fs, "/d/a") == {b"1"}


def test_outcomes_of_many_unsynced_operations_are_sampled():
    fs = CrashFs()
    for number in range(20):
        write(fs, f"/{number}", b"1")
    sizes = {len(crashed.scandir("/")) for crashed in fs.crashes(limit=16)}
    assert {0, 20} <= sizes
    assert len(sizes) > 4


def test_calls_from_the_power_cut_on_do_nothing():
    fs = CrashFs(cut_at=2)
    fs.mkdir("/a")
    for _ in range(2):
        with pytest.raises(PowerCut):
            fs.mkdir("/b")
    assert fs.operations == 1
    (crashed, *_) = [x for x in fs.crashes() if x.scandir("/")]
    assert crashed.scandir("/") == [("a", "folder")]


def test_changes_after_a_crash_do_not_affect_the_original_file_system():
    fs = CrashFs()
    write(fs, "/a", b"1")
    for crashed in fs.crashes():
        crashed.mkdir("/x")
    assert fs.scandir("/") == [("a", "file")]
    assert content(fs, "/a") == b"1"


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (lambda fs: fs.open("/no", os.O_RDONLY), errno.ENOENT),
        (lambda fs: fs.open("/f", os.O_CREAT | os.O_EXCL), errno.EEXIST),
        (lambda fs: fs.open("/f", os.O_DIRECTORY), errno.ENOTDIR),
        (lambda fs: fs.open("/f/x", os.O_CREAT), errno.ENOTDIR),
        (lambda fs: fs.stat("/no/x"), errno.ENOENT),
        (lambda fs: fs.link("/f", "/d"), errno.EEXIST),
        (lambda fs: fs.link("/no", "/x"), errno.ENOENT),
        (lambda fs: fs.rename_noreplace("/f", "/d"), errno.EEXIST),
        (lambda fs: fs.mkdir("/d"), errno.EEXIST),
        (lambda fs: fs.mkdir("/"), errno.EEXIST),
        (lambda fs: fs.rmdir("/d"), errno.ENOTEMPTY),
        (lambda fs: fs.rmdir("/f"), errno.ENOTDIR),
        (lambda fs: fs.unlink("/d"), errno.EISDIR),
        (lambda fs: fs.scandir("/f"), errno.ENOTDIR),
        (lambda fs: fs.mkdir("/" + "n" * 256), errno.ENAMETOOLONG),
        (lambda fs: fs.pwrite(fs.open("/f", os.O_DIRECT), memoryview(b"1"), 0), errno.EINVAL),
        (lambda fs: fs.preadv(fs.open("/d", 0), memoryview(bytearray(1)), 0), errno.EISDIR),
    ],
)
def test_errors_match_linux(call, number):
    fs = CrashFs()
    write(fs, "/f", b"1")
    fs.mkdir("/d")
    fs.mkdir("/d/e")
    with pytest.raises(OSError) as caught:
        call(fs)
    assert caught.value.errno == number
