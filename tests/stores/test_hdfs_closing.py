"""A file in HDFS is closed as soon as a DataNode has reported its last block."""

import gc
import time
import uuid

import hdfs_native
import pytest
from hdfs_native import WriteOptions

import limpet
from limpet.storage import hdfs as hdfs_server
from limpet.storage.hdfs import HdfsServer, close_file
from limpet.types import MIB


class Client:
    """Wraps the client of hdfs-native, whose ``close`` always asks too early and then pauses.

    ``calls`` are those that only the closing of a file makes. ``errors`` are raised by name.
    """

    def __init__(self, inner, pause):
        self._inner, self._pause = inner, pause
        self.calls, self.errors = [], {}

    def create(self, *args):
        return Writer(self._inner.create(*args), self._pause)

    def get_content_summary(self, path):
        self.calls.append("get_content_summary")
        if error := self.errors.get("get_content_summary"):
            raise error
        return self._inner.get_content_summary(path)

    def recover_lease(self, path):
        self.calls.append("recover_lease")
        return self._inner.recover_lease(path)

    def __getattr__(self, name):
        return getattr(self._inner, name)


class Writer:
    def __init__(self, inner, pause):
        self._inner, self._pause = inner, pause

    def close(self):
        self._inner.close()
        time.sleep(self._pause)

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.fixture
def use(hdfs, monkeypatch):
    """Return a function that opens a store with a wrapped client, and returns both."""

    def open_store(pause, **options):
        create = HdfsServer._create_client
        clients = []

        def wrap(owner):
            clients.append(Client(create(owner), pause))
            return clients[-1]

        monkeypatch.setattr(hdfs_server, "_servers", {})
        monkeypatch.setattr(HdfsServer, "_create_client", wrap)
        store = limpet.open_store(f"{hdfs.url}/{uuid.uuid4().hex}", **options)
        assert [*store.list("")] == []
        return store, clients[0]

    return open_store


def test_small_files_and_shards_do_not_wait_for_the_pause(use):
    store, client = use(1.5)
    begin = time.monotonic()
    limpet.save(store.at("version_1"), {"w": bytes(5), "n": 3}, step=1)
    assert time.monotonic() - begin < 1.5
    assert client.calls.count("recover_lease") == 4  # pin, shard, index, manifest
    assert limpet.open(store.at("version_1")).verify().ok


def test_without_an_answer_the_end_of_the_pause_is_awaited(use):
    store, client = use(0.5)
    client.errors["get_content_summary"] = RuntimeError("AccessControlException")
    begin = time.monotonic()
    assert store.put_if_absent("a", b"123").length == 3
    assert time.monotonic() - begin >= 0.5
    assert client.calls.count("get_content_summary") > 3
    assert "recover_lease" not in client.calls
    assert store.get("a", 3) == b"123"


def test_a_lease_is_not_recovered_before_the_last_block_was_reported(use):
    """That would begin a recovery, which takes seconds."""
    store, client = use(0, block_size=MIB)
    for size in (MIB - 1, MIB, 2 * MIB + 1):
        path = store.remote.path(f"a{size}")
        writer = client.create(path, WriteOptions(block_size=MIB, create_parent=True))
        writer.write(bytes(size))
        writer.hsync()
        closed = []

        class Stalled:
            def close(self, writer=writer, closed=closed):
                time.sleep(0.3)  # longer than it is watched
                closed.append(len(client.calls))
                writer.close()

        client.calls.clear()
        close_file(client, path, Stalled())
        assert "recover_lease" not in client.calls[: closed[0]]
        # nothing tells a full block that was reported from one that was not
        assert ("get_content_summary" in client.calls) == (size != MIB)
        assert store.stat(f"a{size}").length == size


@pytest.mark.parametrize("append", [False, True])
def test_a_writer_that_is_collected_is_not_closed(hdfs, monkeypatch, append):
    """It would happen in any thread, and wait for a NameNode that is away."""
    store = limpet.open_store(f"{hdfs.url}/{uuid.uuid4().hex}")
    upload = store.put("a", 2)
    upload.write_at(0, memoryview(b"1"))
    if append:
        upload._target.upload._writer.hsync()
        upload._target.upload._tail.clear()  # as if they were further back than what is kept
        upload._target.upload._go_on(store.remote, b"2")
    path, closed = upload._target.upload.paths[0], []
    monkeypatch.setattr(hdfs_native.FileWriter, "close", lambda writer: closed.append(path))
    upload._target.upload._writer = None
    gc.collect()
    assert closed == []
    assert store.remote.look_up(path, "a") is not None
    upload.abort()
