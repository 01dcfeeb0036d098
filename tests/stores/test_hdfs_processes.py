"""Several processes, and files of other programs, in one folder in HDFS."""

import time
import uuid

import pytest

import limpet
from limpet.errors import AlreadyExists, NotFound, StoreError, Unavailable
from limpet.format.names import index_name, random_id, shard_name
from limpet.run.writer_lock import WriterLock
from limpet.snapshot.location import Location
from limpet.snapshot.pins import hold_pin
from limpet.testing.contract import partial_keys, put


@pytest.fixture
def run_url(hdfs):
    return f"{hdfs.url}/{uuid.uuid4().hex}"


def other_process(url):
    """Return a store that shares nothing with the others of this process."""
    return limpet.open_store(url, timeout=299)


def test_a_file_that_another_process_has_replaced_is_read_anew(run_url):
    store, other = limpet.open_store(run_url), other_process(run_url)
    store.put_if_absent("a", b"old")
    assert store.get("a", 9) == b"old"
    for data in (b"new", b"longer", b"-"):
        other.delete("a")
        other.put_if_absent("a", data)
        assert store.get("a", 9) == data


def test_a_training_that_was_replaced_notices_it_at_once(run_url):
    """The records of two trainings have the same length."""
    first, second = WriterLock(limpet.open_store(run_url)), WriterLock(other_process(run_url))
    first.acquire()
    first.check(first._store)
    second._store.delete("writer.json")  # as if the two were on different machines
    second.acquire()
    with pytest.raises(limpet.errors.LimpetError, match="taken this run over"):
        first.check(first._store)


def file_of_a_user(store, key):
    store.put_if_absent(key, b"somebody's model")
    return store.stat(key)


@pytest.mark.parametrize(
    "write",
    [
        lambda store: limpet.save(f"{store.url}/model.pt", {"a": 1}, step=1),
        lambda store: limpet.save(f"{store.url}/model.pt/version_1", {"a": 1}, step=1),
        lambda store: limpet.save(store.at("model.pt"), {"a": 1}, step=1),
        lambda store: put(store, "model.pt/x", b"1"),
        lambda store: put(store, "model.pt/x/y", b"1"),
        lambda store: store.put_if_absent("model.pt/x", b"1"),
        lambda store: store.put_if_absent("model.pt/x/y", b"1"),
    ],
)
def test_a_file_that_is_in_the_way_stays(run_url, write):
    store = limpet.open_store(run_url)
    before = file_of_a_user(store, "model.pt")
    with pytest.raises(StoreError, match="a file is in the way") as caught:
        write(store)
    assert not isinstance(caught.value, NotFound | AlreadyExists | Unavailable)
    assert "INode" not in str(caught.value)
    assert store.stat("model.pt") == before
    assert store.get("model.pt", 99) == b"somebody's model"


def test_a_save_below_a_manifest_leaves_the_version_intact(run_url):
    store = limpet.open_store(run_url)
    limpet.save(store.at("version_1"), {"a": 1}, step=1)
    with pytest.raises(StoreError, match="a file is in the way"):
        limpet.save(f"{run_url}/version_1/manifest.json", {"a": 2}, step=1)
    assert limpet.load(f"{run_url}/version_1") == {"a": 1}


def test_a_failed_create_deletes_no_folder(run_url):
    """Nothing was created, so the empty folder is that of somebody else."""
    store = limpet.open_store(run_url, replication=600)  # more than the NameNode allows
    other = other_process(run_url)
    other.put_if_absent("v/a", b"1")
    client = other.remote.server._client
    client.delete(other.remote.path("v/a"), recursive=False)
    with pytest.raises(StoreError, match="Cannot write v/b"):
        store.put_if_absent("v/b", b"1")
    assert other.remote.look_up(other.remote.path("v"), "v").isdir


def test_a_file_is_deleted_although_its_folder_is_not(run_url, monkeypatch):
    store = limpet.open_store(run_url)
    store.put_if_absent("v/a", b"1")
    delete = store.remote.server._client.delete

    def refuse_folders(client, path, recursive):
        if path.endswith("/v"):
            raise RuntimeError('RPCError("AccessControlException", "Permission denied")')
        return delete(path, recursive)

    monkeypatch.setattr(type(store.remote.server._client), "delete", refuse_folders)
    store.delete("v/a")
    assert [*store.list("")] == []


def test_an_empty_folder_is_not_an_object(run_url):
    store = limpet.open_store(run_url)
    store.put_if_absent("v/a", b"1")
    store.remote.server._client.delete(store.remote.path("v/a"), recursive=False)
    store.delete("v")
    assert store.remote.look_up(store.remote.path("v"), "v").isdir


@pytest.mark.parametrize("name", [shard_name, index_name])
def test_an_upload_that_takes_longer_than_the_minimum_age_is_protected_by_its_pin(run_url, name):
    """HDFS shows the time of the creation of a file that is open."""
    store, attempt, now = limpet.open_store(run_url), random_id(), time.time() + 30 * 24 * 3600
    key = f"version_1/{name(123_456, 654_321, attempt)}"
    with store.put(key, 2) as upload, hold_pin(Location(store, "version_1"), attempt):
        upload.write_at(0, memoryview(b"1"))
        (partial,) = partial_keys(store)
        assert limpet.Run(store).sweep(grace=0, now=now).kept == [
            (partial, "a save is in progress")
        ]
        upload.write_at(1, memoryview(b"2"))
        upload.commit()
    assert store.get(key, 2) == b"12"
    upload = store.put(f"{key}x", 2)
    upload.write_at(0, memoryview(b"1"))
    assert len(limpet.Run(store).sweep(grace=0, now=now).removed) == 2
    upload.abort()
