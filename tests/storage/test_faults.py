"""If a system call fails, LocalStore leaves the complete object or nothing."""

import errno
import os

import pytest

from limpet.buffers import Buffer
from limpet.errors import AlreadyExists, NotFound, StoreError
from limpet.storage.local.os_calls import Fs
from limpet.storage.local.store import LocalStore
from limpet.testing.contract import keys, partial_keys, put, random_bytes
from limpet.testing.faults import Fault, FaultFs

SIZE = 3 * 4096 + 100
DATA = random_bytes(SIZE)
CLEANUP_CALLS = {"unlink", "rmdir"}


def put_in_pieces(store, key):
    """Write a piece that direct I/O can write and one that it cannot."""
    buffer = Buffer(8192)
    buffer.view[:] = DATA[:8192]
    with store.put(key, SIZE) as upload:
        upload.write_at(0, buffer.view)
        upload.write_at(8192, memoryview(DATA)[8192:])
        return upload.commit()


def put_if_absent(store, key):
    return store.put_if_absent(key, DATA)


WRITERS = pytest.mark.parametrize("write", [put_in_pieces, put_if_absent])


def results_of_all_faults(root, write, fault):
    """Fail the 1st, 2nd, 3rd ... call until no call is left. Yield the result of each attempt."""
    for at in range(1, 200):
        folder = root / str(at)
        fs = FaultFs(None, fault(at))
        try:
            write(LocalStore(folder / "run", fs=fs), "v/a")
            error = None
        except StoreError as caught:
            error = caught
        yield folder, fs.fired, error
        if not fs.fired:
            return
    pytest.fail("the number of calls is unlimited")


def check(folder, fired, error):
    clean = LocalStore(folder / "run")
    if error is None or keys(clean):
        assert keys(clean) == ["v/a"]
        assert clean.get("v/a", SIZE) == DATA
    if error is not None:
        assert error.key == "v/a"
        assert error.store == str(folder / "run")
        assert error.__cause__ is not None
        assert not keys(clean) or error.outcome == "unknown"
    if not CLEANUP_CALLS & set(fired):
        assert partial_keys(clean) == []
        assert keys(clean) or not (folder / "run" / "v").exists()


@WRITERS
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE])
def test_one_call_fails(tmp_path, write, number):
    errors = 0
    for outcome in results_of_all_faults(tmp_path, write, lambda at: Fault(None, at, number)):
        check(*outcome)
        errors += outcome[2] is not None
    assert errors >= 8


@WRITERS
def test_a_call_and_all_later_calls_fail(tmp_path, write):
    for folder, fired, error in results_of_all_faults(
        tmp_path, write, lambda at: Fault(None, at, errno.EIO, lasting=True)
    ):
        check(folder, [*fired, "unlink"] if fired else fired, error)


@WRITERS
@pytest.mark.parametrize("kind", ["open", "link", "unlink", "fsync", "mkdir", "fallocate"])
def test_a_call_succeeds_but_reports_an_error(tmp_path, write, kind):
    for folder, fired, error in results_of_all_faults(
        tmp_path, write, lambda at: Fault(kind, at, errno.EIO, lost=True)
    ):
        check(folder, fired, error)


@WRITERS
@pytest.mark.parametrize("short", [1, 4095, 4096, 5000])
def test_short_writes_are_continued(tmp_path, write, short):
    fs = FaultFs(None, Fault("pwrite", 1, short=short, lasting=True))
    if short < 4095:
        fs.faults = [Fault("pwrite", at, short=short) for at in (1, 2, 3)]
    store = LocalStore(tmp_path, fs=fs)
    write(store, "v/a")
    assert "pwrite" in fs.fired
    assert store.get("v/a", SIZE) == DATA


def test_a_write_that_writes_nothing_is_an_error(tmp_path):
    fs = FaultFs(None, Fault("pwrite", 1, short=0))
    with pytest.raises(StoreError):
        put_in_pieces(LocalStore(tmp_path, fs=fs), "v/a")


@pytest.mark.parametrize("short", [1, 4096, 5000])
@pytest.mark.parametrize("offset", [0, 4096, 7])
def test_short_reads_are_continued(tmp_path, short, offset):
    fs = FaultFs(None, *(Fault("preadv", at, short=short) for at in (1, 2, 4)))
    store = LocalStore(tmp_path, fs=fs)
    put_in_pieces(store, "a")
    buffer, length = Buffer(16_384), SIZE - offset
    store.get_range("a", offset, length, buffer.view)
    assert "preadv" in fs.fired
    assert buffer.view[:length] == DATA[offset:]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("kind", ["pwrite", "preadv"])
def test_the_page_cache_is_used_if_the_first_direct_call_fails(tmp_path, kind, number):
    fs = FaultFs(None, Fault(kind, 1, number))
    store = LocalStore(tmp_path, fs=fs)
    put_in_pieces(store, "a")
    buffer = Buffer(16_384)
    store.get_range("a", 0, SIZE, buffer.view)
    assert fs.fired == [kind]
    assert buffer.view[:SIZE] == DATA


class NoDirect(Fs):
    def open(self, path, flags):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "O_DIRECT is not supported")
        return super().open(path, flags)


def test_the_page_cache_is_used_if_a_direct_open_fails(tmp_path):
    store = LocalStore(tmp_path, fs=NoDirect())
    put_in_pieces(store, "a")
    buffer = Buffer(16_384)
    store.get_range("a", 0, SIZE, buffer.view)
    assert buffer.view[:SIZE] == DATA


class RecordingFs(Fs):
    def __init__(self):
        self.direct = set()
        self.transfers = []

    def open(self, path, flags):
        fd = super().open(path, flags)
        (self.direct.add if flags & os.O_DIRECT else self.direct.discard)(fd)
        return fd

    def pwrite(self, fd, data, offset):
        self.transfers.append((fd in self.direct, offset, len(data)))
        return super().pwrite(fd, data, offset)

    def preadv(self, fd, into, offset):
        self.transfers.append((fd in self.direct, offset, len(into)))
        return super().preadv(fd, into, offset)


def test_direct_io_transfers_exactly_the_aligned_pieces():
    folder = f"/var/tmp/limpet-aligned-{os.getpid()}"
    fs = RecordingFs()
    store = LocalStore(folder, fs=fs)
    buffer = Buffer(16_384)
    try:
        with store.put("a", 9000) as upload:
            upload.write_at(0, buffer.view[:9000])
            upload.commit()
        store.get_range("a", 0, 9000, buffer.view)
        store.get_range("a", 0, 9000, buffer.view[:9000])
        store.get_range("a", 1, 100, buffer.view)
    finally:
        store.delete("a")
        os.rmdir(folder)
    assert fs.transfers == [
        (True, 0, 8192), (False, 8192, 808), (True, 0, 12_288), (True, 0, 8192),
        (False, 8192, 808), (False, 1, 100),
    ]  # fmt: skip


def test_the_file_is_complete_without_fallocate(tmp_path):
    class WithoutFallocate(Fs):
        def fallocate(self, fd, length):
            return False

    store = LocalStore(tmp_path, fs=WithoutFallocate())
    put_in_pieces(store, "a")
    assert store.get("a", SIZE) == DATA


def test_an_unexpected_file_length_is_an_error(tmp_path):
    class TruncatingFs(Fs):
        def fstat(self, fd):
            return super().fstat(fd)._replace(size=SIZE - 1)

    with pytest.raises(StoreError, match="differs from the bytes written"):
        put_in_pieces(LocalStore(tmp_path, fs=TruncatingFs()), "a")
    assert os.listdir(tmp_path) == []


# Publishing.


@WRITERS
@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT])
def test_a_link_that_exists_despite_an_error_is_a_success(tmp_path, write, number):
    fs = FaultFs(None, Fault("link", 1, number, lost=True))
    store = LocalStore(tmp_path, fs=fs)
    write(store, "v/a")
    assert fs.fired == ["link"]
    assert store.get("v/a", SIZE) == DATA
    assert partial_keys(store) == []


@WRITERS
@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
@pytest.mark.parametrize("lost", [None, errno.EEXIST, errno.ENOENT, errno.EIO])
def test_a_rename_that_does_not_replace_is_used_without_hard_links(tmp_path, write, number, lost):
    fs = FaultFs(None, Fault("link", 1, number, lasting=True))
    if lost:
        fs.faults.append(Fault("rename_noreplace", 1, lost, lost=True))
    store = LocalStore(tmp_path, fs=fs)
    write(store, "v/a")
    assert fs.counts["rename_noreplace"] == 1
    assert store.get("v/a", SIZE) == DATA
    assert partial_keys(store) == []
    with pytest.raises(AlreadyExists):
        store.put_if_absent("v/a", b"other")
    assert store.get("v/a", SIZE) == DATA


@WRITERS
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_links_and_noreplace_is_an_error(tmp_path, write, number):
    store = LocalStore(
        tmp_path,
        fs=FaultFs(None, Fault("link", 1, errno.EPERM), Fault("rename_noreplace", 1, number)),
    )
    with pytest.raises(StoreError, match="hard links"):
        write(store, "v/a")
    assert os.listdir(tmp_path) == []


@WRITERS
def test_an_upload_whose_file_was_deleted_does_not_commit(tmp_path, write):
    class DeletingFs(Fs):
        def link(self, source, target):
            os.unlink(source)
            super().link(source, target)

    with pytest.raises(StoreError) as caught:
        write(LocalStore(tmp_path, fs=DeletingFs()), "v/a")
    assert not isinstance(caught.value, NotFound)
    assert os.listdir(tmp_path) == []


@WRITERS
def test_a_failed_fsync_is_not_repeated_and_the_file_is_deleted(tmp_path, write):
    fs = FaultFs(None, Fault("fsync", 1, errno.EIO))
    store = LocalStore(tmp_path, fs=fs)
    with pytest.raises(StoreError):
        write(store, "v/a")
    assert fs.counts["fsync"] == 1
    assert fs.counts["link"] == 0
    assert os.listdir(tmp_path) == []
    write(store, "v/a")


@WRITERS
def test_the_outcome_is_unknown_if_the_folder_cannot_be_synced(tmp_path, write):
    store = LocalStore(tmp_path, fs=FaultFs(None, Fault("fsync", 2, errno.EIO)))
    with pytest.raises(StoreError, match="unknown") as caught:
        write(store, "v/a")
    assert caught.value.outcome == "unknown"


@WRITERS
def test_a_file_system_that_cannot_sync_folders_is_accepted(tmp_path, write):
    fs = FaultFs(None, *(Fault("fsync", at, errno.EINVAL) for at in range(2, 99)))
    store = LocalStore(tmp_path, fs=fs)
    write(store, "v/a")
    assert store.get("v/a", SIZE) == DATA
    store.delete("v/a")
    assert os.listdir(tmp_path) == []


# Errors.


@pytest.mark.parametrize("kind", ["open", "preadv", "stat", "scandir"])
def test_a_failed_read_names_key_and_store(tmp_path, kind):
    put(LocalStore(tmp_path), "v/a", DATA)
    for read in (
        lambda s: s.get("v/a", SIZE),
        lambda s: s.get_range("v/a", 0, 4096, Buffer(4096).view),
        lambda s: s.stat("v/a"),
        lambda s: list(s.list("v")),
    ):
        fs = FaultFs(None, Fault(kind, 1, errno.EIO, lasting=True))
        error = None
        try:
            read(LocalStore(tmp_path, fs=fs))
        except StoreError as caught:
            error = caught
        assert bool(fs.fired) == (error is not None)
        assert error is None or (error.store, error.key) in [
            (str(tmp_path), "v/a"),
            (str(tmp_path), "v"),
        ]


@pytest.mark.parametrize("kind", ["open", "unlink", "fsync"])
def test_a_failed_delete_raises_and_can_be_repeated(tmp_path, kind):
    put(LocalStore(tmp_path), "v/a", DATA)
    store = LocalStore(tmp_path, fs=FaultFs(None, Fault(kind, 1, errno.EIO)))
    with pytest.raises(StoreError):
        store.delete("v/a")
    store.delete("v/a")
    assert os.listdir(tmp_path) == []


def test_descriptors_are_closed_after_any_failure(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in results_of_all_faults(tmp_path, put_in_pieces, lambda at: Fault(None, at, errno.EIO)):
        pass
    assert len(os.listdir("/proc/self/fd")) == before
