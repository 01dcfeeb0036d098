"""A store that only appends, and uploads to it that write in any order."""

import itertools
import os
import random
import tempfile
import threading

import pytest

import limpet
from limpet.errors import NoSpace, StoreError
from limpet.storage.memory import MemoryStore
from limpet.storage.store import Traits, check_key, refuse_partial
from limpet.storage.uploads import SequentialUpload
from limpet.testing import StoreContract
from limpet.types import MIB


class ListAppender:
    """Keeps what is appended, and fails at the append with the number ``fail_at``."""

    def __init__(self, create=None, fail_at=None):
        self.data, self.calls, self.is_aborted = bytearray(), [], False
        self.create, self.fail_at = create, fail_at

    def write_at(self, offset, *views):
        (data,) = views
        assert offset == len(self.data)
        if len(self.calls) == self.fail_at:
            raise StoreError("the server is gone")
        self.calls.append(data.obj)
        self.data += data

    def commit(self):
        return self.create(bytes(self.data))

    def abort(self):
        assert not self.is_aborted
        self.is_aborted = True


class AppendOnlyStore(MemoryStore):
    traits = Traits("appending", 1, durable=False, ordered=True)

    def put(self, key, length):
        check_key(key, self.url)
        refuse_partial(key, self.url)

        def create(data):
            return self._put_object(key, data, accept_existing=False)

        return SequentialUpload(self.url, key, length, ListAppender(create))


class TestContract(StoreContract):
    partials_are_listed = False

    def make_store(self, folder):
        return AppendOnlyStore(str(folder))


def begin(length, **options):
    appender = ListAppender(lambda data: data, **options)
    return SequentialUpload("test://", "v/a", length, appender), appender


@pytest.fixture
def temporary_files(tmp_path, monkeypatch):
    """Count the temporary files, which have no names."""
    made = []
    create = tempfile.TemporaryFile

    def create_one(*args, **options):
        made.append(create(*args, dir=tmp_path, **options))
        return made[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", create_one)
    return made


@pytest.mark.parametrize("seed", range(4))
def test_any_order_gives_the_same_bytes(seed, temporary_files):
    rng = random.Random(seed)
    data = rng.randbytes(500_000)
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(40))})
    pieces = [*itertools.pairwise(cuts)]
    rng.shuffle(pieces)
    upload, appender = begin(len(data))
    for start, stop in pieces:
        buffer = bytearray(data[start:stop])
        upload.write_at(start, memoryview(buffer))
        buffer[:] = bytes(len(buffer))  # the caller uses its buffer again
    assert upload.commit() == data
    assert not appender.is_aborted
    assert [file.closed for file in temporary_files] == [True]


def test_the_temporary_file_is_as_large_as_what_waits(temporary_files):
    data = random.Random(0).randbytes(8 * MIB)
    upload, _ = begin(len(data))
    most = 0
    for start in range(0, len(data), MIB):
        for at in (start + MIB // 2, start):
            upload.write_at(at, memoryview(data)[at : at + MIB // 2])
            most = max(most, os.fstat(temporary_files[0].fileno()).st_blocks * 512)
    assert upload.commit() == data
    assert most < 2 * MIB


def test_a_failed_append_ends_the_upload():
    upload, appender = begin(30, fail_at=1)
    upload.write_at(10, memoryview(bytes(10)))
    with pytest.raises(StoreError, match="the server is gone"):
        upload.write_at(0, memoryview(bytes(10)))
    for call in (upload.commit, lambda: upload.write_at(20, memoryview(bytes(10)))):
        with pytest.raises(StoreError, match="it failed"):
            call()
    upload.abort()
    upload.abort()
    assert appender.is_aborted


@pytest.mark.parametrize("twice", [(0, 10), (5, 10), (15, 2), (20, 10)])
def test_bytes_that_are_written_twice_are_refused(twice):
    offset, size = twice
    upload, appender = begin(30)
    upload.write_at(0, memoryview(bytes(20)))
    upload.write_at(offset, memoryview(bytes(size)))
    if offset != 20:
        upload.write_at(20, memoryview(bytes(10)))
    else:
        upload.write_at(25, memoryview(bytes(5)))
    with pytest.raises(StoreError, match="twice"):
        upload.commit()
    assert appender.is_aborted


def test_a_full_disk_says_what_to_do(monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    upload, appender = begin(30)
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(NoSpace, match="TMPDIR"):
        upload.write_at(10, memoryview(bytes(10)))
    upload.abort()
    assert appender.is_aborted


def test_a_save_appends_in_order(monkeypatch, temporary_files):
    kept, threads = [], set()
    keep, append = SequentialUpload._keep, ListAppender.write_at
    monkeypatch.setattr(SequentialUpload, "_keep", lambda *a: (kept.append(1), keep(*a)))
    monkeypatch.setattr(
        ListAppender, "write_at", lambda *a: (threads.add(threading.get_ident()), append(*a))
    )
    torch = pytest.importorskip("torch")
    state = {str(i): torch.randn(1 << 20) for i in range(10)}
    store = AppendOnlyStore("runs")
    limpet.save(store.at("version_1"), state, step=1)
    limpet.save_async(store.at("version_2"), state, step=2).wait()
    assert kept == []
    assert len(threads) == 2  # one per save
    for version in ("version_1", "version_2"):
        loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        limpet.load(store.at(version), loaded)
        assert all(torch.equal(loaded[key], state[key]) for key in state)
